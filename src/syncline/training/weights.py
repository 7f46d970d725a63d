"""Owns the exchange of weights by workers that train alone between exchanges.

The sync mode names the steps after which workers exchange weights (``sync.Averages``). The last storage of the model's
buckets holds the data to exchange. Under local SGD, DiLoCo and EASGD these are the differences from the last agreed
weights, and their mean gives the next agreed weights (``AgreedWeights``). Under gossip they are the weights themselves,
which a worker averages with the weights of some others. ``WeightExchange`` runs the sequence, the same for all
frameworks.

``WeightMemory`` computes in one kind of memory. ``engine.step`` decides when weights are exchanged, and ``exchange``
moves them.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ..plans.check import check_mixing
from ..plans.messages import Program
from ..session.communicator import Array, compiled
from ..session.session import Session
from ..session.stats import Pace
from ..session.tickets import CALLS, CONSOLIDATE, JOINED, Meeting, step_argument
from ..strategy.words import write
from ..sync import Advises, Agrees, Averages, Elements, Mixes, mixes_of
from ..sync._periodic import agree_in_blocks

log = logging.getLogger("syncline")

DIGEST_AT = 32
"""The first bit of the weights' digest in a ticket's flags."""


class Values(NamedTuple):
    """Memory in the layout of the buckets: a model's tensors, and the flat blocks that contain them."""

    tensors: Sequence[Elements]
    blocks: Sequence[Elements]


class WeightMemory(Protocol):
    """The arithmetic on a model's weights and buckets in one kind of memory."""

    sums_differences: bool
    """Whether ``consolidate`` averages differences and adds the agreed weights. Otherwise it averages weights."""

    @property
    def buckets(self) -> Values:
        """The data to exchange."""
        ...

    def zeros(self) -> Values:
        """Allocate memory of the same layout, filled with zeros."""
        ...

    def read(self, into: Values) -> None:
        """Copy the model's weights ``into`` memory of the layout."""
        ...

    def write(self, values: Values) -> None:
        """Set the model's weights to ``values``."""
        ...

    def subtract(self, values: Values) -> None:
        """Set the buckets to the weights minus ``values``."""
        ...

    def give_up(self, part: float) -> None:
        """Subtract ``part`` times the buckets from the weights."""
        ...

    def share_out(self, weight: float) -> None:
        """Scale the buckets to this worker's share of a mean. The ``weight`` is 1 on average over the workers."""
        ...

    def bytes_of(self, block: Elements) -> Array:
        """The bytes of a block, on the host."""
        ...

    def at_once(self, block: Elements) -> int:
        """The number of elements of a block that one update computes at once."""
        ...

    def add_up(self, add: Callable[[Array], None]) -> None:
        """Call ``add`` for each bucket, in the transport's memory; it replaces the bucket by the workers' sum."""
        ...

    def saved(self, values: Values) -> list[Elements]:
        """Copy ``values`` for a checkpoint."""
        ...

    def load(self, values: Values, saved: Sequence[Elements]) -> None:
        """Restore ``values`` from a checkpoint. UsageError if it is another model's."""
        ...


class Mix(NamedTuple):
    """This rank's program in a plan that sums some workers' arrays, and the number of arrays in its sum."""

    program: Program
    parts: int


