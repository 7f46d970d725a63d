"""The protocol between workers and the owners of their weights, as a state machine: messages in, actions out.

Every owner, a server or a worker, keeps a ``Ledger``. It knows no sockets, threads, clocks or arrays: its caller moves
messages and weights, tells it what has arrived, and carries out the actions that it returns.

A worker pushes its gradients of a step together with the values that the update needs, and goes on when it is released.
Before the push it may ask for the gradients' norm. The unit of pushes is a bucket, or ``ALL`` buckets if one message
announces the whole step; each unit is applied and released by itself. Where pushes are merged, a worker without batches
is a ``shadow`` of the others: it pushes zeros, and its values are not compared with theirs.

The sync mode is the rule. If it merges, the pushes of all workers for a step are one update with values on which they
agree, and one plan may sum them. If it does not, every push is an update with the newest known values: a slow worker's
push is applied with the learning rate that faster workers have already reached. In both cases the mode says how far a
worker may be ahead of a slower one. Bulk-synchronous training merges and lets nobody go on before all have pushed.
Without merging it is asynchronous SGD, with or without a bound on staleness.

Without merging, a worker may leave between two steps and then no longer counts as the slowest. Workers may also meet
there. A worker that has come to the meeting holds up nobody. When all workers that have not left have come, all are
sent the same weights and go on from the clock of the fastest.

With backup workers, the b slowest are not waited for. An update is the sum of the pushes so far, made when the slowest
of the others reaches a new clock. A later worker goes on at once, and its push becomes part of the next update, or of
an update of its own if it pushes again before that. No push is lost, and nobody waits for the slowest (Chen et al.,
"Revisiting Distributed Synchronous SGD", ICLR workshop 2016, which drops late gradients instead).

Rules
* A worker's message is for its next step, with each bucket once. It begins a step only after it has been released from
  all buckets of the step before. Anything else raises and changes nothing.
* Merged pushes agree: all workers bring the same values for a step, and either all ask for the norm or none does.
* ``Apply`` comes once for every update and bucket, with versions counted from 1, before the ``Release`` that it allows.
* A worker's clock, the number of steps it has pushed, only grows. Its lead over the slowest worker at its release is
  the staleness of the step that it may begin; ``Release`` has it.

Theory: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; Ho et al., "More
Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..errors import MismatchError
from ..sync import backup_of

JOIN = "join()"
"""The call of a worker without further batches. It meets others at any call of theirs, until all are at this one."""

ALL = -1
"""In place of a worker's number: all workers, whose pushes are one. In place of a bucket's: the whole step."""


_NO_SHADOWS = "which this sync mode does not allow, since every push is an update by itself: leave instead"


class Rule(Protocol):
    """The ledger's view of a sync mode. It must always let the slowest worker go on."""

    @property
    def merges(self) -> bool:
        """Whether the pushes of all workers for a step are one update, instead of one update each."""
        ...

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Whether a worker at ``clock`` may go on while the slowest is at ``slowest``."""
        ...


Kind = Literal["norm", "push", "shadow", "meet", "leave"]


@dataclass(frozen=True)
class Request:
    """A worker's message.

    ``push``: its gradients are on their way. ``norm``: it asks for their norm first. ``shadow``: a push of zeros
    without values. ``meet``: before this step it waits until all others meet too. ``leave``: it makes no more steps.

    ``values`` are the worker's values for the update: those of the optimizer's groups, and the clipping factor.
    """

    kind: Kind
    worker: int
    clock: int
    values: Mapping[str, Any] = field(default_factory=dict)
    bucket: int = ALL


@dataclass(frozen=True)
class Measure:
    """Compute the norm of a worker's gradients of a step, or of the sum of ``ALL``, and tell it to ``workers``."""

    worker: int
    clock: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Add:
    """Add a worker's push for step ``clock`` to the next update of ``ALL``. ``lag`` is defined as for ``Apply``."""

    worker: int
    clock: int
    bucket: int
    values: Mapping[str, Any]
    lag: int


@dataclass(frozen=True)
class Apply:
    """Apply a worker's push for step ``clock``, or the merged one of ``ALL``, which makes ``version``.

    ``values`` came with the push, ``newest`` with the latest push of the worker that has made the most pushes. ``lag``
    is the number of updates made to the bucket since the weights that the worker was sent last.
    """

    worker: int
    clock: int
    version: int
    bucket: int
    values: Mapping[str, Any]
    newest: Mapping[str, Any]
    lag: int = 0


