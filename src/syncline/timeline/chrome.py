"""Writes a timeline in Chrome's trace event format, which Perfetto and chrome://tracing open.

A process of the format is a rank or server of one run, with a number derived from both; its threads are the lines of
``lines_of``. Spans are complete events with times of rank 0's clock since the first event of the run, so runs of a
comparison, which follow each other, are aligned. If both ends of a message are known, an arrow leads from sender to
receiver (``bind_id``). Events that are reported after a call of compiled code are instants in it. ``otherData`` has the
clock errors and what is missing.

The format: Google, "Trace Event Format", 2016. Events are written one by one; only one run is in memory at a time.

Lines. A thread has one line; further lines hold spans of one kind in turn. The spans of a thread are nested. Exchanges
and messages in flight are not: such a line has one of them at a time, with its nested spans, and there are as many
lines as are in flight at once. Whichever thread drives the exchange does its work, one at a time, on a line of its own.
If that is the training thread, the latter's own line shows a wait meanwhile.

**One iteration.** ``middle`` extracts the spans between two ends of rank 0's optimizer step, on all processes. Receives
are posted long before data arrive. There a receive begins when its message's send begins, and it is left out if that is
unknown. Without optimizer steps, as under frameworks that do not report them, or without one that all processes have
recorded, there is no iteration.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..engine.trace import Kind
from ..errors import UsageError
from ..kernels.private import new_file
from .spans import LIMIT, TRAINING, ProcessSpans, TimedSpan, offset_of

FORMAT = 1
"""The version of the file, which ``syncline explain`` reads back."""

PER_RUN, _PER_PROCESS = 1000, 10_000
"""Ranges of process and line numbers. Viewers take line numbers for thread ids, which must be unique."""

_LEVEL = 4
"""The compression level; higher ones take several times longer for a few per cent."""

Message = tuple[int, ...]
"""Session, sender, receiver, key, segment, step, and the index among messages that agree in these."""

End = tuple[int, int]
"""(process index in the run, span index in the process)"""


@dataclass(frozen=True)
class RecordedRun:
    """The processes of one run, by rank. ``title`` distinguishes the run within the timeline.

    ``unread`` lists the reasons why parts of it could not be read.
    """

    processes: Sequence[ProcessSpans]
    title: str = ""
    unread: Sequence[str] = ()


@dataclass
class Written:
    """A summary of a timeline. ``error_s`` bounds the clock error of all processes."""

    spans: int = 0
    left_out: int = 0
    error_s: float = 0.0
    processes: set[int] = field(default_factory=set)
    unread: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The summary, for who asked for the timeline."""
        found = f"{self.spans:,} span{'s' * (self.spans != 1)} of {len(self.processes)} process"
        found += "es" * (len(self.processes) != 1)
        found += f", clocks within {self.error_s * 1e6:.0f} us" if self.error_s else ", on one clock"
        found += f"; {self.left_out:,} more left out" if self.left_out else ""
        return "; ".join([found, *self.unread])


def write(path: Path, runs: Iterable[RecordedRun]) -> Written:
    """Write a timeline to ``path`` atomically, compressed if it ends with ``.gz``. UsageError if that is impossible."""
    written, about = Written(), dict[str, Any]()
    try:
        with _replacing(path) as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            before = "\n"
            for number, run in enumerate(runs):
                for event in _events(run, number * PER_RUN, written, about):
                    file.write(before + json.dumps(event, separators=(",", ":")))
                    before = ",\n"
            file.write(f'\n],"otherData":{json.dumps(_about(written, about))}}}\n')
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another path") from None
    return written


@contextmanager
def _replacing(path: Path) -> Iterator[IO[str]]:
    # The name is random and no link is followed: in a shared folder no other user can have planted a link there.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    made = new_file(part, 0o666)
    try:
        with os.fdopen(made, "wb") as file, _text(file, compressed=path.suffix == ".gz") as text:
            yield text
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _text(file: BinaryIO, *, compressed: bool) -> IO[str]:
    """The text file inside the possibly compressed one."""
    if compressed:
        return gzip.open(file, "wt", _LEVEL, encoding="utf-8")
    return io.TextIOWrapper(file, encoding="utf-8")


