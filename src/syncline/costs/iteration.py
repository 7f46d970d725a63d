"""The time of a training iteration: ``engine.step`` driven by a virtual clock, with a link that numbers describe.

What is predicted is what is run: the same state machine, schedule, sync mode and buckets. A worker computes layer after
layer for as long as each was measured to take; what the machine hands over goes to the link, and where it waits the
clock goes on until that has come. All workers are alike, so that one says what all do.

Theory. An exchange of n bytes takes a + n b: a latency, which passes beside those of others, and its bytes, of which
the link carries one operation's at a time, always those of the most urgent that is under way. Of each priority
``in_flight`` operations may be; all-gathers, which go behind their reduce-scatters, are counted by themselves, as in
``engine.order``. Each half of an exchange takes half of it. So one operation alone takes what was measured, and many
small ones hide their latencies as far as the schedule lets them.

Not modelled: processors that compute and communicate at once, and what an optimizer takes, under every schedule alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..engine.step import BucketPhase, Laid, Steps, Submit
from ..errors import UsageError
from ..nouns import Layer
from ..schedules import Schedule
from ..sync import SyncMode
from .network import LinearCost
from .virtual import Chain, Chains, Clock, Operations, Resource, Stage
from .worker import Duties, Handed, Stretch, VirtualWorker, run

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


class VirtualLink:
    """Carries operations that take what ``spent`` says, up to ``in_flight`` of each priority at a time."""

    def __init__(self, spent: Callable[[BucketPhase], Spent], in_flight: int) -> None:
        self.clock = Clock()
        self._link = Resource(self.clock, ranked=True)

        def chains(operation: BucketPhase) -> tuple[Chain, ...]:
            latency_s, bytes_s = spent(operation)
            return ((Stage(None, latency_s), Stage("link", bytes_s)),)

        self.operations = Operations(self.clock, Chains(self.clock, {"link": self._link}, chains), in_flight)

    @property
    def carried_s(self) -> float:
        """How long the link was busy with the bytes of operations."""
        return self._link.busy_s

    @property
    def done_at(self) -> Mapping[BucketPhase, float]:
        """When operations were done."""
        return self.operations.done_at

    def submit(self, now_s: float, submit: Submit) -> None:
        """Hand an operation over; times never go back."""
        self.clock.run(now_s)
        self.operations.submit(submit)

    def carry_until(self, wanted: BucketPhase) -> float:
        """Carry what goes before an operation, and that; when it is done.

        Raises UsageError for one that nothing leads to.
        """
        self.clock.run(over=lambda: wanted in self.done_at)
        if wanted not in self.done_at:
            raise UsageError(f"{wanted} is waited for, and nothing that is under way leads to it")
        return self.done_at[wanted]


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

    link = VirtualLink(spent, schedule.in_flight)
    parts = [Stretch(layer.forward_s, layer.backward_s, (tensor,)) for tensor, layer in enumerate(layers)]
    steps = Steps(len(layers), laid, schedule, mode)
    worker = VirtualWorker(link.clock, Duties(tuple(parts)), steps, Handed(link.operations.submit, lambda _: None))
    run(link.clock, worker.iterations(), {}, link.operations)
    carried_s = []
    for iterations in (_BEFORE, _BEFORE + _COUNTED):
        link.clock.run(over=lambda wanted=iterations: len(worker.spent.ends_s) >= wanted)  # type: ignore[misc]
        carried_s.append(link.carried_s)
    whole_s = (worker.spent.ends_s[-1] - worker.spent.ends_s[_BEFORE - 1]) / _COUNTED
    computing_s = math.fsum(layer.forward_s + layer.backward_s for layer in layers)
    return IterationTimes(whole_s, computing_s, (carried_s[1] - carried_s[0]) / _COUNTED)
