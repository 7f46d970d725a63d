"""Owns the forward and backward passes of a model: takes its gradients and makes steps of them.

A hook on each parameter fires when its gradient is complete. The gradient moves into its place in a contiguous bucket,
divided by the number of ranks unless each rank's push is an update by itself, and ``param.grad`` becomes a view of the
bucket. After ``zero_grad(set_to_none=True)`` that is the only copy (``Produced``). The state machine of the step
(``engine.step``) hears of the gradient, and ``training.model`` carries out its answers. When ``backward()`` returns,
all exchanges that the step waits for have arrived, so clipping, a GradScaler and the optimizer see averaged gradients.
The step's ticket carries this rank's weight (``options``). It is sent at the first gradient, unless the pass may still
add to the weight.

A re-entrant checkpoint may produce a gradient several times in one backward pass (``backward``). The first pass shows
whether a model has any. It is therefore *held*: gradients are moved, but nothing is scaled or sent before the pass
ends. If there were any, all later passes are held too.

A backward pass without gradients of parameters (``torch.autograd.grad``) is ignored.

Passes also drive deferred updates (``overlap``), exchanges of weights (``averaging``) and batch statistics
(``buffers``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...engine.step import Apply
from ...session.layout import Layout
from ...session.session import Session
from ...session.tickets import STEP, Meeting
from ...sync import exchanges_gradients
from ...training.model import Framework
from .averaging import Averaging
from .backward import Backward, Keep, Produced
from .buffers import Buffers, SyncBatchNorm
from .options import Options, Samples
from .overlap import Crossing
from .replica import Replica
from .staging import Copier


class TrainedReplica(Replica):
    """A replica whose passes make steps: gradients go into buckets during backward and come back averaged."""

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        options: Options,
        *,
        first_key: int = 0,
        copier: Copier | None = None,
    ) -> None:
        framework = Framework(
            check=self.check_start,
            begin=self._begin,
            weight=self.weight,
            met=self._met,
            apply=self._apply,
            averaged=self._averaged,
        )
        super().__init__(session, model, options, self, framework, first_key=first_key, copier=copier)
        self._fills_missing = options.unused == "zeros"
        self._backward = Backward(self._end_backward, self._given_up)
        self._samples = self.counting if isinstance(self.counting, Samples) else None
        self._synchronising = True  # False inside no_sync()
        self._synchronises = self._alone = False  # the backward pass is exchanged, or is a step of this rank alone
        self._held = True  # nothing is sent before the backward pass ends
        self._touched = False  # the backward pass has produced a gradient
        self._produced = Produced(self.named, self.storage, self.fault)
        self._untold: list[int] = []  # complete gradients that the state machine does not know yet
        self.made_local_steps = False  # whether any step was not exchanged
        self.buffers = Buffers(session, self.selection, self.exchange.staging, first_key, self.fault)
        self.normalises_over_ranks = any(isinstance(module, SyncBatchNorm) for module in model.modules())

    crossing: Crossing | None = None
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
        if self.crossing is not None:
            self.crossing.flush()

    def settle(self) -> None:
        """``flush``, and exchange weights that are due, without counting as a read by the script."""
        if self.crossing is not None:
            self.crossing.settle()
        if self.averaging is not None:
            self.averaging.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate local gradients; the next one outside exchanges their sum."""
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
        """As ``TrainedModel.replace_layout``."""
        self.settle()
        self.trained.replace_layout()

    def resume_with(self, layout: Layout, measured: bool) -> None:
        """As ``TrainedModel.resume_with``."""
        self.settle()
        self.trained.resume_with(layout, measured)

    def detach(self) -> None:
        """Remove the hooks; gradients keep their values."""
        self.hooks.remove()
        if self.averaging is not None:
            self.averaging.detach()
        if self.crossing is not None:
            self.crossing.detach()
        self.exchange.close()

    # What the script does with the model.

    def before_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pass begins."""
        self.guard.check_only_ours()
        if self.crossing is not None:
            self.crossing.before_forward()
        if self.averaging is not None:
            self.averaging.before_forward()
        if torch.is_grad_enabled():
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
                f"the model gives a {type(output).__name__} in which no tensor was found, so that nothing says which"
                " batches a gradient is of: give tensors in tuples, lists, dictionaries or dataclasses, or give"
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
        if not self._synchronises:
            return
        if self.crossing is not None and self.crossing.local is not None:
            self.crossing.local.forget()
        if (
            self.exchange.replaces and self.exchange.on_replacing is None
        ):  # with owners it is replaced after the optimizer's step
            self.replace_layout()
        self._produced.share = 1.0 if self._held or not self.trained.machine.due else self.trained.share

    @property
    def _local(self) -> Keep | None:
        """Keeps this worker's own gradients for a local step, if the schedule has local steps."""
        return None if self.crossing is None or self.crossing.local is None else self.crossing.local.keep

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
            self.trained.made_alone()
        self._touched = False
        if self.crossing is not None:
            self.crossing.backward_over()

    def _end_step(self, held: bool) -> None:
        """Make a step of the pass. If it was ``held``, none of its gradients has been sent."""
        due = self.trained.machine.due
        try:
            if not due:
                self.listeners.local_step()
            self._send_rest(held and due)
        except BaseException as error:
            if self.trained.begun:  # the other ranks wait for the rest of this step
                self.session.member.process.interrupted(error)
            self.trained.begin_anew()
            self.reset()
            raise
        meeting = self.trained.meeting
        self._made_step(due)
        self.reset()
        if self.crossing is not None:
            self.crossing.backward_over()
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
        self.trained.do(self.trained.machine.backward_ended())
        self.buffers.finish()

    # Steps.

    def _made_step(self, due: bool) -> None:
        """Note a step. It was exchanged if that was ``due``."""
        self.trained.made_step(due)
        if self.exchange.times is not None:
            self.exchange.times.end_step()
        self.made_local_steps |= not due
        self.exchanged = True

    def _begin(self) -> None:
        self.listeners.begin()

    def _met(self, kind: int, meeting: Meeting, step: int) -> None:
        if kind == STEP:
            self.buffers.start(meeting)
        elif self.averaging is not None:
            self.averaging.met(kind, meeting, step)

    def _apply(self, action: Apply) -> None:
        if self.crossing is not None:
            self.crossing.apply(action)

    def _averaged(self, kind: int) -> None:
        if self.averaging is not None:
            self.averaging.averaged(kind)
