"""A discrete-event simulator: a virtual clock, resources with queues, and operations that pass through them in stages.

Events are ordered by (time, serial), so every run of a simulation is the same. This module knows nothing of workers,
plans or networks: its caller says which resource is used for how long.

Theory. A resource has lanes. A lane serves one job at a time, the most urgent first and preemptively; jobs of equal
priority are served in order of arrival. Lanes share the resource's capacity evenly, none at a rate above 1 (processor
sharing): the cores of a host are a resource with a lane per thread. One lane may stand for several lanes that are
always busy at the same time: one worker's lane stands for the lanes of all workers like it. In a ``ranked`` resource
only the lanes with the most urgent jobs share the capacity: a port has a lane for each exchange in progress.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ..engine.step import BucketPhase, Submit

Call = Callable[[], None]


class Clock:
    """Time that advances from event to event, from 0; ``now_s`` is in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Call]] = []
        self._serial = count()

    def at(self, when_s: float, call: Call) -> None:
        """Call at a time, after all calls already scheduled for that time."""
        heappush(self._events, (max(when_s, self.now_s), next(self._serial), call))

    def after(self, seconds: float, call: Call) -> None:
        """Call after a delay."""
        self.at(self.now_s + seconds, call)

    def run(self, until_s: float = math.inf, over: Callable[[], bool] = lambda: False) -> None:
        """Advance time to ``until_s``, or until ``over()`` is true or no event is left."""
        while not over() and self._events and self._events[0][0] <= until_s:
            self.now_s, _, call = heappop(self._events)
            call()
        if not over() and math.isfinite(until_s):
            self.now_s = max(self.now_s, until_s)


class _Job:
    """The service time left of a job, and the function to call when it is done."""

    __slots__ = ("done", "left_s")

    def __init__(self, left_s: float, done: Call) -> None:
        self.left_s, self.done = left_s, done


_Waiting = tuple[float, int, int, _Job]


class Resource:
    """Serves jobs as the module's docstring describes.

    ``capacity`` may be below 1. With infinite capacity no lane waits for another.
    """

    def __init__(self, clock: Clock, capacity: float = 1.0, *, ranked: bool = False) -> None:
        self._clock, self._capacity, self._ranked = clock, capacity, ranked
        self._lanes: dict[str, list[_Waiting]] = {}
        self._alike: dict[str, int] = {}
        self._since_s = 0.0
        self._turn = 0  # counts changes of service: an end scheduled before the last change is void
        self._serial = count()
        self._busy_s = 0.0
        self._watching: list[Call] = []

    @property
    def busy_s(self) -> float:
        """Seconds of service so far; a lane that stands for several counts once."""
        self._pass()
        return self._busy_s

    def watch(self, call: Call) -> None:
        """Call whenever the rate of a lane may have changed."""
        self._watching.append(call)

    def rate(self, lane: str) -> float:
        """The rate at which a lane is served now; 0 if it has no job."""
        return self._rate(len(self._served())) if lane in self._lanes else 0.0

    def stand(self, lane: str, alike: int) -> None:
        """Let a lane stand for ``alike`` lanes: each gets the same service, and takes as much of the capacity."""
        self._alike[lane] = alike

    def use(self, seconds: float, done: Call, *, priority: float = 0.0, serial: int = 0, lane: str = "") -> None:
        """Request service for ``seconds``. Among jobs of equal priority the smallest ``serial`` goes first."""
        self._pass()
        heappush(self._lanes.setdefault(lane, []), (priority, serial, next(self._serial), _Job(seconds, done)))
        self._foresee()

    def _served(self) -> list[list[_Waiting]]:
        """The lanes whose first jobs are in service."""
        lanes = list(self._lanes.values())
        if self._ranked and lanes:
            least = min(jobs[0][0] for jobs in lanes)
            lanes = [jobs for jobs in lanes if jobs[0][0] == least]
        return lanes

    def _rate(self, served: int) -> float:
        """The rate at which each of the ``served`` lanes is served."""
        if self._alike and not self._ranked:
            served = sum(self._alike.get(lane, 1) for lane in self._lanes)
        return min(1.0, self._capacity / served)

    def _pass(self) -> None:
        """Account for the service up to now."""
        passed_s = self._clock.now_s - self._since_s
        self._since_s = self._clock.now_s
        served = self._served() if passed_s > 0 else []
        if served:
            served_s = passed_s * self._rate(len(served))
            self._busy_s += served_s * len(served)
            for jobs in served:
                jobs[0][3].left_s -= served_s

    def _foresee(self) -> None:
        self._turn += 1
        served = self._served()
        if served:
            turn, rate = self._turn, self._rate(len(served))
            left_s = max(0.0, min(jobs[0][3].left_s for jobs in served))
            self._clock.after(left_s / rate, lambda: self._end(turn))
        for call in self._watching:
            call()

    def _end(self, turn: int) -> None:
        """Finish the jobs whose service ends now."""
        if turn != self._turn:
            return
        served = self._served()
        least_s = min(jobs[0][3].left_s for jobs in served)
        over = [jobs for jobs in served if jobs[0][3].left_s <= least_s]
        self._pass()
        ended = [heappop(jobs)[3] for jobs in over]
        self._lanes = {lane: jobs for lane, jobs in self._lanes.items() if jobs}
        self._foresee()
        for job in ended:
            job.done()


