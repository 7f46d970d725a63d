"""The protocol between workers and the owners of their weights, as a state machine: messages in, actions out.

Every owner keeps a ``Ledger``, be it a process of its own or a worker. It knows no sockets, threads, clocks or arrays:
who moves messages and weights tells it what has come, and does what it answers.

A worker pushes its gradients of a step, with the values that the update needs from it, and goes on when it is released;
before that it may ask for their norm. What is pushed by itself is applied and released by itself: a bucket, or ``ALL``
of them where one message says that the whole step has been pushed. A worker without batches is the ``shadow`` of the
others where their pushes are merged: it pushes zeros, and has no say in what they agree on.

The sync mode is the rule. Where it merges, the pushes of all workers for a step are one update, with values on which
they agree; an owner may take them in by one plan. Where it does not, every push is an update by itself, with the newest
values that are known: a slow worker's push is applied with the learning rate that those ahead of it have come to. In
both cases the mode says which workers wait for how slow a one. Bulk-synchronous training merges and lets nobody go on
before all have pushed; what does not merge is asynchronous SGD, with or without a bound.

Where pushes are not merged a worker may leave between two steps, and is the slowest no more. Workers may also meet
there: who has come holds up nobody, and when all have that have not left, all are sent the same weights and go on from
the clock of the fastest.

With so many backup workers the slowest of the others is the one that is waited for. An update is the sum of what has
been pushed, made when that one has come to another clock; who comes later goes on at once, and what it has pushed is
part of the next update, or, where it comes again before that, of one of its own. Nothing is lost, and nobody waits for
the slowest (Chen et al., "Revisiting Distributed Synchronous SGD", ICLR workshop 2016, where it is dropped).

Rules
* A worker's message is for its next step, each bucket once, and it begins a step only when it has been released from
  all of the one before; all else raises and changes nothing.
* What is merged is agreed on: all workers bring the same values for a step, and ask for the norm all or none.
* ``Apply`` comes once for every update and bucket, its versions count from 1, and before the ``Release`` that it makes
  possible.
* A worker's clock, the steps that it has pushed, only grows. How far it is ahead of the slowest when it is released is
  the staleness of the step that it may begin; ``Release`` says it.

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
"""The call of who has no more batches: it meets others at whatever call they come to, until all are at this one."""

ALL = -1
"""In place of a worker's number: all of them, whose pushes are one. In place of a bucket's: the whole step."""


class Rule(Protocol):
    """What the ledger asks of a sync mode; the slowest worker must always be allowed to go on."""

    @property
    def merges(self) -> bool:
        """Whether all workers' pushes for a step are one update, or each is one by itself."""
        ...

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Whether a worker at ``clock`` may go on while the slowest is at ``slowest``."""
        ...


Kind = Literal["norm", "push", "shadow", "meet", "leave"]


@dataclass(frozen=True)
class Request:
    """A worker's message: ``push`` says that its gradients are under way, ``norm`` asks for their norm before.

    ``shadow`` is a push of zeros without values. ``meet`` says that before this step it waits for all others to do so
    too, ``leave`` that it makes none any more.
    ``values`` are what the update needs from the worker: the optimizer's group values and the clipping factor.
    """

    kind: Kind
    worker: int
    clock: int
    values: Mapping[str, Any] = field(default_factory=dict)
    bucket: int = ALL


@dataclass(frozen=True)
class Measure:
    """Compute the norm of that worker's gradients, or of the sum of ``ALL``, of that step; tell ``workers``."""

    worker: int
    clock: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Add:
    """Add the push of that worker for step ``clock`` to the next update of ``ALL``; ``lag`` is as for ``Apply``."""

    worker: int
    clock: int
    bucket: int
    values: Mapping[str, Any]
    lag: int


@dataclass(frozen=True)
class Apply:
    """Apply the push of that worker for step ``clock``, or the merged one of ``ALL``: it makes that version.

    ``values`` came with the push, ``newest`` with the latest of who has made most steps. ``lag`` is how many updates
    had been made to the bucket since the weights that the worker was sent last.
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
    """Send the bucket's weights to these workers: as far as it is concerned, they go on.

    ``ahead`` is how many clocks each is ahead of the slowest, ``by`` the worker whose message they have waited for,
    ``met`` the call at which all have met, if they have.
    """

    workers: tuple[int, ...]
    bucket: int
    ahead: tuple[int, ...]
    by: int
    met: str = ""


Action = Measure | Add | Apply | Release


@dataclass
class _Page:
    """A bucket's: the last step that each worker has pushed, who waits, and the first push of steps to be applied.

    ``sent`` are the versions that workers were sent last, ``latest`` their latest pushes, the newest behind the others,
    and ``made`` how many there were of each.
    ``added`` are the workers whose pushes wait for the next update, ``level`` is the clock that the last one was of.
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
class _Turn:
    """A worker's next step: how many buckets it has pushed of it, and how many of the step before are released.

    ``back`` are those that it has pushed and that are released already, and count for the step behind it.
    """

    clock: int
    ready: int
    begun: int = 0
    back: int = 0


