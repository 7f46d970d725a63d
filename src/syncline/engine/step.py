"""The state machine of one worker's steps: what is submitted, awaited and applied, and when.

It reads the schedule (``release``, ``phases``, ``apply``, ``priority``) and the sync mode (``due``, ``merges``,
``averages``). It knows no framework, engine, thread, clock or array. The driver reports what happens to a model and
carries out the answered actions in order; a ``Wait`` ends before the next event. Frameworks' adapters drive it with
real gradients and a simulator with a virtual clock, so predictions match runs.

A step, by the event that waits for its result (``apply``):

    step        produced*  backward_ended: waits for all   stepped: applies all
    layer       produced*  backward_ended   stepped   needed, before each layer's next forward: waits and applies
    next_step   produced*  backward_ended   stepped: waits for, and applies, the step before

Rules
* Each bucket of a due step is submitted once per phase, in the order of the schedule's list. All workers thus submit
  alike, whatever the order in which backward completes buckets. An all-gather follows its reduce-scatter: at once, or,
  if each layer waits for itself, after backward, starting with the layers that are needed first.
* A result is applied exactly once, after it has arrived and after the step's own ``stepped``. Steps are applied in
  order.
* Merged exchanges are agreed on before any of their data is sent. Pushes that are updates of their own need no
  agreement.
* A step that is not due is local: nothing of it is submitted, and the worker's own gradients are applied.
* After the steps that the mode selects (``Averages``) weights are exchanged: all buckets, once, after the optimizer's
  update (``updated``), or else before the next forward pass, and awaited there. Such a step is never due.
* A script that has read the gradients of a step (``flush``) may change them, so the step is applied at once when the
  optimizer is called.
* The forward pass has already announced every tensor that its backward pass reads.
* If owners hold the weights (``held``), workers never see sums of gradients: ``backward_ended`` does not wait, and with
  ``step`` the wait moves to ``stepped``.
* An event out of turn raises and changes nothing.

Theory: wait-free backpropagation (Zhang et al., "Poseidon", USENIX ATC 2017), priorities and layers that wait for
themselves (Jayarajan et al., "P3", MLSys 2019), separate reduce-scatter and all-gather (Zhang et al., "DeAR", ICDCS
2023), delayed updates (Xu et al., "OD-SGD", ACM TACO 2020).
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
    """Agree with the other workers on this step before any of its data is sent."""

    step: int


class Submit(NamedTuple):
    """Submit an operation. It starts after ``after`` has arrived; the smallest priority goes first."""

    operation: BucketPhase
    priority: float
    after: BucketPhase | None = None


class Wait(NamedTuple):
    """Block until these operations have arrived."""

    operations: tuple[BucketPhase, ...]


class Apply(NamedTuple):
    """Update the tensors of these buckets with the result of a step."""

    step: int
    buckets: tuple[int, ...]


class Average(NamedTuple):
    """Replace the weights by the result of the exchange after a step."""

    step: int


Action = Agree | Submit | Wait | Apply | Average


class _Step:
    """The progress of one step."""

    def __init__(self, number: int, due: bool, slices: Sequence[int]) -> None:
        self.number, self.due = number, due
        self.produced: set[int] = set()
        self.left = list(slices)  # gradients per bucket that are not produced yet
        self.next = 0  # the first bucket that has not been submitted
        self.submitted: set[BucketPhase] = set()
        self.under_way: set[BucketPhase] = set()
        self.unapplied = dict.fromkeys(range(len(slices)))  # buckets, in order
        self.ended = self.stepped = False
        self.read = False  # all data have arrived and may be changed before the optimizer is called
        # the previous unapplied step, to whose gradients these are added
        self.instead_of: _Step | None = None

    def came(self, operations: Iterable[BucketPhase]) -> None:
        """Record that operations have arrived, which includes the operations that they followed."""
        for operation in operations:
            self.under_way.discard(operation)
            if operation.phase == "all_gather":
                self.under_way.discard(operation._replace(phase="reduce_scatter"))


class Laid(Protocol):
    """The layout of a model's buckets."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in the order in which they are submitted."""
        ...

    @property
    def priorities(self) -> Sequence[float]:
        """The priorities of the buckets, as given by the schedule."""
        ...


