"""Deferred updates: the exchange overlaps with the next forward pass (``apply="layer"`` or ``"next_step"``).

``backward()`` ends while gradients are still in flight. ``optimizer.step()`` then records the values of its groups and
returns. Each parameter is updated with its averaged gradient at its first use (``first_use``), usually by its layer in
the next forward pass. The script's loop stays as it is:

* Reading a gradient (clipping, a GradScaler) waits for all gradients, which are averages from then on. The optimizer
  then updates at once, with the gradients as the script has left them, or with the script's own gradients.
* If the script has kept a gradient tensor through which it could change the gradient, ``optimizer.step()`` waits. A
  change that cannot be noticed in time is refused.
* Reading a weight (an evaluation, a moving average, ``state_dict``) updates it first.
* A second backward pass without a step waits, and so does the end of an exchange: a checkpoint, another layout, the
  shutdown.
* Weights of compiled models, and weights whose use torch does not report, wait at the model's own forward pass. The
  first pass shows which weights these are. The gradient of a weight that was read before its update is refused.

A copy of the user's optimizer object, whose groups hold these parameters alone, updates them
(``partial_optimizer.update``).

While the schedule is being chosen (``choosing``), ``DeferredUpdates`` only watches: steps end as without overlap, and
it notes whether the script would have had to wait.

Under ``apply="next_step"`` an update uses the gradients of the step before. With ``local`` a worker continues from
weights that include its own latest gradient by a step of plain SGD (``LocalSteps``). While the gradients of step t are
in flight, it computes the next ones at

    w(t+1) = W(t) - lr g(t)

with its own gradient g(t) (added for an optimizer that maximizes), and the shared weights W(t), updated with the
average of step t-1 ("OD-SGD", Xu et al., ACM TACO 2020). Memory: a copy of the weights, and the worker's own gradients.
The optimizer sees averages only, and a script that reads weights between steps sees, on every rank, the weights that
all ranks share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from ...engine.step import Action, Apply
from ...engine.trace import begin
from ...errors import UsageError
from ...nouns import Bucket
from .compiled import eager, is_compiled
from .first_use import Deferral, in_transform
from .hooks import Telling
from .partial_optimizer import Values, group_copies, update, updates_alone, write_back
from .replica import Replica
from .storage import Storage, Writes, shares_memory
from .supported import check_held


class PendingUpdate:
    """The deferred update of one step: its gradients in ``storage``, exchanged in ``buckets``.

    ``written`` detects changes of the gradients, ``values`` are the optimizer's group values at the step, and ``held``
    are the tensors in its groups.
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
        """The tensors in the optimizer's groups that these buckets complete."""
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
        """Whether all tensors have been updated."""
        return not self._left


log = logging.getLogger("syncline")


