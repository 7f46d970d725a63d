"""How many samples the gradients since the last exchange come from: the weight of a rank in the mean.

A forward pass notes the size of its batch; the pass counts when a backward pass comes through one of its outputs (or,
where outputs cannot be watched, with the next gradient). Several forward passes in one backward, and several backward
passes before one exchange, add up. Forward passes that no backward follows do not count.

Owns the counting only: nothing here knows of buckets, sessions or other ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import torch

from ...errors import UsageError

Weight = Callable[..., float] | float | Literal["batch"]


class _Pass:
    """A forward pass. Kept alive by the hooks on its outputs alone, that is as long as its graph exists."""

    __slots__ = ("__weakref__", "samples", "task")

    def __init__(self, samples: float) -> None:
        self.samples = samples
        self.task = -1  # the last backward pass that came through


class Samples:
    """The count of one model. ``on_backward`` is called when a backward pass first comes through a forward pass."""

    def __init__(self, weight: Weight, on_backward: Callable[[], None]) -> None:
        self._weight, self._on_backward = weight, on_backward
        self._open: weakref.WeakSet[_Pass] = weakref.WeakSet()  # forward passes without a backward so far
        self._forward = 0.0
        self._unwatched: list[float] = []  # forward passes whose outputs hide their tensors
        self._now: list[float] = []  # what the present backward pass came through
        self._kept: list[float] = []  # what earlier ones since the last exchange did

    def before_forward(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Note how many samples this forward pass has; raises UsageError for a ``weight`` that is no weight."""
        if self._weight == "batch":
            tensor = next(tensors_in((arguments, keywords)), None)
            self._forward = 1.0 if tensor is None or tensor.dim() == 0 else float(tensor.shape[0])
            return
        given = self._weight(*arguments, **keywords) if callable(self._weight) else self._weight
        self._forward = float(given)
        if not 0 <= self._forward < math.inf:
            raise UsageError(f"weight= gave {self._forward} for this batch: weights are finite numbers from 0 up")

    def after_forward(self, output: Any) -> None:
        """Watch the outputs for a backward pass."""
        found = list(tensors_in(output))
        if not found:
            self._unwatched.append(self._forward)
            return
        made = _Pass(self._forward)
        for tensor in found:
            if tensor.requires_grad:
                self._open.add(made)
                tensor.register_hook(lambda _: self._came_through(made))  # type: ignore[no-untyped-call]

    @property
    def complete(self) -> bool:
        """False while the present backward pass may still come through further forward passes."""
        return not self._open

    @property
    def weight(self) -> float:
        """The weight since the last exchange, the present backward pass included; 1 when nothing could be counted."""
        counted = [*self._kept, *self._now, *self._unwatched]
        return sum(counted) if counted else 1.0

    def keep(self) -> None:
        """The present backward pass made gradients that wait for an exchange."""
        self._kept += [*self._now, *self._unwatched]
        self._now, self._unwatched = [], []

    def drop(self) -> None:
        """The present backward pass made no gradients."""
        self._now = []

    def reset(self) -> None:
        """The gradients were exchanged."""
        self._kept, self._now, self._unwatched = [], [], []

    def _came_through(self, forward: _Pass) -> None:
        task = torch._C._current_graph_task_id()
        if forward.task == task:
            return
        forward.task = task
        self._open.discard(forward)
        self._on_backward()
        self._now.append(forward.samples)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = list(value.values())
    elif hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
