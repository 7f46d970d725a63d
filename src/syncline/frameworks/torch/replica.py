"""One worker's copy of a model: its parameters, the storages of their gradients, its step, and checks of its form.

``Guard`` checks between exchanges that the model has not changed in a way that would break averaging. Gradients would
be averaged twice or not at all if another wrapper were added, or if parameters were replaced or changed their form.
Each such change is refused with the parameter's name and a remedy.

``training.exchange`` decides how buckets travel; on a GPU ``staging`` copies them through pinned host memory.
``passes`` builds on this module, and so do deferred updates and exchanges of weights; a replica knows none of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import stateless

from ...errors import GradientError, UsageError
from ...session.layout import decide_layout
from ...session.session import Session
from ...training.exchange import BucketExchange, storages_of
from ...training.model import Framework, TrainedModel, nothing
from .buffers import unsynchronised
from .hooks import Hooks, Listeners
from .options import Counting, Named, Options, Selection
from .staging import CudaCopier, device_of, staging_for
from .storage import Array, Storage, as_bytes, layers_of, memory
from .supported import check_only_ours
from .timing import LayerTimes, clock_of

_STEPS_UNSEEN = 64
"""The number of steps between checks for parameters that were added to the model."""


class Replica:
    """One model from its preparation until it is detached. All processes construct it together.

    ``framework`` has the functions that a step calls. ``first_key`` is the first of the keys that separate this model's
    exchanges from those of other models.
    """

    hooks: Hooks
    counting: Counting
    """The weight of the gradients since the last exchange."""

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        options: Options,
        framework: Framework,
        *,
        first_key: int = 0,
        copier: CudaCopier | None = None,
    ) -> None:
        self.session, self.model, self.first_key = session, model, first_key
        self.selection = Selection(model, options)
        self.named = self.selection.trained()
        layout, device = decide_layout(session, layers_of(self.named)), device_of(self.named)
        staging = staging_for(device, session.engine, session.fail, copier)
        self.storages = [
            Storage(self.named, layout.buckets, staging.allocate, staging.device)
            for _ in range(storages_of(session.strategy))
        ]
        self.storage = self.storages[0]
        """The gradients of the present backward pass, or of the last one."""
        self.exchange = BucketExchange(
            session, first_key, layout, self.storages, staging, measuring=partial(_measuring, model, self.named)
        )
        self.trained = TrainedModel(session, self.exchange, len(self.named), framework)
        self.guard = Guard(self)
        self.exchanged = False  # an exchange has ended, and no backward pass has begun since
        self.listeners = Listeners()

    @property
    def steps(self) -> int:
        """The number of steps that have been made."""
        return self.trained.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.trained.resume_at(value)

    def storage_of(self, step: int) -> Storage:
        """The storage of a step's gradients, or of the differences of weights after that step."""
        return self.storages[self.exchange.place(step)]

    def turn(self, step: int) -> None:
        """Switch to the storage for the gradients of this step."""
        self.storage = self.storage_of(step)

    def weight(self) -> float:
        """This rank's weight in an exchange."""
        weight = self.counting.weight
        if weight is None:
            raise self.fault(
                "this rank's weight in the mean is unknown: backward passed through no output of the model's forward()"
                " (was another method called?). Give syncline.prepare() a number as weight="
            )
        return weight

    def weights(self) -> Iterator[tuple[str, Array]]:
        """The name and the bytes of each parameter that all ranks have alike."""
        for name, parameter in self.model.named_parameters():
            if not self.selection.ignores(parameter):
                yield name, memory(as_bytes(parameter.contiguous()).cpu())

    def check_start(self) -> None:
        """Check the model at the start of a step that is exchanged."""
        if self.exchanged:
            self.listeners.second_backward()
        self.guard.check_trained(self.steps)
        self.listeners.first_exchange()
        self.listeners.first_exchange = nothing

    def fault(self, text: str) -> GradientError:
        """An error of this worker in a step, which ends the run for all."""
        return self.session.fault(text)


