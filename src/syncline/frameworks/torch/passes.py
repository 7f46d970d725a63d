"""Owns the forward and backward passes of a model: takes its gradients and makes steps of them.

A hook on each parameter fires when its gradient is complete. The gradient moves into its place in a contiguous bucket,
divided by the number of ranks unless each rank's push is an update by itself, and ``param.grad`` becomes a view of the
bucket. After ``zero_grad(set_to_none=True)`` that is the only copy (``Produced``). The state machine of the step
(``engine.step``) is told of the gradient, and ``training.model`` carries out its answers. When ``backward()`` returns,
all exchanges that the step waits for have arrived, so clipping, a GradScaler and the optimizer see averaged gradients.
The step's ticket carries this rank's weight (``options``). It is sent at the first gradient, unless the pass may still
add to the weight.

A re-entrant checkpoint may produce a gradient several times in one backward pass (``backward``). The first pass shows
whether a model has any. It is therefore *held*: gradients are moved, but nothing is scaled or sent before the pass
ends. If there were any, all later passes are held too.

A backward pass without gradients of parameters (``torch.autograd.grad``) is ignored.

Passes also drive deferred updates (``deferred``), exchanges of weights (``averaging``) and batch statistics
(``buffers``).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

import torch

from ...engine.step import Apply
from ...errors import GradientError, UsageError
from ...session.layout import Layout
from ...session.session import Session
from ...session.tickets import STEP, Meeting
from ...sync import exchanges_gradients
from ...training.model import Framework
from .averaging import Averaging
from .buffers import Buffers, SyncBatchNorm
from .deferred import DeferredUpdates
from .hooks import Hooks
from .options import Fixed, Options, Samples
from .replica import Replica
from .staging import CudaCopier
from .storage import Storage

Keep = Callable[[int, torch.Tensor, bool], None]
"""Receives the number of a parameter, this worker's own gradient, and whether it must be copied to be kept."""

_NAMED = 8
"""The maximum number of parameter names in an error."""


