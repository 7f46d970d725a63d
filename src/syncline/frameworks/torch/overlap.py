"""Overlap with the next forward pass: schedules whose results are needed by a layer, or a step, later.

``backward()`` ends while gradients are still under way. ``optimizer.step()`` then notes the values of its groups and
returns; every parameter is updated with its averaged gradient when somebody looks at it (``deferred``), which as a rule
is its layer in the next forward pass. The script's loop stays as it is:

* Who looks at a gradient (clipping, a GradScaler) waits for all of them, and has averages from there on. The optimizer
  then updates at once, whatever has become of them. So it does where a script has put gradients of its own in place.
* Who has kept gradients from before, to change them by, waits in ``optimizer.step()``; who changes them in a way that
  nobody could know of is refused.
* Who looks at a weight (an evaluation, a moving average, ``state_dict``) has it updated first.
* A second backward pass without a step, and whatever ends an exchange (a checkpoint, another layout, the end), waits.
* Weights of compiled models, and those of whose use torch does not tell, wait at the model's own forward pass. The
  first pass shows which ones these are; the gradient of a weight that has been read too early is refused.

Each parameter is updated by a copy of the user's optimizer object whose groups hold nothing else.

Where the schedule is yet to be chosen (``choosing``) a crossing only watches: steps end where they always did, and who
would have to wait is noticed.

Under ``apply="next_step"`` weights are updated with the gradients of the step before. With ``local`` a worker goes on
from weights that are ahead of that by its own gradient, a step of plain SGD; the optimizer sees averages
only, and who looks at weights between steps, on any rank, sees those that all have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ...engine.step import Action, Apply
from ...engine.trace import begin
from ...errors import UsageError
from ...nouns import Bucket
from .compiled import eager, is_compiled
from .deferred import (
    Deferral,
    LocalSteps,
    Values,
    has_hooks,
    in_transform,
    update,
    updates_alone,
    values_of,
    write_back,
)
from .replica import Replica
from .storage import Storage, Writes, shares_memory
from .supported import check_held


class Owed:
    """What a step still owes to the weights: the gradients in ``storage``, as ``written`` knows them, in ``buckets``.

    The optimizer has the tensors ``held``, and its groups had these ``values``.
    """

    def __init__(
        self, storage: Storage, written: Writes, buckets: Sequence[Bucket], values: Values, held: Collection[int]
    ) -> None:
        self.storage, self.written, self.values, self.after = storage, written, values, values
        self._held = held
        self._buckets = buckets
        self._left: dict[int, int] = {}  # buckets of each tensor
        for bucket in buckets:
            for part in bucket.slices:
                self._left[part.tensor] = self._left.get(part.tensor, 0) + 1

    def complete(self, buckets: Iterable[int]) -> list[int]:
        """The tensors that the optimizer has of which these were the last buckets."""
        found = []
        for number in buckets:
            for part in self._buckets[number].slices:
                self._left[part.tensor] -= 1
                if self._left[part.tensor] == 0:
                    del self._left[part.tensor]
                    found.append(part.tensor)
        return [tensor for tensor in found if tensor in self._held]

    @property
    def over(self) -> bool:
        """Whether all tensors have had the update."""
        return not self._left


log = logging.getLogger("syncline")


class Crossing:
    """One model's deferred updates, which ``optimizer`` does, whose class is ``plain``; ``replica`` has the steps.

    ``later`` is for ``apply="next_step"``, and ``local`` says whether workers go on ahead of it.
    """

    def __init__(
        self, replica: Replica, optimizer: torch.optim.Optimizer, plain: type, *, later: bool, local: bool
    ) -> None:
        replica.guard.check_trained(replica.steps)  # no hook can be put on what was frozen since
        self._replica, self._optimizer, self._plain, self._later = replica, optimizer, plain, later
        self._parameters = [parameter for _, parameter in replica.named]
        self._deferral = Deferral(self._parameters, self._read, self.flush)
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self.local = LocalSteps(self._parameters, optimizer) if local else None
        self._alone = updates_alone(optimizer)
        self._owed: dict[int, Owed] = {}  # updates, by step
        self._failed: BaseException | None = None  # what kept an update from being made
        self._written = Writes(replica.storage)  # the gradients, as backward has left them
        self._left: Writes | None = None  # the same as the optimizer has, where steps are watched
        self._early: list[int] = []  # parameters that are read where nobody sees it
        self._first = True  # no step has been exchanged
        self._looked: set[int] | None = None  # those that were looked at in the first pass, while that lasts
        self._unread: frozenset[int] = frozenset()  # those that no forward pass had read when a backward pass began
        self._pass = -1  # the backward pass that they are of
        self.looked = False
        """Whether the script has looked at what was, or would have been, under way."""
        self.gives_way = False
        """Whether another schedule may take the place of one that crosses iterations."""
        self.refused = False
        """Whether it has to, since the optimizer holds what does not go with one."""
        self._in_forward = False  # a forward pass of the model is running, in which weights are read
        self._handles: list[Any] = [
            parameter.register_hook(partial(self._before_gradient, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]
        after = eager(lambda *_: self._after_forward())
        self._handles.append(replica.model.register_forward_hook(after, always_call=True))  # also where the pass fails
        replica.hooks.keep(self._handles[-1:])

    @property
    def model(self) -> torch.nn.Module:
        """Whose steps these are."""
        return self._replica.model

    @property
    def updates_alone(self) -> bool:
        """Whether parameters may be updated one after the other."""
        return self._alone

    @property
    def name(self) -> str:
        """The schedule's."""
        return self._replica.exchange.layout.strategy_in(self._replica.session.strategy).schedule.name

    @property
    def watches(self) -> bool:
        """Whether nothing waits, and who would have to is only noticed."""
        return self._deferral.watches

    @watches.setter
    def watches(self, value: bool) -> None:
        self._deferral.watches = value

    @property
    def attached(self) -> bool:
        """Whether steps are still this one's affair."""
        return bool(self._handles)

    def take_looked(self) -> bool:
        """Whether the script has looked since this was asked last."""
        found, self.looked = self.looked, False
        return found

    def detach(self) -> None:
        """Parameters are what they seem to be; what is under way is not waited for."""
        if self._owed and self._failed is None and self._replica.session.engine.error is None:
            log.warning(
                "%s: the run ends between two steps: some weights have had the last update and others not; call"
                " syncline.flush() before weights are saved",
                self._replica.session.name(self._replica.session.index),
            )
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._deferral.release_all()

    # The optimizer's side.

    def step(self, whole: Callable[[], Any]) -> None:
        """The script calls the optimizer, which would do ``whole``."""
        with self._deferral.lock:
            if self._replica.trained.machine.unstepped:
                if self._defer_step():
                    return
            else:
                self.flush()
        whole()  # without the lock: what it calls may look at parameters in a thread of autograd's, of a device
        if self.watches:
            self._watch_weights()

    def _defer_step(self) -> bool:
        """Have the weights updated later; False where the optimizer has to do it now, as somebody has looked."""
        held = self._of_groups()
        if not self._deferral.any or not self._nobody_looked(held):
            self.flush()
        number = self._replica.trained.machine.begun - 1
        actions = list(self._replica.trained.machine.stepped())
        now = [action for action in actions if isinstance(action, Apply) and action.step == number]
        self._do([action for action in actions if action not in now])
        if now:
            self._deferral.release_all()
            return False
        values = values_of(self._optimizer)  # behind the update before
        storage, buckets = self._replica.storage_of(number), self._replica.exchange.layout.buckets
        self._owed[number] = Owed(storage, self._written, buckets, values, frozenset(held))
        self._deferral.defer(range(len(self._parameters)))
        self._update_others(values)
        if self.local is not None:
            self.local.go_ahead(values)
        return True

    def _watch_weights(self) -> None:
        """The optimizer has updated them: until the next forward pass nobody has to look."""
        with self._deferral.lock:
            self._deferral.defer(range(len(self._parameters)))
            self._left = Writes(self._replica.storage)

    def at_once(self, whole: Callable[[], Any]) -> Any:
        """Let the optimizer update all that it has, with gradients as they are when it looks at them."""
        with self._deferral.lock:
            self.flush()
            if self._replica.trained.machine.unstepped:
                self._do(self._replica.trained.machine.stepped())
        return whole()

    def check_added(self, group: dict[str, Any]) -> None:
        """Raise UsageError where a group that is given to the optimizer cannot be, unless another schedule can."""
        try:
            check_held(self.name, self.model, group)
        except UsageError:
            if not self.gives_way:
                raise
            self.refused = True

    def _of_groups(self) -> list[int]:
        """The parameters that the optimizer updates."""
        held = (one for group in self._optimizer.param_groups for one in group["params"])
        return [number for one in held if (number := self._numbers.get(id(one))) is not None]

    def _nobody_looked(self, held: Iterable[int]) -> bool:
        """Whether all gradients are still what backward has made of them."""
        if has_hooks(self._optimizer):
            return False
        storage = self._replica.storage
        with torch._C.DisableTorchFunctionSubclass():
            for number in held:
                if self._parameters[number].grad is not storage.views[number]:
                    return False
        if not self.watches:
            self._check_unwritten(self._written)
        elif self._written.since() is not None:
            return False
        return not self._keeps()

    def _keeps(self) -> bool:
        """Whether the script has kept what shows, or changes, what is under way: nobody would see it do so."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.gives_way and any(shares_memory(parameter) for parameter in self._parameters):
                return True
            return self._replica.storage.kept

    def _check_unwritten(self, written: Writes, tensors: Iterable[int] | None = None) -> None:
        """Raise GradientError where one of these gradients, or of all, was changed while it was under way."""
        if (number := written.since(tensors)) is not None:
            raise self._replica.fault(
                f"the gradient of {self._replica.named[number][0]!r} was changed through a tensor that was kept from"
                " before, while it was exchanged: read parameter.grad anew each time before it is changed, or use"
                " schedule=fixed"
            )

    def _update_others(self, values: Values) -> None:
        """Parameters whose gradients are not exchanged are updated at once."""
        others = [one for group in values for one in group["params"] if id(one) not in self._numbers]
        mine = [one for one in others if one.grad is not None]
        if mine:
            update(self._optimizer, self._plain, values, mine, [one.grad for one in mine])

    def zero_grad(self, plain: Callable[[], None], *, looks: bool) -> None:
        """The script clears gradients, as ``plain`` does; torch's own way of setting them to None looks at none."""
        if looks:
            self.flush()
            plain()
            return
        with torch._C.DisableTorchFunctionSubclass():
            plain()

    # The model's side.

    def before_forward(self) -> None:
        """The model's own forward pass begins."""
        if self._in_forward:  # the pass before was interrupted
            self._looked = None
        self._in_forward = True
        self.looked |= in_transform()  # in which nothing can be updated
        if torch._C._get_tracing_state() is not None:
            with _untraced():  # or the trace would have the updates, as what the model computes
                self.flush()
        elif self._replica.trained.machine.unstepped and self._deferral.any:
            self.flush()  # gradients will be added to these
        elif is_compiled(self._replica.model):
            self.flush()
        elif self._first:
            if torch.is_grad_enabled():
                self._looked = self._looked or set()
                self._deferral.defer(range(len(self._parameters)))
            else:  # an evaluation shows nothing of what training reads
                self._deferral.release_all()
        elif self.watches or (self._later and torch.is_grad_enabled() and self._replica.model.training):
            self._deferral.release_all()
        else:
            self._deferral.complete(self._parameters[number] for number in self._early)

    def _after_forward(self) -> None:
        """Who looks at weights from now on is not this pass."""
        self._in_forward = False
        if self._looked is not None:
            self._deferral.release_all()

    def _before_gradient(self, number: int, _: torch.Tensor) -> None:
        """Backward is about to add to the gradient of a parameter."""
        if self._left is not None:
            self.looked |= self._left.since() is not None
            self._left = None
        if self._deferral.any:
            self._begin_backward()
        if self._later:
            self._check_free(number)
        if self._looked is not None and number not in self._looked and number not in self._early:
            self._early.append(number)
        if number in self._unread and torch._C._current_graph_task_id() == self._pass:
            raise self._replica.fault(
                f"the weights of {self._replica.named[number][0]!r} were read in this forward pass before their update"
                " had come, by something that PyTorch does not tell of (an extension?), and not so in the first step:"
                " call syncline.flush() before it, or use schedule=fixed"
            )

    def _check_free(self, number: int) -> None:
        """Raise GradientError where backward would add to a gradient that is under way."""
        gradient = self._parameters[number].grad
        if gradient is not None and any(
            gradient.data_ptr() == owed.storage.places[number] for owed in self._owed.values()
        ):
            raise self._replica.fault(
                f"backward() adds to the gradient of {self._replica.named[number][0]!r}, which is still under way from"
                f" the step before: call zero_grad() before backward(), of all models that it goes through, or use"
                f" another schedule than {self.name}"
            )

    def _begin_backward(self) -> None:
        watching, unstepped = self._looked is not None and not self._owed, self._replica.trained.machine.unstepped
        if self.watches:
            self.looked |= unstepped
            self._deferral.release_all()
            return
        if watching or (self._later and not unstepped):  # another forward pass than the model's has read them as is
            self._deferral.release_all()
            return
        if not unstepped:
            self._unread = frozenset(self._deferral.numbers.values())
            self._pass = torch._C._current_graph_task_id()
        self.settle()

    def backward_over(self) -> None:
        """What is exchanged of this pass is under way from now on."""
        self._unread = frozenset()
        self._first = self._first and self._looked is None and self.watches  # it may watch from mid-step on
        self._looked, self._in_forward = None, False
        if self._replica.trained.machine.under_way:
            self._written = Writes(self._replica.storage)
            self._deferral.defer(range(len(self._parameters)))

    # What completes parameters.

    def _do(self, actions: Sequence[Action]) -> None:
        """Carry out what the state machine says, which has passed on by then: what fails now fails for good."""
        if self._failed is not None:
            raise self._failed
        try:
            self._replica.trained.do(actions)
        except BaseException as error:
            self._failed = error if isinstance(error, Exception) else self._replica.fault(f"interrupted ({error!r})")
            raise

    def _read(self, numbers: Sequence[int]) -> None:
        """Somebody looks at these parameters."""
        if self._looked is not None and not self._owed:
            self._looked.update(numbers)
        elif self._later or self._replica.trained.machine.unstepped:
            self.flush()
        else:
            self.looked |= not self._in_forward
            for number in numbers:
                self._do(self._replica.trained.machine.needed(number))

    def flush(self) -> None:
        """The script wants to see what is under way: wait for it, and update what the optimizer was called for."""
        with self._deferral.lock:
            self.looked |= bool(self._owed) or self._deferral.any
            self.settle()

    def settle(self) -> None:
        """The same without the script."""
        with self._deferral.lock:
            if self._owed or self._deferral.any:
                if self._replica.trained.machine.unstepped and self._deferral.any and not self.watches:
                    self._check_unwritten(self._written)
                self._do(self._replica.trained.machine.flush())
                self._deferral.release_all()

    def apply(self, action: Apply) -> None:
        """The results of a step have come for these buckets."""
        owed = self._owed.get(action.step)
        if owed is None:
            return  # the optimizer has done it at once
        tensors = owed.complete(action.buckets)
        self._check_unwritten(owed.written, tensors)
        self._deferral.release(tensors)
        if self.local is not None:
            self.local.go_back()
        if tensors:
            parameters = [self._parameters[number] for number in tensors]
            gradients = [owed.storage.views[number] for number in tensors]
            span = None
            if (observer := self._replica.session.observer) is not None:
                span = begin(observer, "optimizer", f"{self._plain.__name__}, {len(tensors)} tensors")
            owed.after = update(self._optimizer, self._plain, owed.values, parameters, gradients)
            if span is not None:
                span.end()
        if owed.over:
            write_back(self._optimizer, owed.values, owed.after)
            del self._owed[action.step]


def watch_zero_grad(crossing: Crossing) -> None:
    """The model's ``zero_grad``, if it is torch's own, looks at no gradient where it sets them to None."""
    if type(crossing.model).zero_grad is torch.nn.Module.zero_grad:
        crossing.model.zero_grad = partial(_zero_grad, crossing)  # type: ignore[method-assign]


def _zero_grad(crossing: Crossing, set_to_none: bool = True) -> None:
    model = crossing.model
    crossing.zero_grad(partial(type(model).zero_grad, model, set_to_none), looks=not set_to_none)


@contextmanager
def _untraced() -> Iterator[None]:
    """Inside, torch.jit.trace records nothing."""
    library: Any = torch._C
    tracing = library._get_tracing_state()
    library._set_tracing_state(None)
    try:
        yield
    finally:
        library._set_tracing_state(tracing)