class DeferredUpdates:
    """One model's deferred updates by ``optimizer``, whose original class is ``plain``; ``replica`` has the steps.

    ``later``: ``apply="next_step"``. ``local``: workers add their own gradient ahead of the update.
    """

    def __init__(
        self, replica: Replica, optimizer: torch.optim.Optimizer, plain: type, *, later: bool, local: bool
    ) -> None:
        replica.guard.check_trained(replica.steps)  # a parameter frozen since then takes no hook
        self._replica, self._optimizer, self._plain, self._later = replica, optimizer, plain, later
        self._parameters = [parameter for _, parameter in replica.named]
        self._deferral = Deferral(self._parameters, self._read, self.flush)
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self.local = LocalSteps(self._parameters, optimizer) if local else None
        self.updates_alone = updates_alone(optimizer)
        """Whether the optimizer can update parameters one by one."""
        self._pending: dict[int, PendingUpdate] = {}  # updates, by step
        self._failed: BaseException | None = None  # the error that prevented an update
        self._written = Writes(replica.storage)  # detects changes of the gradients since backward
        self._left: Writes | None = None  # the same since the optimizer's step, while watching
        self._early: list[int] = []  # parameters whose reads torch does not report
        self._first = True  # no step has been exchanged yet
        self._looked: set[int] | None = None  # parameters read in the first pass, during that pass
        self._unread: frozenset[int] = frozenset()  # parameters unread when the backward pass began
        self._pass = -1  # that backward pass
        self.looked = False
        """Whether the script has read a value that was in flight, or would have been."""
        self.gives_way = False
        """Whether another schedule may replace one with deferred updates."""
        self.refused = False
        """Whether another schedule must replace it, since the optimizer holds a group that cannot be deferred."""
        self._in_forward = False  # a forward pass of the model, which reads weights, is running
        self._handles: list[Any] = [
            parameter.register_hook(partial(self._before_gradient, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]
        after = eager(lambda *_: self._after_forward())
        self._handles.append(replica.model.register_forward_hook(after, always_call=True))  # also if the pass fails
        replica.hooks.keep(self._handles[-1:])

    @property
    def model(self) -> torch.nn.Module:
        """The model of these updates."""
        return self._replica.model

    @property
    def name(self) -> str:
        """The name of the schedule."""
        return self._replica.exchange.layout.strategy_in(self._replica.session.strategy).schedule.name

    @property
    def watches(self) -> bool:
        """Whether updates are not deferred, and reads that would have waited are only noted."""
        return self._deferral.watches

    @watches.setter
    def watches(self, value: bool) -> None:
        self._deferral.watches = value

    @property
    def attached(self) -> bool:
        """Whether this object still handles the model's steps."""
        return bool(self._handles)

    def take_looked(self) -> bool:
        """Whether the script has read a deferred value since the last call."""
        found, self.looked = self.looked, False
        return found

    def detach(self) -> None:
        """Give parameters their class back, without waiting for exchanges in flight."""
        if self._pending and self._failed is None and self._replica.session.engine.error is None:
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
        """The script calls ``optimizer.step()``. ``whole`` is the optimizer's original step."""
        with self._deferral.lock:
            if self._replica.trained.machine.unstepped:
                if self._defer_step():
                    return
            else:
                self.flush()
        whole()  # without the lock: autograd's threads of a device may read parameters meanwhile
        if self.watches:
            self._watch_weights()

    def _defer_step(self) -> bool:
        """Defer the update. False if the optimizer must update now, because the script has read a gradient."""
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
        values = group_copies(self._optimizer)  # after the update before this one
        storage, buckets = self._replica.storage_of(number), self._replica.exchange.layout.buckets
        self._pending[number] = PendingUpdate(storage, self._written, buckets, values, frozenset(held))
        self._deferral.defer(range(len(self._parameters)))
        self._update_others(values)
        if self.local is not None:
            self.local.go_ahead(values)
        return True

    def _watch_weights(self) -> None:
        """After an update at once, note reads of weights before the next forward pass."""
        with self._deferral.lock:
            self._deferral.defer(range(len(self._parameters)))
            self._left = Writes(self._replica.storage)

    def at_once(self, whole: Callable[[], Any]) -> Any:
        """Finish all deferred updates, and let the optimizer's ``whole`` step use the gradients as they are."""
        with self._deferral.lock:
            self.flush()
            if self._replica.trained.machine.unstepped:
                self._do(self._replica.trained.machine.stepped())
        return whole()

    def check_added(self, group: dict[str, Any]) -> None:
        """Raise UsageError if a new group cannot be deferred, unless another schedule may replace this one."""
        try:
            check_held(self.name, self.model, group)
        except UsageError:
            if not self.gives_way:
                raise
            self.refused = True

    def _of_groups(self) -> list[int]:
        """The numbers of the parameters in the optimizer's groups."""
        held = (one for group in self._optimizer.param_groups for one in group["params"])
        return [number for one in held if (number := self._numbers.get(id(one))) is not None]

    def _nobody_looked(self, held: Iterable[int]) -> bool:
        """Whether all gradients are unread and unchanged since backward."""
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
        """Whether the script has kept a tensor that shares memory with a value in flight: its use is not reported."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.gives_way and any(shares_memory(parameter) for parameter in self._parameters):
                return True
            return self._replica.storage.kept

    def _check_unwritten(self, written: Writes, tensors: Iterable[int] | None = None) -> None:
        """Raise GradientError if one of these gradients (all by default) was changed while it was in flight."""
        if (number := written.since(tensors)) is not None:
            raise self._replica.fault(
                f"the gradient of {self._replica.named[number][0]!r} was changed, while it was exchanged, through a"
                " tensor that the script has kept: read parameter.grad again before each change, or use"
                " schedule=fixed"
            )

    def _update_others(self, values: Values) -> None:
        """Update parameters whose gradients are not exchanged at once."""
        others = [one for group in values for one in group["params"] if id(one) not in self._numbers]
        mine = [one for one in others if one.grad is not None]
        if mine:
            update(self._optimizer, self._plain, values, mine, [one.grad for one in mine])

    def zero_grad(self, plain: Callable[[], None], *, looks: bool) -> None:
        """The script clears gradients by ``plain``. ``looks``: ``plain`` reads them; setting them to None does not."""
        if looks:
            self.flush()
            plain()
            return
        with torch._C.DisableTorchFunctionSubclass():
            plain()

    # The model's side.

    def before_forward(self) -> None:
        """The model's own forward pass begins: complete the parameters whose reads torch does not report."""
        if self._in_forward:  # the pass before was interrupted
            self._looked = None
        self._in_forward = True
        self.looked |= in_transform()  # inside a transform no update is possible
        if torch._C._get_tracing_state() is not None:
            with _untraced():  # or the trace would contain the updates
                self.flush()
        elif self._replica.trained.machine.unstepped and self._deferral.any:
            self.flush()  # backward will add to these gradients
        elif is_compiled(self._replica.model):
            self.flush()
        elif self._first:
            if torch.is_grad_enabled():
                self._looked = self._looked or set()
                self._deferral.defer(range(len(self._parameters)))
            else:  # an evaluation does not show which weights training reads
                self._deferral.release_all()
        elif self.watches or (self._later and torch.is_grad_enabled() and self._replica.model.training):
            self._deferral.release_all()
        else:
            self._deferral.complete(self._parameters[number] for number in self._early)

    def _after_forward(self) -> None:
        """The model's own forward pass is over; later reads are not the pass's."""
        self._in_forward = False
        if self._looked is not None:
            self._deferral.release_all()

    def _before_gradient(self, number: int, _: torch.Tensor) -> None:
        """Backward is about to add to a parameter's gradient."""
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
                " had come, by a use that PyTorch does not report (an extension?) and that the first step did not have:"
                " call syncline.flush() before it, or use schedule=fixed"
            )

    def _check_free(self, number: int) -> None:
        """Raise GradientError if backward would add to a gradient that is in flight."""
        gradient = self._parameters[number].grad
        if gradient is not None and any(
            gradient.data_ptr() == pending.storage.places[number] for pending in self._pending.values()
        ):
            raise self._replica.fault(
                f"backward() adds to the gradient of {self._replica.named[number][0]!r}, which is still in flight from"
                " the step before: call zero_grad() of all models that it goes through before backward(), or use"
                f" another schedule than {self.name}"
            )

    def _begin_backward(self) -> None:
        watching, unstepped = self._looked is not None and not self._pending, self._replica.trained.machine.unstepped
        if self.watches:
            self.looked |= unstepped
            self._deferral.release_all()
            return
        if watching or (self._later and not unstepped):  # a forward pass other than the model's has read the weights
            self._deferral.release_all()
            return
        if not unstepped:
            self._unread = frozenset(self._deferral.numbers.values())
            self._pass = torch._C._current_graph_task_id()
        self.settle()

    def backward_over(self) -> None:
        """Backward is over. Gradients are in flight, so defer the parameters."""
        self._unread = frozenset()
        self._first = self._first and self._looked is None and self.watches  # watching may begin mid-step
        self._looked, self._in_forward = None, False
        if self._replica.trained.machine.under_way:
            self._written = Writes(self._replica.storage)
            self._deferral.defer(range(len(self._parameters)))

    # What completes parameters.

    def _do(self, actions: Sequence[Action]) -> None:
        """Carry out answers of the state machine. It has advanced already, so an error is final."""
        if self._failed is not None:
            raise self._failed
        try:
            self._replica.trained.do(actions)
        except BaseException as error:
            self._failed = error if isinstance(error, Exception) else self._replica.fault(f"interrupted ({error!r})")
            raise

    def _read(self, numbers: Sequence[int]) -> None:
        """The script or a layer reads these parameters: complete their updates."""
        if self._looked is not None and not self._pending:
            self._looked.update(numbers)
        elif self._later or self._replica.trained.machine.unstepped:
            self.flush()
        else:
            self.looked |= not self._in_forward
            for number in numbers:
                self._do(self._replica.trained.machine.needed(number))

    def flush(self) -> None:
        """Wait for all exchanges and finish all deferred updates, because the script reads a value."""
        with self._deferral.lock:
            self.looked |= bool(self._pending) or self._deferral.any
            self.settle()

    def settle(self) -> None:
        """Wait for all exchanges and finish all deferred updates, without a read by the script."""
        with self._deferral.lock:
            if self._pending or self._deferral.any:
                if self._replica.trained.machine.unstepped and self._deferral.any and not self.watches:
                    self._check_unwritten(self._written)
                self._do(self._replica.trained.machine.flush())
                self._deferral.release_all()

    def apply(self, action: Apply) -> None:
        """Update the parameters that these buckets complete."""
        pending = self._pending.get(action.step)
        if pending is None:
            return  # the optimizer has updated at once
        tensors = pending.complete(action.buckets)
        self._check_unwritten(pending.written, tensors)
        self._deferral.release(tensors)
        if self.local is not None:
            self.local.go_back()
        if tensors:
            parameters = [self._parameters[number] for number in tensors]
            gradients = [pending.storage.views[number] for number in tensors]
            span = None
            if (observer := self._replica.session.observer) is not None:
                span = begin(observer, "optimizer", f"{self._plain.__name__}, {len(tensors)} tensors")
            pending.after = update(self._optimizer, self._plain, pending.values, parameters, gradients)
            if span is not None:
                span.end()
        if pending.over:
            write_back(self._optimizer, pending.values, pending.after)
            del self._pending[action.step]


class LocalSteps:
    """Moves ``parameters`` ahead of the shared weights and back, at the learning rates of the optimizer's groups."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        for group in optimizer.param_groups:
            if "lr" not in group:
                raise UsageError(
                    f"{type(optimizer).__name__} has no learning rate, and a local step needs one: use"
                    " schedule=delayed(local=off)"
                )
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._shared = [torch.empty_like(parameter, requires_grad=False) for parameter in parameters]
        self._mine: dict[int, torch.Tensor] = {}
        self._ahead = False

    def forget(self) -> None:
        """Drop the last gradients, from which no step was made: a backward pass begins."""
        self._mine.clear()

    def keep(self, number: int, gradient: torch.Tensor, copy: bool) -> None:
        """Keep this worker's own gradient of a parameter, as a copy if ``copy``."""
        self._mine[number] = gradient.clone() if copy else gradient

    def go_ahead(self, values: Values) -> None:
        """Move from the shared weights to this worker's own."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                shared.copy_(parameter)
            for group in values:
                for parameter in group["params"]:
                    if (gradient := self._mine.get(self._numbers.get(id(parameter), -1))) is not None:
                        parameter.add_(gradient * group["lr"], alpha=1 if group.get("maximize") else -1)
        self._mine, self._ahead = {}, True

    def go_back(self) -> None:
        """Return to the shared weights, if this worker is ahead of them."""
        if not self._ahead:
            return
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for parameter, shared in zip(self._parameters, self._shared, strict=True):
                parameter.copy_(shared)
        self._ahead = False


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks run before or after every step. Such a step cannot be split."""
    of_one = (*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    theirs = [hook for hook in of_one if not isinstance(hook, Telling)]
    return bool(theirs or _global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def watch_zero_grad(deferred: DeferredUpdates) -> None:
    """Replace torch's own ``zero_grad`` of a model: setting gradients to None does not read them."""
    if type(deferred.model).zero_grad is torch.nn.Module.zero_grad:
        deferred.model.zero_grad = partial(_zero_grad, deferred)  # type: ignore[method-assign]


def _zero_grad(deferred: DeferredUpdates, set_to_none: bool = True) -> None:
    model = deferred.model
    deferred.zero_grad(partial(type(model).zero_grad, model, set_to_none), looks=not set_to_none)


@contextmanager
def _untraced() -> Iterator[None]:
    """Suspend the recording of torch.jit.trace."""
    library: Any = torch._C
    tracing = library._get_tracing_state()
    library._set_tracing_state(None)
    try:
        yield
    finally:
        library._set_tracing_state(tracing)