class Ledger:
    """Keeps how far every worker is, who waits for whom, and what is still to be applied, under a rule.

    ``buckets`` are the numbers of what is pushed by itself. Messages call workers as ``called`` does.
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
        self._pages = {bucket: _Page([0] * workers, [0] * workers) for bucket in buckets}
        self._turns = [_Turn(1, len(self._pages)) for _ in self._workers]
        self._asked: dict[int, dict[int, Request]] = {}  # step -> worker -> its question for the norm
        self._shadows: dict[int, set[int]] = {}  # step -> workers without batches
        self._left: set[int] = set()
        self._met: dict[int, str] = {}  # those that wait for all others between two steps, and at which call

    @property
    def clocks(self) -> list[int]:
        """The steps that each worker has pushed as a whole."""
        return [turn.clock - 1 for turn in self._turns]

    def clock_of(self, worker: int) -> int:
        """Those of one."""
        return self._turns[worker].clock - 1

    @property
    def awaited(self) -> dict[int, int]:
        """Worker -> step of those whose push, or question for the norm, others wait for; from any thread."""
        late: dict[int, int] = {}
        moving = self._moving()
        for page in self._pages.values():
            clocks = list(page.clocks)
            for clock in {clocks[worker] for worker in tuple(page.waiting)}:
                for worker in moving:
                    if clocks[worker] < clock and not self._rule.may_proceed(clock, clocks[worker]):
                        late[worker] = clocks[worker] + 1
        for step, asked in list(self._asked.items()):
            here = {*asked, *self._shadows.get(step, ())}
            late |= {worker: step for worker in self._workers if worker not in here}
        if self._met:
            waiting = {worker for page in self._pages.values() for worker in tuple(page.waiting)}
            late |= {worker: self.clocks[worker] + 1 for worker in moving if worker not in waiting}
        return late

    def _moving(self) -> list[int]:
        """The workers that make steps: one of them is the slowest."""
        return [worker for worker in self._workers if worker not in self._left and worker not in self._met]

    def handle(self, request: Request) -> list[Action]:
        """Take a worker's message; what has to be done now, in order.

        Raises MismatchError, and changes nothing, when the message is not the worker's next one or when it differs from
        those that it has to be merged with.
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
        page = self._pages[request.bucket]
        page.clocks[request.worker] = request.clock
        page.waiting.add(request.worker)
        self._push(self._turns[request.worker])
        measured: list[Action] = []
        if request.kind == "shadow":
            self._shadows.setdefault(request.clock, set()).add(request.worker)
            measured = self._measured(request.clock)
        return [*measured, *self._apply(page, request), *self._release(page, request.bucket, request.worker)]

    def _push(self, turn: _Turn) -> None:
        """One bucket more has been; behind the last comes the next step."""
        turn.ready, turn.begun = turn.ready - 1, turn.begun + 1
        if turn.begun == len(self._pages):
            turn.clock, turn.ready, turn.begun, turn.back = turn.clock + 1, turn.back, 0, 0

    def _stop(self, request: Request) -> list[Action]:
        """The worker makes no steps any more, or none before all have met: nobody waits for one of it."""
        if request.kind == "leave":
            self._left.add(request.worker)
        else:
            self._met[request.worker] = request.values.get("call", "")
        if self._met and not self._moving():
            return self._part(request.worker)
        found: list[Action] = []
        for bucket, page in self._pages.items():
            found += [*self._come_to(page, bucket), *self._release(page, bucket, request.worker)]
        return found

    def _part(self, last: int) -> list[Action]:
        """All have met: all get the same weights, and nobody is ahead."""
        met, clock = tuple(sorted(self._met)), max(self.clocks)
        call = next((call for call in self._met.values() if call != JOIN), JOIN)
        self._met.clear()
        found: list[Action] = []
        for worker in met:
            self._turns[worker] = _Turn(clock + 1, len(self._pages))
        for bucket, page in self._pages.items():
            found += self._sum_up(page, bucket)
            for worker in met:
                page.clocks[worker], page.sent[worker] = clock, page.version
            page.level = clock
        return [*found, *(Release(met, bucket, (0,) * len(met), last, call) for bucket in self._pages)]

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
        """The norm of a step, once all have asked that have batches."""
        asked = self._asked.get(clock)
        if asked is None or len(asked) + len(self._shadows.get(clock, ())) < len(self._workers):
            return []
        del self._asked[clock]
        return [Measure(ALL, clock, tuple(sorted(asked)))]

    def _apply(self, page: _Page, request: Request) -> list[Action]:
        if not self._rule.merges:
            worker, clock, bucket, values = request.worker, request.clock, request.bucket, request.values
            page.latest.pop(worker, None)
            page.latest[worker] = request
            page.made[worker] = page.made.get(worker, 0) + 1
            before = self._sum_up(page, bucket) if worker in page.added else []
            lag = page.version - page.sent[worker]
            if self._backup:
                page.added.add(worker)
                return [*before, Add(worker, clock, bucket, values, lag), *self._come_to(page, bucket)]
            page.version += 1
            return [Apply(worker, clock, page.version, bucket, values, self._newest(page).values, lag)]
        if request.kind == "push":
            page.pushed.setdefault(request.clock, request)
        found: list[Action] = []
        while page.version < min(page.clocks):
            page.version += 1
            values = page.pushed.pop(page.version).values
            found.append(Apply(ALL, page.version, page.version, request.bucket, values, values))
        done = min(one.version for one in self._pages.values())
        self._shadows = {step: workers for step, workers in self._shadows.items() if step > done}
        return found

    def _come_to(self, page: _Page, bucket: int) -> list[Action]:
        """One update of all that has been added, where who is waited for has come to another clock."""
        level = self._level(page)
        if not self._backup or level <= page.level:
            return []
        page.level = level
        return self._sum_up(page, bucket)

    def _sum_up(self, page: _Page, bucket: int) -> list[Action]:
        if not page.added:
            return []
        page.version += 1
        page.added.clear()
        newest = self._newest(page)
        return [Apply(ALL, newest.clock, page.version, bucket, newest.values, newest.values)]

    def _newest(self, page: _Page) -> Request:
        """The latest push of who has made most, and has not left: a schedule that has ended is nobody else's."""
        here = [worker for worker in page.latest if worker not in self._left] or list(page.latest)
        return page.latest[max(reversed(here), key=lambda worker: page.made[worker])]

    def _level(self, page: _Page) -> int:
        """The clock of the slowest worker that is waited for, of those that make steps; 0 where there are none."""
        clocks = sorted(page.clocks[worker] for worker in self._moving())
        return clocks[min(self._backup, len(clocks) - 1)] if clocks else 0

    def _release(self, page: _Page, bucket: int, by: int) -> list[Action]:
        if not page.waiting:
            return []
        slowest, level = min(page.clocks[worker] for worker in self._moving()), self._level(page)
        free = [worker for worker in sorted(page.waiting) if self._rule.may_proceed(page.clocks[worker], level)]
        page.waiting.difference_update(free)
        for worker in free:
            page.sent[worker] = page.version
            turn = self._turns[worker]
            if page.clocks[worker] == turn.clock:
                turn.back += 1
            else:
                turn.ready += 1
        ahead = tuple(page.clocks[worker] - slowest for worker in free)
        return [Release(tuple(free), bucket, ahead, by)] if free else []

    def _check_turn(self, request: Request) -> None:
        worker, clock = request.worker, request.clock
        if worker not in self._workers or not self._is_next(request):
            expected = self._turns[worker].clock if worker in self._workers else 0
            part = "" if request.bucket == ALL else f" of bucket {request.bucket}"
            raise MismatchError(
                f"{self._called(worker)} sent a {request.kind}{part} for step {clock}, its next one is step {expected}:"
                " do all ranks call step() once for every backward()?"
            )

    def _is_next(self, request: Request) -> bool:
        """Whether the worker has been released from the step before, and has not sent this yet."""
        worker, clock = request.worker, request.clock
        if worker not in self._moving() or (self._rule.merges and request.kind in ("meet", "leave")):
            return False
        turn = self._turns[worker]
        if clock != turn.clock or turn.begun + turn.ready < len(self._pages):
            return False
        if request.kind not in ("push", "shadow"):
            return turn.begun == 0
        page = self._pages.get(request.bucket)
        return page is not None and page.clocks[worker] == clock - 1 and worker not in page.waiting

    def _check_shadow(self, request: Request) -> None:
        """Somebody has to have batches, whose values count, and to wait for all."""
        shadows = {*self._shadows.get(request.clock, ()), request.worker}
        if not self._rule.merges or len(shadows) == len(self._workers):
            raise MismatchError(
                f"{self._called(request.worker)} takes part in step {request.clock} without batches, and"
                f" {'so do all' if self._rule.merges else 'every push is an update by itself'}"
            )

    def _check_meeting(self, request: Request) -> None:
        """Who meets does it for one thing."""
        call = request.values.get("call", "")
        for worker, other in self._met.items():
            if request.kind == "meet" and JOIN not in (call, other) and call != other:
                raise MismatchError(
                    f"{self._called(request.worker)} is at {call} while {self._called(worker)} is at {other}: all"
                    " workers that have not left make these calls in the same order; inside join() who has no more"
                    " batches takes part in all"
                )

    def _check_norm(self, request: Request) -> None:
        """A worker that waits for the norm would wait forever for one that pushes without asking."""
        clock, worker = request.clock, request.worker
        asked = self._asked.get(clock, {})
        if request.kind == "norm":
            first = next((page.pushed[clock] for page in self._pages.values() if clock in page.pushed), None)
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
            other = self._pages[request.bucket].pushed.get(request.clock)
        if other is not None and other.values != request.values:
            names = sorted(
                key for key in {*other.values, *request.values} if other.values.get(key) != request.values.get(key)
            )
            raise MismatchError(
                f"{self._called(request.worker)} and {self._called(other.worker)} disagree on the optimizer's values in"
                f" step {request.clock} ({', '.join(names)}): set learning rates and clipping, and change weights,"
                " alike on all ranks"
            )