@dataclass(frozen=True)
class Release:
    """Send a bucket's weights to these workers and let them go on.

    ``ahead`` is the lead of each over the slowest in clocks, ``by`` the worker whose message released them, ``met`` the
    call at which all have met, if they have.
    """

    workers: tuple[int, ...]
    bucket: int
    ahead: tuple[int, ...]
    by: int
    met: str = ""


Action = Measure | Add | Apply | Release


@dataclass
class _BucketState:
    """The state of a bucket: for each worker the last step pushed, those that wait, and pushes not yet applied.

    ``sent`` has the version that each worker was sent last. ``latest`` has the latest push of each worker, the newest
    last, and ``made`` the number of its pushes. ``added`` are workers whose pushes wait for the next update, and
    ``level`` is the clock at which the last update was made.
    """

    clocks: list[int]
    sent: list[int]
    waiting: set[int] = field(default_factory=set)
    version: int = 0
    pushed: dict[int, Request] = field(default_factory=dict)
    latest: dict[int, Request] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    added: set[int] = field(default_factory=set)
    level: int = 0


@dataclass
class _NextStep:
    """A worker's next step: the buckets that it has begun, and the released buckets of the step before.

    ``back`` counts the buckets of this step that it has pushed and that are already released; they count for the next
    step.
    """

    clock: int
    ready: int
    begun: int = 0
    back: int = 0


