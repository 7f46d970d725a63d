"""One worker's steps as a state machine: what is handed over, what is waited for, what is applied, and when.

It reads the schedule (``release``, ``phases``, ``apply``, ``priority``) and the sync mode (``due``, ``merges``,
``averages``). It knows no framework, engine, thread, clock or array. Who drives it tells it what happens to a model
and carries out what it answers, in order; an answered ``Wait`` is over before the next event comes. The adapters of
frameworks drive it with real gradients, a simulator with a virtual clock: what is predicted is what is run.

A step, by what waits for its result (``apply``):

    step        produced*  backward_ended: waits for all   stepped: applies all
    layer       produced*  backward_ended   stepped   needed, before each layer's next forward: waits and applies
    next_step   produced*  backward_ended   stepped: waits for, and applies, the step before

Rules
* Each bucket of a step that is due is submitted once in every phase, in the order of the schedule's list, so that all
  workers submit alike whatever order backward completes buckets in. An all-gather goes behind its reduce-scatter: at
  once, or, where layers wait for themselves, when backward has ended, layers that are needed first before the others.
* Nothing is applied twice, before it has arrived, or before the step's own ``stepped``; steps are applied in order.
* What is merged is agreed on before anything of it goes; where every push is an update by itself, nothing is.
* A step that is not due is the worker's own: nothing of it is submitted, and its own gradients are applied.
* After a step of which the mode says so (``Averages``) weights are exchanged: all buckets, once, when the optimizer has
  run (``updated``), or before the next forward pass where nobody has called it, and waited for there. Such a step is
  never due.
* Who has read the gradients of a step (``flush``) may change them: it is applied when the optimizer is called, at once.
* What a backward pass reads has been needed by the forward pass before it.
* Where others hold the weights (``held``) nobody looks at sums of gradients: ``backward_ended`` waits for nothing, and
  with ``step`` it is ``stepped`` that does.
* What comes out of turn raises, and changes nothing.

Theory: wait-free backpropagation (Zhang et al., "Poseidon", USENIX ATC 2017), priorities and layers that wait for
themselves (Jayarajan et al., "P3", MLSys 2019), reduce-scatter and all-gather apart (Zhang et al., "DeAR", ICDCS 2023),
the step after (Xu et al., "OD-SGD", ACM TACO 2020).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

from ..errors import UsageError
from ..nouns import Bucket
from ..schedules import Schedule
from ..sync import Averages, SyncMode

Phase = Literal["allreduce", "reduce_scatter", "all_gather"]


class BucketPhase(NamedTuple):
    """One phase of the exchange of one bucket in one step (steps count from 0)."""

    step: int
    bucket: int
    phase: Phase


class Agree(NamedTuple):
    """Find out whether the others make this step too, and what has to be agreed in it; before anything of it goes."""

    step: int


class Submit(NamedTuple):
    """Hand an operation over; it begins when ``after`` has arrived, the smallest priority before the others."""

    operation: BucketPhase
    priority: float
    after: BucketPhase | None = None


class Wait(NamedTuple):
    """Block until these have arrived."""

    operations: tuple[BucketPhase, ...]


class Apply(NamedTuple):
    """Update the tensors of these buckets with what a step has brought."""

    step: int
    buckets: tuple[int, ...]


class Average(NamedTuple):
    """Let the weights be what the exchange after a step has made of them."""

    step: int


Action = Agree | Submit | Wait | Apply | Average


class _Step:
    """How far one step has come."""

    def __init__(self, number: int, due: bool, slices: Sequence[int]) -> None:
        self.number, self.due = number, due
        self.produced: set[int] = set()
        self.left = list(slices)  # of each bucket, to be produced
        self.next = 0  # the first bucket that has not been submitted
        self.submitted: set[BucketPhase] = set()
        self.under_way: set[BucketPhase] = set()
        self.unapplied = dict.fromkeys(range(len(slices)))  # buckets, in order
        self.ended = self.stepped = False
        self.read = False  # all has arrived, and may be changed, before the optimizer is called
        self.instead_of: _Step | None = None  # the one before, whose gradients these are added to

    def came(self, operations: Iterable[BucketPhase]) -> None:
        """These have arrived, and so has what they went behind."""
        for operation in operations:
            self.under_way.discard(operation)
            if operation.phase == "all_gather":
                self.under_way.discard(operation._replace(phase="reduce_scatter"))


class Laid(Protocol):
    """How a model's tensors travel."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In the order in which they go."""
        ...

    @property
    def priorities(self) -> Sequence[float]:
        """Of the buckets, as the schedule gave them."""
        ...