class Share:
    """The lanes of one user of a shared resource, under names of its own. Each lane stands for ``alike`` lanes."""

    def __init__(self, resource: Resource, name: str, alike: int = 1) -> None:
        self._resource, self._name, self._alike = resource, name, alike
        self.busy_s = 0.0
        """Seconds of service of the jobs that have finished."""

    def use(self, seconds: float, done: Call, *, priority: float = 0.0, serial: int = 0, lane: str = "") -> None:
        """As ``Resource.use``."""

        def served() -> None:
            self.busy_s += seconds
            done()

        name = f"{self._name} {lane}"
        self._resource.stand(name, self._alike)
        self._resource.use(seconds, served, priority=priority, serial=serial, lane=name)

    def watch(self, call: Call) -> None:
        """As ``Resource.watch``."""
        self._resource.watch(call)

    def rate(self, lane: str) -> float:
        """As ``Resource.rate``."""
        return self._resource.rate(f"{self._name} {lane}")


class Hindered:
    """Serves one job at a time, which loses ``factor`` seconds for each second that a lane of ``other`` is served.

    With a factor of 1 or more, nothing progresses while the other lane is busy.
    """

    def __init__(self, clock: Clock, other: Resource | Share, lane: str, factor: float) -> None:
        self._clock, self._other, self._lane, self._factor = clock, other, lane, factor
        self._job: _Job | None = None
        self._rate, self._since_s, self._turn = 1.0, 0.0, 0
        self.busy_s = 0.0
        """Seconds of service of the finished jobs, including lost time."""
        other.watch(self._change)

    def use(self, seconds: float, done: Call, *, priority: float = 0.0, serial: int = 0, lane: str = "") -> None:  # noqa: ARG002
        """Request service for ``seconds``. The former job has ended."""
        assert self._job is None
        begun_s = self._clock.now_s

        def served() -> None:
            self.busy_s += self._clock.now_s - begun_s
            done()

        self._job, self._since_s = _Job(seconds, served), begun_s
        self._change()

    def _change(self) -> None:
        """Account for the service up to now, and foresee the end at the present rate."""
        if self._job is None:
            return
        now_s = self._clock.now_s
        self._job.left_s -= (now_s - self._since_s) * self._rate
        self._since_s, self._turn = now_s, self._turn + 1
        self._rate = 1.0 - self._factor * self._other.rate(self._lane)
        if self._rate > 0:
            turn = self._turn
            self._clock.after(max(0.0, self._job.left_s) / self._rate, lambda: self._end(turn))

    def _end(self, turn: int) -> None:
        if turn == self._turn and self._job is not None:
            job, self._job = self._job, None
            job.done()


Used = Resource | Share | Hindered


