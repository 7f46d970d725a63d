"""The time of a training iteration: ``engine.step`` driven by a virtual clock, with a link that numbers describe.

What is predicted is what is run: the same state machine, schedule, sync mode and buckets. A worker computes layer after
layer for as long as each was measured to take; what the machine hands over goes to the link, and where it waits the
clock goes on until that has come. All workers are alike, so that one says what all do.

Theory. An exchange of n bytes takes a + n b: a latency, which passes beside those of others, and its bytes, of which
the link carries one operation's at a time, always those of the most urgent that is under way. Of each priority
``in_flight`` operations may be; all-gathers, which go behind their reduce-scatters, are counted by themselves, as in
``engine.work``. Each half of an exchange takes half of it. So one operation alone takes what was measured, and many
small ones hide their latencies as far as the schedule lets them.

Not modelled: processors that compute and communicate at once, and what an optimizer takes, under every schedule alike.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ..engine.step import Action, BucketPhase, Laid, Steps, Submit, Wait
from ..errors import UsageError
from ..nouns import Layer
from ..schedules import Schedule
from ..sync import SyncMode
from .network import LinearCost

_BEFORE, _COUNTED = 3, 4
"""Iterations until one is like the one before, and those of which the mean counts: a sync mode may have a period."""


@dataclass(frozen=True)
class IterationTimes:
    """Seconds of one steady iteration: all of it, the computation in it, and what the link carries for it."""

    whole_s: float
    computing_s: float
    link_s: float

    @property
    def exposed_s(self) -> float:
        """What the worker waits."""
        return self.whole_s - self.computing_s


class Spent(NamedTuple):
    """Seconds that an operation takes: its latency, and its bytes on the link."""

    latency_s: float
    bytes_s: float


_Lane = tuple[bool, float]


class _Queue:
    """What waits of one lane, and how many of it are under way."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[int, Submit]] = deque()
        self.active = 0


class VirtualLink:
    """Carries operations that take what ``spent`` says, up to ``in_flight`` of each priority at a time.

    ``done_at`` is when they were done, ``carried_s`` how long it was busy with their bytes.
    """

    def __init__(self, spent: Callable[[BucketPhase], Spent], in_flight: int) -> None:
        self._spent, self._in_flight = spent, in_flight
        self._now_s = 0.0
        self.carried_s = 0.0
        self.done_at: dict[BucketPhase, float] = {}
        self._queues: dict[_Lane, _Queue] = {}
        self._gated: dict[BucketPhase, list[_Lane]] = {}  # whose next one waits for that
        self._latent: list[tuple[float, int, Submit, float]] = []  # by when they may use the link; and how long
        self._ready: list[tuple[float, int, Submit, float]] = []  # the most urgent first; how long they still need it
        self._serial = count()

    def submit(self, now_s: float, submit: Submit) -> None:
        """Hand an operation over; times never go back."""
        self._carry(now_s)
        lane = _lane(submit)
        self._queues.setdefault(lane, _Queue()).waiting.append((next(self._serial), submit))
        self._start(lane)

    def carry_until(self, wanted: BucketPhase) -> float:
        """Carry what goes before an operation, and that; when it is done.

        Raises UsageError for one that nothing leads to.
        """
        self._carry(math.inf, wanted)
        if wanted not in self.done_at:
            raise UsageError(f"{wanted} is waited for, and nothing that is under way leads to it")
        return self.done_at[wanted]

    def _carry(self, until_s: float, wanted: BucketPhase | None = None) -> None:
        """Let time pass up to then, or to where an operation is done, or nothing is left to be carried."""
        while wanted not in self.done_at:
            while self._latent and self._latent[0][0] <= self._now_s:
                _, serial, submit, left_s = heappop(self._latent)
                heappush(self._ready, (submit.priority, serial, submit, left_s))
            over_s = self._now_s + self._ready[0][3] if self._ready else math.inf
            stop_s = min(over_s, self._latent[0][0] if self._latent else math.inf, until_s)
            if math.isinf(stop_s):
                return
            spent_s, self._now_s = stop_s - self._now_s, stop_s
            if self._ready:
                priority, serial, submit, left_s = heappop(self._ready)
                self.carried_s += min(spent_s, left_s)
                if over_s <= stop_s:
                    self._done(submit)
                    continue
                heappush(self._ready, (priority, serial, submit, left_s - spent_s))
            if stop_s == until_s:
                return

    def _done(self, submit: Submit) -> None:
        lane = _lane(submit)
        self.done_at[submit.operation] = self._now_s
        self._queues[lane].active -= 1
        for one in (lane, *self._gated.pop(submit.operation, ())):
            self._start(one)

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
            latency_s, bytes_s = self._spent(submit.operation)
            heappush(self._latent, (self._now_s + latency_s, serial, submit, bytes_s))


def _lane(submit: Submit) -> _Lane:
    return submit.operation.phase == "all_gather", submit.priority


def predict_iteration(
    layers: Sequence[Layer], laid: Laid, schedule: Schedule, mode: SyncMode, cost: LinearCost
) -> IterationTimes:
    """One steady iteration of a worker whose ``layers``, in forward order, take the times that they say.

    ``laid`` are the buckets that travel, and ``cost`` what an exchange takes by its bytes. Takes tens of microseconds
    per tensor and bucket.
    """
    nbytes = [bucket.nbytes for bucket in laid.buckets]

    def spent(operation: BucketPhase) -> Spent:
        share = 1.0 if operation.phase == "allreduce" else 0.5
        return Spent(share * cost.base_s, share * cost.per_byte_s * nbytes[operation.bucket])

    worker = _Worker(layers, Steps(len(layers), laid, schedule, mode), VirtualLink(spent, schedule.in_flight))
    for _ in range(_BEFORE):
        worker.iterate()
    begun_s, carried_s = worker.now_s, worker.link.carried_s
    for _ in range(_COUNTED):
        worker.iterate()
    computing_s = math.fsum(layer.forward_s + layer.backward_s for layer in layers)
    whole_s = (worker.now_s - begun_s) / _COUNTED
    return IterationTimes(whole_s, computing_s, (worker.link.carried_s - carried_s) / _COUNTED)


class _Worker:
    """Computes on a clock that begins at 0."""

    def __init__(self, layers: Sequence[Layer], steps: Steps, link: VirtualLink) -> None:
        self.layers, self.steps, self.link = layers, steps, link
        self.now_s = 0.0

    def iterate(self) -> None:
        """A forward pass, a backward pass and the optimizer's step."""
        for tensor, layer in enumerate(self.layers):
            self._do(self.steps.needed(tensor))
            self.now_s += layer.forward_s
        for tensor in reversed(range(len(self.layers))):
            self.now_s += self.layers[tensor].backward_s
            self._do(self.steps.produced(tensor))
        self._do(self.steps.backward_ended())
        self._do(self.steps.stepped())
        self._do(self.steps.updated())

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Submit):
                self.link.submit(self.now_s, action)
            elif isinstance(action, Wait):
                for operation in action.operations:
                    self.now_s = max(self.now_s, self.link.carry_until(operation))
