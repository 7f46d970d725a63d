"""Exchanges message by message: plans carried out by their programs on ports and links that messages share.

What a simulated training says of an operation in a few numbers is simulated here as it happens: a rank sends when what
it sends is there, adds what has come one after the other, and goes on, each at its own time. The quick model and the
clocks of plans are held to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial

from syncline.costs.clock import Begin, Call, Clock, Resource
from syncline.costs.cluster import Cluster
from syncline.costs.plans import ProcessPlacement
from syncline.engine.step import BucketPhase, Submit
from syncline.plans.messages import Program, compile_program
from syncline.plans.plan import Plan
from syncline_bench.predict.fabric import Fabric
from syncline_bench.predict.iterations import Together
from syncline_bench.predict.settings import Exchanges, Habits, Iteration, Model, Setting


def simulate_one_by_one(setting: Setting, model: Model, habits: Habits) -> Iteration:
    """The iterations of a training whose exchanges are not compressed, without processors' time for messages."""
    return _OneByOne(setting, model, habits).run()


class _OneByOne(Together):
    def _begin(self, exchanges: Exchanges) -> Begin:
        sizes = [bucket.nbytes for bucket in self._laid.buckets]
        return PlanRuns(
            self._clock,
            self._setting.cluster,
            self._setting.placement,
            lambda operation: exchanges.plan(operation.phase),
            lambda operation: sizes[operation.bucket],
        )


@lru_cache(maxsize=512)
def _program(plan: Plan, rank: int) -> Program:
    return compile_program(plan, rank)


class PlanRuns:
    """Sets operations going that carry out a plan over a bucket, as ``costs.clock.Begin`` has it.

    ``plan_of`` gives the plan of an operation, ``nbytes_of`` the bytes of its bucket. ``cores`` are where ranks add.
    """

    def __init__(
        self,
        clock: Clock,
        cluster: Cluster,
        placement: ProcessPlacement,
        plan_of: Callable[[BucketPhase], Plan],
        nbytes_of: Callable[[BucketPhase], float],
    ) -> None:
        self._clock, self._gamma_s = clock, cluster.gamma_s_per_byte
        self.fabric = Fabric(clock, cluster, placement)
        self.cores = [Resource(clock) for _ in range(placement.group.processes)]
        self._plan_of, self._nbytes_of = plan_of, nbytes_of

    def __call__(self, submit: Submit, serial: int, ended: Call) -> None:
        """Begin on all ranks."""
        operation = submit.operation
        plan, nbytes = self._plan_of(operation), self._nbytes_of(operation)
        _PlanRun(self, plan, nbytes, submit.priority, serial, ended).begin()

    def add(self, rank: int, nbytes: float, priority: float, serial: int, done: Call) -> None:
        """Have a rank add so many bytes."""
        self.cores[rank].use(nbytes * self._gamma_s, done, priority=priority, serial=serial)


class _PlanRun:
    """One plan under way: what each rank's actions still wait for, and what has come too early."""

    def __init__(self, runs: PlanRuns, plan: Plan, nbytes: float, priority: float, serial: int, ended: Call) -> None:
        self._runs, self._priority, self._serial, self._ended = runs, priority, serial, ended
        self._chunk = nbytes / plan.chunks
        self._programs = [_program(plan, rank) for rank in range(plan.world)]
        self._waits = [list(program.waits) for program in self._programs]
        self._receives = {
            (action.peer, rank, action.index): i
            for rank, program in enumerate(self._programs)
            for i, action in enumerate(program.actions)
            if action.kind != "send"
        }
        self._came: set[tuple[int, int]] = set()
        self._left = sum(len(program.actions) for program in self._programs)

    def begin(self) -> None:
        """Start what waits for nothing."""
        if not self._left:
            self._ended()
            return
        ready = [(rank, i) for rank, waits in enumerate(self._waits) for i, left in enumerate(waits) if not left]
        for rank, i in ready:
            self._ready(rank, i)

    def _ready(self, rank: int, i: int) -> None:
        """What an action waited for has been done."""
        action = self._programs[rank].actions[i]
        if action.kind == "send":
            nbytes = (action.hi - action.lo) * self._chunk
            receive = action.peer, self._receives[rank, action.peer, action.index]
            sent = partial(self._sent, (rank, i), receive)
            urgency = self._priority, self._serial, action.step
            self._runs.fabric.send(rank, action.peer, nbytes, urgency, sent)
        elif (rank, i) in self._came:
            self._take(rank, i)

    def _sent(self, send: tuple[int, int], receive: tuple[int, int]) -> None:
        self._done(deque([send]))
        rank, i = receive
        self._came.add(receive)
        if not self._waits[rank][i]:
            self._take(rank, i)

    def _take(self, rank: int, i: int) -> None:
        """Apply what has come."""
        action = self._programs[rank].actions[i]
        done = partial(self._done, deque([(rank, i)]))
        if action.kind == "reduce":
            nbytes = (action.hi - action.lo) * self._chunk
            self._runs.add(rank, nbytes, self._priority, self._serial, done)
        else:
            done()

    def _done(self, over: deque[tuple[int, int]]) -> None:
        rank, i = over.popleft()
        self._left -= 1
        ready = []
        for j in self._programs[rank].unlocks[i]:
            self._waits[rank][j] -= 1
            if not self._waits[rank][j]:
                ready.append(j)
        for j in ready:
            self._ready(rank, j)
        if not self._left:
            self._left = -1
            self._ended()
