"""Who is at fault in a stall: follows the wait-for graph by asking one process after the other for whom it waits.

The process that one waits for may itself wait: all workers for a server, the server for the worker that has not sent
its gradients. The search follows the edges as each process tells them (Chandy, Misra, Haas, "Distributed Deadlock
Detection", 1983). The culprit is its end: a process that waits for nobody, or does not answer. In a cycle it is the
last process, and the error shows the cycle.

The answers of one search are of different moments: a busy process may not have read yet what lies before it. A search
therefore counts only if a second one finds the same, and each process has looked for messages in between and not moved.
Then all answers hold at one moment (the double collect of Afek et al., "Atomic snapshots of shared memory", 1993).

Pure: ``watch`` carries the answers, the engine's ``watchdog`` says when to search.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

Waits = Mapping[int, str]
"""Peer -> label of what is waited for."""

ANEW = 2
"""Of so many looks that have ended since a moment, the last has begun since."""

_CIRCLE = 8
"""So many of those that wait for each other are told."""

_ENTRIES = 256
_LABEL_BYTES = 100
_ENTRY = struct.Struct("<IB")
_COUNTS = struct.Struct("<Qq")
ANSWER_BYTES = range(_COUNTS.size, _COUNTS.size + _ENTRIES * (_ENTRY.size + _LABEL_BYTES) + 1)
"""How long an answer may be."""


@dataclass(frozen=True)
class Answer:
    """For whom a process waits.

    ``moves`` counts what has arrived, gone or begun in it, ``looks`` its looks for messages that have ended in vain, -1
    if it has nothing to look for: they tell two answers apart.
    """

    waits: Waits
    moves: int = 0
    looks: int = -1

    def still(self, before: Answer) -> bool:
        """Whether nothing has moved since the answer ``before``, and a whole look was in between: two have ended."""
        same = (self.waits, self.moves) == (before.waits, before.moves)
        looked = before.looks >= 0 and self.looks >= before.looks + ANEW
        return same and (looked or self.looks == before.looks == -1)


@dataclass(frozen=True)
class Culprit:
    """A process and the end of a sentence that begins with its name."""

    rank: int
    why: str


@dataclass(frozen=True)
class Found:
    """What one search has found: who is to blame, and what each said that was asked, None if nothing."""

    culprit: Culprit | None
    answers: Mapping[int, Answer | None]

    def confirms(self, before: Found) -> bool:
        """Whether this search, a later one, shows that what the one before has found was true."""
        if self.culprit != before.culprit or self.answers.keys() != before.answers.keys():
            return False
        pairs = [(now, before.answers[peer]) for peer, now in self.answers.items()]
        return all(now is then is None or (now and then and now.still(then)) for now, then in pairs)


def find_culprit(me: int, waits: Waits, ask: Callable[[int], Answer | None]) -> Found:
    """Follow the waits from ``me``, which waits for ``waits``; no culprit if that is nobody.

    ``ask`` returns a process's answer, None if it gives none. Each is asked at most once.
    """
    answers: dict[int, Answer | None] = {}
    last: tuple[int, str] | None = None
    todo = sorted(waits.items(), reverse=True)
    while todo:
        peer, label = todo.pop()
        if peer == me or peer in answers:
            continue
        answer = answers[peer] = ask(peer)
        if answer is None:
            return Found(Culprit(peer, f"does not say for whom it waits in {label}"), answers)
        if not answer.waits.keys() - {peer}:
            return Found(Culprit(peer, f"has not come to {label}"), answers)
        last = peer, label
        todo += sorted(answer.waits.items(), reverse=True)
    if last is None:
        return Found(None, answers)
    known = {me: waits} | {peer: answer.waits for peer, answer in answers.items() if answer is not None}
    why = f"waits for others that wait for it, in {last[1]}: {_circle(last[0], known)}"
    return Found(Culprit(last[0], why), answers)


def _circle(start: int, waits: Mapping[int, Waits]) -> str:
    """Some who wait for each other, as one gets to them from ``start``; everybody waits for another."""
    path = [start]
    while len(set(path)) == len(path):
        path.append(min(peer for peer in waits[path[-1]] if peer != path[-1]))
    circle = path[path.index(path[-1]) :]
    told = [f"rank {one} for rank {other} ({waits[one][other]})" for one, other in pairwise(circle)]
    return ", ".join(told[:_CIRCLE]) + (", and so on" if len(told) > _CIRCLE else "")


def pack(answer: Answer) -> bytes:
    """An answer as it travels; labels are cut, and nobody needs to know of more than a few hundred processes."""
    found = [_COUNTS.pack(answer.moves, answer.looks)]
    for peer, label in sorted(answer.waits.items())[:_ENTRIES]:
        text = label.encode(errors="replace")[:_LABEL_BYTES]
        found.append(_ENTRY.pack(peer, len(text)) + text)
    return b"".join(found)


def unpack(data: bytes, processes: int) -> Answer:
    """The answer of a process; raises ValueError for what ``pack`` never makes."""
    if len(data) < _COUNTS.size:
        raise ValueError("the counts are cut off")
    moves, looks = _COUNTS.unpack_from(data)
    if looks < -1:
        raise ValueError(f"a process that has looked {looks} times")
    waits: dict[int, str] = {}
    data = data[_COUNTS.size :]
    while data:
        if len(data) < _ENTRY.size:
            raise ValueError("an entry is cut off")
        peer, size = _ENTRY.unpack_from(data)
        text, data = data[_ENTRY.size : _ENTRY.size + size], data[_ENTRY.size + size :]
        if len(text) < size or size > _LABEL_BYTES or peer >= processes or peer in waits or len(waits) == _ENTRIES:
            raise ValueError(f"an entry of {size} bytes for rank {peer}")
        label = text.decode(errors="ignore")
        waits[peer] = "".join(char for char in label if char.isprintable())
    return Answer(waits, moves, looks)
