"""What goes down to the ranks of a bench, and the one record that they keep for their starter to look at.

Owns ``Work``, the argument of every rank, and ``Turn``, a few numbers in a file that rank 0 maps: whose turn it is, and
how far the bench has come. Writing them costs rank 0 nothing that a message would (the starter is not woken up, which
on a busy machine would take a core from a rank in the middle of a repetition), and they survive the rank.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

_FIELDS = 4
_TURN_FILE = "turn"


@dataclass(frozen=True)
class Work:
    """What one set of ranks measures, as JSON in their command line.

    ``cells`` holds each size with the numbers of the contenders to measure at it; ``folder`` is where the ranks report;
    ``address`` and ``interface`` are where rank 0's store listens and what Gloo is bound to; ``library`` names the MPI
    library under whose launcher the ranks run, if any; ``repeat`` is how often each size is measured, None for as
    often as it asks for. With ``link`` the ranks measure their link, which is otherwise known or not wanted; with
    ``memory`` they measure the growth of their memory instead of times.
    """

    collective: str
    contenders: tuple[str, ...]
    cells: tuple[tuple[int, tuple[int, ...]], ...]
    folder: str
    address: str = "127.0.0.1"
    interface: str = "lo"
    library: str = ""
    repeat: int | None = None
    link: bool = False
    memory: bool = False

    def to_json(self) -> str:
        """As an argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        """Back from the argument."""
        fields = json.loads(text)
        cells = tuple((size, tuple(numbers)) for size, numbers in fields["cells"])
        return cls(**{**fields, "contenders": tuple(fields["contenders"]), "cells": cells})


@dataclass(frozen=True)
class Position:
    """Where a set of ranks is: the number of the contender whose turn it is and the size, and the turns done so far.

    ``contender`` is None before the first contender and between two, ``nbytes`` 0 while it connects.
    """

    contender: int | None
    nbytes: int
    turns: int


class Turn:
    """The record, mapped; written by rank 0, read by the starter, which made it."""

    def __init__(self, folder: str | Path, create: bool = False) -> None:
        path = Path(folder) / _TURN_FILE
        if create:
            path.write_bytes(bytes(8 * _FIELDS))
        with path.open("r+b") as file:
            self._numbers = np.frombuffer(mmap.mmap(file.fileno(), 8 * _FIELDS), np.int64)

    def begin(self, contender: int, nbytes: int) -> None:
        """It is this contender's turn."""
        self._numbers[1] = nbytes
        self._numbers[0] = contender + 1

    def end(self) -> None:
        """It is nobody's turn."""
        self._numbers[0] = 0
        self._numbers[2] += 1

    def read(self) -> Position:
        """What it says now."""
        number, nbytes, turns, _ = (int(value) for value in self._numbers)
        return Position(number - 1 if number else None, nbytes, turns)
