"""Finds the process at fault in a stall: follows the wait-for graph by asking one process after another.

A process that others wait for may itself wait: all workers for a server, and the server for the worker that has not
sent its gradients. The search follows the edges that each process reports (Chandy, Misra, Haas, "Distributed Deadlock
Detection", 1983). The culprit is the end of the path: a process that waits for none, or does not answer. In a cycle it
is the last process, and the error shows the cycle.

The answers of one search stem from different moments: a busy process may have unread messages. A search therefore
counts only if a second one finds the same, and if in between each process has polled and not moved. Then all answers
hold at one moment (the double collect of Afek et al., "Atomic snapshots of shared memory", 1993).

This module does no I/O: ``watch`` sends the questions and answers, and the engine's ``watchdog`` starts the searches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

Waits = Mapping[int, str]
"""Peer -> label of the waiting work."""

ANEW = 2
"""After this many finished polls, at least one poll has begun and ended since the question."""

_CIRCLE = 8
"""The maximum number of edges of a cycle in an error."""

_ENTRIES = 256
_LABEL_BYTES = 100
_ENTRY = struct.Struct("<IB")
_COUNTS = struct.Struct("<Qq")
ANSWER_BYTES = range(_COUNTS.size, _COUNTS.size + _ENTRIES * (_ENTRY.size + _LABEL_BYTES) + 1)
"""The possible lengths of an answer."""


@dataclass(frozen=True)
class Answer:
    """The processes that a process waits for.

    ``moves`` counts arrivals, departures and begins of its messages. ``looks`` counts its polls that found nothing, or
    is -1 if it has no reason to poll. Together they distinguish two answers.
    """

    waits: Waits
    moves: int = 0
    looks: int = -1

    def still(self, before: Answer) -> bool:
        """Whether nothing has moved since the answer ``before`` although a whole poll lies in between."""
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
    """The result of a search: the culprit, and the answer of each process that was asked, None if it gave none."""

    culprit: Culprit | None
    answers: Mapping[int, Answer | None]

    def confirms(self, before: Found) -> bool:
        """Whether this later search proves the result of the search ``before``."""
        if self.culprit != before.culprit or self.answers.keys() != before.answers.keys():
            return False
        pairs = [(now, before.answers[peer]) for peer, now in self.answers.items()]
        return all(now is then is None or (now and then and now.still(then)) for now, then in pairs)


def find_culprit(me: int, waits: Waits, ask: Callable[[int], Answer | None]) -> Found:
    """Follow the waits from ``me``, which waits for ``waits``. Without waits there is no culprit.

    ``ask`` returns a process's answer, or None. Each process is asked at most once.
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
    """A cycle of processes that wait for each other, reached from ``start``, as text."""
    path = [start]
    while len(set(path)) == len(path):
        path.append(min(peer for peer in waits[path[-1]] if peer != path[-1]))
    circle = path[path.index(path[-1]) :]
    told = [f"rank {one} for rank {other} ({waits[one][other]})" for one, other in pairwise(circle)]
    return ", ".join(told[:_CIRCLE]) + (", and so on" if len(told) > _CIRCLE else "")


def pack(answer: Answer) -> bytes:
    """An answer as bytes. Labels are truncated, and so is the list after a few hundred processes."""
    found = [_COUNTS.pack(answer.moves, answer.looks)]
    for peer, label in sorted(answer.waits.items())[:_ENTRIES]:
        text = label.encode(errors="replace")[:_LABEL_BYTES]
        found.append(_ENTRY.pack(peer, len(text)) + text)
    return b"".join(found)


def unpack(data: bytes, processes: int) -> Answer:
    """The answer of a process. Raises ValueError for bytes that ``pack`` cannot have made."""
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
