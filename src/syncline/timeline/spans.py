"""The spans of one process in two files, as they are told: what has been recorded survives the process.

``NAME.spans`` is mapped into memory. Its rows have one size: the first one counts what was left out, each further one
is a span, written when it begins; when it ends its end is filled in, so that 0 there is a span without end.
``NAME.names`` has a line of JSON for everything else: an object that describes the process, or was noted later, or a
text, which rows mean by its number from 0 among all texts. Nothing is written through to a disk: a machine that stops
loses what it had not written yet, a process that is killed nothing.

Limits: ``LIMIT`` spans of a process, 16 MiB of rows, are kept; what begins after them is counted. Room in the file is
taken a MiB at a time, before it is written to: a full disk ends the recording, and no process.

Segments are not kept, they follow from what is sent and received in them, and neither are calls of compiled code that
have done nothing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple, get_args

from ..engine.trace import Kind, Span
from ..errors import UsageError
from ..kernels.private import new_file

LIMIT = 1 << 18
"""Spans of one process that are kept."""

SUFFIXES = ".spans", ".names"

TRAINING = "training thread"
"""What the main thread of a process is called."""

_ROW = struct.Struct("<ddqdiiiiiiIHBx")
_HEAD = struct.Struct("<8sQ")
_END, _END_AT = struct.Struct("<d"), 8
_MAGIC = b"SYNCLTL1"
_GROWTH_BYTES = 1 << 20
_MOST_NAMES = 1 << 16
_NAME_CHARACTERS = 300
_KINDS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind != "segment")
_APART: frozenset[Kind] = frozenset({"segment", "advance"})
_CODES = {kind: code for code, kind in enumerate(_KINDS)}


class TimedSpan(NamedTuple):
    """A span of a file, with times of its process's clock; ``within`` is the place of the one around it, or -1.

    ``end_s`` is 0 where it has none. Names that were too many are empty.
    """

    begin_s: float
    end_s: float
    nbytes: int
    priority: float
    within: int
    key: int
    segment: int
    step: int
    peer: int
    kind: Kind
    label: str
    phase: str
    thread: str


@dataclass(frozen=True)
class ProcessSpans:
    """What a process has recorded: ``notes`` are all objects of its names, one over the other; spans as they began."""

    notes: Mapping[str, Any]
    spans: tuple[TimedSpan, ...]
    left_out: int = 0


class SpanFile:
    """Keeps the spans of this process in ``folder``; told from any thread.

    ``notes`` describe the process. Raises OSError where the files cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        notes: Mapping[str, Any],
        clock: Callable[[], float] = time.perf_counter,
        limit: int = LIMIT,
    ) -> None:
        self.clock = clock
        self.paths = [folder / f"{name}{suffix}" for suffix in SUFFIXES]
        self._limit = limit
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._threads: dict[int, int] = {}
        self._idle: tuple[Span, float] | None = None  # a call of compiled code that has done nothing so far
        self._rows = self._left_out = self._room = 0
        self._ready = 0  # rows for which there is room
        self._closed = False
        with ExitStack() as undo:
            self._file = undo.enter_context(os.fdopen(_in_place_of(self.paths[0]), "w+b", buffering=0))
            undo.callback(self.paths[0].unlink)
            os.ftruncate(self._file.fileno(), (limit + 1) * _ROW.size)
            self._grow()
            self._map = undo.enter_context(mmap.mmap(self._file.fileno(), (limit + 1) * _ROW.size))
            self._names = os.fdopen(_in_place_of(self.paths[1]), "wb", buffering=0)
            undo.pop_all()
        _HEAD.pack_into(self._map, 0, _MAGIC, 0)
        self.note(**notes)
        self._number("")

    # As an observer: what follows is called for everything, and is as short as it can be.

    def begin(self, span: Span) -> None:
        """Write its row, without an end."""
        now = self.clock()
        if span.kind in _APART:
            if span.kind == "advance":
                self._idle = span, now
            return
        with self._lock:
            if self._idle is not None and span.within is self._idle[0]:
                self._write(*self._idle)
                self._idle = None
            self._write(span, now)

    def end(self, span: Span) -> None:
        """Fill in the end."""
        now = self.clock()
        if span.mark:
            try:
                _END.pack_into(self._map, span.mark * _ROW.size + _END_AT, now)
            except (TypeError, ValueError):  # of a map that has been closed
                assert self._closed
        elif self._idle is not None and self._idle[0] is span:
            self._idle = None

    def _write(self, span: Span, now: float) -> None:
        place = self._rows + 1
        if place > self._ready and not self._make_room(place):
            return
        self._rows = span.mark = place  # from 1: that before it has the head of the file
        outer, numbers = span.within, self._numbers
        if outer is not None and outer.kind == "segment":
            outer = outer.within
        label, phase, thread = numbers.get(span.label), numbers.get(span.phase), self._threads.get(get_ident())
        _ROW.pack_into(
            self._map, place * _ROW.size, now, 0.0, span.nbytes, span.priority,
            -1 if outer is None else outer.mark - 1,
            self._number(span.label) if label is None else label,
            span.key, span.segment, span.step, span.peer,
            self._number(span.phase) if phase is None else phase,
            self._thread() if thread is None else thread,
            _CODES[span.kind],
        )  # fmt: skip

    def _make_room(self, place: int) -> bool:
        """Whether one more row can be kept; it is counted where it cannot."""
        if self._closed:
            return False
        if place <= self._limit and self._grow():
            return True
        self._left_out += 1
        _HEAD.pack_into(self._map, 0, _MAGIC, self._left_out)
        return False

    # What else there is to say.

    def note(self, **what: Any) -> None:
        """Add to what describes the process."""
        if not self._closed:
            self._names.write(json.dumps(what).encode() + b"\n")

    def close(self) -> None:
        """Keep nothing more; the files stay."""
        with self._lock:
            if self._closed:
                return
            with contextlib.suppress(OSError):
                self.note(ended=True)
            self._closed, self._ready = True, 0
            self._map.close()
            os.ftruncate(self._file.fileno(), (self._rows + 1) * _ROW.size)
            self._file.close()
            self._names.close()

    def forget(self) -> None:
        """In a forked child: the files are the parent's."""
        self._lock, self._closed, self._ready = threading.Lock(), True, 0

    def remove(self) -> None:
        """Close and remove the files."""
        self.close()
        for path in self.paths:
            path.unlink(missing_ok=True)

    # To be called under the lock.

    def _grow(self) -> bool:
        """Take more room in the file; False, for good, where there is none."""
        wanted = min((self._limit + 1) * _ROW.size, self._room + _GROWTH_BYTES)
        try:
            os.posix_fallocate(self._file.fileno(), self._room, wanted - self._room)
        except OSError:
            if not self._room:
                raise
            self._limit = self._rows
            return False
        self._room, self._ready = wanted, wanted // _ROW.size - 1
        return True

    def _number(self, text: str) -> int:
        shown = text if len(text) <= _NAME_CHARACTERS else f"{text[:_NAME_CHARACTERS]}..."
        number = self._numbers.get(shown)
        if number is None:
            if len(self._numbers) == _MOST_NAMES:
                return 0
            number = self._numbers[shown] = len(self._numbers)
            with contextlib.suppress(OSError):  # a full disk: the row has a number without a text
                self._names.write(json.dumps(shown).encode() + b"\n")
        return number

    def _thread(self) -> int:
        """The number of the name of this thread."""
        main = threading.current_thread() is threading.main_thread()
        number = self._threads[get_ident()] = self._number(TRAINING if main else threading.current_thread().name)
        return number


