"""Finds out what the processes of a recorded run did: iterations, stages, exchanges and links. It judges nothing.

**An iteration** of a worker lasts from one end of its optimizer's step to the next. Without optimizer steps it begins
where the worker agrees with the others on a step. Iterations of different workers belong together if their ends are
closest. The first one is left out: a run warms up, and exchanges nothing before the end of its first backward pass.

**Stages** divide the time of the training thread, the innermost span first. Time before a forward pass that no span
covers is ``loading``; other such time is the ``script``'s.

**A message** occupies its link from the start of its send or receive, whichever is later, to the end of its receive. A
send may end earlier, because the kernel buffers it. A link is busy while a message occupies it. Over shared memory no
message is recorded, so there are no links.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from syncline.costs.cluster import Floats
from syncline.engine.trace import Kind
from syncline.errors import DataError, UsageError
from syncline.timeline.chrome import RecordedRun, name_of, times_of
from syncline.timeline.spans import TRAINING, ProcessSpans, TimedSpan
from syncline.wire.meeting import printable

Stage = Literal["loading", "forward", "backward", "optimizer", "wait", "script", "update"]
STAGES: tuple[Stage, ...] = get_args(Stage)

MOST_STEPS = 24
"""The iterations that are looked at, from the middle of the run."""

_FULL = 0.85
"""The share of cores' time from which they count as busy all the time."""

AGREEING = "a training step"
"""The label of the exchange in which workers agree on a step before its buckets."""

_OF_KIND: Mapping[Kind, Stage] = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "wait": "wait",
    "update": "update",
}

Interval = tuple[float, float]


class Stretch(NamedTuple):
    """A part of a training thread's time: in one stage, within one span or none."""

    begin_s: float
    end_s: float
    stage: Stage
    label: str = ""


class ExchangeSpan(NamedTuple):
    """An exchange on one process: when it was submitted, began and ended there."""

    key: int
    label: str
    nbytes: int
    submit_s: float
    begin_s: float
    end_s: float


class Message(NamedTuple):
    """A message whose both ends are known. It occupies its link from ``ready_s`` to ``end_s``."""

    src: int
    dst: int
    nbytes: int
    key: int
    sent_s: float
    ready_s: float
    end_s: float


@dataclass(frozen=True)
class Side:
    """One process: its training thread, its exchanges, and the time in codecs and in updates of weights."""

    number: int
    name: str
    server: bool
    thread: tuple[Stretch, ...]
    exchanges: tuple[ExchangeSpan, ...]
    coding: tuple[Interval, ...]
    serving: tuple[Interval, ...]
    """Updates of weights by an owner here, and additions and copies of what it received."""
    owns: bool = False
    """Whether it updates weights for others, too."""


