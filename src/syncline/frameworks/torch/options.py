"""The options of ``prepare``: a rank's weight in the mean, missing gradients, ignored tensors, and the group of ranks.

By default all ranks have the same weight, or each has a constant of its own (``Fixed``). If the loss is a mean over a
batch whose size differs between ranks, ``Samples`` counts the samples behind the gradients. A forward pass notes the
weight of its batch, and the weight counts when a backward pass first passes through one of its outputs. Several forward
passes in one backward pass, and several backward passes before one exchange, add up. A forward pass without a backward
pass does not count. In truncated backpropagation, a forward pass that an earlier backward pass has covered counts again
only if the present backward pass covers no other.

Nothing here communicates.
"""

from __future__ import annotations

import difflib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...errors import GradientError, UsageError
from ...session.session import Session
from .storage import distinct

Weight = Callable[..., float] | float | Literal["batch"]


class Fixed:
    """The same weight in every exchange: the calls of ``Samples``, which have no effect here."""

    complete = True

    def __init__(self, weight: float) -> None:
        self.weight = checked(weight, "")

    def keep(self) -> None:
        """No effect."""

    drop = reset = keep

    def resume(self, weight: float) -> None:
        """No effect."""


class _Pass:
    """A forward pass. The hooks on its outputs keep it alive as long as its graph exists."""

    __slots__ = ("__weakref__", "task", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.task = -1  # the last backward pass that has reached it


class Samples:
    """Counts the samples of one model. ``on_backward`` is called when a backward pass reaches a forward pass's output.

    ``weight`` is ``"batch"`` (the first dimension of the first tensor argument) or a function of the model's arguments.
    """

    def __init__(self, weight: Callable[..., float] | Literal["batch"], on_backward: Callable[[], None]) -> None:
        self._weigh = _batch_size if weight == "batch" else weight
        self._on_backward = on_backward
        self._open: weakref.WeakSet[_Pass] = weakref.WeakSet()  # forward passes without a backward so far
        self._forward = 0.0
        self._new: list[_Pass] = []  # forward passes that the present backward pass is the first to reach
        self._again: list[_Pass] = []  # forward passes that an earlier backward pass has reached too
        self.total = 0.0
        """The weights of all exchanges so far."""
        self._kept: list[float] = []  # weights of earlier backward passes since the last exchange

    def before_forward(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Note the weight of this forward pass. Raises UsageError for an invalid weight."""
        self._forward = checked(self._weigh(*arguments, **keywords), " for this batch")

    def after_forward(self, output: Any) -> bool:
        """Watch the outputs for a backward pass. Returns False if they contain no tensor.

        Outputs that are leaves, such as a returned parameter, are not watched: they outlive the pass.
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
        """False while the present backward pass may still reach further forward passes."""
        return not self._open

    @property
    def weight(self) -> float | None:
        """The weight since the last exchange, including the present backward pass; None if nothing was counted."""
        counted = [*self._kept, *self._now()]
        return sum(counted) if counted else None

    def keep(self) -> None:
        """Count the present backward pass: its gradients wait for an exchange."""
        self._kept += self._now()
        self._new, self._again = [], []

    def drop(self) -> None:
        """Do not count the present backward pass; its forward passes may still be counted later."""
        self._open.update(self._new)
        self._new, self._again = [], []

    def reset(self) -> None:
        """Start again from 0: the gradients were exchanged."""
        self.total += self.weight or 0.0
        self._kept, self._new, self._again = [], [], []

    def resume(self, weight: float) -> None:
        """Count this weight in addition to later ones."""
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


Counting = Fixed | Samples
"""The weight of one rank and model in each exchange."""


def checked(weight: float, of_what: str) -> float:
    """A weight as a float. Raises UsageError for a value that is negative, infinite or NaN."""
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
    """The arguments of ``prepare`` besides the model and the optimizer.

    ``unused`` selects what happens to parameters without a gradient in a backward pass: an ``"error"`` that names them,
    or ``"zeros"``. ``weight`` is the rank's weight in every exchange: a number, ``"batch"``, or a function that takes
    the model's arguments and returns the weight of the batch. ``ignore`` names parameters and buffers to leave alone.
    ``broadcast_buffers`` copies rank 0's buffers to all ranks; without it each rank keeps its own. Raises UsageError.
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
        """Whether the rank's weight is a constant."""
        return isinstance(self.weight, (int, float))

    @property
    def agreed(self) -> list[str]:
        """The part of the options that must be equal on all ranks."""
        weight = "a function" if callable(self.weight) else "'batch'" if self.weight == "batch" else "a number"
        return [f"broadcast_buffers={self.broadcast_buffers}", f"{weight} as weight="]


class Selection:
    """The parameters and buffers of a model that take part: all except those that ``options`` or the model ignore.

    A tensor with several names is ignored if any of them is. Raises UsageError for an unknown name.
    """

    def __init__(self, model: torch.nn.Module, options: Options) -> None:
        self.model, self._options = model, options
        parameters = list(model.named_parameters(remove_duplicate=False))
        known = [name for name, _ in (*parameters, *model.named_buffers(remove_duplicate=False))]
        for name in sorted(options.ignore.difference(known)):
            near = difflib.get_close_matches(name, known, 1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"ignore= names {name!r}, which is not a parameter or buffer of the model{hint}")
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
        """Functions that return the memory of each buffer to copy from rank 0, once each, by name.

        They are functions because modules may replace their buffers by new tensors.
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


def ranks_of(session: Session, group: Any) -> tuple[int, ...]:
    """The ranks in a group of PyTorch's, in ascending order: one dimension of a DeviceMesh, or a ProcessGroup.

    The backend of torch.distributed does not matter, because nothing is sent there. Its ranks must equal the workers'
    own, as they do if one launcher has started both. Raises UsageError for other types, for a mesh of several
    dimensions, and if this worker is not in the group.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            example = f'mesh["{names[0]}"]' if names else "mesh[NAME], of a mesh made with mesh_dim_names=,"
            raise UsageError(
                f"group= is a DeviceMesh of {group.ndim} dimensions: give the one whose ranks are to train together,"
                f" such as {example}"
            )
        found = [int(rank) for rank in group.mesh.tolist()]
    elif isinstance(group, dist.ProcessGroup):
        found = _ranks_of_group(group)
    else:
        raise UsageError(
            "group= takes the result of syncline.new_group(), one dimension of a DeviceMesh, or a ProcessGroup, not"
            f" {type(group).__name__}"
        )
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (session.rank, session.world_size):
        raise UsageError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed, and rank"
            f" {session.rank} of {session.world_size} in Syncline: start both with the same ranks, or give"
            " syncline.new_group(ranks)"
        )
    if session.rank not in found:
        raise UsageError(f"{session.name(session.rank)} is not in this group, of ranks {', '.join(map(str, found))}")
    return tuple(sorted(found))


def _ranks_of_group(group: dist.ProcessGroup) -> list[int]:
    try:
        return [int(rank) for rank in dist.get_process_group_ranks(group)]
    except (KeyError, ValueError) as error:  # torch raises one of them for a destroyed group
        raise UsageError(
            "group= is a ProcessGroup that was destroyed: give syncline.new_group(ranks), which lives as long as the"
            " run, or destroy the group after its last use"
        ) from error
