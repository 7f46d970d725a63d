"""Which messages are timed: plans between a few ranks, run by the engine as any other plan is.

Owns the patterns and how many messages of a size are in one. Does not know how long anything takes.

* ``lone``: two ranks send one message to and fro, and nothing else is under way.
* ``turns``: a ring in which all send to the next one what they have received from the one before, step by step, as the
  ring's own steps do.
* ``stream``: a ring in which all send messages to the next one that wait for nothing.

In rings every port sends and receives at the same time. Chunks are two sets, of which a rank sends one and receives the
other, so that nothing has to be copied out of the way: an even number of ranks takes part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.plans.plan import COPY, Plan

Pattern = Literal["lone", "turns", "stream"]

SIZES = (*(1 << power for power in (6, 8, 10, 12, 14, 16, 17, 18, 20, 22, 24)),)
"""Bytes of a message: four times as many each, and one more where libraries change how they send."""

_IN_A_ROW: dict[Pattern, int] = {"lone": 16, "turns": 64, "stream": 128}
"""Messages of a run: so many that its beginning and end are little of it."""

_BYTES_IN_A_ROW: dict[Pattern, int] = {"lone": 1 << 20, "turns": 4 << 20, "stream": 4 << 20}
"""Of large messages fewer. What a link lets pass at once after a pause is little of these."""

_LEAST_IN_A_ROW = 2


@dataclass(frozen=True)
class Cell:
    """A pattern of so many ``messages`` of a size; in rings as many by every rank."""

    pattern: Pattern
    nbytes: int
    messages: int

    @property
    def text(self) -> str:
        """For messages."""
        return f"{self.pattern} of {self.nbytes} B"

    @property
    def flights(self) -> int:
        """How many messages have to arrive one after the other."""
        return 1 if self.pattern == "stream" else self.messages

    @property
    def moved(self) -> int:
        """How many messages each rank sends or receives."""
        return self.messages if self.pattern == "lone" else 2 * self.messages

    @property
    def chunks(self) -> int:
        """The parts of the array, each of ``nbytes``."""
        return {"lone": 1, "turns": 2, "stream": 2 * self.messages}[self.pattern]

    @property
    def array_bytes(self) -> int:
        """The array that the plan runs over."""
        return self.chunks * self.nbytes

    def taking_part(self, members: Sequence[int]) -> tuple[int, ...]:
        """Which of an even number of ranks have something to do."""
        return tuple(members[:2] if self.pattern == "lone" else members)

    def plan(self, world: int, members: Sequence[int]) -> Plan:
        """The plan between these ranks of a world, of whom there is an even number."""
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
"""The least that an operation can be: what it takes beside its messages is the engine's own."""


def cells_of(nbytes: int, most_bytes: int) -> tuple[Cell, ...]:
    """The cells of a size, whose arrays have up to ``most_bytes``; none where even two messages are more."""
    if 2 * nbytes > most_bytes:
        return ()
    counts = {
        pattern: max(_LEAST_IN_A_ROW, min(most, _BYTES_IN_A_ROW[pattern] // nbytes))
        for pattern, most in _IN_A_ROW.items()
    }
    counts["stream"] = min(counts["stream"], most_bytes // (2 * nbytes))
    return tuple(Cell(pattern, nbytes, count) for pattern, count in counts.items())
