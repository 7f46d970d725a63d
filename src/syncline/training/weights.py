"""Weights that workers exchange after some updates: what of them travels, and what becomes of them by it.

Workers that train by themselves meet after the steps of which the sync mode says so (``sync.Averages``). What travels
lies in the last storage of the model's buckets: the differences from the weights that all have agreed on last, whose
mean gives the next agreed ones (``AgreedWeights``: local SGD, DiLoCo, EASGD), or the weights themselves, which a worker
averages with those of some others (``MixedWeights``: gossip). ``WeightExchange`` has the sequence, the same for every
framework.

How numbers are computed with is ``WeightMemory``'s, one for each kind of memory. Does not know when weights are
exchanged (``engine.step``), nor how they travel (``exchange``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ..plans.check import check_mixing
from ..plans.messages import Program
from ..session.communicator import Array, compiled
from ..session.session import Session
from ..session.tickets import CALLS, CONSOLIDATE, JOINED, Meeting, step_argument
from ..sync import Agrees, Averages, Elements, Mixes, mixes_of
from ..sync._periodic import agree_in_blocks


class Values(NamedTuple):
    """Memory laid out as the buckets of a model's weights: its tensors, and the flat blocks that they lie in."""

    tensors: Sequence[Elements]
    blocks: Sequence[Elements]


class WeightMemory(Protocol):
    """A model's weights, and the buckets in which they travel, in one kind of memory, whose arithmetic this is."""

    sums_differences: bool
    """Whether the final mean is the agreed weights and the mean difference, in place of a mean of weights."""

    @property
    def buckets(self) -> Values:
        """What travels."""
        ...

    def zeros(self) -> Values:
        """More memory of that layout."""
        ...

    def read(self, into: Values) -> None:
        """Copy the weights."""
        ...

    def write(self, values: Values) -> None:
        """Let the weights be these."""
        ...

    def subtract(self, values: Values) -> None:
        """Let the buckets be the weights less ``values``."""
        ...

    def give_up(self, part: float) -> None:
        """Take so much of what the buckets hold from the weights."""
        ...

    def share_out(self, weight: float) -> None:
        """Let the buckets be this worker's part of a mean in which it counts so much, on the average 1."""
        ...

    def bytes_of(self, block: Elements) -> Array:
        """Those of a block, on the host."""
        ...

    def at_once(self, block: Elements) -> int:
        """Of how many of its elements an update is computed at once."""
        ...

    def add_up(self, add: Callable[[Array], None]) -> None:
        """Have ``add`` replace each bucket, in the transport's memory, by the workers' sum."""
        ...

    def saved(self, values: Values) -> list[Elements]:
        """Copies for a checkpoint."""
        ...

    def load(self, values: Values, saved: Sequence[Elements]) -> None:
        """Have ``values`` be what ``saved`` gave; raises UsageError for that of another model."""
        ...


class Mix(NamedTuple):
    """This rank's part in a plan that adds some workers' arrays, and how many it adds up."""

    program: Program
    parts: int


