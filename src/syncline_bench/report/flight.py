"""A flight record as lines, as the parts of a page, and in the format of PyTorch's flight recorder.

The chart shows the operations of every process around the one in which others waited. ``torch_dumps`` are the objects
that ``torchfrtrace`` (``torch.distributed.flight_recorder``) expects, one per rank: its analyzer looks for the first
collective that some rank has not joined, or joined with another type, size or state. It knows the collectives of torch
only, so an operation without a counterpart there is an ``all_reduce``, and the backend is called ``gloo``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from syncline.plans.plan import ranks_text
from syncline.timeline.flight import FlightOperation, FlightRecord, ProcessFlight, judge

from . import units
from .columns import Column, Table
from .figures import Chart, Key, new_figure, styled, svg

_ENDED, _OPEN = "#0072B2", "#D55E00"
_BEFORE, _LEAST_S = 0.2, 0.05
"""The chart begins by this share of the waiting time, and at least by this time, before the operation."""
_LINE_CHARACTERS = 400

_TORCH_VERSION = "2.10"
_TYPES = {"broadcast": "broadcast", "barrier": "barrier", "reduce": "reduce", "scatter": "scatter"}


def _last(part: ProcessFlight) -> str:
    """The operation in which a process was, or the last one that it had finished."""
    found = [one for one in part.operations if one.is_open]
    if found:
        more = f" and {len(found) - 1} more" * (len(found) > 1)
        return f"in {found[0].text}{more}, for {units.seconds(max(0.0, part.at_s - found[0].begin_s))}"
    return f"after {part.operations[-1].text}" if part.operations else "before any operation"


def _waits(part: ProcessFlight) -> str:
    """The processes that a process waited for. Without a fault only whether it waited is known."""
    if part.fault is None:
        return "somebody" if part.blocked_s else units.MISSING
    return ranks_text(sorted(part.fault.waits)) if part.fault.waits else "nobody"


def fate(part: ProcessFlight) -> str:
    """The last words of a process, or else the end that its launcher saw."""
    return part.ended or "left no error" if part.fault is None else f"{part.fault.kind}: {part.fault.text}"


def _place(part: ProcessFlight) -> str:
    return (part.fault.place if part.fault is not None else "") or units.MISSING


COLUMNS: tuple[Column[ProcessFlight], ...] = (
    Column("process", "name", kind="name"),
    Column("was", by=_last, kind="text", means="the operation in which it was, or its last one"),
    Column("waited for", by=_waits, kind="text", means="the processes whose data it waited for, as far as it knew"),
    Column("script at", by=_place, kind="text", means="the place of its main thread at the fault"),
    Column("operations", by=lambda part: str(part.begun), means="how many operations it had begun"),
)


def lines(record: FlightRecord) -> Iterator[str]:
    """A flight record for a terminal: the verdict, then a line on each process."""
    yield record.verdict
    for part in record.parts:
        said = f"  {part.name}: {_last(part)}; waited for {_waits(part)}; script at {_place(part)}; {fate(part)}"
        yield said if len(said) <= _LINE_CHARACTERS else f"{said[:_LINE_CHARACTERS]} ..."
    yield from (f"  {name} left no record" for name in absent(record))
    yield from record.unread


def absent(record: FlightRecord) -> list[str]:
    """The names of the processes that left no record."""
    here = {part.process for part in record.parts}
    numbers = [one for one in range(record.processes) if one not in here]
    return [f"rank {one}" if one < record.workers else f"server {one - record.workers}" for one in numbers]


def table(record: FlightRecord) -> Table[ProcessFlight]:
    """The processes as a table."""
    return Table(COLUMNS, record.parts, title="Processes")


@styled()
def flight_chart(record: FlightRecord) -> Chart:
    """The operations of every process around the one in which others waited, on the wall clock."""
    parts = record.parts
    ends = [part.at_s + part.wall_s for part in parts]
    last_s = max(ends)
    found = judge(parts, record.culprits[0] if len(record.culprits) == 1 else -1).operation
    begins = [
        one.begin_s + part.wall_s
        for part in parts
        for one in part.operations
        if one.is_open and (found is None or one.same == found.same)
    ]
    first_s = min(begins, default=last_s)
    first_s -= max(_LEAST_S, _BEFORE * (last_s - first_s))
    figure, axes = new_figure(0.7 + 0.35 * len(parts))
    axes.set_ylim(len(parts) - 0.2, -0.3)
    axes.set_xlim(0, last_s - first_s)
    axes.grid(visible=False, axis="y")
    axes.set_yticks([place + 0.25 for place in range(len(parts))], [part.name for part in parts])
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("seconds")
    for place, (part, end_s) in enumerate(zip(parts, ends, strict=True)):
        for is_open, color in ((False, _ENDED), (True, _OPEN)):
            bars = [
                (max(one.begin_s + part.wall_s, first_s) - first_s, (one.end_s + part.wall_s if one.end_s else end_s))
                for one in part.operations
                if one.is_open is is_open and not one.tolerant
            ]
            shown = [(begin, end - first_s - begin) for begin, end in bars if end > first_s]
            hatch = "////" if is_open else None
            axes.broken_barh(shown, (place, 0.5), facecolor=color, hatch=hatch, edgecolor="none", lw=0)
    title = "Operations before the end"
    caption = (
        "The exchanges that each process had begun, from begin to end, on the wall clocks of the hosts. One that is not"
        " finished ends here with the fault that the process saw, or with its last sign of life."
    )
    keys = (Key("finished", _ENDED), Key("not finished", _OPEN, hatched=True))
    return Chart(title, caption, svg(figure, title), keys)


# For PyTorch's analyzer

_Same = tuple[int, int, tuple[int, ...]]


def torch_dumps(record: FlightRecord) -> dict[int, dict[str, Any]]:
    """For each process that left a record, what a rank of torch would have dumped."""
    begun: dict[_Same, float] = {}
    for part in record.parts:
        for one in part.operations:
            same = _same(part, one)
            begun[same] = min(begun.get(same, math.inf), one.begin_s + part.wall_s)
    numbers = {same: number for number, same in enumerate(sorted(begun, key=lambda same: (begun[same], same)))}
    return {part.process: _dump(part, numbers) for part in record.parts}


def _same(part: ProcessFlight, one: FlightOperation) -> _Same:
    return *one.same, tuple(part.members(one))


def _dump(part: ProcessFlight, numbers: Mapping[_Same, int]) -> dict[str, Any]:
    everyone = tuple(range(part.processes))
    groups, entries = {_group(everyone): everyone}, list[dict[str, Any]]()
    for one in part.operations:
        same = _same(part, one)
        groups[_group(same[2])] = same[2]
        if not one.tolerant:
            entries.append(_entry(part, one, numbers[same], _group(same[2])))
    entries.sort(key=lambda entry: entry["record_id"])
    config = {name: {"name": name, "desc": desc, "ranks": str(list(ranks))} for (name, desc), ranks in groups.items()}
    return {"version": _TORCH_VERSION, "pg_config": config, "entries": entries}


def _group(ranks: tuple[int, ...]) -> tuple[str, str]:
    """The name and the description of a group of ranks."""
    return "-".join(map(str, ranks)), ranks_text(ranks)


def _entry(part: ProcessFlight, one: FlightOperation, number: int, group: tuple[str, str]) -> dict[str, Any]:
    sizes, created = [[max(0, one.nbytes)]], round((one.begin_s + part.wall_s) * 1e9)
    ended = round((one.end_s + part.wall_s) * 1e9) if one.end_s else None
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": group,
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "is_p2p": False,
        "profiling_name": f"gloo:{_TYPES.get(one.label, 'all_reduce')}",
        "time_created_ns": created,
        "time_discovered_started_ns": created,
        "time_discovered_completed_ns": ended,
        "duration_ms": None if ended is None else (ended - created) / 1e6,
        "input_sizes": sizes,
        "output_sizes": sizes,
        "input_dtypes": ["Byte"],
        "output_dtypes": ["Byte"],
        "state": "started" if ended is None else "completed",
        "retired": ended is not None,
        "timeout_ms": 0,
        "frames": [{"name": one.text, "filename": "syncline", "line": 0}],
    }