def _in_place_of(path: Path) -> int:
    """A descriptor of a new file; what an earlier run has left there goes, and stays what it is for who has it open."""
    path.unlink(missing_ok=True)
    return new_file(path)


def read(path: Path) -> ProcessSpans:
    """What lies in the files of a process, whose ``.spans`` is at ``path``; raises UsageError for other files."""
    try:
        return parse(path.read_bytes(), path.with_suffix(SUFFIXES[1]).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is no part of a timeline: {error}") from None


def parse_names(names: bytes) -> tuple[dict[str, Any], list[str]]:
    """The notes and the texts of a process; raises ValueError for what none of this version has written."""
    notes, texts = dict[str, Any](), list[str]()
    for line in names.split(b"\n")[:-1]:  # what was written last may be no whole line
        try:
            said = json.loads(line)
            text = str(said)
        except RecursionError:
            raise ValueError("a line of it is nested too deeply") from None
        if isinstance(said, dict):
            notes |= said
        else:
            texts.append(text)
    if not all(type(notes.get(name)) is int and notes[name] >= 0 for name in ("process", "session")):
        raise ValueError("it does not say of which process it is")
    return notes, texts


def parse(rows: bytes, names: bytes) -> ProcessSpans:
    """The same, of their bytes; raises ValueError for what no process of this version has written."""
    if len(rows) < _ROW.size or rows[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not begin as one of this version")
    notes, texts = parse_names(names)
    spans: list[TimedSpan] = []
    text = dict(enumerate(texts)).get
    for row in _ROW.iter_unpack(rows[_ROW.size : len(rows) // _ROW.size * _ROW.size]):
        begin_s, end_s, nbytes, priority, within, label, key, segment, step, peer, phase, thread, code = row
        if begin_s == 0.0:
            break  # nothing was written from here on
        kind: Kind = _KINDS[code] if code < len(_KINDS) else "work"
        within = within if within < len(spans) else -1
        of, turn, where = (text(number, "") for number in (label, phase, thread))
        numbers = (begin_s, end_s, nbytes, priority, within, key, segment, step, peer)
        spans.append(TimedSpan(*numbers, kind, of, turn, where))
    return ProcessSpans(notes, tuple(spans), _HEAD.unpack_from(rows)[1])
