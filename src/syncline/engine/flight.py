"""Keeps the last operations of a process in memory that outlives it: the flight record of a run that ends badly.

An operation is a whole exchange: a bucket, a collective, or the tickets before it. Messages are not kept; ``fault``
asks for the unfinished ones. The memory belongs to a launcher or is a file (``timeline.flight``), so the record of a
killed process stays. Nothing is created per operation: it is one row of a ring of ``ROWS``, written when the operation
begins, and the time of its end. That costs a microsecond, against 5 to 10 for each span of an observer.

    byte 0          head: magic and version, state, process, the bytes of notes, since when a thread waits, pid
    HEAD_BYTES      notes: lines of JSON
    ROWS_AT         rows

The nth operation is in row n % ROWS. An operation is the same on all ranks if its key and its turn are: ranks use the
keys of exchanges alike, and the turn counts how often a process has used that key.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import FrameType

ROWS = 1 << 10
"""The operations that are kept."""

HEAD_BYTES, NOTES_BYTES = 64, (1 << 16) - 64
ROWS_AT = HEAD_BYTES + NOTES_BYTES

HEAD = struct.Struct("<8sIIQdI")
ROW = struct.Struct("<QqqIiddB79s")
"""Number from 1, key, bytes or -1, turn, training step or -1, begin, end or 0, whether it is tolerant, label."""

_pack_row, _ROW_BYTES, _clock = ROW.pack_into, ROW.size, time.perf_counter

BYTES = ROWS_AT + ROWS * _ROW_BYTES
"""The size of a record. A multiple of a page."""

MAGIC = b"SYNCLFR1"
UNUSED, RUNNING, FAILED = range(3)
"""The states of a record. It is unused before a session, and again after one without a failure."""

_END_AT = struct.calcsize("<QqqIid")
_STATE_AT, _NOTED_AT, _BLOCKED_AT = 8, 16, 24
_FAULT_BYTES = 1 << 15
"""The part of the notes that only a fault may use."""

_LABEL_BYTES = 79
_MOST_LABELS = 1 << 12
_TEXT_CHARACTERS, _MOST_WAITS, _MOST_FRAMES = 2000, 64, 24
_HERE = f"{Path(__file__).parents[1]}{os.sep}"


class Flight:
    """The record of this process, written to ``memory`` of ``BYTES``. Thread-safe. ``step`` is the training step.

    ``on_end`` is called with True at the first fault, or with False at an end without one.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        process: int,
        notes: Mapping[str, object],
        on_end: Callable[[bool], None] = lambda _: None,
    ) -> None:
        self.step = -1
        self._on_end = on_end
        self.faulted = False
        self._memory = memory
        self._whole = memoryview(memory)
        self._times, self._numbers = self._whole.cast("d"), self._whole.cast("Q")
        self._next = count(1).__next__
        self._turns: dict[int, int] = {}
        self._labels: dict[str, bytes] = {}
        self._noting = threading.Lock()
        self._noted = 0
        memory[:BYTES] = bytes(BYTES)
        HEAD.pack_into(memory, 0, MAGIC, RUNNING, process, 0, 0.0, os.getpid())
        clock = time.perf_counter()
        self.note({"process": process, "wall_s": time.time() - clock, **notes})

    # Called for every operation, so kept as short as possible.

    def begin(
        self, key: int, label: str, nbytes: int, tolerant: bool = False, begin_s: float = 0.0, end_s: float = 0.0
    ) -> int:
        """An operation begins now, or has begun and ended at these times; returns its number for ``end``."""
        number, turns = self._next(), self._turns
        try:
            shown = self._labels[label]
            turn = turns[key] = turns[key] + 1
        except KeyError:  # a key's or label's first use; trying costs nothing, asking does
            shown = self._labels.get(label) or self._shortened(label)
            turn = turns[key] = turns.get(key, 0) + 1
        _pack_row(
            self._whole, ROWS_AT + number % ROWS * _ROW_BYTES,
            number, key, nbytes, turn, self.step, begin_s or _clock(), end_s, tolerant, shown,
        )  # fmt: skip
        return number

    def end(self, number: int) -> None:
        """An operation ends now. Its row may have been used again."""
        at = ROWS_AT + number % ROWS * _ROW_BYTES
        if self._numbers[at >> 3] == number:
            self._times[(at + _END_AT) >> 3] = _clock()

    def blocked(self, since_s: float) -> None:
        """A thread waits since that time, or, with 0, no longer. The last call counts."""
        self._times[_BLOCKED_AT >> 3] = since_s

    def _shortened(self, label: str) -> bytes:
        found = label.encode(errors="backslashreplace")[:_LABEL_BYTES]
        if len(self._labels) < _MOST_LABELS:
            self._labels[label] = found
        return found

    # Called seldom

    def note(self, what: Mapping[str, object], room: int = NOTES_BYTES - _FAULT_BYTES) -> None:
        """Add to the description of the process, if there is room."""
        line = json.dumps(what).encode() + b"\n"
        with self._noting:
            end = self._noted + len(line)
            if end <= room:
                self._memory[HEAD_BYTES + self._noted : HEAD_BYTES + end] = line
                self._noted = self._numbers[_NOTED_AT >> 3] = end

    def group(self, first_key: int, keys: int, processes: Sequence[int]) -> None:
        """Only these processes take part in exchanges with these keys."""
        self.note({"group": [first_key, keys, list(processes)]})

    def fault(self, error: BaseException, culprit: int, waits: Mapping[int, str]) -> None:
        """Keep what is known at the first fault: the error, who is to blame or -1, and for whom this process waits."""
        with self._noting:
            if self.faulted:
                return
            self.faulted = True
        told = {
            "at_s": time.perf_counter(),
            "kind": type(error).__name__,
            "text": str(error)[:_TEXT_CHARACTERS],
            "culprit": culprit,
            "waits": [[peer, label[:_LABEL_BYTES]] for peer, label in sorted(waits.items())[:_MOST_WAITS]],
            "frames": _frames(error),
        }
        self.note({"fault": told}, NOTES_BYTES)
        struct.pack_into("<I", self._memory, _STATE_AT, FAILED)
        self._on_end(True)

    def close(self) -> None:
        """End the record. It stays if there was a fault."""
        if not self.faulted:
            struct.pack_into("<I", self._memory, _STATE_AT, UNUSED)
            self._on_end(False)


def _frames(error: BaseException) -> list[str]:
    """The place of the script: of the error if the main thread raised it, else where that thread is now."""
    main = threading.main_thread().ident
    frame = None if main is None else sys._current_frames().get(main)
    trace = error.__traceback__ if threading.get_ident() == main else None
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return _described(frame if trace is None else trace.tb_frame, -1 if trace is None else trace.tb_lineno)


def _described(frame: FrameType | None, line: int) -> list[str]:
    """A stack as texts, the innermost call outside Syncline first. ``line`` replaces that of the first frame."""
    found: list[str] = []
    inside = False
    while frame is not None and len(found) < _MOST_FRAMES:
        code = frame.f_code
        if not code.co_filename.startswith(_HERE):
            found.append(f"{code.co_filename}:{frame.f_lineno if line < 0 else line} ({code.co_name})"[-300:])
        elif not inside:  # what Syncline itself has called does not count
            found, inside = [], True
        frame, line = frame.f_back, -1
    return found
