"""Slurm's compressed lists: of hosts (``gpu[1-3,07],login``) and of counts (``2(x3),1``).

Pure text. A host is a name with any number of bracketed ranges in it; the numbers of a range keep their leading zeros.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from ..errors import UsageError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> list[str]:
    """Every host that a list names, in its order; UsageError for text that is no such list."""
    hosts: list[str] = []
    for entry in _split(text):
        pieces = re.split(r"\[([^\[\]]*)\]", entry)
        if not entry or any(mark in piece for piece in pieces for mark in "[]"):
            raise UsageError(f"{text!r} is no list of hosts such as node[01-04]")
        choices = [list(_numbers(piece, text)) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return hosts


def expand_counts(text: str) -> list[int]:
    """The counts of all nodes in order; UsageError for text that is no such list."""
    counts: list[int] = []
    for entry in text.split(","):
        found = _COUNT.fullmatch(entry.strip())
        if found is None:
            raise UsageError(f"{text!r} is no list of counts such as 2(x3),1")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(text: str) -> list[str]:
    """The entries between the commas that are in no bracket."""
    return [entry.strip() for entry in re.split(r",(?![^\[\]]*\])", text)]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    for piece in ranges.split(","):
        found = _RANGE.fullmatch(piece)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise UsageError(f"{text!r} is no list of hosts: {piece!r} is no range of numbers")
        for number in range(int(found[1]), int(found[2] or found[1]) + 1):
            yield f"{number:0{len(found[1])}}"