def _about(written: Written, about: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "made by": "syncline",
        "format": FORMAT,
        "clock": "CLOCK_MONOTONIC of rank 0, from the first event of each run",
        "clock error (us)": round(written.error_s * 1e6, 3),
        "limit": f"{LIMIT} spans of each process",
        "spans": written.spans,
        "left out": written.left_out,
        "could not be read": written.unread,
        "processes": about,
    }


def name_of(process: ProcessSpans) -> str:
    """The display name of a process."""
    return str(process.notes.get("name", f"process {process.notes['process']}"))


def times_of(process: ProcessSpans) -> tuple[list[float], list[float]]:
    """The start and end of each span on rank 0's clock. A span without end lasts as long as its process is known."""
    offset = offset_of(process.notes)
    begins = [offset.there(span.begin_s) for span in process.spans]
    last = max((max(span.begin_s, span.end_s) for span in process.spans), default=0.0)
    return begins, [offset.there(span.end_s or last) for span in process.spans]


def exchanges_of(spans: Sequence[TimedSpan]) -> list[tuple[int, str]]:
    """The key and phase of the exchange that each span belongs to; -1 and empty if it belongs to none."""
    found: list[tuple[int, str]] = []
    for span in spans:
        key, phase = (-1, "") if span.within < 0 else found[span.within]
        found.append((span.key if span.key >= 0 else key, span.phase or phase))
    return found