class WeightExchange:
    """The exchanges of one model's weights. All workers make it together; ``key`` is the first key of the exchanges.

    This class exchanges the weights themselves: a worker's weights are averaged with the weights of some others
    (gossip). Raises PlanError for a mode whose plans do not spread each worker's weights to all workers.
    """

    def __init__(self, session: Session, key: int, mode: Averages, memory: WeightMemory) -> None:
        self._session, self._key, self._memory = session, key, memory
        self._mixes = mode if isinstance(mode, Mixes) else None
        if self._mixes is not None:
            check_mixing(mixes_of(self._mixes, session.world_size))
        self.follows = False
        """Whether an update that is equal on all workers has changed the weights since they were agreed."""
        self.since = 0
        """The steps that this worker has made alone since the last exchange of weights."""
        self._agreed_at: int | None = 0  # the run's steps up to the last exchange; None: unknown since a resumption
        self._pace = session.paces.setdefault(key, Pace())
        if session.rank == 0 and not session.alone:
            session.process.before_end.append(partial(_tell_differing, session, self._pace))
            if isinstance(mode, Advises):
                session.process.before_end.append(partial(self._advise, mode))

    def _advise(self, mode: Advises) -> None:
        """At the end of the run, tell of a mode that it was too short for."""
        steps = 0 if self._agreed_at is None else self._agreed_at + self.since
        if steps and (advice := mode.advice(steps)):
            log.warning("%s: %s", self._session.name(self._session.rank), advice)

    def mix(self, step: int) -> Mix | None:
        """This rank's part in the mode's own plan after that step; None if all workers are averaged."""
        if self._mixes is None:
            return None
        plan, rank = self._mixes.mix(self._session.world_size, step), self._session.rank
        return Mix(compiled(plan, rank), len(plan.sums[rank]))

    @property
    def fingerprint(self) -> int:
        """A digest of agreed weights that no exchange has made, else 0, from bit ``DIGEST_AT`` on.

        It must be equal on all workers.
        """
        return 0

    def weight(self, counted: Callable[[], float]) -> float:  # noqa: ARG002
        """This worker's weight in the mean. ``counted`` returns the weight of the batches since the last exchange."""
        return 1.0

    def anew(self) -> None:
        """Take the present weights as the agreed ones, if there are agreed ones."""

    def give(self) -> None:
        """Set the weights to the agreed ones, if there are any."""

    def put(self) -> None:
        """Fill the buckets for an exchange."""
        self._memory.read(self._memory.buckets)

    def take_sum(self, step: int) -> None:
        """Use the sum in the buckets, after that step."""
        mix = self.mix(step)
        assert mix is not None
        for block in self._memory.buckets.blocks:
            block /= mix.parts
        self.take_final()

    def put_own(self, weight: float) -> bool:
        """Set the buckets to this worker's share of the final weights. False if these are known without an exchange."""
        self.put()
        self._memory.share_out(weight)
        return True

    def take_final(self) -> None:
        """Set the weights to the final ones, after ``put_own`` and an exchange."""
        self._memory.write(self._memory.buckets)

    def saved(self) -> dict[str, list[Elements]]:
        """The state that all workers share and that a resumed run needs."""
        return {}

    def load(self, saved: Mapping[str, Sequence[Elements]]) -> None:
        """Restore ``saved``. All workers load the same state, which the next exchange checks."""

    def made_alone(self) -> None:
        """Note a step that this worker makes alone, before its update."""
        self.rest()
        self.follows = False
        self.since += 1
        self._pace.apart = self.since

    def rest(self) -> None:
        """Take the present weights as agreed if they are equal on all workers, before a joint call between steps."""
        if self.follows:
            self.anew()

    def take(self, meeting: Meeting, step: int) -> None:
        """Take the result of the exchange after that step. GradientError if workers started from different weights."""
        self._check_alike(meeting)
        self.take_sum(step)
        self.since, self._agreed_at = 0, step + 1
        self._pace.apart = 0

    def take_over(self, steps: int, memory: Sequence[Elements] | None, copy: Callable[[Values], None]) -> None:  # noqa: ARG002
        """Go on after so many steps of a run that has lost or got workers, from the present weights.

        ``copy`` copies values of the worker whose state counts to all. ``memory`` is what that worker remembers.
        """
        self._agreed_at = steps

    def forget(self) -> None:
        """Begin again from the present weights, after a state without agreed weights was loaded."""
        self.since, self.follows, self._agreed_at = 0, False, None
        self._pace.apart = 0

    def consolidate(self, step: int, counted: Callable[[], float], met: Callable[[Meeting], None]) -> None:
        """Give all workers the final weights without changing the further course of the run.

        All workers call it together, after ``rest``. ``met`` is called with this worker's meeting.
        """
        session = self._session
        argument, weight = step_argument(self._key, step), self.weight(counted)
        meeting = session.meet(CONSOLIDATE, argument, weight=weight, flags=self.fingerprint)
        met(meeting)
        session.await_all(meeting, CALLS[CONSOLIDATE])
        self._check_alike(meeting)
        if self.put_own(meeting.share()):
            self._memory.add_up(self._add)
        self.take_final()
        self._pace.apart = 0

    def _add(self, array: Array) -> None:
        """Sum a bucket among the workers alone, without servers or codec."""
        self._session.run(self._session.allreduce_program(array.nbytes), array, "consolidate")

    def _check_alike(self, meeting: Meeting) -> None:
        """Raise GradientError if workers have continued from different weights."""
        marks = {ticket.flags >> DIGEST_AT for ticket in meeting.tickets() if ticket.kind != JOINED}
        if len(marks) > 1:
            raise self._session.fault(
                "ranks have loaded different weights into the model since the last exchange, so their differences from"
                " the agreed weights cannot be averaged: load the same weights on all ranks, or a checkpoint"
                " (load_state_dict) after them"
            )