class Backward:
    """The backward passes of one model.

    ``ended`` is called at the end of a pass, inside autograd. ``backward()`` raises its exceptions. ``given_up`` is
    called when a pass turns out to have ended with an exception; it raises if the run cannot recover.
    """

    def __init__(self, ended: Callable[[], None], given_up: Callable[[], None]) -> None:
        self.nested = False  # a pass has had inner tasks, so one pass may produce a gradient several times
        self._ended, self._given_up = ended, given_up
        self.tasks: list[int] = []
        """The known tasks of the present pass, in order of arrival."""
        self._depth = 0  # of the outermost known task around them, in the thread of the first task
        self._thread = 0

    def enter(self) -> None:
        """Note the task that autograd is running. Call it at least whenever that is not in ``tasks``."""
        task = torch._C._current_graph_task_id()
        if task in self.tasks:
            return
        depth, thread = _depth(), threading.get_ident()
        if self.tasks and task > max(self.tasks):
            # Autograd runs device nodes in threads of its own, whose stacks do not show an outer pass.
            if depth > (self._depth if thread == self._thread else 0):
                self.nested = True
            else:
                self.give_up()
        if not self.tasks:
            self._depth, self._thread = depth, thread
            _at_end_of_task(self._task_ended)
        self.tasks.append(task)

    @property
    def running(self) -> bool:
        """Whether a pass has begun and not ended."""
        return bool(self.tasks)

    def give_up(self) -> None:
        """Report that the present pass has ended with an exception, and forget it."""
        self._given_up()
        self.leave()

    def leave(self) -> None:
        """Forget the present pass and its tasks."""
        self.tasks.clear()

    def _task_ended(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is None:
            self._ended()
            return
        self.nested = True
        self._depth -= 1
        handle: Any = None

        def after(*_: Any) -> None:
            handle.remove()
            _at_end_of_task(self._task_ended)

        handle = node.register_hook(after)


def _at_end_of_task(call: Callable[[], None]) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(call)


def _depth() -> int:
    """The number of nested backward passes that Python has started in this thread."""
    frame: FrameType | None = sys._getframe(1)
    engine, found = torch.autograd.graph._engine_run_backward.__code__, 0
    while frame is not None:
        found += frame.f_code is engine
        frame = frame.f_back
    return found


class Produced:
    """Puts the gradients of the parameters ``named`` into their buckets, and refuses those that cannot be exchanged."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        storage: Storage,
        fault: Callable[[str], GradientError],
    ) -> None:
        self._named, self._fault = named, fault
        self.storage = storage
        """The buckets of the present pass."""
        self._share, self._factor = 1.0, torch.ones((), dtype=torch.float32, device="cpu")
        self._versions = [(0, 0)] * len(named)  # of each parameter and gradient, when it was placed
        self.forget()

    def forget(self) -> None:
        """Forget the gradients of the pass."""
        self._came = [False] * len(self._named)

    @property
    def any(self) -> bool:
        """Whether any gradient has been produced in the pass."""
        return True in self._came

    @property
    def share(self) -> float:
        """The factor by which gradients are multiplied as they are placed."""
        return self._share

    @share.setter
    def share(self, value: float) -> None:
        if value != self._share:
            self._share, self._factor = value, torch.tensor(value, dtype=torch.float32, device="cpu")

    def place(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor, keep: Keep | None) -> bool:
        """Put a gradient into its place in its bucket. Returns whether it is that parameter's first in the pass.

        ``keep`` receives the gradient before it is scaled. GradientError for a gradient that cannot be exchanged.
        """
        if gradient.is_sparse or gradient.requires_grad:
            self._refuse(index, gradient)
        storage, share = self.storage, self._share
        moves = gradient.data_ptr() != storage.places[index]
        if keep is not None:
            keep(index, gradient, not moves)
        if moves:
            view = storage.fresh(index)
            # torch turns a Python number into a tensor in every call, which costs more than scaling a small gradient.
            torch.mul(gradient, self._factor if gradient.dtype is torch.float32 else share, out=view)
            parameter.grad = gradient = view
        elif share != 1.0:
            gradient.mul_(share)
        self._versions[index] = parameter._version, gradient._version
        came, self._came[index] = self._came[index], True
        return not came

    def fill(self, index: int, keep: Keep | None) -> None:
        """Replace a missing gradient by the sum that was accumulated before the pass, or by zeros."""
        parameter = self._named[index][1]
        if parameter.grad is None:
            parameter.grad = self.storage.fresh(index).zero_()
        else:
            self.place(index, parameter, parameter.grad, keep)

    def share_out(self, share: float) -> None:
        """Multiply all gradients of the pass by ``share``."""
        for came, view in zip(self._came, self.storage.views, strict=True):
            if came:
                view.mul_(share)

    def check_first(self, index: int) -> None:
        """Raise GradientError if a gradient is produced a second time after it was sent."""
        if self._came[index]:
            raise self._fault(
                f"the gradient of {self._named[index][0]!r} was produced again after it had been sent: this backward"
                " pass has re-entrant checkpoints, but the first one had none; use use_reentrant=False, or checkpoint"
                " from"
                " the first step on"
            )

    def check_untouched(self) -> None:
        """Raise GradientError if a parameter or its gradient was changed after the gradient was placed."""
        places = self.storage.places
        for index, (name, parameter) in enumerate(self._named):
            gradient = parameter.grad
            if self._came[index] and (
                gradient is None
                or gradient.data_ptr() != places[index]
                or (parameter._version, gradient._version) != self._versions[index]
            ):
                raise self._fault(
                    f"{name!r} or its gradient was changed during backward, when the gradient had been sent: change"
                    " gradients and make optimizer steps after backward(), not in post-accumulate hooks"
                    " (Tensor.register_hook is called in time)"
                )

    def _refuse(self, index: int, gradient: torch.Tensor) -> NoReturn:
        """Raise GradientError for a gradient that is sparse or can itself be differentiated."""
        name = self._named[index][0]
        if gradient.is_sparse:
            raise self._fault(f"the gradient of {name!r} is sparse, which cannot be exchanged: use sparse=False")
        raise self._fault(
            f"the gradient of {name!r} can itself be differentiated (create_graph=True), which an exchange would"
            " lose: use torch.autograd.grad() for inner derivatives and a plain backward() for the last one"
        )

    def refuse_missing(self, missing: Sequence[int]) -> NoReturn:
        """Raise GradientError that names the parameters without a gradient."""
        names = ", ".join(repr(self._named[index][0]) for index in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise self._fault(
            f"{len(missing)} parameters got no gradient in this backward pass: {names}{more}. If that is meant,"
            ' pass unused="zeros" to syncline.prepare(), or freeze them before it'
        )


class TrainedReplica(Replica):
    """A replica whose passes make steps: gradients go into buckets during backward and come back averaged."""

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        options: Options,
        *,
        first_key: int = 0,
        copier: CudaCopier | None = None,
    ) -> None:
        framework = Framework(
            check=self.check_start,
            begin=lambda: self.listeners.begin(),
            weight=self.weight,
            met=self._met,
            apply=self._apply,
            averaged=self._averaged,
            weights=self.weights,
        )
        super().__init__(session, model, options, framework, first_key=first_key, copier=copier)
        self.options = options
        """The options that ``prepare`` was given."""
        self._fills_missing = options.unused == "zeros"
        self._backward = Backward(self._end_backward, self._given_up)
        weight, events = options.weight, (self.on_gradient, self.before_forward, self.on_state_loaded)
        self._samples: Samples | None = None
        if isinstance(weight, (int, float)):
            self.counting = Fixed(weight)
            self.hooks = Hooks(session, model, self.named, *events)
        else:
            self.counting = self._samples = samples = Samples(weight, self.came_through_output)
            self.trained.pace.samples = lambda: samples.total
            self.hooks = Hooks(session, model, self.named, *events, self.after_forward)
        self._synchronising = True  # False inside no_sync()
        self._synchronises = self._alone = False  # the backward pass is exchanged, or is a step of this rank alone
        self._held = True  # nothing is sent before the backward pass ends
        self._touched = False  # the backward pass has produced a gradient
        self._produced = Produced(self.named, self.storage, self.fault)
        self._untold: list[int] = []  # complete gradients that the state machine does not know yet
        self.made_local_steps = False  # whether any step was not exchanged
        self.buffers = Buffers(self.exchange, self.selection, self.fault)
        self.normalises_over_ranks = any(isinstance(module, SyncBatchNorm) for module in model.modules())

    deferred: DeferredUpdates | None = None
    """The deferred updates, if the schedule has any."""

    averaging: Averaging | None = None
    """The exchange of weights, if workers train alone in between."""

    # The user's side.

    @property
    def synchronous_at_first(self) -> bool:
        """Whether the mode exchanges gradients in some steps and weights in others."""
        return self.averaging is not None and exchanges_gradients(self.exchange.mode)

    def flush(self) -> None:
        """Wait for all exchanges in flight between two steps, and finish all deferred updates."""
        if self.deferred is not None:
            self.deferred.flush()

    def settle(self) -> None:
        """``flush``, and exchange weights that are due, without counting as a read by the script."""
        if self.deferred is not None:
            self.deferred.settle()
        self.trained.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate local gradients; the next one outside exchanges their sum.

        UsageError in an elastic run whose workers go at their own pace.
        """
        if self.session.next_samples is not None:
            raise UsageError(
                f"no_sync() in an elastic run under sync={self.session.strategy.sync.name}: a push names the one batch"
                " that it was computed from, so make a step of each batch"
            )
        before, self._synchronising = self._synchronising, False
        try:
            yield
        finally:
            self._synchronising = before

    def shadow(self, meeting: Meeting, number: int) -> None:
        """Take part with zeros in the step of that number of the other ranks."""
        self.turn(number)
        self._zero()
        self.trained.shadow(STEP, meeting, number)
        self.buffers.finish()
        self.exchange.exchanged(meeting)
        self.reset()

    def _zero(self) -> None:
        """Set the gradients of the present step to zero."""
        self.exchange.staging.synchronize()  # copies of the last step may still read this memory
        with torch.no_grad():
            for flat in self.storage.resident.values():
                flat.zero_()

    def replace_layout(self) -> None:
        """Finish deferred updates, then call ``TrainedModel.replace_layout``."""
        self.settle()
        self.trained.replace_layout()

    def resume_with(self, layout: Layout, measured: bool) -> None:
        """Finish deferred updates, then call ``TrainedModel.resume_with``."""
        self.settle()
        self.trained.resume_with(layout, measured)

    def detach(self) -> None:
        """Remove the hooks; gradients keep their values."""
        self.hooks.remove()
        if self.averaging is not None:
            self.averaging.detach()
        if self.deferred is not None:
            self.deferred.detach()
        self.exchange.close()

    # What the script does with the model.

    def before_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Check the model at the start of a forward pass, and finish exchanges that the pass must not overtake."""
        self.guard.check_only_ours()
        if self.deferred is not None:
            self.deferred.before_forward()
        if self.averaging is not None:
            self.averaging.before_forward()
        if torch.is_grad_enabled():
            if self.model.training:
                self.listeners.begins()
            self.listeners.forward()
            self.guard.check_first()
            if self._backward.running and torch._C._current_graph_task_id() == -1:
                self._backward.give_up()
            if self._samples is not None:
                self._samples.before_forward(arguments, keywords)

    def on_state_loaded(self, module: torch.nn.Module) -> None:
        """The script has loaded a state into a module."""
        if module is self.model:  # not a copy of the model
            self.guard.check_same_parameters()
            self.listeners.loaded()

    def after_forward(self, output: Any) -> None:
        """Note an output: its samples count when backward passes through it."""
        if torch.is_grad_enabled() and self._samples is not None and not self._samples.after_forward(output):
            raise self.fault(
                f"the model returned a {type(output).__name__} without any tensor, so the batch of a gradient is"
                " unknown: return tensors in tuples, lists, dictionaries or dataclasses, or give"
                " syncline.prepare() a number as weight="
            )

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete, or in a held pass a part of it."""
        if torch._C._current_graph_task_id() not in self._backward.tasks:  # saves two calls for every further gradient
            self._enter(index)
        if not self._touched:
            self._touch()
        gradient = parameter.grad
        if gradient is None or not self._synchronises:  # an autograd function may return None
            return
        times, produced = self.exchange.times, self._produced
        if times is not None:
            times.produced(index)
        if not self._held:
            produced.check_first(index)
        if produced.place(index, parameter, gradient, self._local):
            self._untold.append(index)
            if not self._held and self.counting.complete:
                self._tell()

    def _touch(self) -> None:
        """The first gradient of a pass is complete."""
        self._touched = True
        if self.session.renewed is not None and (self._synchronises or self._alone):
            self.exchange.check_view()
        if not self._synchronises:
            return
        if self.deferred is not None and self.deferred.local is not None:
            self.deferred.local.forget()
        if (
            self.exchange.replaces and self.exchange.on_replacing is None
        ):  # with owners it is replaced after the optimizer's step
            self.replace_layout()
        self._produced.share = 1.0 if self._held or not self.trained.machine.due else self.trained.share

    @property
    def _local(self) -> Keep | None:
        """Keeps this worker's own gradients for a local step, if the schedule has local steps."""
        return None if self.deferred is None or self.deferred.local is None else self.deferred.local.keep

    # One backward pass.

    def _tell(self) -> None:
        """Report complete gradients to the state machine, and carry out its answers."""
        trained = self.trained
        for index in self._untold:
            if actions := trained.machine.produced(index):
                trained.do(actions)
        self._untold.clear()

    def came_through_output(self) -> None:
        """Backward has reached an output: the first sign of a pass, before any gradient."""
        if self.hooks.attached:
            self._enter()

    def _enter(self, first: int | None = None) -> None:
        if not self._backward.running:
            self.session.check_usable()
            self.guard.check_forms()
            self.listeners.backward(first)
            self.turn(self.trained.machine.begun)
            self._produced.storage = self.storage
            # Scripts set it on the model, as they would on DistributedDataParallel's wrapper.
            synchronises = self._synchronising and getattr(self.model, "require_backward_grad_sync", True)
            self._alone = synchronises and self.averaging is not None and not self.trained.machine.due
            self._synchronises = synchronises and not self._alone
        self._backward.enter()

    def _given_up(self) -> None:
        """The last backward pass ended with an exception that the script has caught."""
        if self.session.engine.error is not None:
            raise self.session.engine.error
        if self.trained.meeting is not None or (self.trained.machine.due and self._produced.any and not self._held):
            raise self.fault(
                "the last backward pass ended with an exception after its exchange had begun; the other ranks wait for"
                " the rest of it: end the script instead of catching the exception"
            )
        self.trained.machine.abandon()
        self.counting.drop()
        if self.exchange.times is not None:
            self.exchange.times.forget()
        self._forget()

    def reset(self) -> None:
        """End the pass after its exchange."""
        self._backward.leave()
        self.counting.reset()
        self._forget()

    def _forget(self) -> None:
        self._touched = False
        self.trained.forget()
        self._produced.forget()
        self._untold = []

    def _end_backward(self) -> None:
        """End the backward pass: make a step of it if it is exchanged."""
        held, self._held = self._held, self._backward.nested
        if self._touched and self._synchronises:
            self._end_step(held)
        else:
            self._end_own()

    def _end_own(self) -> None:
        """End a pass that is not exchanged: it accumulates, is a step of this rank alone, or is ignored."""
        averaging = self.averaging
        if self.exchange.times is not None:
            self.exchange.times.forget()
        if self._touched and not (averaging is not None and averaging.repeats):
            self.counting.keep()
        else:
            self.counting.drop()
        self._backward.leave()
        if self._touched and self._alone and averaging is not None and averaging.begin_step():
            self.listeners.begins()  # without a forward pass of the model, as of a method of its own
            self.trained.made_alone()
        self._touched = False
        if self.deferred is not None:
            self.deferred.backward_over()

    def _end_step(self, held: bool) -> None:
        """Make a step of the pass. If it was ``held``, none of its gradients has been sent."""
        due = self.trained.machine.due
        try:
            if not due:
                self.trained.check_not_due()
            self._send_rest(held and due)
        except BaseException as error:
            if self.trained.begun:  # the other ranks wait for the rest of this step
                self.session.process.interrupted(error)
            self.trained.begin_anew()
            self.reset()
            raise
        meeting = self.trained.meeting
        self._made_step(due)
        self.reset()
        if self.deferred is not None:
            self.deferred.backward_over()
        self.listeners.exchanged(meeting)

    def _send_rest(self, unshared: bool) -> None:
        """Send the remaining gradients, divided first if they are ``unshared``, and wait as the state machine says."""
        self._produced.check_untouched()
        if unshared:
            self._produced.share_out(self.trained.share)
        self._tell()
        if missing := self.trained.machine.missing:
            if not self._fills_missing:
                self._produced.refuse_missing(missing)
            self._produced.share = self.trained.share if self.trained.machine.due else 1.0
            for index in missing:
                self._produced.fill(index, self._local)
            self._untold += missing
            self._tell()
        self.trained.end_backward()
        self.buffers.finish()

    # Steps.

    def _made_step(self, due: bool) -> None:
        """Note a step. It was exchanged if that was ``due``."""
        self.trained.made_step(due)
        if self.exchange.times is not None:
            self.exchange.times.end_step()
        self.made_local_steps |= not due
        self.exchanged = True

    def _met(self, kind: int, meeting: Meeting, step: int) -> None:
        if kind == STEP:
            self.buffers.start(meeting)
        elif self.averaging is not None:
            self.averaging.met(kind, meeting, step)

    def _apply(self, action: Apply) -> None:
        if self.deferred is not None:
            self.deferred.apply(action)

    def _averaged(self, kind: int) -> None:
        if self.averaging is not None:
            self.averaging.averaged(kind)
