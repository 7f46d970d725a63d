"""Timing messages between ranks of a session, and the line, the flight and the processor time that the times make.

Owns the course: which cells are measured how often, and what of a run is timed. All ranks of the session call it
together; rank 0 decides by its own clock and tells the others. A run is preceded by one of its kind that is not timed:
it brings the ranks together, and uses up what a link lets pass at once after a pause. Cells take turns, round by round,
so that a busy moment hits all alike.

Theory. A run of a plan takes ``start``, and per message in a row alpha and beta times its bytes, and a flight for each
that has to arrive before the next may go. A stream has many messages to one flight, the steps of a ring have one to
each: their difference is the flight. Lone messages are not fitted on, but held against the result. They take longer
where a processor without work is slow to wake up, which those of a ring seldom are. Processor time is fitted on the
steps of a ring: a bucket's share, and that per message and byte sent or received.
"""

from __future__ import annotations

import gc
import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from syncline.engine.exchange import SEGMENT_BYTES, SHARED_SEGMENT_BYTES
from syncline.plans.messages import Program, compile_program
from syncline.session.session import Session

from ..report import units
from .fits import Estimate, Fit, Row, Samples, fit, pieces
from .patterns import SIZES, TINY, Cell, cells_of

Told = Callable[[float, str], None]
"""Told the share that is done, and what is going on."""

_LONGEST_S = 0.2
"""Messages that are foreseen to take longer are not sent: their time follows from shorter ones."""

_LEAST_SIZES, _PATIENCE = 5, 2
"""On slow links no larger messages are sent once so many sizes have taken so many times the budget."""

_GROWTH = 4
_LONG_BYTES = 16 << 20
"""Runs of so many bytes need no other before them."""

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 30
_LABEL = "calibration"


@dataclass(frozen=True)
class Timed:
    """What was measured of one cell: seconds of the slowest rank, and processor seconds of each, in the mean."""

    cell: Cell
    times_s: Samples
    cpu_s: Samples


def measure(session: Session, members: Sequence[int], budget_s: float, told: Told) -> list[Timed]:
    """Time all cells between an even number of ranks; all ranks of the session call it, and all get the same."""
    with _without_collector():
        return _Measuring(session, members, budget_s, told).run()


class _Measuring:
    """One course of measurements, as every rank goes through it."""

    def __init__(self, session: Session, members: Sequence[int], budget_s: float, told: Told) -> None:
        self._session, self._members, self._budget_s, self._told = session, tuple(members), budget_s, told
        # Where all ranks share memory a plan runs over smaller segments; a message is to be one, whole.
        shared = getattr(session.engine.transport, "window", None) is not None
        self._most_bytes = SHARED_SEGMENT_BYTES if shared else SEGMENT_BYTES
        self._memory = session.engine.allocate(self._most_bytes, np.dtype(np.uint8))
        self._programs: dict[Cell, Program] = {}

    def run(self) -> list[Timed]:
        """From small to large messages once, then in turn as often as there is time for."""
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
        """Every cell that is short enough, with its seconds."""
        self._round([TINY])  # first uses load code and map memory
        found = {TINY: self._round([TINY])[TINY][0]}
        begun = time.perf_counter()
        for count, nbytes in enumerate(SIZES, 1):
            cells = cells_of(nbytes, self._most_bytes)
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
        """How often each cell is measured: each gets an equal part of the time."""
        share_s = self._budget_s / len(once)
        counts = [min(_MOST_ROUNDS, max(_LEAST_ROUNDS, round(share_s / seconds))) for seconds in once.values()]
        return dict(zip(once, self._agreed(counts), strict=True))

    def _agreed(self, mine: Any) -> Any:
        """Rank 0's decision, whatever this rank would have decided."""
        return json.loads(self._session.tell_all(json.dumps(mine).encode()))

    def _round(self, cells: Sequence[Cell]) -> dict[Cell, tuple[float, float]]:
        """Each cell once: seconds of the slowest rank, and processor seconds of those that take part."""
        own = np.array([self._time(cell) for cell in cells])
        every = np.stack([np.frombuffer(data).reshape(own.shape) for data in self._session.gather(own.tobytes())])
        found = {}
        for place, cell in enumerate(cells):
            mine = every[list(cell.taking_part(self._members)), place]
            found[cell] = float(mine[:, 0].max()), float(mine[:, 1].mean())
        return found

    def _time(self, cell: Cell) -> tuple[float, float]:
        program, array = self._program(cell), self._memory[: cell.array_bytes]
        before = cell if cell.messages * cell.nbytes < _LONG_BYTES else TINY
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
def _without_collector() -> Iterator[None]:
    """No search for garbage in the middle of a measurement."""
    before = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


# What the times say.


@dataclass(frozen=True)
class LinkFit:
    """A link: where its pieces begin, with alpha and beta of each, and the flight.

    ``off`` holds by how much lone messages, on which nothing was fitted, are longer than these say, by size.
    """

    starts: tuple[int, ...]
    alpha: tuple[Estimate, ...]
    beta: tuple[Estimate, ...]
    flight: Estimate
    off: Mapping[int, float]


def fit_link(timed: Sequence[Timed]) -> LinkFit:
    """The link that a ring's steps and streams show."""
    fitted_on = [one for one in timed if one.cell.pattern != "lone"]

    def rows_of(starts: Sequence[int]) -> list[Row]:
        return [Row(_amounts(one.cell, starts), one.times_s) for one in fitted_on]

    starts = pieces(sorted({one.cell.nbytes for one in fitted_on}), rows_of)
    found = fit(rows_of(starts)).constants
    alpha, beta = (tuple(found[f"{name}{place}"] for place in range(len(starts))) for name in ("alpha", "beta"))
    off = {
        one.cell.nbytes: one.times_s.median / _sum(_amounts(one.cell, starts), found) - 1
        for one in timed
        if one.cell.pattern == "lone"
    }
    return LinkFit(starts, alpha, beta, found["flight"], off)


def _amounts(cell: Cell, starts: Sequence[int]) -> dict[str, float]:
    place = bisect_right(starts, cell.nbytes) - 1
    line = {f"alpha{place}": cell.messages, f"beta{place}": cell.messages * cell.nbytes}
    return {"start": 1, "flight": cell.flights, **line}


def _sum(amounts: Mapping[str, float], constants: Mapping[str, Estimate]) -> float:
    return sum(amount * constants[name].value for name, amount in amounts.items())


def fit_processor(timed: Sequence[Timed]) -> Fit:
    """``bucket``, ``message`` and ``byte_cpu`` of the ranks' processor time in the steps of a ring."""
    rows = []
    for one in timed:
        if one.cell.pattern == "turns":
            moved = one.cell.moved
            amounts = {"bucket": 1, "message": moved, "byte_cpu": moved * one.cell.nbytes}
            rows.append(Row(amounts, one.cpu_s))
    return fit(rows)
