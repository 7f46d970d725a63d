"""What goes down to the ranks of a bench: what a set is for, and its turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

TURNS = 6
"""In how many turns a contender's repetitions of a size are done, where there are so many."""


@dataclass(frozen=True)
class Work:
    """What one set of ranks is for, as JSON in their command line.

    ``contender`` is measured, or with an empty name the limits: copies, and with ``link`` the sockets of the machine.
    No array is larger than ``most_bytes``.
    """

    collective: str
    contender: str
    most_bytes: int
    link: bool = False

    def to_json(self) -> str:
        """As an argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        """Back from the argument."""
        return cls(**json.loads(text))


def turns_of(repetitions: int) -> Sequence[int]:
    """How many repetitions each turn has, as equal as can be."""
    turns = min(TURNS, repetitions)
    return [repetitions // turns + (turn < repetitions % turns) for turn in range(turns)]
