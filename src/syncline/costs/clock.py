"""A virtual clock, resources that are used by turns or shared, and operations that go through them stage by stage.

Events are ordered by (time, serial), so that every run of a simulation is the same. Knows nothing of workers, plans or
networks: who drives it says what uses what for how long.

Theory. A resource has lanes. A lane serves one job at a time, the most urgent first, which interrupts another; of jobs
that are equally urgent the one that was there first. Lanes share the resource's capacity evenly, none getting more than
1 (processor sharing): the cores of a host are a resource with a lane per thread. A lane may stand for several that are
always busy at the same time, as that of one worker does for all that are like it. Where a resource is ``ranked`` only
those lanes share it whose jobs are the most urgent: a port has a lane for each exchange under way.
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
    """Time that passes from event to event, beginning at 0; ``now_s`` are seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Call]] = []
        self._serial = count()

    def at(self, when_s: float, call: Call) -> None:
        """Have something done then, behind what is done at the same time already."""
        heappush(self._events, (max(when_s, self.now_s), next(self._serial), call))

    def after(self, seconds: float, call: Call) -> None:
        """Have something done so much later."""
        self.at(self.now_s + seconds, call)

    def run(self, until_s: float = math.inf, over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass to ``until_s``, or to where it is ``over`` or nothing is left to happen."""
        while not over() and self._events and self._events[0][0] <= until_s:
            self.now_s, _, call = heappop(self._events)
            call()
        if not over() and math.isfinite(until_s):
            self.now_s = max(self.now_s, until_s)


class _Job:
    """Seconds that are still to be served, of somebody who is told when they have been."""

    __slots__ = ("done", "left_s")

    def __init__(self, left_s: float, done: Call) -> None:
        self.left_s, self.done = left_s, done


_Waiting = tuple[float, int, int, _Job]


class Resource:
    """Serves jobs as the head of this file says.

    ``capacity`` may be below 1, and infinite where nobody waits for another lane.
    """

    def __init__(self, clock: Clock, capacity: float = 1.0, *, ranked: bool = False) -> None:
        self._clock, self._capacity, self._ranked = clock, capacity, ranked
        self._lanes: dict[str, list[_Waiting]] = {}
        self._alike: dict[str, int] = {}
        self._since_s = 0.0
        self._turn = 0  # counts changes of what is served: an end that was foreseen before one is none
        self._serial = count()
        self._busy_s = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds that have been served up to now, those of a lane that stands for several once."""
        self._pass()
        return self._busy_s

    def stand(self, lane: str, alike: int) -> None:
        """Have a lane stand for so many that are alike: each of them is served as it is, and takes as much capacity."""
        self._alike[lane] = alike

    def use(self, seconds: float, done: Call, *, priority: float = 0.0, serial: int = 0, lane: str = "") -> None:
        """Be served for so long; of the same priority the smallest ``serial`` goes first."""
        self._pass()
        heappush(self._lanes.setdefault(lane, []), (priority, serial, next(self._serial), _Job(seconds, done)))
        self._foresee()

    def _served(self) -> list[list[_Waiting]]:
        """The lanes whose first jobs are being served."""
        lanes = list(self._lanes.values())
        if self._ranked and lanes:
            least = min(jobs[0][0] for jobs in lanes)
            lanes = [jobs for jobs in lanes if jobs[0][0] == least]
        return lanes

    def _rate(self, served: int) -> float:
        """What a second serves of each lane that is being served; so many are."""
        if self._alike and not self._ranked:
            served = sum(self._alike.get(lane, 1) for lane in self._lanes)
        return min(1.0, self._capacity / served)

    def _pass(self) -> None:
        """Serve up to now."""
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

    def _end(self, turn: int) -> None:
        """What is served next to its end has come to it."""
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
    """The lanes that somebody has on a resource which others use as well, under names of its own.

    Each lane stands for so many that are ``alike``.
    """

    def __init__(self, resource: Resource, name: str, alike: int = 1) -> None:
        self._resource, self._name, self._alike = resource, name, alike
        self.busy_s = 0.0
        """Seconds of what has been served to its end."""

    def use(self, seconds: float, done: Call, *, priority: float = 0.0, serial: int = 0, lane: str = "") -> None:
        """As ``Resource.use``."""

        def served() -> None:
            self.busy_s += seconds
            done()

        name = f"{self._name} {lane}"
        self._resource.stand(name, self._alike)
        self._resource.use(seconds, served, priority=priority, serial=serial, lane=name)


Used = Resource | Share


class Stage(NamedTuple):
    """Seconds on a lane of a resource, its own operation's where that is empty; where there is none they just pass."""

    resource: str | None
    seconds: float
    lane: str = ""


Chain = Sequence[Stage]


class _Queue:
    """What waits of one lane, and how many of it are under way."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Submit]] = deque()
        self.active = 0


_Lane = tuple[bool, float]


Begin = Callable[[Submit, int, Call], None]
"""Sets an operation going, of which there were so many before; it calls back once when that is done."""


class Chains:
    """Sets operations going that are done when all of their chains have gone through their stages."""

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
    """Operations under way, which ``begin`` sets going one after the other.

    Up to ``in_flight`` of each priority begin before another is done; all-gathers, which go behind their
    reduce-scatters, are counted by themselves, as in ``engine.order``. ``done_at`` is when they were done, ``opens_s``
    when what is handed over may begin.
    """

    def __init__(self, clock: Clock, begin: Begin, in_flight: int) -> None:
        self._clock, self._begin, self._in_flight = clock, begin, in_flight
        self.done_at: dict[BucketPhase, float] = {}
        self.opens_s = 0.0
        self._queues: dict[_Lane, _Queue] = {}
        self._gated: dict[BucketPhase, list[_Lane]] = {}  # whose next one waits for that
        self._wanted: dict[BucketPhase, list[Call]] = {}
        self._serial = count()

    def submit(self, submit: Submit) -> None:
        """Hand an operation over."""
        lane = _lane(submit)
        self._queues.setdefault(lane, _Queue()).waiting.append((next(self._serial), submit))
        self._start(lane)

    def when_done(self, operation: BucketPhase, call: Call) -> None:
        """Have something done once an operation is; at once if it is."""
        if operation in self.done_at:
            call()
        else:
            self._wanted.setdefault(operation, []).append(call)

    def _start(self, lane: _Lane) -> None:
        """Let what waits there begin, in order, as far as others of its priority let it."""
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