class Steps:
    """The steps of one worker with one model of ``tensors`` tensors, which travel as ``layout`` says.

    ``begun`` is the number of its first one, in a run that goes on from another. ``held`` says that others hold the
    weights.
    Raises UsageError for an event out of turn.
    """

    def __init__(
        self,
        tensors: int,
        layout: Laid,
        schedule: Schedule,
        mode: SyncMode,
        *,
        begun: int = 0,
        held: bool = False,
    ) -> None:
        self._tensors, self._schedule, self._mode, self._held = tensors, schedule, mode, held
        self._slices = [len(bucket.slices) for bucket in layout.buckets]
        self._priorities = layout.priorities
        self._of_tensor: list[list[int]] = [[] for _ in range(tensors)]
        for number, bucket in enumerate(layout.buckets):
            for part in bucket.slices:
                self._of_tensor[part.tensor].append(number)
        self._open: deque[_Step] = deque()  # those of which something is left to apply, the oldest first
        self._now: _Step | None = None  # the one whose backward pass is running
        self._averages = mode if isinstance(mode, Averages) else None
        self._when_ready = schedule.release == "ready"
        self._gathers_late = schedule.phases == "split" and schedule.apply == "layer"
        phases: tuple[Phase, ...] = ("allreduce",) if schedule.phases == "whole" else ("reduce_scatter", "all_gather")
        self._last = phases[-1]
        self._at_once = phases[:1] if self._gathers_late else phases  # those in which a complete bucket is submitted
        self._owed: int | None = None  # the last step after which weights are to be exchanged, and have not been
        self.begun = begun
        """How many steps have begun."""

    @property
    def due(self) -> bool:
        """Whether the present step is exchanged, or the next one where no backward pass is running."""
        return self._mode.due(self.begun) if self._now is None else self._now.due

    @property
    def unstepped(self) -> bool:
        """Whether a backward pass has ended for which the optimizer has not been called."""
        last = self._open[-1] if self._open else None
        return last is not None and last.ended and not last.stepped

    @property
    def under_way(self) -> bool:
        """Whether something has not arrived, or not been applied, that waits for another event."""
        return any(step.stepped or not step.read for step in self._open if step.due)

    @property
    def owes(self) -> bool:
        """Whether weights are to be exchanged before another step begins."""
        return self._owed is not None

    @property
    def missing(self) -> list[int]:
        """The tensors that the present backward pass has not produced."""
        made = () if self._now is None else self._now.produced
        return [tensor for tensor in range(self._tensors) if tensor not in made]

    # What happens to the model.

    def produced(self, tensor: int) -> list[Action]:
        """The gradient of a tensor is complete."""
        if not 0 <= tensor < self._tensors:
            raise UsageError(f"there is no tensor {tensor}: the model has {self._tensors}")
        actions: list[Action] = []
        step = self._now
        if step is None:
            step = self._begin(actions)
        elif tensor in step.produced:
            raise UsageError(f"tensor {tensor} was produced twice in step {step.number}")
        step.produced.add(tensor)
        for number in self._of_tensor[tensor]:
            step.left[number] -= 1
        if step.due and self._when_ready and step.next < len(step.left) and step.left[step.next] == 0:
            self._submit_complete(step, actions)
        return actions

    def dropped(self) -> None:
        """The backward pass was given up, and begins again in the same step; UsageError where a bucket has gone."""
        step = self._now
        if step is not None:
            if step.next:
                raise UsageError(f"a bucket of step {step.number} has gone, which cannot be dropped")
            step.produced.clear()
            step.left = list(self._slices)

    def backward_ended(self) -> list[Action]:
        """All gradients of the step have been produced."""
        step = self._now
        if step is None or len(step.produced) < self._tensors:
            raise UsageError(f"backward ended with {len(self.missing)} of {self._tensors} tensors not produced")
        step.ended, step.instead_of, self._now = True, None, None
        self._owe(step.number)
        actions: list[Action] = []
        if step.due:
            if step.next < len(step.left):
                self._submit_complete(step, actions)
            if self._gathers_late:
                for number in reversed(range(len(self._slices))):
                    self._submit(step, number, ("all_gather",), actions)
            if self._schedule.apply == "step" and not self._held:
                self._wait(step, step.unapplied, actions)
        return actions

    def stepped(self) -> list[Action]:
        """The optimizer is called; what it shall update now is answered."""
        step = self._open[-1] if self._open else None
        if step is None or not step.ended or step.stepped:
            raise UsageError("the optimizer is called before a backward pass has ended, or a second time after it")
        step.stepped = True
        actions: list[Action] = []
        if self._schedule.apply == "step" or not step.due or step.read:
            self._finish(actions)
        elif self._schedule.apply == "next_step":
            self._finish(actions, until=step)
        return actions

    def made_alone(self) -> None:
        """A step that is not due was made, up to the optimizer's call, by somebody who needs to be told nothing."""
        if self._now is not None or self.due or any(step.under_way for step in self._open):
            raise UsageError(f"step {self.begun} is no worker's own: it is exchanged, or another one is under way")
        self._open.clear()  # of which nothing was left but to apply it
        self.begun += 1
        self._owe(self.begun - 1)

    def updated(self) -> list[Action]:
        """The weights are those of a worker's own steps now: exchange them where that is due."""
        if self._now is not None:
            raise UsageError(f"weights are updated in the middle of the backward pass of step {self._now.number}")
        actions: list[Action] = []
        if self._owed is not None:
            step = _Step(self._owed, False, self._slices)
            actions.append(Agree(step.number))
            for bucket in range(len(self._slices)):
                self._submit(step, bucket, self._at_once, actions)
            self._wait(step, step.unapplied, actions)
            actions.append(Average(step.number))
        self._owed = None
        return actions

    def needed(self, tensor: int) -> list[Action]:
        """A forward pass is about to read a tensor."""
        actions: list[Action] = []
        if self._schedule.apply == "layer":
            for step in [step for step in self._open if step.stepped]:
                wanted = [number for number in self._of_tensor[tensor] if number in step.unapplied]
                self._apply(step, wanted, actions)
        return actions

    def arrived(self, operation: BucketPhase) -> None:
        """An operation is done; what a ``Wait`` has named need not be told."""
        oldest = self._open[0].number if self._open else self.begun
        step = next((step for step in self._open if step.number == operation.step), None)
        if step is None and not 0 <= operation.step < oldest:
            raise UsageError(f"{operation} arrived, which was not submitted")
        if step is not None:
            if operation not in step.submitted:
                raise UsageError(f"{operation} arrived, which was not submitted")
            step.came((operation,))

    def flush(self) -> list[Action]:
        """Somebody reads weights or gradients: wait for all that is under way, apply what was stepped.

        Not in the middle of a backward pass, which needs the weights of its forward pass.
        """
        if self._now is not None:
            raise UsageError(
                f"weights or gradients are read in the middle of the backward pass of step {self._now.number}"
            )
        actions: list[Action] = []
        for step in list(self._open):
            if step.stepped:
                self._apply(step, list(step.unapplied), actions)
            else:
                self._wait(step, step.unapplied, actions)
                step.read = True
        return actions

    def abandon(self) -> None:
        """The present backward pass has ended with an exception. Only a step of the worker's own can be given up."""
        step = self._now
        if step is None:
            return
        if step.due:
            raise UsageError(f"step {step.number} cannot be given up: the others wait for the rest of it")
        self._open.pop()
        if step.instead_of is not None:
            self._open.append(step.instead_of)
        self._now = None
        self.begun -= 1

    # What follows from it.

    def _owe(self, step: int) -> None:
        if self._averages is not None and self._averages.averages(step):
            self._owed = step

    def _begin(self, actions: list[Action]) -> _Step:
        due = self._mode.due(self.begun)
        if due and self._averages is not None and self._averages.averages(self.begun):
            raise UsageError(
                f"the sync mode says of step {self.begun} both that gradients are exchanged (due) and that weights are"
                " (averages): let it say one of them"
            )
        last = self._open[-1] if self._open else None
        if last is not None and not last.stepped:
            if self._schedule.apply != "step" and not last.read:
                raise UsageError(
                    f"a second backward pass begins before the optimizer was called for that of step {last.number}:"
                    f" gradients of which apply={self._schedule.apply!r} waits later cannot be added up by passes that"
                    " are exchanged; accumulate them under no_sync()"
                )
            self._open.pop()  # the script adds up averages, or applies them with an optimizer that nobody tells of
        else:
            last = None
        if self._schedule.apply == "layer":
            self._finish(actions)  # layers that no forward pass has read, so that this backward pass does not either
        step = self._now = _Step(self.begun, due, self._slices)
        step.instead_of = last
        self._open.append(step)
        self.begun += 1
        if step.due and self._mode.merges:
            actions.append(Agree(step.number))
        return step

    def _submit_complete(self, step: _Step, actions: list[Action]) -> None:
        """Submit the buckets that are complete, in the order of the list."""
        while step.next < len(step.left) and step.left[step.next] == 0:
            number = step.next
            step.next += 1
            self._submit(step, number, self._at_once, actions)

    def _submit(self, step: _Step, number: int, phases: tuple[Phase, ...], actions: list[Action]) -> None:
        """Submit these phases of a bucket; an all-gather goes behind its reduce-scatter."""
        for phase in phases:
            operation = BucketPhase(step.number, number, phase)
            step.submitted.add(operation)
            step.under_way.add(operation)
            after = BucketPhase(step.number, number, "reduce_scatter") if phase == "all_gather" else None
            actions.append(Submit(operation, self._priorities[number], after))

    def _wait(self, step: _Step, buckets: Iterable[int], actions: list[Action]) -> None:
        """Wait for what of these buckets has not arrived."""
        wanted = [BucketPhase(step.number, number, self._last) for number in buckets]
        late = [operation for operation in wanted if operation in step.under_way]
        if late:
            actions.append(Wait(tuple(late)))
            step.came(late)

    def _apply(self, step: _Step, buckets: list[int], actions: list[Action]) -> None:
        """Apply these buckets of a step once they have arrived."""
        if not buckets:
            return
        if step.under_way:
            self._wait(step, buckets, actions)
        actions.append(Apply(step.number, tuple(buckets)))
        for number in buckets:
            del step.unapplied[number]
        if not step.unapplied:
            self._open.remove(step)

    def _finish(self, actions: list[Action], until: _Step | None = None) -> None:
        """Apply all that is left of the steps before ``until``, or of all."""
        for step in list(self._open):
            if step is until:
                return
            self._apply(step, list(step.unapplied), actions)
