"""What a script asks of ``prepare``: how ranks are weighed, what may be missing, what stays each rank's own.

How much a rank counts in the mean of an exchange: as a rule every rank counts alike, or with a number of its own
(``Fixed``). Where the loss is a mean over a batch whose size differs between ranks, ``Samples`` counts what the
gradients come from: a forward pass notes the weight of its batch; the pass counts when a backward pass first comes
through one of its outputs. Several forward passes in one backward, and several backward passes before one exchange, add
up. Forward passes that no backward follows do not count, nor do those that an earlier backward came through already, as
in truncated backpropagation, unless there is nothing else that a backward comes through.

Nothing here knows of buckets, sessions or other ranks.
"""

from __future__ import annotations

import difflib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch

from ...errors import GradientError, UsageError
from .storage import distinct

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


Named = list[tuple[str, torch.nn.Parameter]]

_DDP_IGNORE = "_ddp_params_and_buffers_to_ignore"  # where DistributedDataParallel keeps the names, on the model


@dataclass(frozen=True)
class Options:
    """The arguments of ``prepare`` beside the model and the optimizer.

    ``unused`` says what happens to parameters that get no gradient in a backward pass: an ``"error"`` that names them,
    or ``"zeros"``. ``weight`` is what a rank counts in every exchange, or ``"batch"``, or a function of the model's
    arguments: what each of its batches counts. ``ignore`` names parameters and buffers that are left alone.
    ``broadcast_buffers`` is whether buffers are rank 0's everywhere, or each rank's own. Raises UsageError.
    """

    unused: Literal["error", "zeros"] = "error"
    weight: Weight = 1
    ignore: frozenset[str] = frozenset()
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        if self.unused not in ("error", "zeros"):
            raise UsageError(f"unused={self.unused!r}: choose 'error' or 'zeros'")
        if self.fixed:
            checked(self.weight, "")  # type: ignore[arg-type]
        elif self.weight != "batch" and not callable(self.weight):
            raise UsageError(f"weight={self.weight!r}: give a number, 'batch', or a function of the model's arguments")

    @property
    def fixed(self) -> bool:
        """Whether a rank counts the same in every exchange."""
        return isinstance(self.weight, (int, float))

    @property
    def agreed(self) -> list[object]:
        """What has to be the same on all ranks, as JSON can say it."""
        weight = "a function" if callable(self.weight) else "'batch'" if self.weight == "batch" else "a number"
        return [f"broadcast_buffers={self.broadcast_buffers}", f"{weight} as weight="]


class Selection:
    """What of a model takes part: everything but what ``options`` and the model itself say to leave alone.

    A tensor that has several names is ignored by any of them. Raises UsageError for a name that nothing has.
    """

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        self.model, self._options = model, options
        parameters = list(model.named_parameters(remove_duplicate=False))
        known = [name for name, _ in (*parameters, *model.named_buffers(remove_duplicate=False))]
        for name in sorted(options.ignore.difference(known)):
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"ignore= names {name!r}, which is no parameter or buffer of the model{hint}")
        self._names = options.ignore.union(getattr(model, _DDP_IGNORE, ()))
        self._ignored = {id(tensor) for name, tensor in parameters if name in self._names}

    def trained(self) -> Named:
        """The parameters whose gradients are exchanged, by name."""
        return [item for item in self.model.named_parameters() if item[1].requires_grad and not self.ignores(item[1])]

    def ignores(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is left alone."""
        return id(parameter) in self._ignored

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Every parameter and buffer that starts from rank 0's values, once each, by name."""
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for name, parameter in self.model.named_parameters():
            if not self.ignores(parameter):
                found.setdefault(id(parameter), (name, parameter))
        for name, buffer in self.buffers().items():
            tensor = buffer()
            found.setdefault(id(tensor), (name, tensor))
        return list(found.values())

    def buffers(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Ways to get at what every buffer has in memory that is rank 0's everywhere, once each, by name.

        Modules may put new tensors in their place.
        """
        if not self._options.broadcast_buffers:
            return {}
        all_names = list(self.model.named_buffers(remove_duplicate=False))
        ignored = {id(buffer) for name, buffer in all_names if name in self._names}
        found: dict[int, tuple[str, Callable[[], torch.Tensor]]] = {}
        for prefix, module in self.model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in ignored:
                    name = f"{prefix}.{key}" if prefix else key
                    found.setdefault(id(buffer), (name, partial(_buffer, module, key, name)))
        return dict(found.values())


def _buffer(module: torch.nn.Module, key: str, name: str) -> torch.Tensor:
    buffer = module._buffers[key]
    if buffer is None:
        raise GradientError(f"buffer {name!r} has been removed since syncline.prepare(): prepare the model again")
    return distinct(buffer)
