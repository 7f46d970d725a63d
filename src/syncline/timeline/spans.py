"""Stores the spans of one process in two files as they occur, so that they survive the process.

``NAME.spans`` is mapped into memory. All rows have one size. The first row counts the spans that were left out; each
further row is a span, written at its start; its end time is filled in later, so 0 means a span without end.
``NAME.names`` has a line of JSON for everything else: an object with notes about the process, or a text, which rows
refer to by its number from 0 among all texts. Nothing is synced to disk: if the machine stops, the last data are lost;
if the process is killed, nothing is.

Limits: ``LIMIT`` spans per process, 16 MiB of rows, are kept; later ones are counted. File space is reserved a MiB at a
time before it is used, so that a full disk ends the recording but not the process.

Segments are not kept, because they follow from their sends and receives; neither are compiled calls that did nothing.

**Clocks** of all processes are converted to rank 0's, from measured offsets. Processes of one kernel share
CLOCK_MONOTONIC, unless they are in different time namespaces (``identity``): they need no measurement and have no
error. Any other process asks rank 0 for its time and assigns the answer to the middle of the round trip. The error is
at most half the round trip, however it is divided between the two directions, so the exchange with the shortest round
trip is the most accurate. Clocks drift, so the offset is measured at the start and at the end. It is interpolated
linearly in between and constant outside. This module does not communicate.

Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989; Mills, "Internet time synchronization:
the network time protocol", IEEE Transactions on Communications 39, 1991.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from typing import Any, NamedTuple, get_args

from ..engine.trace import Kind, Span
from ..errors import UsageError
from ..kernels.private import new_file

LIMIT = 1 << 18
"""The most spans that are kept per process."""

SUFFIXES = ".spans", ".names"

TRAINING = "training thread"
"""The name of a process's main thread."""

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
    """A span of a file, with times of its process's clock. ``within`` is the index of the enclosing span, or -1.

    ``end_s`` is 0 for a span without end. Names beyond the limit are empty.
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
    """The recording of a process. ``notes`` merges all its objects; spans are in the order of their starts."""

    notes: Mapping[str, Any]
    spans: tuple[TimedSpan, ...]
    left_out: int = 0


class SpanFile:
    """Keeps the spans of this process in ``folder``. Thread-safe.

    ``notes`` describe the process. Raises OSError if the files cannot be made.
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
        self._ready = 0  # the number of rows that fit
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

    # The observer: called for every event, so kept as short as possible.

    def begin(self, span: Span) -> None:
        """Write the span's row, without an end."""
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
            except (TypeError, ValueError):  # the map has been closed
                assert self._closed
        elif self._idle is not None and self._idle[0] is span:
            self._idle = None

    def _write(self, span: Span, now: float) -> None:
        place = self._rows + 1
        if place > self._ready and not self._make_room(place):
            return
        self._rows = span.mark = place  # counts from 1: row 0 is the file's head
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
        """Whether one more row fits. A row that does not is counted."""
        if self._closed:
            return False
        if place <= self._limit and self._grow():
            return True
        self._left_out += 1
        _HEAD.pack_into(self._map, 0, _MAGIC, self._left_out)
        return False

    # Notes and the end

    def note(self, **what: Any) -> None:
        """Add to the description of the process."""
        if not self._closed:
            self._names.write(json.dumps(what).encode() + b"\n")

    def close(self) -> None:
        """Stop recording; the files stay."""
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
        """Forget the files in a forked child, because they belong to the parent."""
        self._lock, self._closed, self._ready = threading.Lock(), True, 0

    def remove(self) -> None:
        """Close and remove the files."""
        self.close()
        for path in self.paths:
            path.unlink(missing_ok=True)

    # Called with the lock held.

    def _grow(self) -> bool:
        """Reserve more space in the file. False, for good, if there is none."""
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
            with contextlib.suppress(OSError):  # the disk is full: the row has a number without a text
                self._names.write(json.dumps(shown).encode() + b"\n")
        return number

    def _thread(self) -> int:
        """The number of the current thread's name."""
        main = threading.current_thread() is threading.main_thread()
        number = self._threads[get_ident()] = self._number(TRAINING if main else threading.current_thread().name)
        return number


def _in_place_of(path: Path) -> int:
    """The descriptor of a new file. An earlier run's file is unlinked, because others may have it open."""
    path.unlink(missing_ok=True)
    return new_file(path)


