"""Reads a timeline back from the file that ``syncline.timeline.chrome`` writes.

A file has an event on each line and is read line by line, because a timeline of eight ranks has some 200 MB of text.
Spans get their kind, times, label and arguments back. Instants, which compiled code reports after its calls, have no
duration and are left out. A session's number is not in an event, so the sessions of a process become one.
"""

from __future__ import annotations

import gc
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, get_args

from syncline.engine.trace import Kind
from syncline.errors import DataError
from syncline.timeline.chrome import FORMAT, PER_RUN, RecordedRun
from syncline.timeline.spans import ProcessSpans, TimedSpan

_HEAD = '{"displayTimeUnit":"ms","traceEvents":[\n'
_TAIL = '],"otherData":'
_KINDS = frozenset(get_args(Kind))
_NAME = re.compile(r"(?:(?P<title>.*): )?(?P<own>(?P<role>rank|server) \d+(?: \(.*\))?)", re.DOTALL)
_SESSION = re.compile(r", session \d+$")
_LINES = 4096
"""The events that are parsed in one call."""
_MOST_PROCESSES = 1 << 16
_LONGEST_LINE = 1 << 20
"""The most characters of an event. One has some 300."""
MOST_CHARACTERS = 1 << 26
"""The most characters of the events that are parsed in one call: a small file may unpack to any length."""

Event = dict[str, Any]


def is_timeline(path: Path) -> bool:
    """Whether a file's name or first bytes are those of a timeline. Raises DataError if it cannot be read."""
    try:
        with _opened(path) as file:
            start = file.read(4096)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {_why(error)}") from None
    return path.name.endswith(".json.gz") or '"traceEvents"' in start or start.lstrip().startswith("[")


def read_timeline(path: Path) -> list[RecordedRun]:
    """The runs of a timeline, with times since the first event of each.

    Raises DataError for a file that is damaged, or that this version of Syncline has not written.
    """
    found = _Runs()
    try:
        with _opened(path) as file, _uncollected():
            for events in _events(file, found):
                found.add(events)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or incomplete: {_why(error)}; copy it again, or record again") from None
    except _Foreign as error:
        raise DataError(f"{path} {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{path} is not a timeline of this version of Syncline: {error!r:.200}") from None
    return found.runs()


class _Foreign(Exception):
    """The file is not a timeline that this version reads."""


def _why(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)


@contextmanager
def _opened(path: Path) -> Iterator[IO[str]]:
    with path.open("rb") as raw:
        compressed = raw.read(2) == b"\x1f\x8b"
    if compressed:
        with gzip.open(path, "rt", encoding="utf-8") as text:
            yield text
    else:
        with path.open(encoding="utf-8") as text:
            yield text


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without searches for garbage, which would go through all spans read so far again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _events(file: IO[str], found: _Runs) -> Iterator[list[Event]]:
    """The events of a file, some at a time; ``found`` gets what the file says about them at its end."""
    if file.readline(len(_HEAD) + 1) != _HEAD:
        raise _Foreign(
            "is not a timeline of Syncline: it does not start like one; record one with --trace, or SYNCLINE_TRACE"
        )
    while True:
        lines = _lines(file)
        last = lines and lines[-1].startswith(_TAIL)
        if not lines:
            raise _Foreign("is incomplete: its end is missing; copy it again, or record again")
        body = "".join(lines[:-1] if last else lines).rstrip().rstrip(",")
        yield json.loads(f"[{body}]")
        if last:
            found.about = _about(json.loads(lines[-1][len(_TAIL) :].rstrip()[:-1]))
            return


def _lines(file: IO[str]) -> list[str]:
    """The next lines of a file, at its end none."""
    found, characters = list[str](), 0
    while len(found) < _LINES and (line := file.readline(_LONGEST_LINE)):
        characters += len(line)
        if characters > MOST_CHARACTERS:
            raise _Foreign(f"has {_LINES} events of more than {MOST_CHARACTERS} characters, which no timeline has")
        found.append(line)
    return found


def _about(said: Any) -> Event:
    if not isinstance(said, dict) or said.get("made by") != "syncline":
        raise _Foreign("is another program's trace, which does not say what explain needs; record one with --trace")
    version = said.get("format", FORMAT)
    if version != FORMAT:
        raise _Foreign(f"has the format {version!r:.20} of another version of Syncline, and this one reads {FORMAT}")
    return said


class _Runs:
    """The processes of all runs, by their numbers in the file."""

    def __init__(self) -> None:
        self.about: Event = {}
        self._names: dict[int, str] = {}
        self._threads: dict[int, str] = {}
        self._spans: dict[int, list[TimedSpan]] = {}

    def add(self, events: list[Event]) -> None:
        """Take events in the order of the file."""
        spans, threads, last, into = self._spans, self._threads, -1, list[TimedSpan]()
        for event in events:
            phase, pid = event["ph"], event["pid"]
            if phase == "M":
                self._name(event, pid)
                continue
            if phase != "X":
                continue
            if pid != last:
                last, into = pid, spans.setdefault(pid, [])
            args, kind, begin_s, lasts_s = event["args"], event["cat"], 1e-6 * event["ts"], 1e-6 * event["dur"]
            if kind not in _KINDS or not (math.isfinite(begin_s) and math.isfinite(lasts_s) and lasts_s >= 0):
                raise ValueError(f"an event of the kind {kind!r} at {begin_s} s lasts {lasts_s} s")
            get = args.get
            numbers = get("bytes", -1), get("key", -1), get("segment", -1), get("step", -1), get("peer", -1)
            label, turn = args["of"], get("phase", "")
            if not (type(label) is type(turn) is str and all(type(number) is int for number in numbers)):
                raise ValueError(f"an event has the arguments {args!r:.100}")
            # The order of TimedSpan's fields. The first microsecond of a run must not look like no end at all.
            begin_s, end_s = begin_s + 1.0, 0.0 if "unfinished" in args else begin_s + lasts_s + 1.0
            nbytes, key, segment, step, peer = numbers
            thread = threads.get(event["tid"], "")
            into.append(TimedSpan(begin_s, end_s, nbytes, 0.0, -1, key, segment, step, peer, kind, label, turn, thread))

    def _name(self, event: Event, pid: int) -> None:
        if event["name"] == "process_name":
            if type(pid) is not int or not pid > 0 or len(self._names) == _MOST_PROCESSES:
                raise ValueError(f"it names the process {pid!r:.20}")
            self._names[pid] = str(event["args"]["name"])
        elif event["name"] == "thread_name":
            self._threads[event["tid"]] = str(event["args"]["name"])

    def runs(self) -> list[RecordedRun]:
        """The runs in the order of the file."""
        found: dict[int, tuple[str, list[ProcessSpans]]] = {}
        said = self.about.get("processes")
        told = {_SESSION.sub("", name): notes for name, notes in said.items()} if isinstance(said, dict) else {}
        for pid, name in sorted(self._names.items()):
            match = _NAME.fullmatch(name)
            title, own = ((match["title"] or "", match["own"])) if match else ("", name)
            notes = told.get(name)
            notes = notes if isinstance(notes, dict) else {}
            process = ProcessSpans(
                {
                    "process": (pid - 1) % PER_RUN,
                    "session": 0,
                    "name": own,
                    "server": bool(match and match["role"] == "server"),
                    **{key: notes[key] for key in ("strategy", "workers", "cores") if key in notes},
                },
                tuple(self._spans.get(pid, ())),
                int(notes.get("left out", 0)),
            )
            found.setdefault((pid - 1) // PER_RUN, (title, []))[1].append(process)
        return [RecordedRun(processes, title) for title, processes in found.values()]
