"""One model's buckets on their way: tickets, codecs, works, and what is found out before the first one goes.

The state machine of ``engine.step`` says what is handed over and what is waited for, ``BucketExchange`` does it. Does
not know who has put what into the buckets; whether these are gradients or differences of weights says ``agree``, since
what codecs have left of the one is not to be added to the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from ..compression.compression import Compression
from ..engine.order import CodedOrder, Lane, Order, When, Work
from ..engine.step import BucketPhase, Submit
from ..errors import MismatchError
from ..serving.worker import Worker
from ..session.layout import Layout
from ..session.session import Session
from ..session.tickets import STEP, Meeting, step_argument, step_of
from ..sync import Agrees, SyncMode, exchanges_gradients
from ._weights import Array


class BucketExchange:
    """The exchange of these buckets, whose first key is ``key``, ``in_flight`` of each priority at a time.

    ``rule`` says what the optimizer is, in words that have to be the same on all workers that make a step together.
    """

    def __init__(
        self,
        session: Session,
        key: int,
        layout: Layout,
        arrays: Sequence[Array],
        mode: SyncMode,
        in_flight: int,
        rule: Callable[[], str],
    ) -> None:
        self._session, self._key, self._layout, self._arrays = session, key, layout, arrays
        self._mode, self._rule = mode, rule
        self._lane = Lane(in_flight)
        self._works: dict[BucketPhase, Work] = {}
        self._meeting: Meeting | None = None
        self._unchecked: Meeting | None = None  # whose tickets nobody has looked at
        self._kind = STEP
        self.worker: Worker | None = None
        """What pushes them, where owners hold the weights."""
        self._compress()

    def compress(self) -> None:
        """Compress as the session's strategy says, with a memory that is empty; between steps."""
        self._compress()
        self.plan()

    def _compress(self) -> None:
        layout, arrays = self._layout, self._arrays
        self.compression = self._session.compression(layout.layers, layout.buckets, arrays)
        self.apart: Compression | None = None
        """What compresses differences of weights where gradients travel too: what is left of gradients is theirs."""
        if self.compression is not None and isinstance(self._mode, Agrees) and exchanges_gradients(self._mode):
            self.apart = self.compression.fresh(layout.buckets, arrays)

    def plan(self) -> None:
        """Run what the session's strategy says now; between steps."""
        self._orders = self._orders_of(self.compression)
        self._orders_apart = [] if self.apart is None else self._orders_of(self.apart)

    def _orders_of(self, compression: Compression | None) -> list[Order | CodedOrder]:
        session, key, labels = self._session, self._key, self._layout.labels
        if self.worker is not None:
            return []
        if compression is not None:
            return [session.coded_order(compression, i, key + i, label) for i, label in enumerate(labels)]
        programs = [session.bucket_program(array.nbytes) for array in self._arrays]
        return [Order(programs[i], self._arrays[i], key + i, label) for i, label in enumerate(labels)]

    def agree(self, kind: int, step: int) -> None:
        """Find out whether all workers come for the same: buckets handed over from now on are of this kind and step."""
        rule = zlib.crc32(self._rule().encode())
        self._kind = kind
        argument = step_argument(self._key, step)
        self._meeting = self._unchecked = self._session.meet(kind, argument, weight=1.0, flags=rule)

    def submit(self, submit: Submit) -> None:
        """Hand a bucket over."""
        number, meeting = submit.operation.bucket, self._meeting
        when = When(lane=self._lane, priority=submit.priority)
        if meeting is not None:  # there is none, ever, where pushes are not merged, which is refused for weights
            when = When(meeting.work, self._check, self._lane, submit.priority)
        self._works[submit.operation] = self._handed_over(number, when)

    def wait(self, operations: Sequence[BucketPhase]) -> None:
        """Until these have arrived."""
        self._session.engine.wait(*[self._works.pop(operation) for operation in operations])

    def _handed_over(self, number: int, when: When) -> Work:
        if self.worker is not None:
            return self.worker.start(number, when)
        orders = self._orders if self._kind == STEP or self.apart is None else self._orders_apart
        return self._session.engine.start(orders[number], when)

    def _check(self) -> None:
        """Before a bucket goes, in the thread that drives: all workers have come for the same, which is seen once."""
        meeting, self._unchecked = self._unchecked, None
        if meeting is not None:
            tickets = meeting.tickets()
            mine = tickets[self._session.rank].flags
            for rank, ticket in enumerate(tickets):
                if ticket.flags != mine:
                    raise self._parted(rank, step_of(ticket))

    def _parted(self, rank: int, step: int) -> MismatchError:
        other, me = self._session.name(rank), self._session.name(self._session.rank)
        text = f"{other} updates with other values in step {step} than {me}, which has {self._rule()}"
        return MismatchError(self._session.titled(f"{text}: set the optimizer's attributes alike on all workers"))