class AgreedWeights:
    """By how much weights differ from those that all workers have agreed on last, at first the present ones."""

    alike = False

    def __init__(self, mode: Agrees, workers: int, memory: WeightMemory) -> None:
        self._mode, self._memory, self._pull = mode, memory, mode.pull(workers)
        self.agreed = memory.zeros()
        """What this worker's weights are at first and after an exchange, unless it is a centre that no worker has."""
        self._remembered = memory.zeros() if mode.remembers else Values((), ())
        self._mark: int | None = 0  # None where it has to be computed: this rank alone says what was agreed on
        memory.read(self.agreed)

    def mix(self, step: int) -> None:
        """All are averaged."""

    @property
    def fingerprint(self) -> int:
        """Of the agreed weights, where no exchange has made them: it has to be the same on all workers."""
        if self._mark is None:
            self._mark = 0
            for block in (*self.agreed.blocks, *self._remembered.blocks):
                self._mark = zlib.crc32(self._memory.bytes_of(block), self._mark)
        return self._mark

    def anew(self) -> None:
        """The present weights count as agreed on: all workers have to have the same, which the next exchange checks."""
        self._memory.read(self.agreed)
        self._mark = None

    def forget(self) -> None:
        """The same, and nothing is remembered."""
        for block in self._remembered.blocks:
            block[...] = 0
        self.anew()

    def put(self) -> None:
        """Let the buckets be this worker's part of the mean difference, and the weights give up what they have to."""
        self._memory.subtract(self.agreed)
        if self._pull < 1:
            self._memory.give_up(self._pull)
        self._memory.share_out(1.0)

    def take(self, step: int) -> None:  # noqa: ARG002
        """The mean has come, after that step: agree on what follows from it, and go on from there."""
        remembered = self._remembered.blocks or [None] * len(self.agreed.blocks)
        for mean, agreed, memory in zip(self._memory.buckets.blocks, self.agreed.blocks, remembered, strict=True):
            agree_in_blocks(self._mode, agreed, mean, memory, self._memory.at_once(mean))
        self._mark = 0
        if self._pull == 1:
            self.give()

    def give(self) -> None:
        """Let the weights be the agreed ones."""
        self._memory.write(self.agreed)

    def put_own(self, weight: float) -> bool:
        """Let the buckets be this worker's part of the final weights; False where the centre is that."""
        if self._pull < 1:
            return False
        if self._memory.sums_differences:
            self._memory.subtract(self.agreed)
        else:
            self._memory.read(self._memory.buckets)
        self._memory.share_out(weight)
        return True

    def take_final(self) -> None:
        """The sum of all parts has come, where there are some: let the weights be the final ones."""
        if self._pull < 1:
            self.give()
            return
        if self._memory.sums_differences:
            for mean, agreed in zip(self._memory.buckets.blocks, self.agreed.blocks, strict=True):
                mean += agreed
        self._memory.write(self._memory.buckets)

    def saved(self) -> dict[str, list[Elements]]:
        """What all workers have alike and a resumed run has to know."""
        found = {"agreed": self._memory.saved(self.agreed)}
        if self._mode.remembers:
            found["memory"] = self._memory.saved(self._remembered)
        return found

    def load(self, saved: Mapping[str, Sequence[Elements]]) -> None:
        """All workers call it with the same, which the next exchange checks."""
        self._memory.load(self.agreed, saved["agreed"])
        if self._mode.remembers:
            self._memory.load(self._remembered, saved["memory"])
        self._mark = None


class MixedWeights:
    """All of the weights, which a worker averages with those of some others: nothing is agreed on.

    Raises PlanError for a mode whose plans do not bring what each has to everybody.
    """

    alike, fingerprint = True, 0

    def __init__(self, mode: Mixes, workers: int, rank: int, memory: WeightMemory) -> None:
        check_mixing(mixes_of(mode, workers))
        self._mode, self._workers, self._rank, self._memory = mode, workers, rank, memory

    def mix(self, step: int) -> Mix:
        """As the mode has it."""
        plan = self._mode.mix(self._workers, step)
        return Mix(compiled(plan, self._rank), len(plan.sums[self._rank]))

    def program(self, step: int) -> Program:
        """What takes the place of the strategy's architecture after that step."""
        return self.mix(step).program

    def anew(self) -> None:
        """Weights are what they are."""

    def forget(self) -> None:
        """There is nothing to remember."""

    def give(self) -> None:
        """Nothing is agreed on."""

    def put(self) -> None:
        """What is added up is divided afterwards."""
        self._memory.read(self._memory.buckets)

    def take(self, step: int) -> None:
        """The weights are the mean of the sum."""
        parts = self.mix(step).parts
        for block in self._memory.buckets.blocks:
            block /= parts
        self.take_final()

    def put_own(self, weight: float) -> bool:
        """A part of the mean of all workers' weights."""
        self.put()
        self._memory.share_out(weight)
        return True

    def take_final(self) -> None:
        """What has come."""
        self._memory.write(self._memory.buckets)

    def saved(self) -> dict[str, list[Elements]]:
        """Workers have nothing alike."""
        return {}

    def load(self, saved: Mapping[str, Sequence[Elements]]) -> None:
        """There is nothing to take up."""


