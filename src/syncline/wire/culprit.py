"""Who holds everybody up when nothing moves: found by asking one process after the other for whom it waits.

Whom a process waits for may itself wait for another one: all workers wait for a server, which waits for the worker that
has not sent its gradients; in a ring everybody waits for a neighbour. So whoever blames somebody first follows the
wait-for graph, with the edges as each process tells them (Chandy, Misra, Haas, "Distributed Deadlock Detection", 1983).
Its end is the culprit: a process that waits for nobody, because it has not come to the operation. One that does not
answer ends the search too. Where all wait for each other, the last one is named.

Owns the search and how an answer is written. Knows no socket, thread or clock: ``watch`` carries the answers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Waits = Mapping[int, str]
"""Peer -> label of what is waited for."""

_ENTRIES = 256
_LABEL_BYTES = 100
_ENTRY = struct.Struct("<IB")
ANSWER_BYTES = _ENTRIES * (_ENTRY.size + _LABEL_BYTES)
"""The longest answer."""


@dataclass(frozen=True)
class Culprit:
    """A process and the end of a sentence that begins with its name."""

    rank: int
    why: str


def find_culprit(me: int, waits: Waits, ask: Callable[[int], Waits | None]) -> Culprit | None:
    """Follow from ``me``, which waits for ``waits``, who waits for whom; None when that is nobody.

    ``ask`` says for whom a process waits, None when it does not answer. Each is asked once at most.
    """
    asked, last = {me}, None
    todo = sorted(waits.items(), reverse=True)
    while todo:
        peer, label = todo.pop()
        if peer in asked:
            continue
        asked.add(peer)
        theirs = ask(peer)
        if theirs is None:
            return Culprit(peer, f"does not say for whom it waits in {label}")
        if not theirs.keys() - {peer}:
            return Culprit(peer, f"has not come to {label}")
        last = Culprit(peer, f"waits for others that wait for it, in {label}")
        todo += sorted(theirs.items(), reverse=True)
    return last


def pack(waits: Waits) -> bytes:
    """An answer as it travels; labels are cut, and nobody needs to know of more than a few hundred processes."""
    found = []
    for peer, label in sorted(waits.items())[:_ENTRIES]:
        text = label.encode(errors="replace")[:_LABEL_BYTES]
        found.append(_ENTRY.pack(peer, len(text)) + text)
    return b"".join(found)


def unpack(data: bytes, processes: int) -> Waits:
    """The answer of a process; raises ValueError for what ``pack`` never makes."""
    waits: dict[int, str] = {}
    while data:
        if len(data) < _ENTRY.size:
            raise ValueError("an entry is cut off")
        peer, size = _ENTRY.unpack_from(data)
        text, data = data[_ENTRY.size : _ENTRY.size + size], data[_ENTRY.size + size :]
        if len(text) < size or size > _LABEL_BYTES or peer >= processes or peer in waits or len(waits) == _ENTRIES:
            raise ValueError(f"an entry of {size} bytes for rank {peer}")
        label = text.decode(errors="ignore")
        waits[peer] = "".join(char for char in label if char.isprintable())
    return waits
