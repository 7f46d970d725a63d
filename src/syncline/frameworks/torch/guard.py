"""What a prepared model has to be from one exchange to the next, and what nobody else may do with it.

Gradients would be averaged twice, or by nobody, if others wrapped the model, took the place of its parameters, or gave
these another form: each is refused by name, with the remedy. None of it takes part in an exchange.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless

from ...errors import GradientError, UsageError
from .batch_norm import unsynchronised
from .options import Named, Selection
from .storage import Storage
from .supported import check_only_ours

_STEPS_UNSEEN = 64
"""After so many steps at most it is seen that parameters have been added to the model."""


class Forms:
    """Element types, shapes, strides and devices of parameters, as they were when this was made."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._known = [
            (name, parameter, parameter.dtype, parameter.shape, parameter.stride(), parameter.device)
            for name, parameter in named
        ]

    def changed(self) -> str | None:
        """The first parameter that has another form now, in words; None where all are as they were."""
        for name, parameter, dtype, shape, stride, device in self._known:
            if (
                parameter.dtype != dtype
                or parameter.shape != shape
                or parameter.stride() != stride
                or parameter.device != device
            ):
                now = _form(parameter.dtype, parameter.shape, parameter.stride(), parameter.device)
                return (
                    f"parameter {name!r} was {_form(dtype, shape, stride, device)} at syncline.prepare() and is {now}"
                    " now (by .double(), .half(), .to() or .data?): bring the model into its form before prepare()"
                )
        return None


class Guard:
    """Looks at one model; ``fault`` makes an error of this rank that ends the run for all."""

    def __init__(
        self,
        model: torch.nn.Module,
        named: Named,
        selection: Selection,
        storages: Sequence[Storage],
        fault: Callable[[str], GradientError],
    ) -> None:
        self._model, self._named, self._storages, self._fault = model, named, storages, fault
        self.forms = Forms(named)
        self._looked_through = False
        *self._path, self._first = named[0][0].split(".")
        self._known = {id(parameter) for parameter in model.parameters()}
        self._required = [
            (name, parameter, parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if not selection.ignores(parameter)
        ]

    def check_only_ours(self) -> None:
        """Raise GradientError where DistributedDataParallel has been put around, or into, the model."""
        around = DistributedDataParallel._active_ddp_module
        if around is not None and any(parameter is self._named[0][1] for parameter in around.parameters()):
            raise self._fault(
                "this model has been given to syncline.prepare() and then to DistributedDataParallel (as Accelerate and"
                " Trainers do by themselves), and both would average its gradients: leave one of them out"
            )
        if not self._looked_through:
            self._looked_through = True
            try:
                check_only_ours(self._model)
            except UsageError as error:
                raise self._fault(str(error)) from None
            if unsynchronised(self._model):
                raise self._fault(
                    "this model was converted to SyncBatchNorm after syncline.prepare(): do that before it"
                )

    def check_first(self) -> None:
        """Raise GradientError where the first parameter is another: without any of ours nothing would be exchanged."""
        module: Any = self._model
        for name in self._path:
            module = module._modules.get(name)
            if module is None:
                break
        present = None if module is None else module._parameters.get(self._first)
        if present is not self._named[0][1] and not _for_one_call(present):
            self.check_same_parameters()

    def check_same_parameters(self) -> None:
        """Raise GradientError where others have taken the place of the parameters that have our hooks."""
        present = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in self._named:
            if id(parameter) not in present:
                raise self._fault(
                    f"parameter {name!r} is no longer the one of syncline.prepare() (load_state_dict(assign=True), or"
                    " another module in its place?), and the new one would not be exchanged: do that before prepare()"
                )

    def check_trained(self, steps: int) -> None:
        """Raise GradientError where parameters have been frozen, unfrozen or, as seen at times, added."""
        changed = [name for name, parameter, required in self._required if parameter.requires_grad != required]
        if not changed and steps % _STEPS_UNSEEN == 0:  # to walk through a model takes as long as some exchanges
            changed = [name for name, parameter in self._model.named_parameters() if id(parameter) not in self._known]
        if changed:
            raise self._fault(
                f"{changed[0]!r} was frozen, unfrozen or added after syncline.prepare(): do that before it, or, without"
                " server processes, prepare the model again"
            )

    def check_forms(self) -> None:
        """Raise GradientError unless parameters have the form that buckets were made for, and these are in place."""
        if (changed := self.forms.changed()) is not None:
            raise self._fault(changed)
        if any(storage.moved for storage in self._storages):
            raise self._fault(
                "the gradients have been moved to other memory (model.share_memory()?), which is not the one that is"
                " exchanged: call it before syncline.prepare()"
            )


def _form(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], device: torch.device) -> str:
    return f"{dtype} {tuple(shape)} with strides {stride} on {device}"


def _for_one_call(weight: Any) -> bool:
    """Whether a weight is another one's place only during a call, by ``torch.func.functional_call``.

    Gradients of such weights are the script's own. Only that puts tensors in place of parameters; for parameters the
    calls that this one is made in tell.
    """
    if isinstance(weight, torch.Tensor) and not isinstance(weight, torch.nn.Parameter):
        return True
    call = getattr(stateless, "_functional_call", None)
    frame: Any = sys._getframe(1)
    while call is not None and frame is not None:
        if frame.f_code is call.__code__:
            return True
        frame = frame.f_back
    return False