class Stage(NamedTuple):
    """Seconds on a lane of a resource, by default a lane of the operation's own. Without a resource, a pure delay."""

    resource: str | None
    seconds: float
    lane: str = ""


Chain = Sequence[Stage]


class _Queue:
    """The operations that wait in a lane, and the number in progress."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Submit]] = deque()
        self.active = 0


_Lane = tuple[bool, float]


Begin = Callable[[Submit, int, Call], None]
"""Starts an operation, with its serial number; calls back when the operation is done."""


class Chains:
    """Starts operations that are done once all of their chains have passed through their stages."""

    def __init__(
        self,
        clock: Clock,
        resources: Mapping[str, Used],
        chains: Callable[[BucketPhase], Sequence[Chain]],
    ) -> None:
        self._clock, self._resources, self._chains = clock, resources, chains

    def __call__(self, submit: Submit, serial: int, ended: Call) -> None:
        """As ``Begin``."""
        chains = self._chains(submit.operation)
        left = count(len(chains) - 1, -1)

        def chain_ended() -> None:
            if next(left) == 0:
                ended()

        for chain in chains:
            self._advance(deque(chain), submit.priority, serial, chain_ended)
        if not chains:
            ended()

    def _advance(self, stages: deque[Stage], priority: float, serial: int, ended: Call) -> None:
        while stages and stages[0].seconds <= 0:
            stages.popleft()
        if not stages:
            ended()
            return
        stage = stages.popleft()

        def go_on() -> None:
            self._advance(stages, priority, serial, ended)

        if stage.resource is None:
            self._clock.after(stage.seconds, go_on)
        else:
            resource = self._resources[stage.resource]
            resource.use(stage.seconds, go_on, priority=priority, serial=serial, lane=stage.lane or str(serial))


class Operations:
    """The operations in progress, which ``begin`` starts.

    At most ``in_flight`` operations of each priority are in progress. All-gathers, which follow their reduce-scatters,
    are counted separately, as in ``engine.order``. ``done_at`` has when operations ended, ``opens_s`` is the earliest
    time at which one may begin.
    """

    def __init__(self, clock: Clock, begin: Begin, in_flight: int) -> None:
        self._clock, self._begin, self._in_flight = clock, begin, in_flight
        self.done_at: dict[BucketPhase, float] = {}
        self.opens_s = 0.0
        self._queues: dict[_Lane, _Queue] = {}
        self._gated: dict[BucketPhase, list[_Lane]] = {}  # lanes whose next operation waits for the key
        self._wanted: dict[BucketPhase, list[Call]] = {}
        self._serial = count()

    def submit(self, submit: Submit) -> None:
        """Queue an operation."""
        lane = _lane(submit)
        self._queues.setdefault(lane, _Queue()).waiting.append((next(self._serial), submit))
        self._start(lane)

    def when_done(self, operation: BucketPhase, call: Call) -> None:
        """Call once an operation is done; at once if it is done already."""
        if operation in self.done_at:
            call()
        else:
            self._wanted.setdefault(operation, []).append(call)

    def _start(self, lane: _Lane) -> None:
        """Start the waiting operations of a lane, in order, while its limit allows."""
        queue = self._queues[lane]
        while queue.waiting and queue.active < self._in_flight:
            serial, submit = queue.waiting[0]
            if submit.after is not None and submit.after not in self.done_at:
                gated = self._gated.setdefault(submit.after, [])
                gated += [lane] if lane not in gated else []
                return
            queue.waiting.popleft()
            queue.active += 1
            self._clock.at(self.opens_s, partial(self._begin, submit, serial, partial(self._done, submit)))

    def _done(self, submit: Submit) -> None:
        lane, operation = _lane(submit), submit.operation
        self.done_at[operation] = self._clock.now_s
        self._queues[lane].active -= 1
        for one in (lane, *self._gated.pop(operation, ())):
            self._start(one)
        for call in self._wanted.pop(operation, ()):
            call()


def _lane(submit: Submit) -> _Lane:
    return submit.operation.phase == "all_gather", submit.priority
