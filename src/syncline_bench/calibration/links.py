"""Times messages between the ranks of a session, and fits the constants of a link and of the processor to the times.

Owns the course of the measurement: how often each cell is measured, and which part of a run is timed. All ranks of the
session call it together; rank 0 decides by its own clock and tells the others. An untimed run precedes each timed run:
it synchronizes the ranks and uses up the burst that a link lets pass after a pause. The cells take turns, round by
round, so that a busy moment affects all of them equally.

Theory. A run of a plan takes ``start`` once, alpha and beta times its bytes for each message in sequence, and one
flight for each message that must arrive before the next is sent. A stream has many messages per flight, the steps of a
ring have one; the difference between them is the flight. Lone messages are excluded from the fit and compared with its
result. They take longer if an idle processor is slow to wake up, which seldom happens in a ring. Processor time is
fitted to the steps of a ring: one constant per bucket, one per message and one per byte, both sent or received.

The patterns are plans between a few ranks, which the engine runs like any plan:

* ``lone``: two ranks send one message back and forth, and no other message is in flight.
* ``turns``: in a ring, each rank sends the chunk that it received in the previous step, as in a ring allreduce.
* ``stream``: in a ring, each rank sends a sequence of messages that wait for no other message.
* ``native``: the reduce-scatter and the all-gather of the transport's message library among all ranks of a host.

In rings every port sends and receives at the same time. Neighbours send different chunks, so that a rank never receives
into a chunk that it is sending; the number of ranks is therefore even.
"""

from __future__ import annotations

import gc
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from syncline.algorithms.hierarchical import hierarchical
from syncline.engine.exchange import SEGMENT_BYTES, SHARED_SEGMENT_BYTES
from syncline.nouns import Group
from syncline.plans.messages import Program, compile_program
from syncline.plans.plan import COPY, Plan
from syncline.session.session import Session

from ..report import units
from .fits import Estimate, Row, Samples, fit, pieces

Pattern = Literal["lone", "turns", "stream", "native"]

BUDGET_S = 5.0
"""The default time for the messages of one kind of link, approximately."""

_FEWEST = 3
"""The fewest rounds of a measurement with less time."""

SIZES = (*(1 << power for power in (6, 8, 10, 12, 14, 16, 17, 18, 20, 22, 24)),)
"""The message sizes in bytes: powers of 4, and 128 KiB, near which libraries change their protocol."""

_IN_A_ROW: dict[Pattern, int] = {"lone": 16, "turns": 64, "stream": 128}
"""The messages of a run: enough to make its beginning and end negligible."""

_BYTES_IN_A_ROW: dict[Pattern, int] = {"lone": 1 << 20, "turns": 4 << 20, "stream": 4 << 20}
"""The bytes that limit the number of large messages. A link's burst after a pause is small compared with them."""

_LEAST_IN_A_ROW = 2


