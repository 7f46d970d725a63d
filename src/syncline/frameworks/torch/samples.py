"""How much a rank counts in the mean of an exchange.

As a rule every rank counts alike, or with a number of its own (``Fixed``). Where the loss is a mean over a batch whose
size differs between ranks, ``Samples`` counts what the gradients come from: a forward pass notes the weight of its
batch; the pass counts when a backward pass first comes through one of its outputs. Several forward passes in one
backward, and several backward passes before one exchange, add up. Forward passes that no backward follows do not count,
nor do those that an earlier backward came through already, as in truncated backpropagation, unless there is nothing
else that a backward comes through.

Owns the counting only: nothing here knows of buckets, sessions or other ranks.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import torch

from ...errors import UsageError

Weight = Callable[..., float] | float | Literal["batch"]


class Counting(Protocol):
    """The weight of one rank and model, exchange by exchange."""

    @property
    def complete(self) -> bool:
        """False while the present backward pass may still change the weight."""
        ...

    @property
    def weight(self) -> float | None:
        """The weight since the last exchange, the present backward pass included; None when nothing was counted."""
        ...

    def keep(self) -> None:
        """The present backward pass made gradients that wait for an exchange."""
        ...

    def drop(self) -> None:
        """The present backward pass made no gradients."""
        ...

    def reset(self) -> None:
        """The gradients were exchanged."""
        ...

    def resume(self, weight: float) -> None:
        """So much had been counted since the last exchange in the run that is resumed."""
        ...


class Fixed:
    """The same weight in every exchange, whatever it is made of."""

    complete = True

    def __init__(self, weight: float) -> None:
        self.weight = checked(weight, "")

    def keep(self) -> None:
        """Nothing is counted."""

    drop = reset = keep

    def resume(self, weight: float) -> None:
        """Nothing is counted."""


class _Pass:
    """A forward pass. Kept alive by the hooks on its outputs, that is as long as its graph exists."""

    __slots__ = ("__weakref__", "task", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.task = -1  # the last backward pass that came through


class Samples:
    """The count of one model. ``on_backward`` is called when a backward pass comes through a forward pass.

    ``weight`` is ``"batch"``, the first dimension of the first tensor given to the model, or a function of the
    model's arguments.
    """

    def __init__(self, weight: Callable[..., float] | Literal["batch"], on_backward: Callable[[], None]) -> None:
        self._weigh = _batch_size if weight == "batch" else weight
        self._on_backward = on_backward
        self._open: weakref.WeakSet[_Pass] = weakref.WeakSet()  # forward passes without a backward so far
        self._forward = 0.0
        self._new: list[_Pass] = []  # what the present backward pass is the first to come through
        self._again: list[_Pass] = []  # what else it came through
        self._kept: list[float] = []  # what earlier ones since the last exchange counted

    def before_forward(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Note the weight of this forward pass; raises UsageError for one that is none."""
        self._forward = checked(self._weigh(*arguments, **keywords), " for this batch")

    def after_forward(self, output: Any) -> bool:
        """Watch the outputs for a backward pass; False where no tensor can be found in them.

        Those that are leaves (a model may return one of its parameters) outlive the pass and are none of its results.
        """
        found = list(tensors_in(output))
        made = _Pass(self._forward)
        for tensor in found:
            if tensor.grad_fn is not None:
                self._open.add(made)
                tensor.register_hook(lambda _: self._came_through(made))  # type: ignore[no-untyped-call]
        return bool(found)

    @property
    def complete(self) -> bool:
        """False while the present backward pass may still come through further forward passes."""
        return not self._open

    @property
    def weight(self) -> float | None:
        """The weight since the last exchange, the present backward pass included; None when nothing was counted."""
        counted = [*self._kept, *self._now()]
        return sum(counted) if counted else None

    def keep(self) -> None:
        """The present backward pass made gradients that wait for an exchange."""
        self._kept += self._now()
        self._new, self._again = [], []

    def drop(self) -> None:
        """The present backward pass made no gradients: what it came through may still be counted."""
        self._open.update(self._new)
        self._new, self._again = [], []

    def reset(self) -> None:
        """The gradients were exchanged."""
        self._kept, self._new, self._again = [], [], []

    def resume(self, weight: float) -> None:
        """Beside what is counted from now on."""
        self._kept = [weight]

    def _now(self) -> list[float]:
        return [made.weight for made in self._new or self._again]

    def _came_through(self, forward: _Pass) -> None:
        task = torch._C._current_graph_task_id()
        if forward.task == task:
            return
        forward.task = task
        self._on_backward()
        if forward in self._open:
            self._open.discard(forward)
            self._new.append(forward)
        elif forward not in self._new and forward not in self._again:
            self._again.append(forward)


def checked(weight: float, of_what: str) -> float:
    """A weight as a number; raises UsageError for one that is none."""
    found = float(weight)
    if not 0 <= found < math.inf:
        raise UsageError(f"weight= gave {found}{of_what}: weights are finite numbers from 0 up")
    return found


def _batch_size(*arguments: Any, **keywords: Any) -> float:
    tensor = next(tensors_in((arguments, keywords)), None)
    return 1.0 if tensor is None or tensor.dim() == 0 else float(tensor.shape[0])


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