def read(path: Path) -> ProcessSpans:
    """The recording in a process's files; ``path`` is the ``.spans`` file. Raises UsageError for other files."""
    try:
        return parse(path.read_bytes(), path.with_suffix(SUFFIXES[1]).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a part of a timeline: {error}") from None


def parse_names(names: bytes) -> tuple[dict[str, Any], list[str]]:
    """The notes and the texts of a process. Raises ValueError for text that no process of this version writes."""
    notes, texts = dict[str, Any](), list[str]()
    for line in names.split(b"\n")[:-1]:  # the last line may be incomplete
        try:
            said = json.loads(line)
            text = str(said)
        except RecursionError:
            raise ValueError("one of its lines is nested too deeply") from None
        if isinstance(said, dict):
            notes |= said
        else:
            texts.append(text)
    if not all(type(notes.get(name)) is int and notes[name] >= 0 for name in ("process", "session")):
        raise ValueError("it does not name its process")
    return notes, texts


def parse(rows: bytes, names: bytes) -> ProcessSpans:
    """The recording in the bytes of a process's files. Raises ValueError if no process of this version wrote them."""
    if len(rows) < _ROW.size or rows[: len(_MAGIC)] != _MAGIC:
        raise ValueError("it does not start like a file of this version")
    notes, texts = parse_names(names)
    offset_of(notes)  # raises for a clock that is not valid
    spans: list[TimedSpan] = []
    text = dict(enumerate(texts)).get
    for row in _ROW.iter_unpack(rows[_ROW.size : len(rows) // _ROW.size * _ROW.size]):
        begin_s, end_s, nbytes, priority, within, label, key, segment, step, peer, phase, thread, code = row
        if begin_s == 0.0:
            break  # unused rows start here
        kind: Kind = _KINDS[code] if code < len(_KINDS) else "work"
        within = within if within < len(spans) else -1
        of, turn, where = (text(number, "") for number in (label, phase, thread))
        numbers = (begin_s, end_s, nbytes, priority, within, key, segment, step, peer)
        spans.append(TimedSpan(*numbers, kind, of, turn, where))
    return ProcessSpans(notes, tuple(spans), _HEAD.unpack_from(rows)[1])


@dataclass(frozen=True)
class Reading:
    """Rank 0's clock was ``offset_s`` ahead of this process's when the latter showed ``at_s``, within the error."""

    at_s: float
    offset_s: float
    round_trip_s: float

    @classmethod
    def of(cls, asked_s: float, there_s: float, heard_s: float) -> Reading:
        """From a round trip that left and returned at times of this clock, while rank 0's showed ``there_s``."""
        middle_s = (asked_s + heard_s) / 2
        return cls(middle_s, there_s - middle_s, heard_s - asked_s)

    @property
    def error_s(self) -> float:
        """The bound of the error."""
        return self.round_trip_s / 2


def best(readings: Iterable[Reading]) -> Reading:
    """The reading with the shortest round trip."""
    return min(readings, key=lambda reading: reading.round_trip_s)


@dataclass(frozen=True)
class Offset:
    """How far rank 0's clock is ahead of a process's, from readings in order of time; none if they share a clock."""

    readings: tuple[Reading, ...] = ()

    @property
    def error_s(self) -> float:
        """The bound of the error at the readings, and between them if clocks drift evenly."""
        return max((reading.error_s for reading in self.readings), default=0.0)

    def there(self, at_s: float) -> float:
        """The time of rank 0's clock when this process's showed ``at_s``."""
        if not self.readings:
            return at_s
        first, last = self.readings[0], self.readings[-1]
        passed_s = last.at_s - first.at_s
        drift = (last.offset_s - first.offset_s) / passed_s if passed_s > 0 else 0.0
        # extrapolation would amplify the errors of two close readings
        between_s = min(max(at_s, first.at_s), last.at_s)
        return at_s + first.offset_s + drift * (between_s - first.at_s)


def offset_of(notes: Mapping[str, Any]) -> Offset:
    """The offset that a process has recorded. Raises ValueError for notes that no process of this version writes."""
    try:
        readings = [Reading(float(at), float(off), float(trip)) for at, off, trip in notes.get("clock", [])]
    except (TypeError, ValueError, OverflowError):
        raise ValueError("its clock is not valid") from None
    if len(readings) > 2 or not all(math.isfinite(sum(vars(reading).values())) for reading in readings):
        raise ValueError("its clock is not valid")
    return Offset(tuple(readings))


def identity() -> str:
    """A text that is equal for processes that share a clock."""
    found = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):  # a kernel without time namespaces
        found += f" {Path('/proc/self/ns/time').readlink()}"
    return found