def _measuring(model: torch.nn.Module, named: Named, steps: int, forward: bool) -> LayerTimes:
    return LayerTimes(model, named, steps, clock_of(device_of(named)), forward=forward)


class Forms:
    """The element types, shapes, strides and devices of parameters at the time of construction."""

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._known = [
            (name, parameter, parameter.dtype, parameter.shape, parameter.stride(), parameter.device)
            for name, parameter in named
        ]

    def changed(self) -> str | None:
        """A text on the first parameter whose form has changed; None if none has."""
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
    """Checks the model of a replica between exchanges. An error ends the run for all."""

    def __init__(self, replica: Replica) -> None:
        self._model, self._named, self._storages = replica.model, replica.named, replica.storages
        self._fault = replica.fault
        self.forms = Forms(replica.named)
        self._looked_through = False
        *self._path, self._first = replica.named[0][0].split(".")
        self._known = {id(parameter) for parameter in replica.model.parameters()}
        self._required = [
            (name, parameter, parameter.requires_grad)
            for name, parameter in replica.model.named_parameters()
            if not replica.selection.ignores(parameter)
        ]

    def check_only_ours(self) -> None:
        """Raise GradientError if DistributedDataParallel was put around the model or into it."""
        around = DistributedDataParallel._active_ddp_module
        if around is not None and any(parameter is self._named[0][1] for parameter in around.parameters()):
            raise self._fault(
                "this model was given to syncline.prepare() and then to DistributedDataParallel (Accelerate and"
                " Trainers do that by themselves), and both would average its gradients: leave one of them out"
            )
        if not self._looked_through:
            self._looked_through = True
            try:
                check_only_ours(self._model)
            except UsageError as error:
                raise self._fault(str(error)) from None
            if unsynchronised(self._model):
                raise self._fault(
                    "this model was converted to SyncBatchNorm after syncline.prepare(): convert it before"
                )

    def check_first(self) -> None:
        """Raise GradientError if the first parameter was replaced. If all were, no hook would fire and nothing would
        be exchanged."""
        module: Any = self._model
        for name in self._path:
            module = module._modules.get(name)
            if module is None:
                break
        present = None if module is None else module._parameters.get(self._first)
        if present is not self._named[0][1] and not _for_one_call(present):
            self.check_same_parameters()

    def check_same_parameters(self) -> None:
        """Raise GradientError if parameters with our hooks were replaced by others."""
        present = {id(parameter) for parameter in self._model.parameters()}
        for name, parameter in self._named:
            if id(parameter) not in present:
                raise self._fault(
                    f"parameter {name!r} was replaced after syncline.prepare() (load_state_dict(assign=True), or"
                    " another module in its place?), and the new one would not be exchanged: replace it before"
                    " prepare()"
                )

    def check_trained(self, steps: int) -> None:
        """Raise GradientError if parameters were frozen or unfrozen, or (checked now and then) added."""
        changed = [name for name, parameter, required in self._required if parameter.requires_grad != required]
        if not changed and steps % _STEPS_UNSEEN == 0:  # walking through a model can take as long as an exchange
            changed = [name for name, parameter in self._model.named_parameters() if id(parameter) not in self._known]
        if changed:
            raise self._fault(
                f"{changed[0]!r} was frozen, unfrozen or added after syncline.prepare(): change it before prepare(),"
                " or, without server processes, prepare the model again"
            )

    def check_forms(self) -> None:
        """Raise GradientError unless parameters have their original form, and gradients lie in the original memory."""
        if (changed := self.forms.changed()) is not None:
            raise self._fault(changed)
        if any(storage.moved for storage in self._storages):
            raise self._fault(
                "the gradients were moved to other memory (model.share_memory()?), which is not exchanged: call that"
                " before syncline.prepare()"
            )


def _form(dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], device: torch.device) -> str:
    return f"{dtype} {tuple(shape)} with strides {stride} on {device}"


def _for_one_call(weight: Any) -> bool:
    """Whether ``torch.func.functional_call`` has replaced a weight for the duration of a call.

    The script handles gradients of such weights itself. A plain tensor in the place of a parameter can only come from
    there; for a parameter the stack of calls tells.
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