class Ledger:
    """Keeps how far every worker is, who waits for whom, and which pushes are still to be applied, under a rule.

    ``buckets`` are the numbers of the units that are pushed by themselves. Errors call workers as ``called`` does.
    """

    def __init__(
        self,
        workers: int,
        rule: Rule,
        buckets: Sequence[int] = (ALL,),
        called: Callable[[int], str] = "rank {}".format,
    ) -> None:
        self._called = called
        self._workers = range(workers)
        self._rule, self._backup = rule, backup_of(rule)
        self._states = {bucket: _BucketState([0] * workers, [0] * workers) for bucket in buckets}
        self._next_steps = [_NextStep(1, len(self._states)) for _ in self._workers]
        self._asked: dict[int, dict[int, Request]] = {}  # step -> worker -> its request for the norm
        self._shadows: dict[int, set[int]] = {}  # step -> workers without batches
        self._left: set[int] = set()
        self._met: dict[int, str] = {}  # workers that wait in a meeting, and their calls

    @property
    def clocks(self) -> list[int]:
        """The number of whole steps that each worker has pushed."""
        return [next_step.clock - 1 for next_step in self._next_steps]

    def clock_of(self, worker: int) -> int:
        """The number of whole steps that one worker has pushed."""
        return self._next_steps[worker].clock - 1

    @property
    def awaited(self) -> dict[int, int]:
        """Worker -> step, for workers whose push or question for the norm others wait for. Safe in any thread."""
        late: dict[int, int] = {}
        moving = self._moving()
        for state in self._states.values():
            clocks = list(state.clocks)
            for clock in {clocks[worker] for worker in tuple(state.waiting)}:
                for worker in moving:
                    if clocks[worker] < clock and not self._rule.may_proceed(clock, clocks[worker]):
                        late[worker] = clocks[worker] + 1
        for step, asked in list(self._asked.items()):
            here = {*asked, *self._shadows.get(step, ())}
            late |= {worker: step for worker in self._workers if worker not in here}
        if self._met:
            waiting = {worker for state in self._states.values() for worker in tuple(state.waiting)}
            late |= {worker: self.clocks[worker] + 1 for worker in moving if worker not in waiting}
        return late

    def _moving(self) -> list[int]:
        """The workers that make steps. One of them is the slowest."""
        return [worker for worker in self._workers if worker not in self._left and worker not in self._met]

    def handle(self, request: Request) -> list[Action]:
        """Handle a worker's message; return the actions to carry out, in order.

        Raises MismatchError, without any change, if the message is not the worker's next one or contradicts the
        messages that it has to be merged with.
        """
        self._check_turn(request)
        if request.kind in ("meet", "leave"):
            self._check_meeting(request)
            return self._stop(request)
        if request.kind == "shadow":
            self._check_shadow(request)
        elif self._rule.merges:
            self._check_norm(request)
            self._check_values(request)
        if request.kind == "norm":
            return self._measure(request)
        state = self._states[request.bucket]
        state.clocks[request.worker] = request.clock
        state.waiting.add(request.worker)
        self._push(self._next_steps[request.worker])
        measured: list[Action] = []
        if request.kind == "shadow":
            self._shadows.setdefault(request.clock, set()).add(request.worker)
            measured = self._measured(request.clock)
        return [*measured, *self._apply(state, request), *self._release(state, request.bucket, request.worker)]

    def _push(self, next_step: _NextStep) -> None:
        """Count one more pushed bucket; after the last one the next step begins."""
        next_step.ready, next_step.begun = next_step.ready - 1, next_step.begun + 1
        if next_step.begun == len(self._states):
            next_step.clock, next_step.ready, next_step.begun, next_step.back = (
                next_step.clock + 1,
                next_step.back,
                0,
                0,
            )

    def _stop(self, request: Request) -> list[Action]:
        """The worker leaves, or waits for a meeting: nobody waits for its steps meanwhile."""
        if request.kind == "leave":
            self._left.add(request.worker)
        else:
            self._met[request.worker] = request.values.get("call", "")
        if self._met and not self._moving():
            return self._part(request.worker)
        found: list[Action] = []
        for bucket, state in self._states.items():
            found += [*self._come_to(state, bucket), *self._release(state, bucket, request.worker)]
        return found

    def _part(self, last: int) -> list[Action]:
        """All workers have met: send all the same weights, with nobody ahead."""
        met, clock = tuple(sorted(self._met)), max(self.clocks)
        call = next((call for call in self._met.values() if call != JOIN), JOIN)
        self._met.clear()
        found: list[Action] = []
        for worker in met:
            self._next_steps[worker] = _NextStep(clock + 1, len(self._states))
        for bucket, state in self._states.items():
            found += self._sum_up(state, bucket)
            for worker in met:
                state.clocks[worker], state.sent[worker] = clock, state.version
            state.level = clock
        return [*found, *(Release(met, bucket, (0,) * len(met), last, call) for bucket in self._states)]

    def _measure(self, request: Request) -> list[Action]:
        worker, clock = request.worker, request.clock
        if self._backup:
            raise MismatchError(
                f"{self._called(worker)} asks for the norm of gradients that are added to others as they come"
            )
        if not self._rule.merges:
            return [Measure(worker, clock, (worker,))]
        self._asked.setdefault(clock, {})[worker] = request
        return self._measured(clock)

    def _measured(self, clock: int) -> list[Action]:
        """Measure the norm of a step once all workers with batches have asked."""
        asked = self._asked.get(clock)
        if asked is None or len(asked) + len(self._shadows.get(clock, ())) < len(self._workers):
            return []
        del self._asked[clock]
        return [Measure(ALL, clock, tuple(sorted(asked)))]

    def _apply(self, state: _BucketState, request: Request) -> list[Action]:
        if not self._rule.merges:
            worker, clock, bucket, values = request.worker, request.clock, request.bucket, request.values
            state.latest.pop(worker, None)
            state.latest[worker] = request
            state.made[worker] = state.made.get(worker, 0) + 1
            before = self._sum_up(state, bucket) if worker in state.added else []
            lag = state.version - state.sent[worker]
            if self._backup:
                state.added.add(worker)
                return [*before, Add(worker, clock, bucket, values, lag), *self._come_to(state, bucket)]
            state.version += 1
            return [Apply(worker, clock, state.version, bucket, values, self._newest(state).values, lag)]
        if request.kind == "push":
            state.pushed.setdefault(request.clock, request)
        found: list[Action] = []
        while state.version < min(state.clocks):
            state.version += 1
            values = state.pushed.pop(state.version).values
            found.append(Apply(ALL, state.version, state.version, request.bucket, values, values))
        done = min(one.version for one in self._states.values())
        self._shadows = {step: workers for step, workers in self._shadows.items() if step > done}
        return found

    def _come_to(self, state: _BucketState, bucket: int) -> list[Action]:
        """Make one update of all added pushes if the slowest awaited worker has reached a new clock."""
        level = self._level(state)
        if not self._backup or level <= state.level:
            return []
        state.level = level
        return self._sum_up(state, bucket)

    def _sum_up(self, state: _BucketState, bucket: int) -> list[Action]:
        if not state.added:
            return []
        state.version += 1
        state.added.clear()
        newest = self._newest(state)
        return [Apply(ALL, newest.clock, state.version, bucket, newest.values, newest.values)]

    def _newest(self, state: _BucketState) -> Request:
        """The latest push of the worker with most pushes among those that have not left.

        A worker that has left may have ended its learning-rate schedule; the others must not inherit its values.
        """
        here = [worker for worker in state.latest if worker not in self._left] or list(state.latest)
        return state.latest[max(reversed(here), key=lambda worker: state.made[worker])]

    def _level(self, state: _BucketState) -> int:
        """The clock of the slowest awaited worker among those that make steps; 0 if there are none."""
        clocks = sorted(state.clocks[worker] for worker in self._moving())
        return clocks[min(self._backup, len(clocks) - 1)] if clocks else 0

    def _release(self, state: _BucketState, bucket: int, by: int) -> list[Action]:
        if not state.waiting:
            return []
        slowest, level = min(state.clocks[worker] for worker in self._moving()), self._level(state)
        free = [worker for worker in sorted(state.waiting) if self._rule.may_proceed(state.clocks[worker], level)]
        state.waiting.difference_update(free)
        for worker in free:
            state.sent[worker] = state.version
            next_step = self._next_steps[worker]
            if state.clocks[worker] == next_step.clock:
                next_step.back += 1
            else:
                next_step.ready += 1
        ahead = tuple(state.clocks[worker] - slowest for worker in free)
        return [Release(tuple(free), bucket, ahead, by)] if free else []

    def _check_turn(self, request: Request) -> None:
        worker, clock = request.worker, request.clock
        if worker not in self._workers or not self._is_next(request):
            expected = self._next_steps[worker].clock if worker in self._workers else 0
            part = "" if request.bucket == ALL else f" of bucket {request.bucket}"
            raise MismatchError(
                f"{self._called(worker)} sent a {request.kind}{part} for step {clock}, but its next step is {expected}:"
                " do all ranks call step() once for every backward()?"
            )

    def _is_next(self, request: Request) -> bool:
        """Whether the worker has been released from the step before and has not sent this message yet."""
        worker, clock = request.worker, request.clock
        if worker not in self._moving() or (self._rule.merges and request.kind in ("meet", "leave")):
            return False
        next_step = self._next_steps[worker]
        if clock != next_step.clock or next_step.begun + next_step.ready < len(self._states):
            return False
        if request.kind not in ("push", "shadow"):
            return next_step.begun == 0
        state = self._states.get(request.bucket)
        return state is not None and state.clocks[worker] == clock - 1 and worker not in state.waiting

    def _check_shadow(self, request: Request) -> None:
        """At least one worker must have batches, because its values count, and the rule must merge."""
        shadows = {*self._shadows.get(request.clock, ()), request.worker}
        if not self._rule.merges or len(shadows) == len(self._workers):
            raise MismatchError(
                f"{self._called(request.worker)} takes part in step {request.clock} without batches,"
                f" {'and so do all others: one of them has to have batches' if self._rule.merges else _NO_SHADOWS}"
            )

    def _check_meeting(self, request: Request) -> None:
        """All workers that meet must be in the same call."""
        call = request.values.get("call", "")
        for worker, other in self._met.items():
            if request.kind == "meet" and JOIN not in (call, other) and call != other:
                raise MismatchError(
                    f"{self._called(request.worker)} is at {call} while {self._called(worker)} is at {other}: all"
                    " workers that have not left make these calls in the same order; inside join() a worker without"
                    " batches takes part in all of them"
                )

    def _check_norm(self, request: Request) -> None:
        """Norms and pushes of one step must not mix: a worker that waits for the norm would wait forever."""
        clock, worker = request.clock, request.worker
        asked = self._asked.get(clock, {})
        if request.kind == "norm":
            first = next((state.pushed[clock] for state in self._states.values() if clock in state.pushed), None)
            wrong = worker in asked or first is not None
        else:
            first = next(iter(asked.values()), None)
            wrong = first is not None
        if wrong:
            other = worker if first is None or worker in asked else first.worker
            raise MismatchError(
                f"{self._called(worker)} sent a {request.kind} for step {clock} out of turn with {self._called(other)}:"
                " do all ranks call clip_grad_norm_() as often in every step?"
            )

    def _check_values(self, request: Request) -> None:
        if request.kind == "norm":
            other = next(iter(self._asked.get(request.clock, {}).values()), None)
        else:
            other = self._states[request.bucket].pushed.get(request.clock)
        if other is not None and other.values != request.values:
            names = sorted(
                key for key in {*other.values, *request.values} if other.values.get(key) != request.values.get(key)
            )
            raise MismatchError(
                f"{self._called(request.worker)} and {self._called(other.worker)} disagree on the optimizer's values in"
                f" step {request.clock} ({', '.join(names)}): set learning rates and clipping, and change weights,"
                " alike on all ranks"
            )