def _events(run: RecordedRun, first: int, written: Written, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All events of one run."""
    times = [times_of(process) for process in run.processes]
    origin = min((min(begins) for begins, _ in times if begins), default=0.0)
    arrows = _arrows(run)
    written.unread += run.unread
    known: dict[int, dict[Line, int]] = {}  # the lines of each process so far; a process may have several sessions
    for index, (process, (begins, ends)) in enumerate(zip(run.processes, times, strict=True)):
        pid = first + int(process.notes["process"]) + 1
        name = f"{run.title}: {name_of(process)}" if run.title else name_of(process)
        error_s, session = offset_of(process.notes).error_s, int(process.notes["session"])
        said = about[f"{name}, session {session + 1}" if session else name] = {}
        said |= {"clock error (us)": round(error_s * 1e6, 3), "spans": len(process.spans)}
        said |= {"left out": process.left_out} if process.left_out else {}
        said |= {name: process.notes[name] for name in ("workers", "strategy", "cores") if name in process.notes}
        written.spans += len(process.spans)
        written.left_out += process.left_out
        written.error_s = max(written.error_s, error_s)
        written.processes.add(pid)
        yield _named("process_name", pid, 0, name=name)
        yield _named("process_sort_index", pid, 0, sort_index=pid)
        yield from _events_of(process, pid, begins, ends, origin, arrows[index], known.setdefault(pid, {}))


def _named(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _events_of(
    process: ProcessSpans,
    pid: int,
    begins: Sequence[float],
    ends: Sequence[float],
    origin: float,
    arrows: Mapping[int, int],
    tids: dict[Line, int],
) -> Iterator[dict[str, Any]]:
    spans = process.spans
    placed = [span._replace(begin_s=begin) for span, begin in zip(spans, begins, strict=True)]
    lines, exchanges = lines_of(placed, ends), exchanges_of(spans)
    for new in sorted(set(filter(None, lines)) - tids.keys()):
        tid = tids[new] = pid * _PER_PROCESS + len(tids) + 1
        yield _named("thread_name", pid, tid, name=new.title)
        yield _named("thread_sort_index", pid, tid, sort_index=PER_RUN * new.order + new.number)
    for place, (span, line) in enumerate(zip(spans, lines, strict=True)):
        if line is None:
            continue
        event: dict[str, Any] = {"name": _title(span), "cat": span.kind, "pid": pid, "tid": tids[line]}
        event["ts"] = round((begins[place] - origin) * 1e6, 3)
        if is_moment(spans, span):
            event |= {"ph": "i", "s": "t"}
        else:
            event |= {"ph": "X", "dur": round((ends[place] - begins[place]) * 1e6, 3)}
        if place in arrows:
            event |= {"bind_id": hex(arrows[place]), "flow_out" if span.kind == "send" else "flow_in": True}
        yield event | {"args": _arguments(span, *exchanges[place])}


def _title(span: TimedSpan) -> str:
    """The title of a span in a viewer."""
    what = span.label.partition(" (")[0]  # without the names of a bucket's tensors
    if span.kind in ("send", "receive"):
        return f"{what} {'to' if span.kind == 'send' else 'from'} {span.peer}"
    if span.kind in ("forward", "backward", "optimizer"):
        return {"optimizer": "optimizer step"}.get(span.kind, span.kind)
    if span.kind == "wait":
        return f"wait: {what}"
    if span.kind == "compute":
        return f"{span.phase or 'codec'} {what}"
    return f"{span.kind} {what}" if span.kind in ("reduce", "copy", "advance") else what


def _arguments(span: TimedSpan, key: int, phase: str) -> dict[str, Any]:
    """Further attributes of a span and of its exchange."""
    found: dict[str, Any] = {"of": span.label}
    numbers = {"bytes": span.nbytes, "peer": span.peer, "segment": span.segment, "step": span.step, "key": key}
    found |= {name: number for name, number in numbers.items() if number >= 0}
    if phase:
        found["phase"] = phase
    if key >= 0:  # JSON has no infinity
        found["priority"] = span.priority if math.isfinite(span.priority) else str(span.priority)
    if not span.end_s:
        found["unfinished"] = True
    return found


def messages_of(run: RecordedRun) -> list[tuple[End, End]]:
    """The send and the receive of every message for which both are known."""
    sent: dict[Message, End] = {}
    received: dict[Message, End] = {}
    for index, process in enumerate(run.processes):
        rank, session = int(process.notes["process"]), int(process.notes["session"])
        counted = Counter[Message]()
        for place, (span, (key, _)) in enumerate(zip(process.spans, exchanges_of(process.spans), strict=True)):
            if span.kind not in ("send", "receive") or key < 0 or is_moment(process.spans, span):
                continue
            ends = (rank, span.peer) if span.kind == "send" else (span.peer, rank)
            alike = (session, *ends, key, span.segment, span.step)
            counted[alike] += 1
            (sent if span.kind == "send" else received)[(*alike, counted[alike])] = index, place
    return [(sent[message], received[message]) for message in sorted(sent.keys() & received.keys())]


def _arrows(run: RecordedRun) -> list[dict[int, int]]:
    """For every process, the numbers of the arrows that begin or end at its spans."""
    found: list[dict[int, int]] = [{} for _ in run.processes]
    for number, ends in enumerate(messages_of(run), 1):
        for index, place in ends:
            found[index][place] = number
    return found


# Lines ----------------------------------------------------------------------------------------------------------------


_COMPUTE: frozenset[Kind] = frozenset({"forward", "backward", "optimizer"})
_DRIVEN: frozenset[Kind] = frozenset({"reduce", "copy", "advance", "compute"})
_NAMES: dict[Kind, tuple[int, str]] = {
    "work": (3, "exchanges"),
    "run": (3, "exchanges"),
    "staging": (4, "copies from the device"),
    "send": (5, "sends"),
    "receive": (6, "receives"),
}


@dataclass(frozen=True, order=True)
class Line:
    """A line of a process: its position, its name, and its number among lines of that name."""

    order: int
    name: str
    number: int = 0

    @property
    def title(self) -> str:
        """The title in a viewer."""
        return self.name if not self.number else f"{self.name} ({self.number + 1})"


def lines_of(spans: Sequence[TimedSpan], ends: Sequence[float]) -> list[Line | None]:
    """The line of each span, whose end is given separately; None for spans that are not shown.

    Spans of one line are nested or disjoint.
    """
    found: list[Line | None] = [None] * len(spans)
    open_in: dict[Line, list[int]] = {}  # per line, the open spans
    for place in sorted(range(len(spans)), key=lambda place: (spans[place].begin_s, -ends[place], place)):
        span, first = spans[place], _first_line(spans, place)
        if first is None:
            continue
        around = found[span.within] if span.within >= 0 else None
        tried = [around] if around is not None and around.name == first.name else []
        tried += [line for line in open_in if line.name == first.name and line not in tried]
        line = next((line for line in tried if _fits(open_in[line], spans, ends, place)), None)
        if line is None:
            line = Line(first.order, first.name, sum(known.name == first.name for known in open_in))
        open_in.setdefault(line, []).append(place)
        found[place] = line
    return found


def _first_line(spans: Sequence[TimedSpan], place: int) -> Line | None:
    span = spans[place]
    if span.kind == "work" and span.key < 0:
        return None  # a message, which is shown, or a mere order
    if span.kind in ("send", "receive") and is_moment(spans, span):
        return Line(2, "memory")
    if span.kind in _NAMES:
        return Line(*_NAMES[span.kind])
    if span.kind in _DRIVEN:
        return Line(2, "memory")
    return Line(0, TRAINING) if span.kind in _COMPUTE or span.thread == TRAINING else Line(1, span.thread)


def is_moment(spans: Sequence[TimedSpan], span: TimedSpan) -> bool:
    """Whether a span has no duration: work of compiled code, which is reported after the call."""
    return span.within >= 0 and spans[span.within].kind == "advance"


def _fits(open_here: list[int], spans: Sequence[TimedSpan], ends: Sequence[float], place: int) -> bool:
    """Whether a span fits a line: the line must be empty there, or inside an enclosing span."""
    while open_here and ends[open_here[-1]] <= spans[place].begin_s:
        open_here.pop()
    if not open_here:
        return True
    around = open_here[-1]
    if ends[place] > ends[around]:
        return False
    return spans[place].kind not in _NAMES or around == spans[place].within


_SHOWN: frozenset[Kind] = frozenset(
    {"forward", "backward", "optimizer", "wait", "update", "compute", "reduce", "copy", "advance", "send", "receive"}
)


@dataclass(frozen=True)
class Bar:
    """A bar of a process, in seconds since the iteration's start. ``kind`` is the kind of its span."""

    begin_s: float
    end_s: float
    kind: Kind


@dataclass(frozen=True)
class Iteration:
    """The ``number``-th of ``count`` iterations of a run, in process order. ``error_s`` bounds the clock error."""

    title: str
    number: int
    count: int
    length_s: float
    processes: tuple[tuple[str, tuple[Bar, ...]], ...]
    error_s: float = 0.0


def middle(run: RecordedRun) -> Iteration | None:
    """An iteration in the middle of a run; None if there is none."""
    if not run.processes:
        return None
    times = [times_of(process) for process in run.processes]
    known_s = min((max(begins, default=0.0) for begins, _ in times), default=0.0)
    first, (_, ends) = run.processes[0], times[0]
    steps = [end for span, end in zip(first.spans, ends, strict=True) if span.kind == "optimizer" and span.end_s]
    steps = [end for end in sorted(steps) if end <= known_s or not any(one.left_out for one in run.processes)]
    if len(steps) < 2:
        return None
    number = len(steps) // 2
    start, stop = steps[number - 1], steps[number]
    coming = _coming(run, [begins for begins, _ in times])
    shown = tuple(
        (name_of(process), _bars(process, begins, ends, start, stop))
        for process, begins, (_, ends) in zip(run.processes, coming, times, strict=True)
    )
    error_s = max(offset_of(process.notes).error_s for process in run.processes)
    return Iteration(run.title, number + 1, len(steps), stop - start, shown, error_s)


def _coming(run: RecordedRun, begins: Sequence[Sequence[float]]) -> list[list[float]]:
    """The start times of spans; for a receive, the start of its message's send."""
    found = [
        [math.inf if span.kind == "receive" else begin for span, begin in zip(process.spans, times, strict=True)]
        for process, times in zip(run.processes, begins, strict=True)
    ]
    for (sender, send), (receiver, receive) in messages_of(run):
        found[receiver][receive] = max(begins[receiver][receive], begins[sender][send])
    return found


def _bars(
    process: ProcessSpans, begins: Sequence[float], ends: Sequence[float], start: float, stop: float
) -> tuple[Bar, ...]:
    """The bars of a process between two times, clipped to them."""
    return tuple(
        Bar(max(begin, start) - start, min(end, stop) - start, span.kind)
        for span, begin, end in zip(process.spans, begins, ends, strict=True)
        if span.kind in _SHOWN and begin < stop and end > max(start, begin) and not is_moment(process.spans, span)
    )
