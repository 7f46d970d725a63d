"""One worker's copy of a model: its parameters, the storages of their gradients, which step it is, what it has to be.

What a model has to be from one exchange to the next is ``Guard``'s: gradients would be averaged twice, or by nobody, if
others wrapped the model, took the place of its parameters, or gave these another form. Each is refused by name, with
the remedy.

How buckets travel is the affair of ``training.exchange``. Buckets of a model on a GPU are staged through pinned memory
of the transport (``staging``). Does not know what forward and backward passes do (``passes``), nor who defers updates
or exchanges weights: these know a replica.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
from .hooks import Hooks, Listeners, Told
from .options import Counting, Fixed, Named, Options, Samples, Selection
from .staging import Copier, device_of, staging_for
from .storage import Storage, layers_of
from .supported import check_only_ours
from .timing import LayerTimes, clock_of

_STEPS_UNSEEN = 64
"""After so many steps at most it is seen that parameters have been added to the model."""


class Replica:
    """One model from when it is prepared until it is detached; all processes make it together.

    ``told`` hears what the script does with the model, and ``framework`` has what a step asks for. ``first_key`` begins
    the range of keys that tell this model's exchanges from those of others.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        options: Options,
        told: Told,
        framework: Framework,
        *,
        first_key: int = 0,
        copier: Copier | None = None,
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
        """Where the gradients of the present backward pass are, or those of the last one."""
        self.exchange = BucketExchange(
            session, first_key, layout, self.storages, staging, measuring=partial(_measuring, model, self.named)
        )
        self.trained = TrainedModel(session, self.exchange, len(self.named), framework)
        self.guard = Guard(model, self.named, self.selection, self.storages, self.fault)
        self.exchanged = False  # True between the end of an exchange and the next backward
        self.listeners = Listeners()
        self.counting: Counting
        """How much the gradients since the last exchange count."""
        if isinstance(options.weight, (int, float)):
            self.counting = Fixed(options.weight)
        else:
            self.counting = Samples(options.weight, told.came_through_output)
        self.hooks = Hooks(session, model, self.named, told, outputs=isinstance(self.counting, Samples))

    @property
    def steps(self) -> int:
        """How many steps have been made."""
        return self.trained.steps

    @steps.setter
    def steps(self, value: int) -> None:
        self.trained.resume_at(value)

    def storage_of(self, step: int) -> Storage:
        """Where the gradients of a step are, or how weights differ after it."""
        return self.storages[self.exchange.place(step)]

    def turn(self, step: int) -> None:
        """The gradients of this step are made from now on."""
        self.storage = self.storage_of(step)

    def weight(self) -> float:
        """How much this rank counts in an exchange."""
        weight = self.counting.weight
        if weight is None:
            raise self.fault(
                "nothing says how much this rank counts: backward came through no output of the model's forward()"
                " (another method was called?). Give syncline.prepare() a number as weight="
            )
        return weight

    def check_start(self) -> None:
        """A step that is exchanged begins."""
        if self.exchanged:
            self.listeners.second_backward()
        self.guard.check_trained(self.steps)
        self.listeners.first_exchange()
        self.listeners.first_exchange = nothing

    def fault(self, text: str) -> GradientError:
        """As ``Session.fault``."""
        return self.session.fault(text)


def _measuring(model: torch.nn.Module, named: Named, steps: int, forward: bool) -> LayerTimes:
    return LayerTimes(model, named, steps, clock_of(device_of(named)), forward=forward)


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