@dataclass(frozen=True)
class Link:
    """The messages of one direction between two processes, in the order of their ends."""

    messages: tuple[Message, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of all messages together."""
        return sum(message.nbytes for message in self.messages)

    @property
    def busy(self) -> list[Interval]:
        """The times in which the link was occupied."""
        return union((message.ready_s, message.end_s) for message in self.messages)

    @property
    def bytes_per_s(self) -> float:
        """The mean rate while it was busy."""
        busy_s = total(self.busy)
        return float(self.nbytes / busy_s) if busy_s > 0 else float("inf")


class Cores(NamedTuple):
    """Cores that processes of the run had in common, and how many of them were busy in the mean over the run."""

    host: str
    number: int
    processes: int
    own: float
    others: float

    @property
    def full(self) -> bool:
        """Whether hardly any of them was idle."""
        return self.own + self.others >= _FULL * self.number


@dataclass(frozen=True)
class Activity:
    """The activity in the iterations that are examined.

    ``stages`` has the seconds of each stage by worker and iteration, ``steps`` the begin and the end of each worker's
    iterations. ``window`` is the time from the first begin to the last end.
    """

    title: str
    workers: tuple[Side, ...]
    servers: tuple[Side, ...]
    steps: Floats
    stages: Mapping[Stage, Floats]
    links: Mapping[tuple[int, int], Link]
    count: int
    strategy: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict)
    cores: tuple[Cores, ...] = ()
    """Empty if the recording does not tell, as of a run that was killed."""

    @property
    def step_s(self) -> float:
        """The median iteration of all workers."""
        return float(np.median(self.steps[:, :, 1] - self.steps[:, :, 0]))

    @property
    def window(self) -> Interval:
        """The time of all iterations that are looked at."""
        return float(self.steps[:, :, 0].min()), float(self.steps[:, :, 1].max())

    @property
    def own_s(self) -> Floats:
        """The seconds that each worker did not wait, by worker and iteration."""
        lasted: Floats = self.steps[:, :, 1] - self.steps[:, :, 0]
        return lasted - self.stages["wait"]

    @property
    def sides(self) -> tuple[Side, ...]:
        """The numbers of all processes, workers first."""
        return (*self.workers, *self.servers)

    def per_step(self, seconds: float) -> float:
        """A sum over the window as a mean per iteration."""
        return seconds / int(self.steps.shape[1])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time that is in any of the intervals, as disjoint ones in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = found[-1][0], end
        elif end > begin:
            found.append((begin, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """The length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def common(ones: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time that is in both of two lists of disjoint intervals in order."""
    found: list[Interval] = []
    here = there = 0
    while here < len(ones) and there < len(others):
        begin, end = max(ones[here][0], others[there][0]), min(ones[here][1], others[there][1])
        if begin < end:
            found.append((begin, end))
        if ones[here][1] < others[there][1]:
            here += 1
        else:
            there += 1
    return found


def observe(run: RecordedRun) -> Activity:
    """The activity of a run. Raises UsageError for a run that cannot be explained, with the reason."""
    title = f" of {printable(run.title)}" if run.title else ""
    workers = [process for process in run.processes if not is_server(process)]
    if len(workers) < 2:
        count = "no rank" if not workers else "one rank only"
        raise UsageError(
            f"the timeline{title} has {count}, so there is no exchange to explain: record a run of several workers, and"
            " merge the parts of all hosts"
        )
    timed = {int(process.notes["process"]): times_of(process) for process in run.processes}
    threads = [thread_of(process, *timed[int(process.notes["process"])]) for process in workers]
    ends = [_boundaries(process, *timed[int(process.notes["process"])]) for process in workers]
    steps = _aligned(ends)
    if steps is None:
        least = min(map(len, ends))
        raise UsageError(
            f"the timeline{title} has {least} end{'s' * (least != 1)} of iterations that all ranks recorded, and the"
            " first iteration is a warm-up: record at least 3 iterations"
        )
    low, high = float(steps[:, :, 0].min()), float(steps[:, :, 1].max())
    notes = workers[0].notes
    sides = {
        int(process.notes["process"]): _side(process, *timed[int(process.notes["process"])], low, high)
        for process in run.processes
    }
    hosts = {number: side.name.partition(" (")[2].rstrip(")") for number, side in sides.items()}
    return Activity(
        title=printable(run.title),
        workers=tuple(
            replace(sides[int(process.notes["process"])], thread=tuple(thread))
            for process, thread in zip(workers, threads, strict=True)
        ),
        servers=tuple(sides[int(process.notes["process"])] for process in run.processes if is_server(process)),
        steps=steps,
        stages=_stages(threads, steps),
        links=_links(run, timed, low, high),
        count=max(map(len, ends)) - 1,
        strategy=str(notes.get("strategy", "")),
        hosts=hosts,
        cores=_cores(run, hosts),
    )


def _cores(run: RecordedRun, hosts: Mapping[int, str]) -> tuple[Cores, ...]:
    """The use of cores by the processes that have the same. ValueError for notes that no process writes."""
    alike: dict[tuple[str, tuple[int, ...]], list[tuple[float, float]]] = defaultdict(list)
    for process in run.processes:
        if "cores" not in process.notes:
            continue
        try:
            note = process.notes["cores"]
            wall_s, own_s, busy_s = (float(note[name]) for name in ("wall_s", "own_s", "busy_s"))
            usable = tuple(map(int, note["usable"]))
            if not (usable and wall_s > 0 and 0 <= own_s < math.inf and 0 <= busy_s < math.inf):
                raise ValueError
        except (TypeError, KeyError, ValueError, OverflowError):
            raise DataError(f"{name_of(process)!r:.60} has an impossible use of cores: record again") from None
        alike[hosts[int(process.notes["process"])], usable].append((own_s / wall_s, busy_s / wall_s))
    return tuple(
        Cores(host, len(usable), len(uses), own, max(0.0, max(busy for _, busy in uses) - own))
        for (host, usable), uses in alike.items()
        for own in [sum(one for one, _ in uses)]
    )


def is_server(process: ProcessSpans) -> bool:
    """Whether a process is a server."""
    return bool(process.notes.get("server", name_of(process).startswith("server")))


# Training threads


def thread_of(process: ProcessSpans, begins: Sequence[float], ends: Sequence[float]) -> list[Stretch]:
    """The time of the training thread, each part in its innermost span."""
    places = [
        place
        for place, span in enumerate(process.spans)
        if span.kind in ("forward", "backward", "optimizer") or (span.thread == TRAINING and span.kind in _OF_KIND)
    ]
    places.sort(key=lambda place: (begins[place], -ends[place]))
    found: list[Stretch] = []
    around: list[int] = []
    now = begins[places[0]] if places else 0.0

    def go_to(time: float, into: Stage) -> None:
        """Account for the time until then; time in no span belongs to what comes ``into`` view."""
        nonlocal now
        while around and ends[around[-1]] <= time:
            now = _put(found, process, around.pop(), now, ends)
        if around and time > now:
            now = _put(found, process, around[-1], now, ends, time)
        elif time > now:
            found.append(Stretch(now, time, "loading" if into == "forward" else "script"))
            now = time

    for place in places:
        go_to(begins[place], _OF_KIND[process.spans[place].kind])
        around.append(place)
    while around:
        now = _put(found, process, around.pop(), now, ends)
    return found


def _put(
    found: list[Stretch],
    process: ProcessSpans,
    place: int,
    now: float,
    ends: Sequence[float],
    until: float | None = None,
) -> float:
    """Append the part of a span from ``now`` on; return its end."""
    end = ends[place] if until is None else until
    if end > now:
        span = process.spans[place]
        found.append(Stretch(now, end, _OF_KIND[span.kind], span.label))
    return max(now, end)


def _boundaries(process: ProcessSpans, begins: Sequence[float], ends: Sequence[float]) -> list[float]:
    """The ends of a worker's iterations."""
    steps = [end for span, end in zip(process.spans, ends, strict=True) if span.kind == "optimizer" and span.end_s]
    if len(steps) < 2:
        steps = [
            begin
            for span, begin in zip(process.spans, begins, strict=True)
            if span.kind == "work" and span.label.startswith(AGREEING)
        ]
    return sorted(steps)


def _aligned(ends: Sequence[Sequence[float]]) -> Floats | None:
    """The iterations that all workers have recorded, by worker: begins and ends. None if there is none after the first.

    The iterations of other workers are those that end closest to the first worker's.
    """
    lead = ends[0]
    if min(map(len, ends)) < 3:
        return None
    known = min(other[-1] for other in ends)
    half = (lead[-1] - lead[0]) / (len(lead) - 1) / 2
    numbers = [number for number in range(2, len(lead)) if lead[number] <= known + half]
    first = max(0, (len(numbers) - MOST_STEPS) // 2)
    found: list[list[Interval]] = []
    for number in numbers[first : first + MOST_STEPS]:
        row: list[Interval] = []
        for other in ends:
            at = bisect_left(other, lead[number])
            place = min(
                (one for one in (at - 1, at) if 0 < one < len(other)),
                key=lambda one: abs(other[one] - lead[number]),
                default=0,
            )
            row.append((other[place - 1], other[place]))
        if all(row) and (not found or all(mine[1] > before[1] for mine, before in zip(row, found[-1], strict=True))):
            found.append(row)
    return np.array(found, np.float64).transpose(1, 0, 2) if found else None


def _stages(threads: Sequence[Sequence[Stretch]], steps: Floats) -> dict[Stage, Floats]:
    """The seconds of each stage, by worker and iteration."""
    found: dict[Stage, Floats] = {stage: np.zeros(steps.shape[:2]) for stage in STAGES}
    for worker, thread in enumerate(threads):
        begins = [stretch.begin_s for stretch in thread]
        for step, (begin, end) in enumerate(steps[worker].tolist()):
            for stretch in thread[max(0, bisect_right(begins, begin) - 1) : bisect_left(begins, end)]:
                lasted = min(stretch.end_s, end) - max(stretch.begin_s, begin)
                if lasted > 0:
                    found[stretch.stage][worker, step] += lasted
    return found


# Exchanges


def _side(process: ProcessSpans, begins: Sequence[float], ends: Sequence[float], low: float, high: float) -> Side:
    """A process without its thread, in a window of time."""
    submitted: dict[int, float] = {}
    exchanges: list[ExchangeSpan] = []
    coding: list[Interval] = []
    serving: list[Interval] = []
    owns = False
    for span, begin, end in zip(process.spans, begins, ends, strict=True):
        if begin > high or end < low:
            continue
        if span.kind == "work" and span.key >= 0:
            submitted[span.key] = begin
        elif span.kind == "run":
            submit = submitted.get(span.key, begin)
            exchanges.append(ExchangeSpan(span.key, span.label, _bytes_of(span), submit, begin, end))
        elif span.kind == "compute":
            coding.append((begin, end))
        elif span.kind in ("update", "reduce", "copy"):
            serving.append((begin, end))
            owns |= span.kind == "update"
    number = int(process.notes["process"])
    name = printable(name_of(process)).replace("\n", " ")
    return Side(
        number, name, is_server(process), (), tuple(exchanges), tuple(union(coding)), tuple(union(serving)), owns
    )


_BYTES = re.compile(r", (\d{1,18}) bytes\)")


def _bytes_of(span: TimedSpan) -> int:
    """The bytes of an exchange. One of payloads has none of its own, but its label has those of the bucket."""
    match = _BYTES.search(span.label) if span.nbytes < 0 else None
    return int(match.group(1)) if match else max(0, span.nbytes)


def together(activity: Activity) -> list[list[ExchangeSpan]]:
    """The exchanges of workers that belong together, one of each worker, in the order of their begins.

    These have the same key and overlap: none ends before the last one has begun. Others are left out.
    """
    others: list[dict[int, list[ExchangeSpan]]] = []
    for side in activity.workers[1:]:
        by_key: dict[int, list[ExchangeSpan]] = defaultdict(list)
        for exchange in side.exchanges:
            by_key[exchange.key].append(exchange)
        others.append(by_key)
    found = []
    for exchange in activity.workers[0].exchanges:
        row = [exchange]
        for by_key in others:
            its = by_key.get(exchange.key, [])
            at = bisect_right([one.begin_s for one in its], exchange.end_s) - 1
            if at < 0 or its[at].end_s < exchange.begin_s:
                break
            row.append(its[at])
        else:
            found.append(row)
    return found


# Links


def _links(
    run: RecordedRun, timed: Mapping[int, tuple[list[float], list[float]]], low: float, high: float
) -> dict[tuple[int, int], Link]:
    """The links with messages in a window of time."""
    found: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for message in _messages(run, timed, low, high):
        found[message.src, message.dst].append(message)
    return {
        ends: Link(tuple(sorted(messages, key=lambda message: message.end_s)))
        for ends, messages in sorted(found.items())
    }


def _messages(
    run: RecordedRun, timed: Mapping[int, tuple[list[float], list[float]]], low: float, high: float
) -> Iterable[Message]:
    """The messages whose both ends are known, and that ended in the window.

    The sends and receives that agree in all numbers follow each other in time, so the nth send in the window need not
    be the nth receive there: each receive gets the last send that began before the receive's end.
    """
    sends: dict[tuple[int, ...], list[tuple[float, int]]] = defaultdict(list)
    receives: dict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for process in run.processes:
        number = int(process.notes["process"])
        begins, ends = timed[number]
        keys = _keys(process)
        for place, (span, begin, end) in enumerate(zip(process.spans, begins, ends, strict=True)):
            if span.kind == "send" and low <= begin <= high and keys[place] >= -1:
                sends[number, span.peer, keys[place], span.segment, span.step].append((begin, span.nbytes))
            elif span.kind == "receive" and span.end_s and low <= end <= high and keys[place] >= -1:
                receives[span.peer, number, keys[place], span.segment, span.step].append((begin, end))
    for alike, its in receives.items():
        sent = sends.get(alike, [])
        begins = [begin for begin, _ in sent]
        for begin, end in its:
            at = bisect_right(begins, end) - 1
            if at >= 0:
                sent_s, nbytes = sent[at]
                yield Message(alike[0], alike[1], max(0, nbytes), alike[2], sent_s, max(begin, sent_s), end)


def _keys(process: ProcessSpans) -> list[int]:
    """The key of each span's exchange: -1 for none, -2 for a span that has no duration."""
    found: list[int] = []
    for span in process.spans:
        within = process.spans[span.within] if span.within >= 0 else None
        if within is not None and within.kind == "advance":
            found.append(-2)
        else:
            found.append(span.key if span.key >= 0 or within is None else found[span.within])
    return found
