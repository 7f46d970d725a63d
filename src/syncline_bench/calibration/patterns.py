"""The patterns of messages that a calibration times: plans between a few ranks, which the engine runs like any plan.

Owns the patterns and the number of messages of each size. Measures nothing.

* ``lone``: two ranks send one message back and forth, and no other message is in flight.
* ``turns``: in a ring, each rank sends the chunk that it received in the previous step, as in a ring allreduce.
* ``stream``: in a ring, each rank sends a sequence of messages that wait for no other message.

In rings every port sends and receives at the same time. Neighbours send different chunks, so that a rank never receives
into a chunk that it is sending; the number of ranks is therefore even.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from syncline.plans.plan import COPY, Plan

Pattern = Literal["lone", "turns", "stream"]

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
        return {"lone": 1, "turns": 2, "stream": 2 * self.messages}[self.pattern]

    @property
    def array_bytes(self) -> int:
        """The size of the array that the plan runs on."""
        return self.chunks * self.nbytes

    def taking_part(self, members: Sequence[int]) -> tuple[int, ...]:
        """The members that send or receive; the number of members is even."""
        return tuple(members[:2] if self.pattern == "lone" else members)

    def plan(self, world: int, members: Sequence[int]) -> Plan:
        """The plan between these ranks, whose number is even, in a world of ``world`` ranks."""
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


def cells_of(nbytes: int, most_bytes: int) -> tuple[Cell, ...]:
    """The cells of a size, with arrays of up to ``most_bytes``; empty if two messages exceed that."""
    if 2 * nbytes > most_bytes:
        return ()
    counts = {
        pattern: max(_LEAST_IN_A_ROW, min(most, _BYTES_IN_A_ROW[pattern] // nbytes))
        for pattern, most in _IN_A_ROW.items()
    }
    counts["stream"] = min(counts["stream"], most_bytes // (2 * nbytes))
    return tuple(Cell(pattern, nbytes, count) for pattern, count in counts.items())
