"""Common data types: Group, Layer, Spec, Slice, Bucket, and the units of the strategy grammar.

All are frozen data with only arithmetic on their own fields. Sizes are bytes, times are seconds, rates are bits per
second; names say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np

from .errors import UsageError

Size = NewType("Size", int)
"""A number of bytes; written with a unit, as in ``25MiB``."""

Rate = NewType("Rate", float)
"""A speed in bits per second; written with a unit, as in ``1Gbit``."""

Seconds = NewType("Seconds", float)
"""A duration in seconds; written with a unit, as in ``5ms``."""


@dataclass(frozen=True)
class Group:
    """The processes of a run as algorithms see them: workers first, then dedicated servers.

    ``workers`` compute and are ranks 0 to workers-1; ``servers`` is the number of further processes, which only
    aggregate. ``nodes`` gives the node (host) number of every worker; empty if all are on one, or it does not matter.
    """

    workers: int
    servers: int = 0
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"a group needs at least one worker, got {self.workers}")
        if self.servers < 0:
            raise UsageError(f"the number of servers cannot be negative, got {self.servers}")
        if self.nodes and len(self.nodes) != self.workers:
            raise UsageError(f"nodes names {len(self.nodes)} workers, but the group has {self.workers}")

    @property
    def processes(self) -> int:
        """The number of workers and servers together."""
        return self.workers + self.servers

    def members_by_node(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each node, nodes in the order of their first worker."""
        if not self.nodes:
            return (tuple(range(self.workers)),)
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            found.setdefault(node, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())


@dataclass(frozen=True)
class Spec:
    """A tensor's name, shape and element type (a numpy type name, or ``bfloat16``)."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.elements * item_bytes(self.dtype)


@dataclass(frozen=True)
class Layer:
    """An exchanged tensor with its layer's computation times, for schedules and the simulator.

    Layers are listed in forward order. ``forward_s`` and ``backward_s`` are seconds, 0 if unknown.
    """

    spec: Spec
    forward_s: float = 0.0
    backward_s: float = 0.0


@dataclass(frozen=True)
class Slice:
    """Elements ``start`` to ``stop`` of the tensor with index ``tensor`` in the list of layers."""

    tensor: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """How many elements the slice has."""
        return self.stop - self.start


@dataclass(frozen=True)
class Bucket:
    """Slices of one element type that travel together, in the order in which they lie in memory."""

    slices: tuple[Slice, ...]
    dtype: str

    @property
    def elements(self) -> int:
        """How many elements the bucket has."""
        return sum(part.elements for part in self.slices)

    @property
    def nbytes(self) -> int:
        """The bucket's size in bytes."""
        return self.elements * item_bytes(self.dtype)

    def describe(self, layers: Sequence[Layer]) -> str:
        """A short name for messages: the first and last tensor in it."""
        names = [layers[part.tensor].spec.name for part in self.slices]
        inner = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"{inner}, {self.nbytes} bytes"


def item_bytes(dtype: str) -> int:
    """The bytes of one element of ``dtype``."""
    return numpy_dtype(dtype).itemsize


def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """The numpy type of that name; ``bfloat16``, which numpy lacks, comes from ml_dtypes.

    Raises UsageError for types that neither has, such as torch's float8 types.
    """
    if dtype == "bfloat16":
        import ml_dtypes

        found: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
        return found
    try:
        known: np.dtype[np.generic] | None = np.dtype(dtype)
    except TypeError:
        known = None
    # once loaded, ml_dtypes gives numpy further names, whose types it cannot add
    if known is None or known.isbuiltin != 1:
        raise UsageError(
            f"elements of type {dtype} cannot be added, so such gradients cannot be exchanged: keep these tensors as"
            " buffers, or as parameters without gradients"
        )
    return known