class Steps:
    """The steps of one worker for one model of ``tensors`` tensors in the buckets of ``layout``.

    ``begun`` is the number of the first step, above 0 in a resumed run. ``held`` says that owners hold the weights.
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
        self._open: deque[_Step] = deque()  # steps with unapplied buckets, the oldest first
        self._now: _Step | None = None  # the step whose backward pass is running
        self._averages = mode if isinstance(mode, Averages) else None
        self._when_ready = schedule.release == "ready"
        self._gathers_late = schedule.phases == "split" and schedule.apply == "layer"
        phases: tuple[Phase, ...] = ("allreduce",) if schedule.phases == "whole" else ("reduce_scatter", "all_gather")
        self._last = phases[-1]
        # the phases in which a complete bucket is submitted
        self._at_once = phases[:1] if self._gathers_late else phases
        self._average_after: int | None = None  # the last step after which weights must be exchanged and have not been
        self.begun = begun
        """The number of steps that have begun."""

    @property
    def due(self) -> bool:
        """Whether the current step is exchanged; between backward passes, the next one."""
        return self._mode.due(self.begun) if self._now is None else self._now.due

    @property
    def unstepped(self) -> bool:
        """Whether a backward pass has ended without a call of the optimizer since."""
        last = self._open[-1] if self._open else None
        return last is not None and last.ended and not last.stepped

    @property
    def under_way(self) -> bool:
        """Whether anything is in flight or unapplied that a later event completes."""
        return any(step.stepped or not step.read for step in self._open if step.due)

    @property
    def averages_next(self) -> bool:
        """Whether weights must be exchanged before another step begins."""
        return self._average_after is not None

    @property
    def missing(self) -> list[int]:
        """The tensors that the current backward pass has not produced."""
        made = () if self._now is None else self._now.produced
        return [tensor for tensor in range(self._tensors) if tensor not in made]

    # Events

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
        """The backward pass was abandoned and starts again in the same step. UsageError if a bucket has been sent."""
        step = self._now
        if step is not None:
            if step.next:
                raise UsageError(f"a bucket of step {step.number} has been sent, so the step cannot be dropped")
            step.produced.clear()
            step.left = list(self._slices)

    def backward_ended(self) -> list[Action]:
        """All gradients of the step have been produced."""
        step = self._now
        if step is None or len(step.produced) < self._tensors:
            raise UsageError(f"backward ended with {len(self.missing)} of {self._tensors} tensors not produced")
        step.ended, step.instead_of, self._now = True, None, None
        self._note_average(step.number)
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
        """The optimizer is called. The answer contains the updates to make now."""
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
        """A local step was made, up to the optimizer's call, without reporting its events."""
        if self._now is not None or self.due or any(step.under_way for step in self._open):
            raise UsageError(
                f"step {self.begun} is not local to this worker: it is exchanged, or another step is under way"
            )
        self._open.clear()  # only applying was left
        self.begun += 1
        self._note_average(self.begun - 1)

    def updated(self) -> list[Action]:
        """Local updates have been made. The answer exchanges weights if that is due."""
        if self._now is not None:
            raise UsageError(f"weights are updated in the middle of the backward pass of step {self._now.number}")
        actions: list[Action] = []
        if self._average_after is not None:
            step = _Step(self._average_after, False, self._slices)
            actions.append(Agree(step.number))
            for bucket in range(len(self._slices)):
                self._submit(step, bucket, self._at_once, actions)
            self._wait(step, step.unapplied, actions)
            actions.append(Average(step.number))
        self._average_after = None
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
        """An operation is done. Reporting operations named by a ``Wait`` is optional."""
        oldest = self._open[0].number if self._open else self.begun
        step = next((step for step in self._open if step.number == operation.step), None)
        if step is None and not 0 <= operation.step < oldest:
            raise UsageError(f"{operation} arrived, which was not submitted")
        if step is not None:
            if operation not in step.submitted:
                raise UsageError(f"{operation} arrived, which was not submitted")
            step.came((operation,))

    def flush(self) -> list[Action]:
        """Weights or gradients are read: wait for everything in flight and apply the steps of finished optimizer calls.

        Not allowed during a backward pass, which needs the weights of its forward pass.
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
        """The current backward pass has failed. Only a local step can be abandoned."""
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

    # Consequences

    def _note_average(self, step: int) -> None:
        if self._averages is not None and self._averages.averages(step):
            self._average_after = step

    def _begin(self, actions: list[Action]) -> _Step:
        due = self._mode.due(self.begun)
        if due and self._averages is not None and self._averages.averages(self.begun):
            raise UsageError(
                f"in step {self.begun} the sync mode exchanges both gradients (due) and weights (averages): let only"
                " one of them return True"
            )
        last = self._open[-1] if self._open else None
        if last is not None and not last.stepped:
            if self._schedule.apply != "step" and not last.read:
                raise UsageError(
                    f"a second backward pass begins before the optimizer was called for step {last.number}: under"
                    f" apply={self._schedule.apply!r} gradients arrive later, so exchanged passes cannot accumulate"
                    " them; accumulate under no_sync()"
                )
            # the script accumulates averages, or applies them with an optimizer that does not report its steps
            self._open.pop()
        else:
            last = None
        if self._schedule.apply == "layer":
            self._finish(actions)  # no forward pass has read these layers, so this backward pass does not either
        step = self._now = _Step(self.begun, due, self._slices)
        step.instead_of = last
        self._open.append(step)
        self.begun += 1
        if step.due and self._mode.merges:
            actions.append(Agree(step.number))
        return step

    def _submit_complete(self, step: _Step, actions: list[Action]) -> None:
        """Submit the complete buckets, in the order of the list."""
        while step.next < len(step.left) and step.left[step.next] == 0:
            number = step.next
            step.next += 1
            self._submit(step, number, self._at_once, actions)

    def _submit(self, step: _Step, number: int, phases: tuple[Phase, ...], actions: list[Action]) -> None:
        """Submit these phases of a bucket; an all-gather follows its reduce-scatter."""
        for phase in phases:
            operation = BucketPhase(step.number, number, phase)
            step.submitted.add(operation)
            step.under_way.add(operation)
            after = BucketPhase(step.number, number, "reduce_scatter") if phase == "all_gather" else None
            actions.append(Submit(operation, self._priorities[number], after))

    def _wait(self, step: _Step, buckets: Iterable[int], actions: list[Action]) -> None:
        """Wait for the operations of these buckets that have not arrived."""
        wanted = [BucketPhase(step.number, number, self._last) for number in buckets]
        late = [operation for operation in wanted if operation in step.under_way]
        if late:
            actions.append(Wait(tuple(late)))
            step.came(late)

    def _apply(self, step: _Step, buckets: list[int], actions: list[Action]) -> None:
        """Apply these buckets of a step after they have arrived."""
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
        """Apply the unapplied rest of the steps before ``until``, or of all steps."""
        for step in list(self._open):
            if step is until:
                return
            self._apply(step, list(step.unapplied), actions)
