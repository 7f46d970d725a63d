"""The interfaces by which workers and owners exchange the gradients and weights of a model.

``merged`` implements them where the pushes of all workers are one, ``single`` where each push is an update. Both know
plans, keys and arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..compression.compression import Compression
from ..engine.order import When, Work
from ..session.layout import Layout
from .records import Array, Record
from .shard import Holding

Update = Callable[[int], None]
"""Updates a bucket, or ``ALL``, with the values of one step."""


@dataclass(frozen=True, eq=False)
class Model:
    """A prepared model's arrays, by bucket; ``weights`` are those that all workers have.

    ``first_key`` is the first of the keys that belong to its exchanges.
    """

    layout: Layout
    gradients: Sequence[Array]
    weights: Sequence[Array]
    compression: Compression | None
    first_key: int = 0


class Pushes(Protocol):
    """The pushes to an owner. ``worker`` is ``ALL`` where the pushes of all workers are one."""

    def settle(self, worker: int) -> None:
        """Wait until a worker's push is in the gradients and nothing in progress reads the weights."""
        ...

    def add(self, worker: int, bucket: int, scale: float) -> None:
        """Add a worker's push of a bucket, or of ``ALL``, times ``scale``, to the next update."""
        ...

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """Call ``update`` for a bucket, or for ``ALL``, now or as soon as the worker's push has arrived."""
        ...


class Exchanges(Pushes, Protocol):
    """An owner's part in pushes and pulls."""

    def coming(self, worker: int) -> Sequence[Work]:
        """The works that precede the handling of a worker's message about its gradients, by bucket."""
        ...

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """Start sending these workers the weights of a bucket, or of ``ALL``."""
        ...

    def rest(self) -> None:
        """Wait until nothing in progress reads the weights."""
        ...

    def close(self) -> None:
        """End after the last update: another object takes over."""
        ...


class Traffic(Protocol):
    """This process's part in the pushes and pulls of one model with ``buckets`` buckets."""

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        ...

    def push(self, number: int, when: When) -> Work:
        """Start this worker's part in the push of a bucket."""
        ...

    def pull(self, number: int, when: When) -> Work:
        """Start this worker's part in the pull of a bucket's weights."""
        ...

    def exchanges(self, apart: bool) -> Exchanges:
        """An owner's part in all exchanges, beginning with the first push. It never ends if the workers leave.

        ``apart`` says whether buckets may be updated one after the other.
        """
        ...

    def holdings(self) -> list[Holding] | None:
        """The slices that this process owns, None if it is no owner."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether the owners' weights may be more precise than the workers', so that a checkpoint needs them."""
        ...

    def know(self, records: Sequence[Record]) -> None:
        """Note that the workers now have these weights instead of those that they were sent."""
        ...

    def resume_at(self, step: int) -> None:
        """Have an owner go on from this step, counted from 0."""
        ...