class AgreedWeights(WeightExchange):
    """Exchanges the differences from the last agreed weights. The first agreed weights are the present ones."""

    def __init__(self, session: Session, key: int, mode: Agrees, memory: WeightMemory) -> None:
        super().__init__(session, key, mode, memory)
        self._mode, self._pull = mode, mode.pull(session.world_size)
        self.agreed = memory.zeros()
        """This worker's weights at first and after each exchange. Under EASGD: the centre, which no worker has."""
        self._remembered = memory.zeros() if mode.remembers else Values((), ())
        # No digest is needed after an exchange, which leaves the same weights on all ranks. None: to be computed, since
        # this rank has set the agreed weights by itself.
        self._mark: int | None = 0
        memory.read(self.agreed)

    @property
    def fingerprint(self) -> int:
        if self._mark is None:
            self._mark = 0
            for block in (*self.agreed.blocks, *self._remembered.blocks):
                self._mark = zlib.crc32(self._memory.bytes_of(block), self._mark)
        return self._mark << DIGEST_AT

    def weight(self, counted: Callable[[], float]) -> float:
        """0 for a worker that has made no step since the last exchange."""
        return counted() if self.since else 0.0

    def outlive(self) -> tuple[list[Elements] | None, list[Elements]]:
        """Copies of what the mode remembers, if it does, and of a centre that no worker has."""
        remembered = self._memory.saved(self._remembered) if self._mode.remembers else None
        return remembered, self._memory.saved(self.agreed) if self._pull < 1 else []

    def anew(self) -> None:
        """The next exchange checks that all workers have the same."""
        self._memory.read(self.agreed)
        self._mark = None

    def forget(self) -> None:
        """Also clears the outer momentum."""
        for block in self._remembered.blocks:
            block[...] = 0
        self.anew()
        super().forget()

    def take_over(self, steps: int, memory: Sequence[Elements] | None, copy: Callable[[Values], None]) -> None:
        super().take_over(steps, memory, copy)
        if self._mode.remembers:
            if memory is not None:
                self._memory.load(self._remembered, memory)
            copy(self._remembered)
            self._mark = None

    def put(self) -> None:
        """This worker's share of the mean difference. Under EASGD pull the weights to the centre."""
        self._memory.subtract(self.agreed)
        if self._pull < 1:
            self._memory.give_up(self._pull)
        self._memory.share_out(1.0)

    def take_sum(self, step: int) -> None:  # noqa: ARG002
        """Compute the next agreed weights from the mean in the buckets, and continue from them."""
        remembered = self._remembered.blocks or [None] * len(self.agreed.blocks)
        for mean, agreed, memory in zip(self._memory.buckets.blocks, self.agreed.blocks, remembered, strict=True):
            agree_in_blocks(self._mode, agreed, mean, memory, self._memory.at_once(mean))
        self._mark = 0
        if self._pull == 1:
            self.give()

    def give(self) -> None:
        self._memory.write(self.agreed)

    def put_own(self, weight: float) -> bool:
        """False under EASGD, where the centre is final."""
        if self._pull < 1:
            return False
        if self._memory.sums_differences:
            self._memory.subtract(self.agreed)
        else:
            self._memory.read(self._memory.buckets)
        self._memory.share_out(weight)
        return True

    def take_final(self) -> None:
        """The centre under EASGD, otherwise the sum in the buckets."""
        if self._pull < 1:
            self.give()
            return
        if self._memory.sums_differences:
            for mean, agreed in zip(self._memory.buckets.blocks, self.agreed.blocks, strict=True):
                mean += agreed
        self._memory.write(self._memory.buckets)

    def saved(self) -> dict[str, list[Elements]]:
        found = {"agreed": self._memory.saved(self.agreed)}
        if self._mode.remembers:
            found["memory"] = self._memory.saved(self._remembered)
        return found

    def load(self, saved: Mapping[str, Sequence[Elements]]) -> None:
        self._memory.load(self.agreed, saved["agreed"])
        if self._mode.remembers:
            self._memory.load(self._remembered, saved["memory"])
        self._mark = self._agreed_at = None


def _tell_differing(session: Session, pace: Pace) -> None:
    """At the end of the run, tell of replicas that differ. Holds no model, which the script may have released."""
    if pace.apart:
        steps = "1 step" if pace.apart == 1 else f"{pace.apart} steps"
        log.warning(
            "%s: replicas differ: %s since the last exchange of weights, under sync=%s; call syncline.consolidate()"
            " (JAX: syncline.jax.consolidate) before you evaluate or use the weights",
            session.name(session.rank),
            steps,
            write("sync", session.strategy.sync),
        )


def weight_exchange(session: Session, key: int, mode: Averages, memory: WeightMemory) -> WeightExchange:
    """The exchange of weights of that sync mode."""
    if isinstance(mode, Agrees):
        return AgreedWeights(session, key, mode, memory)
    return WeightExchange(session, key, mode, memory)
