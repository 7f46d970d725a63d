"""One worker's copy of the model: gradients go into buckets during backward and come back averaged when it ends.

A hook on each parameter fires when its gradient is complete. The gradient is moved (scaled) into its place in a
contiguous bucket and ``param.grad`` becomes a view of it; after ``zero_grad(set_to_none=True)`` that is the only copy.
What goes when, and what is waited for, is decided by the state machine of ``engine.step``, to which this file tells
what backward does. Schedules whose results are applied by the optimizer's step have all arrived when backward ends, so
that what follows ``backward()`` (clipping, GradScaler, the step) sees averaged gradients.

Gradients are divided by the number of ranks on their way into the bucket, unless each rank's are an update by
themselves. Where ranks do not count alike (``samples``:
rank i counts w_i / sum of w; one without batches left counts nothing), a ticket shows it, and the progress thread
corrects a bucket by w_i N / sum of w before it goes. The ticket goes with the first gradient, unless the pass may
still add to the weight.

A re-entrant checkpoint may produce a gradient several times in one backward pass (``backward``). Whether a model has
some shows in its first pass, which is therefore *held*: gradients are moved, but nothing is scaled or sent before the
pass ends. So is every later one if there were some.

A backward pass that makes no gradients of parameters (``torch.autograd.grad``) is none of ours.

How gradients lie in buckets and how these travel is ``gradients``' affair, that of batch statistics ``buffers``', and
``produced`` says which of a pass have come and whether they may be exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ...engine.step import Action, Agree, Apply, BucketPhase, Steps, Submit, Wait
from ...engine.work import Work
from ...errors import GradientError
from ...session.layout import Layout
from ...session.session import Session
from ...session.tickets import AVERAGE, STEP, Meeting, step_argument
from ...sync import alone, exchanges_gradients
from .backward import Backward
from .batch_norm import SyncBatchNorm
from .buffers import Buffers
from .crossing import Crossing
from .gradients import Gradients
from .guard import Guard
from .hooks import Hooks, Listeners, nothing
from .options import Options, Selection
from .produced import Produced
from .samples import Counting, Fixed, Samples
from .staging import Copier
from .storage import Storage

if TYPE_CHECKING:
    from .averaging import Averaging


class Replica:
    """The hooks of one model.

    ``first_key`` begins the range of keys that tell this model's exchanges from those of others.
    """

    def __init__(
        self,
        session: Session,
        model: torch.nn.Module,
        options: Options,
        *,
        first_key: int = 0,
        copier: Copier | None = None,
    ) -> None:
        self.session, self.model = session, model
        self.selection = Selection(model, options)
        self.named = self.selection.trained()
        schedule, self._mode = session.strategy.schedule_object(), session.strategy.sync_mode()
        self.gradients = Gradients(session, model, self.named, schedule, first_key=first_key, copier=copier)
        self.guard = Guard(model, self.named, self.selection, self.gradients.storages, self.fault)
        self.first_key = first_key
        self.weight = 1.0  # what the gradients of the last step that was pushed by itself count
        self.exchanged = False  # True between the end of an exchange and the next backward
        self._unused = options.unused
        self._backward = Backward(self._end_backward, self._given_up)
        self._samples: Samples | None = None
        self._counting: Counting
        if isinstance(options.weight, (int, float)):
            self._counting = Fixed(options.weight)
        else:
            self._counting = self._samples = Samples(options.weight, self._came_through_output)
        self._schedule = schedule
        self.steps = 0
        self.made_local_steps = False  # which were not exchanged
        self._buffers = Buffers(session, self.selection, self.gradients.staging, first_key, self.fault)
        self._share = 1.0 if alone(self._mode) else 1.0 / session.world_size
        self._synchronising = True
        self._synchronises = self._alone = False  # the present backward pass is exchanged, or a step of the rank's own
        self._held = True  # nothing of a backward pass is sent before it ends
        self._touched = False  # the present backward pass has made a gradient
        self._meeting: Meeting | None = None
        self._produced = Produced(self.named, self.gradients, self.fault)
        self._untold: list[int] = []  # of those that have come, what the state machine does not know yet
        self._begun = False  # something of the present backward pass is under way
        self._works: dict[BucketPhase, Work] = {}
        self._of_buffers: list[Work] = []
        self.listeners = Listeners()
        self.hooks = Hooks(session, model, self.named, self, outputs=self._samples is not None)
        self.normalises_over_ranks = any(isinstance(module, SyncBatchNorm) for module in model.modules())
        self._reset()

    # The user's side.

    @property
    def steps(self) -> int:
        """How many steps have been made."""
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value
        self.machine = self._machine(value)

    def machine_at(self, step: int) -> Steps:
        """A state machine of which that step has just been made."""
        machine = self._machine(step)
        machine.made_alone()
        return machine

    def _machine(self, begun: int) -> Steps:
        held = self.session.strategy.server_holds_weights
        return Steps(len(self.named), self.gradients.layout, self._schedule, self._mode, begun=begun, held=held)

    @property
    def storage(self) -> Storage:
        """Where the gradients of the present backward pass are, or those of the last one."""
        return self.gradients.storage

    crossing: Crossing | None = None
    """Where steps end in the next iteration."""

    averaging: Averaging | None = None
    """Where workers train by themselves and exchange weights."""

    @property
    def synchronous_at_first(self) -> bool:
        """Whether weights are exchanged, and gradients in other steps."""
        return self.averaging is not None and exchanges_gradients(self._mode)

    def flush(self) -> None:
        """Wait for whatever is under way between two steps, and update what the optimizer was called for."""
        if self.crossing is not None:
            self.crossing.flush()

    def settle(self) -> None:
        """The same, for what is ours: it is no sign of a script that looks."""
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
        """Take part in the others' step of that number with zeros."""
        self._meeting = meeting
        self._of_buffers = self._buffers.start(meeting)
        self.gradients.turn(number)
        self.gradients.zero()
        steps = self._machine(number)
        for index in range(len(self.named)):
            self.do([action for action in steps.produced(index) if not isinstance(action, Agree)])
        self.do([*steps.backward_ended(), *steps.flush()])
        self._finish_buffers()
        self.gradients.exchanged(meeting)
        self._reset()

    def replace_layout(self) -> None:
        """As ``Gradients.replace_layout``."""
        self.settle()
        self.gradients.replace_layout()
        self._schedule = self.gradients.schedule
        self.steps = self._steps  # the state machine goes by the buckets

    def resume_with(self, layout: Layout, measured: bool) -> None:
        """As ``Gradients.resume_with``."""
        self.settle()
        self.gradients.resume_with(layout, measured)
        self._schedule = self.gradients.schedule
        self.steps = self._steps

    def detach(self) -> None:
        """Remove the hooks; gradients keep their values."""
        self.hooks.remove()
        if self.averaging is not None:
            self.averaging.detach()
        if self.crossing is not None:
            self.crossing.detach()
        self.gradients.close()

    # What hooks tell.

    def before_forward(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pass begins."""
        self.guard.check_only_ours()
        if self.crossing is not None:
            self.crossing.before_forward()
        if self.averaging is not None:
            self.averaging.before_forward()
        if torch.is_grad_enabled():
            self.guard.check_first()
            if self._backward.running and torch._C._current_graph_task_id() == -1:
                self._backward.give_up()
            if self._samples is not None:
                self._samples.before_forward(arguments, keywords)

    def on_state_loaded(self, module: torch.nn.Module) -> None:
        """The script has loaded a state."""
        if module is self.model:  # and no copy of it
            self.guard.check_same_parameters()
            self.listeners.loaded()

    def after_forward(self, output: Any) -> None:
        """When backward comes through this output, its samples count."""
        if torch.is_grad_enabled() and self._samples is not None and not self._samples.after_forward(output):
            raise self.fault(
                f"the model gives a {type(output).__name__} in which no tensor was found, so that nothing says which"
                " batches a gradient is of: give tensors in tuples, lists, dictionaries or dataclasses, or give"
                " syncline.prepare() a number as weight="
            )

    def on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        """A parameter's gradient is complete, or, in a pass that is held, some of it."""
        self._enter()
        if not self._touched:
            self._touched = True
            if self._synchronises and self.crossing is not None and self.crossing.local is not None:
                self.crossing.local.forget()
        if not self._synchronises or parameter.grad is None:  # an autograd function may give None
            return
        gradients = self.gradients
        if gradients.replaces and gradients.on_replacing is None:  # with owners, behind the optimizer's step
            self.replace_layout()
        if gradients.times is not None:
            gradients.times.produced(index)
        if not self._held:
            self._produced.check_first(index)
        self._move(index, parameter, 1.0 if self._held or not self.machine.due else self._share)
        if not self._produced.came(index, parameter, parameter.grad):
            return
        self._untold.append(index)
        if not self._held and self._counting.complete:
            self._tell()

    # One backward pass.

    def _tell(self) -> None:
        """Let the state machine know which gradients have come, and do what it says."""
        for index in self._untold:
            self.do(self.machine.produced(index))
        self._untold.clear()

    def do(self, actions: Sequence[Action]) -> None:
        """What the state machine says."""
        for action in actions:
            if isinstance(action, Submit):
                self._submit(action)
            elif isinstance(action, Agree):
                self._meeting = self._meet(action.step)
            elif isinstance(action, Wait):
                self._wait(action.operations)
            elif self.crossing is not None and isinstance(action, Apply):
                self.crossing.apply(action)

    def _came_through_output(self) -> None:
        """The first sign of a backward pass, before any gradient."""
        if self.hooks.attached:
            self._enter()

    def _enter(self) -> None:
        if not self._backward.running:
            self.session.check_usable()
            self.guard.check_forms()
            self.gradients.turn(self.machine.begun)
            # Set by scripts on the model, where they would set it on DistributedDataParallel's wrapper.
            synchronises = self._synchronising and getattr(self.model, "require_backward_grad_sync", True)
            self._alone = synchronises and self.averaging is not None and not self.machine.due
            self._synchronises = synchronises and not self._alone
        self._backward.enter()

    def _given_up(self) -> None:
        """The last backward pass ended with an exception that the script has caught."""
        if self.session.engine.error is not None:
            raise self.session.engine.error
        if self._meeting is not None or (self.machine.due and self._produced.any and not self._held):
            raise self.fault(
                "the last backward pass ended with an exception after its exchange had begun; the other ranks wait for"
                " the rest of it: end the script instead of catching the exception"
            )
        self.machine.abandon()
        self._counting.drop()
        if self.gradients.times is not None:
            self.gradients.times.forget()
        self._forget()

    def _reset(self) -> None:
        """The exchange is over."""
        self._backward.leave()
        self._counting.reset()
        self._forget()

    def _forget(self) -> None:
        self._touched = False
        self._meeting = None
        self._produced.forget()
        self._untold = []
        self._begun = False

    def _move(self, index: int, parameter: torch.Tensor, share: float) -> None:
        """Put ``share`` of a gradient where it belongs in its bucket."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.requires_grad:
            self._produced.refuse(index, gradient)
        moves = gradient.data_ptr() != self.storage.places[index]
        if self.crossing is not None and self.crossing.local is not None:
            self.crossing.local.keep(index, gradient, copy=not moves)
        if moves:
            view = self.storage.fresh(index)
            torch.mul(gradient, share, out=view)
            parameter.grad = view
        elif share != 1.0:
            gradient.mul_(share)

    def _check_start(self) -> None:
        """A step that is exchanged begins."""
        if self.exchanged:
            self.listeners.second_backward()
        self.guard.check_trained(self.steps)
        self.listeners.first_exchange()
        self.listeners.first_exchange = nothing

    def _meet(self, step: int) -> Meeting:
        self._check_start()
        self.listeners.begin()
        argument, flags = step_argument(self.first_key, step), self.gradients.flags
        meeting = self.session.meet(STEP, argument, weight=self._weight(), flags=flags)
        self._begun = True
        self._of_buffers = self._buffers.start(meeting)
        return meeting

    def _weight(self) -> float:
        """How much this rank counts in an exchange."""
        weight = self._counting.weight
        if weight is None:
            raise self.fault(
                "nothing says how much this rank counts: backward came through no output of the model's forward()"
                " (another method was called?). Give syncline.prepare() a number as weight="
            )
        return weight

    def meet_to_average(self, step: int, flags: int, kind: int = AVERAGE) -> Meeting:
        """An exchange of weights begins, behind that step; who has made none since the last one counts nothing."""
        self._check_start()
        return self.session.meet(kind, step_argument(self.first_key, step), weight=self.left_weight, flags=flags)

    @property
    def left_weight(self) -> float:
        """What this rank counts in an exchange of weights: nothing where it has made no step since the last one."""
        if self.averaging is None:
            return 0.0
        return 1.0 if self.averaging.alike else self._weight() if self.averaging.since else 0.0

    def resume_weight(self, weight: float) -> None:
        """This rank has counted so much since the last exchange of weights."""
        self._counting.resume(weight)

    def averaged(self, meeting: Meeting) -> None:
        """Weights have been exchanged."""
        self._counting.reset()
        self.gradients.exchanged(meeting)

    def _submit(self, submit: Submit) -> None:
        """A bucket is complete."""
        if self._meeting is None and not self._begun:  # nothing is agreed on where pushes are not merged
            self._check_start()
            self.weight = self._weight()
            self.listeners.begin()
        self._begun = True
        after = None if submit.after is None else self._works.pop(submit.after)
        started = self.gradients.start(submit.operation, self._meeting, submit.priority, after)
        self._works[submit.operation] = started

    def _end_backward(self) -> None:
        """At the end of backward: nothing may be missing, everything has to arrive."""
        held, self._held = self._held, self._backward.nested
        if not (self._touched and self._synchronises):
            if self.gradients.times is not None:
                self.gradients.times.forget()
            if self._touched and not (self.averaging is not None and self.averaging.repeats):
                self._counting.keep()
            else:
                self._counting.drop()
            self._backward.leave()
            if self._touched and self._alone:
                self._made_alone()
            self._touched = False
            if self.crossing is not None:
                self.crossing.backward_over()
            return
        due = self.machine.due
        try:
            if not due:
                self.listeners.local_step()
            self._produced.check_untouched()
            if held and due:
                self._produced.share_out(self._share)
            self._tell()
            if missing := self.machine.missing:
                self._fill(missing)
                self._tell()
            self.do(self.machine.backward_ended())
            self._finish_buffers()
        except BaseException as error:
            if self._begun:  # the others wait for the rest of this step
                self.session.member.interrupted(error)
            self.steps = self._steps  # whatever the pass has come to
            self._reset()
            raise
        self._steps += 1
        meeting = self._meeting
        if due:
            self.gradients.exchanged(meeting)
            if self._mode.merges or self.session.alone:
                self.session.coordination.begun()
        if self.gradients.times is not None:
            self.gradients.times.end_step()
        self.made_local_steps |= not due
        self.exchanged = True
        if self.averaging is not None:
            self.averaging.exchanged()
        self._reset()
        if self.crossing is not None:
            self.crossing.backward_over()
        self.listeners.exchanged(meeting)

    def _made_alone(self) -> None:
        """A step of the rank's own, whose gradients are left as they are."""
        assert self.averaging is not None
        if self.averaging.begin_step():
            self.machine.made_alone()
            self._steps += 1

    def _fill(self, missing: list[int]) -> None:
        if self._unused != "zeros":
            self._produced.refuse_missing(missing)
        for index in missing:
            parameter = self.named[index][1]
            # A gradient kept from before the exchange (accumulated under no_sync) still counts.
            if parameter.grad is None:
                parameter.grad = self.storage.fresh(index).zero_()
            else:
                self._move(index, parameter, self._share if self.machine.due else 1.0)
            self._untold.append(index)

    def _wait(self, operations: Sequence[BucketPhase]) -> None:
        self.session.engine.wait(*[self._works.pop(operation) for operation in operations])
        self.gradients.staging.join()

    def _finish_buffers(self) -> None:
        """Buffers are there when backward ends, whatever schedule gradients have."""
        if self._of_buffers:
            self.session.engine.wait(*self._of_buffers)
            self._of_buffers = []
            self.gradients.staging.join()
            self._buffers.finish()

    def fault(self, text: str) -> GradientError:
        """An error of this rank that ends the run for all."""
        error = GradientError(self.session.titled(f"{self.session.name(self.session.index)}: {text}"))
        self.session.fail(error)
        return error
