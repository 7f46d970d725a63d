"""What a script asks of ``prepare``: how ranks are weighed, what may be missing, what stays each rank's own."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ...errors import GradientError, UsageError
from .samples import Weight, checked
from .storage import distinct

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