class WeightExchange:
    """The exchanges of one model's weights, whose first key is ``key``; all workers make it together.

    ``follows`` says whether what they agree on has yet to be taken from the weights.
    """

    def __init__(
        self, session: Session, key: int, mode: Averages, memory: WeightMemory, *, follows: bool = False
    ) -> None:
        self._session, self._key, self._memory = session, key, memory
        self.travelling: AgreedWeights | MixedWeights
        """What of the weights is exchanged."""
        if isinstance(mode, Agrees):
            self.travelling = AgreedWeights(mode, session.world_size, memory)
        else:
            assert isinstance(mode, Mixes)
            self.travelling = MixedWeights(mode, session.world_size, session.rank, memory)
        self.follows = follows
        """Whether all have the same weights, which those that are agreed on have yet to become."""
        self.since = 0
        """How many steps of its own this worker has made since weights were exchanged last."""

    @property
    def program(self) -> Callable[[int], Program] | None:
        """What exchanges them in place of the strategy's architecture, by step, where anything does."""
        return self.travelling.program if isinstance(self.travelling, MixedWeights) else None

    def weight(self, counted: Callable[[], float]) -> float:
        """What this worker counts: ``counted``, or nothing where it has made no step since the last exchange."""
        if self.travelling.alike:
            return 1.0
        return counted() if self.since else 0.0

    def made_alone(self) -> None:
        """A step of the worker's own is made, whose update is yet to come."""
        if self.follows:
            self.travelling.anew()
            self.follows = False
        self.since += 1

    def updated_alike(self) -> None:
        """Weights have had an update that is the same on all workers."""
        self.follows = True

    def rest(self) -> None:
        """What all agree on is what they have, before something that all do together between two steps."""
        if self.follows:
            self.travelling.anew()

    @property
    def fingerprint(self) -> int:
        """What has to be the same on all workers for an exchange to make sense."""
        return self.travelling.fingerprint

    def put(self) -> None:
        """All come to exchange weights: what of them travels goes into the buckets."""
        self.travelling.put()

    def take(self, meeting: Meeting, step: int) -> None:
        """What was exchanged after that step has come."""
        self._check_alike(meeting)
        self.travelling.take(step)
        self.since = 0

    def forget(self) -> None:
        """A state that has nothing of this was loaded: go on from the weights that there are, as in the beginning."""
        self.travelling.forget()
        self.since, self.follows = 0, False

    def consolidate(self, step: int, counted: Callable[[], float], met: Callable[[Meeting], None]) -> None:
        """Let all workers' weights be what the run gives, whose course stays what it would be without it.

        All call it together, behind ``rest``; ``met`` is told when this worker has come.
        """
        session, travelling = self._session, self.travelling
        argument, weight = step_argument(self._key, step), self.weight(counted)
        meeting = session.meet(CONSOLIDATE, argument, weight=weight, flags=self.fingerprint)
        met(meeting)
        session.await_all(meeting, CALLS[CONSOLIDATE])
        self._check_alike(meeting)
        if travelling.put_own(meeting.share()):
            self._memory.add_up(self._add)
        travelling.take_final()

    def _add(self, array: Array) -> None:
        """Between the workers alone: servers and codecs have no part in it."""
        self._session.run(self._session.allreduce_program(array.nbytes), array, "consolidate")

    def _check_alike(self, meeting: Meeting) -> None:
        """Raise GradientError where workers have gone on from different weights."""
        marks = {ticket.flags for ticket in meeting.tickets() if ticket.kind != JOINED}
        if len(marks) > 1:
            raise self._session.fault(
                "ranks have loaded different weights into the model since all agreed on some, so that what theirs"
                " differ by says nothing: load the same ones on all ranks, or a checkpoint (load_state_dict) after them"
            )