@dataclass(frozen=True)
class Cell:
    """A pattern with its number of messages (in rings, of every rank) and their size."""

    pattern: Pattern
    nbytes: int
    messages: int

    @property
    def text(self) -> str:
        """The pattern and size for remarks."""
        return f"{self.pattern} of {self.nbytes} B"

    @property
    def flights(self) -> int:
        """The number of messages that have to arrive one after the other."""
        return 1 if self.pattern == "stream" else self.messages

    @property
    def moved(self) -> int:
        """The number of messages that each rank sends or receives."""
        return self.messages if self.pattern == "lone" else 2 * self.messages

    @property
    def chunks(self) -> int:
        """The number of chunks of the array, each of ``nbytes``."""
        return {"lone": 1, "turns": 2, "stream": 2 * self.messages, "native": 1}[self.pattern]

    @property
    def array_bytes(self) -> int:
        """The size of the array that the plan runs on."""
        return self.chunks * self.nbytes

    def taking_part(self, members: Sequence[int]) -> tuple[int, ...]:
        """The members that send or receive; the number of members is even."""
        return tuple(members[:2] if self.pattern == "lone" else members)

    def plan(self, world: int, members: Sequence[int]) -> Plan:
        """The plan between these ranks in a world of ``world`` ranks. Their number is even unless a library sums."""
        if self.pattern == "native":
            one_host = hierarchical(Group(len(members)), inside="native")
            return replace(one_host.among(members), world=world, native=(tuple(members),))
        return Plan.of(f"calibration: {self.pattern}", world, self.chunks, list(self._transfers(members)))

    def _transfers(self, members: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if self.pattern == "lone":
            for step in range(self.messages):
                yield step, members[step % 2], members[1 - step % 2], 0, 1, COPY
            return
        turns = self.pattern == "turns"
        for number in range(self.messages):
            for place, rank in enumerate(members):
                chunk = (place - number) % 2 if turns else place % 2 * self.messages + number
                yield number, rank, members[(place + 1) % len(members)], chunk, 1, COPY


TINY = Cell("turns", SIZES[0], 1)
"""The smallest operation, which shows the engine's own time."""


def cells_of(nbytes: int, most_bytes: int, *, native: bool = False) -> tuple[Cell, ...]:
    """The cells of a size, with arrays of up to ``most_bytes``; empty if two messages exceed that.

    With ``native`` the single cell of the message library's collectives.
    """
    if native:
        return (Cell("native", nbytes, 1),)
    if 2 * nbytes > most_bytes:
        return ()
    counts = {
        pattern: max(_LEAST_IN_A_ROW, min(most, _BYTES_IN_A_ROW[pattern] // nbytes))
        for pattern, most in _IN_A_ROW.items()
    }
    counts["stream"] = min(counts["stream"], most_bytes // (2 * nbytes))
    return tuple(Cell(pattern, nbytes, count) for pattern, count in counts.items())


Told = Callable[[float, str], None]
"""Receives the share of the work that is done, and a text on the current step."""

_LONGEST_S = 0.2
"""Messages with a longer expected time are not sent: their time follows from the shorter ones."""

_LEAST_SIZES, _PATIENCE = 5, 2
"""The sizes grow no further once this many sizes are measured and this many times the budget is spent."""

_GROWTH = 4
_LONG_BYTES = 16 << 20
"""Before runs of at least this many bytes, the untimed run is a tiny one."""

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 30
_LABEL = "calibration"


@dataclass(frozen=True)
class Timed:
    """The samples of one cell: seconds of the slowest rank, and the ranks' mean processor seconds."""

    cell: Cell
    times_s: Samples
    cpu_s: Samples


def without_torch(session: Session) -> str:
    """Which ranks lack torch, in words; empty if none does. All ranks call it together."""
    lacking = [rank for rank, able in enumerate(session.gather(b"1" if find_spec("torch") else b"0")) if able == b"0"]
    return f"torch is not installed on rank {', '.join(map(str, lacking))}" if lacking else ""


def rounds_within(session: Session, budget_s: float, most: int) -> int:
    """The rounds of a measurement that has ``most`` in the default time or a longer one. Rank 0 decides."""
    mine = max(_FEWEST, min(most, round(most * budget_s / BUDGET_S)))
    return int(session.tell_all(str(mine).encode()))


def measure(
    session: Session, members: Sequence[int], budget_s: float, told: Told, *, native: bool = False
) -> list[Timed]:
    """Time all cells between an even number of ranks, or with ``native`` the message library among all of a host.

    All ranks of the session call this and get the same result.
    """
    with without_collector():
        return _Measuring(session, members, budget_s, told, native).run()


class _Measuring:
    """One course of measurements; every rank executes it."""

    def __init__(
        self, session: Session, members: Sequence[int], budget_s: float, told: Told, native: bool = False
    ) -> None:
        self._tiny, self._native = Cell("native", SIZES[0], 1) if native else TINY, native
        self._session, self._members, self._budget_s, self._told = session, tuple(members), budget_s, told
        # A message has to be one whole segment, and segments are smaller if all ranks share memory.
        shared = getattr(session.engine.transport, "window", None) is not None
        self._most_bytes = SHARED_SEGMENT_BYTES if shared else SEGMENT_BYTES
        self._memory = session.engine.allocate(self._most_bytes, np.dtype(np.uint8))
        self._programs: dict[Cell, Program] = {}

    def run(self) -> list[Timed]:
        """Measure all cells once, from small to large messages, then in turn until the budget is spent."""
        once = self._once()
        rounds = self._rounds(once)
        samples: dict[Cell, list[tuple[float, float]]] = {cell: [] for cell in once}
        for number in range(max(rounds.values())):
            self._told(number / max(rounds.values()), "all sizes in turn")
            live = [cell for cell, count in rounds.items() if number < count]
            shift = number % len(live)
            for cell, found in self._round([*live[shift:], *live[:shift]]).items():
                samples[cell].append(found)
        return [
            Timed(cell, Samples(tuple(times_s)), Samples(tuple(cpu_s)))
            for cell, found in samples.items()
            for times_s, cpu_s in [zip(*found, strict=True)]
        ]

    def _once(self) -> dict[Cell, float]:
        """Measure every cell that is short enough once. Returns the seconds of each."""
        tiny = self._tiny
        self._round([tiny])  # first uses load code and map memory
        found = {tiny: self._round([tiny])[tiny][0]}
        begun = time.perf_counter()
        for count, nbytes in enumerate(SIZES, 1):
            cells = cells_of(nbytes, self._most_bytes, native=self._native)
            if not cells:
                break
            self._told(0.0, f"messages of up to {units.size(nbytes)}")
            found |= {cell: times[0] for cell, times in self._round(cells).items()}
            lone_s = found[cells[0]] / cells[0].messages
            spent = count >= _LEAST_SIZES and time.perf_counter() - begun > _PATIENCE * self._budget_s
            if not self._agreed(lone_s * _GROWTH <= _LONGEST_S and not spent):
                break
        return found

    def _rounds(self, once: Mapping[Cell, float]) -> dict[Cell, int]:
        """The number of measurements of each cell: every cell gets an equal share of the budget."""
        share_s = self._budget_s / len(once)
        counts = [min(_MOST_ROUNDS, max(_LEAST_ROUNDS, round(share_s / seconds))) for seconds in once.values()]
        return dict(zip(once, self._agreed(counts), strict=True))

    def _agreed(self, mine: Any) -> Any:
        """Rank 0's value; the other ranks' values are ignored."""
        return json.loads(self._session.tell_all(json.dumps(mine).encode()))

    def _round(self, cells: Sequence[Cell]) -> dict[Cell, tuple[float, float]]:
        """Measure each cell once: the slowest rank's seconds and the mean processor seconds, over the participants."""
        own = np.array([self._time(cell) for cell in cells])
        every = np.stack([np.frombuffer(data).reshape(own.shape) for data in self._session.gather(own.tobytes())])
        found = {}
        for place, cell in enumerate(cells):
            mine = every[list(cell.taking_part(self._members)), place]
            found[cell] = float(mine[:, 0].max()), float(mine[:, 1].mean())
        return found

    def _time(self, cell: Cell) -> tuple[float, float]:
        program, array = self._program(cell), self._memory[: cell.array_bytes]
        before = cell if cell.messages * cell.nbytes < _LONG_BYTES else self._tiny
        self._session.run(self._program(before), self._memory[: before.array_bytes], _LABEL)
        used, begun = time.process_time(), time.perf_counter()
        self._session.run(program, array, _LABEL)
        return time.perf_counter() - begun, time.process_time() - used

    def _program(self, cell: Cell) -> Program:
        if cell not in self._programs:
            plan = cell.plan(self._session.world_size, self._members)
            self._programs[cell] = compile_program(plan, self._session.rank)
        return self._programs[cell]


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable garbage collection during a measurement."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# The fits.


@dataclass(frozen=True)
class LinkFit:
    """A link: the sizes at which its pieces begin, alpha and beta of each piece, and the flight.

    ``off`` is the relative excess of the lone messages' times over the fit, which excludes them, by size in bytes.
    """

    starts: tuple[int, ...]
    alpha: tuple[Estimate, ...]
    beta: tuple[Estimate, ...]
    flight: Estimate
    off: Mapping[int, float]


def fit_link(timed: Sequence[Timed]) -> LinkFit:
    """Fit a link to the steps of a ring and to the streams, or a message library's collectives, without a flight."""
    fitted_on = [one for one in timed if one.cell.pattern != "lone"]

    def rows_of(starts: Sequence[int]) -> list[Row]:
        return [Row(_amounts(one.cell, starts), one.times_s) for one in fitted_on]

    starts = pieces(sorted({one.cell.nbytes for one in fitted_on}), rows_of)
    found = fit(rows_of(starts))
    alpha, beta = (tuple(found[f"{name}{place}"] for place in range(len(starts))) for name in ("alpha", "beta"))
    off = {
        one.cell.nbytes: one.times_s.median / _sum(_amounts(one.cell, starts), found) - 1
        for one in timed
        if one.cell.pattern == "lone"
    }
    return LinkFit(starts, alpha, beta, found.get("flight", Estimate(0.0, 0.0, 0.0, 0)), off)


def _amounts(cell: Cell, starts: Sequence[int]) -> dict[str, float]:
    place = bisect_right(starts, cell.nbytes) - 1
    line: dict[str, float] = {f"alpha{place}": cell.messages, f"beta{place}": cell.messages * cell.nbytes}
    return line if cell.pattern == "native" else {"start": 1, "flight": cell.flights, **line}


def _sum(amounts: Mapping[str, float], constants: Mapping[str, Estimate]) -> float:
    return sum(amount * constants[name].value for name, amount in amounts.items())


def fit_processor(timed: Sequence[Timed]) -> dict[str, Estimate]:
    """Fit ``bucket``, ``message`` and ``byte_cpu`` to the ranks' processor time in the steps of a ring."""
    rows = []
    for one in timed:
        if one.cell.pattern == "turns":
            moved = one.cell.moved
            amounts = {"bucket": 1, "message": moved, "byte_cpu": moved * one.cell.nbytes}
            rows.append(Row(amounts, one.cpu_s))
    return fit(rows)
