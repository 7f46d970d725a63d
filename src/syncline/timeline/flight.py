"""Reads, merges and judges flight records: the last operations of all processes of a run that ended badly.

The file is JSON in UTF-8:

    format, version     "syncline flight record", 1; another version is refused
    made by             the version of Syncline
    processes, workers  their numbers; processes are numbered workers first, then servers
    verdict             who waited for whom in which operation, as one sentence
    culprits            the processes that the others waited for, or that failed first
    unread              what could not be read, as sentences
    records             one object for each process that left a record:
      process, name     its number and its name, which has the host
      ended             how it ended, if a launcher knows: "was killed by SIGKILL"
      begun             the number of all its operations, of which the last ``engine.flight.ROWS`` are kept
      wall_s            the difference between the wall clock and the clock of its times
      at_s              the time of the fault, or of the last sign of life
      blocked_s         since when a thread has been blocked in Syncline; 0 if none was
      fault             null, or what the process knew at its first fault: kind and text of the error, the culprit
                        or -1, waits as [process, operation], and frames: the stack of the main thread, outside
                        Syncline, innermost call first
      groups            [first key, number of keys, processes]: who takes part in exchanges with these keys. The
                        smallest range counts; exchanges with other keys have all processes
      operations        [number, key, bytes or -1, turn, step or -1, begin, end or 0, tolerant, label], oldest first

An operation is the same on all processes if its key and its turn are (``engine.flight``). A tolerant one may stay
unfinished: a server that waits for a further step.

``judge`` is a pure function. It trusts what processes and launcher say about the process that failed first, except
that an interrupted process is not to blame for a hang that was there before. Then it looks for the operation in which
others waited for that process, or without a culprit for the operation that some process has not entered.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ..engine.flight import BYTES, FAILED, HEAD, HEAD_BYTES, MAGIC, NOTES_BYTES, ROW, ROWS, ROWS_AT, UNUSED
from ..errors import UsageError
from ..plans.plan import ranks_text
from ..version import __version__
from ..wire.meeting import printable

FORMAT, VERSION = "syncline flight record", 1

MOST_BYTES = 1 << 29
"""The largest file that is read."""

_PIECE_BYTES = 1 << 20

_MOST_PROCESSES = 1 << 20
_SHOWN_S = 0.1
_LIBRARIES = "/site-packages/", "/dist-packages/", "/lib/python3", "<frozen "
_TEXT_CHARACTERS = 2000


class FlightOperation(NamedTuple):
    """An exchange, with times of its process's clock. ``end_s`` is 0 if it has not ended."""

    number: int
    key: int
    nbytes: int
    turn: int
    step: int
    begin_s: float
    end_s: float
    tolerant: bool
    label: str

    @property
    def same(self) -> tuple[int, int]:
        """The key and turn that the same operation has on other processes."""
        return self.key, self.turn

    @property
    def is_open(self) -> bool:
        """Whether it should have ended and has not."""
        return not (self.end_s or self.tolerant)

    @property
    def text(self) -> str:
        """Its name, with its training step."""
        return self.label if self.step < 0 else f"{self.label}, step {self.step}"


@dataclass(frozen=True)
class Fault:
    """The knowledge of a process at its first fault, as the file has it."""

    kind: str
    text: str
    culprit: int = -1
    waits: Mapping[int, str] = field(default_factory=dict)
    frames: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The innermost call of the script, or else of a library; empty if it is unknown."""
        own = [frame for frame in self.frames if not any(part in frame for part in _LIBRARIES)]
        return next(iter(own or self.frames), "")


@dataclass(frozen=True)
class ProcessFlight:
    """The record of a process, as the file has it; ``run`` tells runs apart that use one folder."""

    process: int
    name: str
    operations: tuple[FlightOperation, ...] = ()
    begun: int = 0
    wall_s: float = 0.0
    at_s: float = 0.0
    blocked_s: float = 0.0
    fault: Fault | None = None
    ended: str = ""
    groups: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    processes: int = 1
    workers: int = 1
    run: str = ""

    def find(self, operation: FlightOperation) -> FlightOperation | None:
        """The same operation of this process."""
        return next((one for one in self.operations if one.same == operation.same), None)

    def members(self, operation: FlightOperation) -> Sequence[int]:
        """The processes that take part in an operation."""
        fits = [group for group in self.groups if group[0] <= operation.key < group[0] + group[1]]
        return min(fits, key=lambda group: group[1])[2] if fits else range(self.processes)


ABSENT, INSIDE, ELSEWHERE = range(3)
"""The relation of the process at fault to an operation: it has not entered it, is in it, or neither."""


class _Awaited(NamedTuple):
    """An operation that has not ended, when it began by the wall clock, and the processes that had not entered it."""

    relation: int
    at_s: float
    operation: FlightOperation
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """One sentence, the processes at fault if known, and the operation in which others waited for them.

    It ``tells`` nothing if a script failed by itself while no other process waited: then its own error says all.
    """

    text: str
    culprits: tuple[int, ...] = ()
    operation: FlightOperation | None = None
    tells: bool = True


@dataclass(frozen=True)
class FlightRecord:
    """A flight record: the processes that left one, by number, and the verdict."""

    processes: int
    workers: int
    parts: tuple[ProcessFlight, ...]
    verdict: str
    culprits: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()
    tells: bool = field(default=True, compare=False)
    """What its verdict says (``Verdict``); a file that was written tells something."""


# Reading and writing


def load(path: Path) -> FlightRecord:
    """Read a flight record. Raises UsageError for other files, other versions, and damaged ones."""
    try:
        with path.open("rb") as file:
            # Piece by piece: one call would take the memory for all of them, however small the file.
            data = b"".join(islice(iter(partial(file.read, _PIECE_BYTES), b""), MOST_BYTES // _PIECE_BYTES + 1))
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        return _record(json.loads(data))
    except RecursionError:
        raise UsageError(f"{path} is not a flight record: it is nested too deeply") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is not a flight record of this version of Syncline: {why}") from None


def dump(record: FlightRecord) -> str:
    """A flight record as the text of its file."""
    return json.dumps(
        {
            "format": FORMAT,
            "version": VERSION,
            "made by": f"syncline {__version__}",
            "processes": record.processes,
            "workers": record.workers,
            "verdict": record.verdict,
            "culprits": record.culprits,
            "unread": record.unread,
            "records": [_as_json(part) for part in record.parts],
        }
    )


def _as_json(part: ProcessFlight) -> dict[str, Any]:
    found = {name: getattr(part, name) for name in ("process", "name", "ended", "begun", "wall_s", "at_s", "blocked_s")}
    fault = part.fault
    told = None if fault is None else {**vars(fault), "waits": sorted(fault.waits.items())}
    return {**found, "fault": told, "groups": part.groups, "operations": part.operations}


def _record(said: Any) -> FlightRecord:
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        raise ValueError(f"it does not say that its format is {FORMAT!r}")
    if said.get("version") != VERSION:
        raise ValueError(f"its version is {said.get('version')!r}, and this one reads version {VERSION}")
    processes, workers = _whole(said["processes"], 1, _MOST_PROCESSES), _whole(said["workers"], 1, _MOST_PROCESSES)
    parts = tuple(
        replace(_part(one, processes), processes=processes, workers=workers) for one in _several(said["records"])
    )
    culprits = tuple(_whole(one, 0, processes - 1) for one in _several(said["culprits"]))
    unread = tuple(_text(one) for one in _several(said["unread"]))
    return FlightRecord(processes, workers, parts, _text(said["verdict"]), culprits, unread)


def _part(said: Any, processes: int) -> ProcessFlight:
    fault, operations = said["fault"], _several(said["operations"])
    if len(operations) > ROWS:
        raise ValueError(f"a process has {len(operations)} operations, and a record keeps {ROWS}")
    return ProcessFlight(
        _whole(said["process"], 0, processes - 1),
        _text(said["name"]),
        tuple(_operation(*one) for one in operations),
        begun=_whole(said["begun"]),
        wall_s=_number(said["wall_s"]),
        at_s=_number(said["at_s"]),
        blocked_s=_number(said["blocked_s"]),
        fault=None if fault is None else _fault(fault, processes),
        ended=_text(said["ended"]),
        groups=tuple(_group(one, processes) for one in _several(said["groups"])),
    )


def _fault(said: Any, processes: int) -> Fault:
    waits = {_whole(peer, 0, processes - 1): _text(label) for peer, label in _several(said["waits"])}
    frames = tuple(_text(one) for one in _several(said["frames"]))
    return Fault(_text(said["kind"]), _text(said["text"]), _whole(said["culprit"], -1, processes - 1), waits, frames)


def _group(said: Any, processes: int) -> tuple[int, int, tuple[int, ...]]:
    first, keys, members = said
    return _whole(first), _whole(keys), tuple(_whole(one, 0, processes - 1) for one in _several(members))


def _operation(number: Any, key: Any, nbytes: Any, turn: Any, step: Any, *rest: Any) -> FlightOperation:
    begin_s, end_s, tolerant, label = rest
    whole = _whole(number), _whole(key, -(1 << 63)), _whole(nbytes, -1), _whole(turn), _whole(step, -1)
    return FlightOperation(*whole, _number(begin_s), _number(end_s), bool(tolerant), _text(label))


def _whole(said: Any, least: int = 0, most: int = (1 << 63) - 1) -> int:
    if type(said) is not int or not least <= said <= most:
        raise ValueError(f"{str(said)[:40]!r} is not a whole number from {least} to {most}")
    return said


def _number(said: Any) -> float:
    if type(said) not in (int, float) or not math.isfinite(said):
        raise ValueError(f"{str(said)[:40]!r} is not a number")
    return float(said)


def _text(said: Any) -> str:
    if not isinstance(said, str):
        raise ValueError(f"{str(said)[:40]!r} is not a text")
    return printable(said.replace("\n", " "))[:_TEXT_CHARACTERS]


def _several(said: Any) -> Sequence[Any]:
    if not isinstance(said, list | tuple):
        raise ValueError(f"{str(said)[:40]!r} is not a list")
    return said


# The memory of a process


def parse(memory: bytes, ended: str = "") -> ProcessFlight | None:
    """The record in the memory of a process; None if it is unused. Raises ValueError if no process of this version
    wrote it. ``ended`` tells how the process ended."""
    if len(memory) != BYTES:
        raise ValueError(f"it has {len(memory)} bytes")
    magic, state, process, noted, blocked_s, _ = HEAD.unpack_from(memory)
    if not any(magic):
        return None
    if magic != MAGIC or noted > NOTES_BYTES or not math.isfinite(blocked_s) or process >= _MOST_PROCESSES:
        raise ValueError("it does not start like a record of this version")
    if state == UNUSED:
        return None
    notes, groups, fault = dict[str, Any](), list[Any](), None
    try:
        for line in memory[HEAD_BYTES : HEAD_BYTES + noted].split(b"\n")[:-1]:
            said = json.loads(line)
            if "group" in said:
                groups.append(said["group"])
            elif "fault" in said:
                fault = said["fault"] if state == FAILED else None
            else:
                notes |= said
        processes = _whole(notes["processes"], 1, _MOST_PROCESSES)
        operations = _operations(memory)
        last_s = max((max(one.begin_s, one.end_s) for one in operations), default=0.0)
        return ProcessFlight(
            _whole(process, 0, processes - 1),
            _text(notes["name"]),
            operations,
            begun=operations[-1].number if operations else 0,
            wall_s=_number(notes["wall_s"]),
            at_s=max(last_s, blocked_s) if fault is None else _number(fault["at_s"]),
            blocked_s=blocked_s,
            fault=None if fault is None else _fault(fault, processes),
            ended=ended,
            groups=tuple(_group(one, processes) for one in groups),
            processes=processes,
            workers=_whole(notes["workers"], 1, processes),
            run=_text(notes["run"]),
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"its notes are not those of this version: {error}") from None


def _operations(memory: bytes) -> tuple[FlightOperation, ...]:
    """The operations of a ring of rows, oldest first."""
    found = []
    for number, *rest, label in ROW.iter_unpack(memory[ROWS_AT:]):
        if number:
            found.append(_operation(number, *rest, label.rstrip(b"\0").decode(errors="replace")))
    found.sort()
    last = found[-1].number if found else 0
    return tuple(one for one in found if one.number > last - ROWS)


# The verdict


def merge(
    parts: Iterable[ProcessFlight],
    unread: Iterable[str] = (),
    culprit: int = -1,
    ended: Mapping[int, str] | None = None,
) -> FlightRecord | None:
    """The record of a run from those of its processes; None if there is none. A launcher may know the ``culprit``,
    and how processes ``ended``."""
    kept = tuple(sorted(parts, key=lambda part: part.process))
    if not kept:
        return None
    verdict = judge(kept, culprit, ended or {})
    processes, workers = kept[0].processes, kept[0].workers
    return FlightRecord(processes, workers, kept, verdict.text, verdict.culprits, tuple(unread), verdict.tells)


def judge(parts: Sequence[ProcessFlight], culprit: int = -1, ended: Mapping[int, str] | None = None) -> Verdict:
    """Tell who waited for whom in which operation. ``culprit`` and ``ended`` are what a launcher knows, if any."""
    known = {part.process: part for part in parts}
    for part in parts:
        if part.fault is not None and part.fault.kind == "MismatchError":
            return Verdict(part.fault.text)
    culprit = _culprit(parts, culprit)
    fate = _fate(known.get(culprit), ended or {}, culprit)
    faults = [(part.process, part.fault) for part in parts if part.fault is not None and part.process != culprit]
    waits = {process: fault.waits[culprit] for process, fault in faults if culprit in fault.waits}
    found = _awaited(parts, known, culprit)
    if found is None or (waits and found.relation == ELSEWHERE):
        text = _unrelated(culprit, fate, waits, parts[0].workers)
        died = culprit in known and known[culprit].fault is None  # without a word
        tells = died or found is not None or any(fault.waits for _, fault in faults)
        return Verdict(text, (culprit,) if culprit >= 0 else (), tells=tells)
    several = found.relation == ABSENT and not fate and culprit in known
    guilty = found.missing if culprit < 0 or several else (culprit,)
    return Verdict(_sentence(found, guilty, fate, known), guilty, found.operation)


def _culprit(parts: Sequence[ProcessFlight], told: int) -> int:
    """The process that failed first: what the launcher was told, else what most processes say; -1 if unknown."""
    named = Counter(part.fault.culprit for part in parts if part.fault is not None and part.fault.culprit >= 0)
    first = told if told >= 0 else min(named, key=lambda one: (-named[one], one), default=-1)
    own = next((part.fault for part in parts if part.process == first), None)
    interrupted = own is not None and (own.kind == "ClosedError" or own.text == "KeyboardInterrupt")
    return -1 if interrupted else first


def _awaited(parts: Sequence[ProcessFlight], known: Mapping[int, ProcessFlight], culprit: int) -> _Awaited | None:
    """The operation in which processes waited: one that the culprit has not entered, or else is in, or else any."""
    begun: dict[tuple[int, int, tuple[int, ...]], tuple[float, FlightOperation]] = {}
    for part in parts:
        for operation in part.operations:
            if operation.is_open and part.process != culprit:
                same = *operation.same, tuple(part.members(operation))
                at_s = operation.begin_s + part.wall_s
                begun[same] = min(begun.get(same, (math.inf, operation)), (at_s, operation))
    turns = {part.process: _turns(part) for part in parts}
    found: list[_Awaited] = []
    for (*_, members), (at_s, operation) in begun.items():
        missing = {one for one in members if one in known and not _entered(known[one], turns[one], operation, at_s)}
        missing |= {culprit} & (set(members) - known.keys())
        theirs = known[culprit].find(operation) if culprit in known else None
        inside = theirs is not None and theirs.is_open
        absent = culprit in missing or (culprit < 0 and len(missing) > 0)
        relation = ABSENT if absent else INSIDE if inside else ELSEWHERE
        found.append(_Awaited(relation, at_s, operation, tuple(sorted(missing))))
    return min(found, default=None)


def _turns(part: ProcessFlight) -> dict[int, int]:
    """The last turn of each key that a process has begun."""
    return {one.key: one.turn for one in part.operations}


def _entered(part: ProcessFlight, turns: Mapping[int, int], operation: FlightOperation, at_s: float) -> bool:
    """Whether a process has begun an operation, or may have: others did at ``at_s`` by the wall clock, and its ring
    may have lost it since."""
    lost = part.begun > len(part.operations) > 0 and part.operations[0].begin_s + part.wall_s > at_s
    return lost or turns.get(operation.key, 0) >= operation.turn


def _unrelated(culprit: int, fate: str, waits: Mapping[int, str], workers: int) -> str:
    """The verdict without an operation; ``waits`` has the messages in which others waited for the culprit."""
    if culprit < 0:
        return "no process was in an operation that others had not entered"
    text = f"{_called([culprit], workers)} {fate or 'failed'}; "
    if not waits:
        return f"{text}no other process was in an operation"
    label = Counter(waits.values()).most_common(1)[0][0]
    return f"{text}{_called([one for one in waits if waits[one] == label], workers)} waited for it in {label}"


def _sentence(found: _Awaited, guilty: Sequence[int], fate: str, known: Mapping[int, ProcessFlight]) -> str:
    """The verdict on an operation."""
    workers, operation = next(iter(known.values())).workers, found.operation
    who, what, waited = _called(guilty, workers), operation.text, "waited for it"
    if not guilty:
        text, waited = f"all processes had entered {what}, which did not end", "waited in it"
    elif guilty[0] not in known:
        text, waited = f"{who} {fate or 'failed'} and left no record", f"waited in {what}"
    elif found.relation == ABSENT:
        text = f"{who} {f'{fate} and ' if fate else ''}did not enter {what}"
    elif found.relation == INSIDE:
        text = f"{who} {fate} in {what}" if fate else f"{who} did not finish {what}"
    else:
        text, waited = f"{who} {fate or 'failed'}", f"waited in {what}"
    there = {one: part for one, part in known.items() if one not in guilty and _waits_in(part, operation)}
    if there:
        waited_s = max(part.at_s - _waits_in(part, operation) for part in there.values())
        text += f"; {_called(sorted(there), workers)} {waited}"
        text += f" for {waited_s:.1f} s" if waited_s >= _SHOWN_S else ""
    for one in guilty:
        fault = known[one].fault if one in known else None
        if fault is not None and fault.place:
            text += f"; {_called([one], workers)} was at {fault.place}"
    return text


def _waits_in(part: ProcessFlight, operation: FlightOperation) -> float:
    """When a process began the same operation, if it has not ended there; else 0."""
    found = part.find(operation)
    return found.begin_s if found is not None and found.is_open else 0.0


def _fate(part: ProcessFlight | None, ended: Mapping[int, str], process: int) -> str:
    """The fate of a process, as the end of a sentence; empty if nothing is known, or if it ended because of others
    or of the wait for it."""
    own = None if part is None else part.fault
    if own is None:
        return ended.get(process, "")
    told = own.kind.startswith("Peer")  # by others, which waited for it
    return f"failed with {own.kind}: {own.text}" if own.culprit == process and not told else ""


def _called(processes: Sequence[int], workers: int) -> str:
    """The names of processes, ranks first, as part of a sentence."""
    ranks, servers = [one for one in processes if one < workers], [one - workers for one in processes if one >= workers]
    told = [ranks_text(ranks)] if ranks else []
    return " and ".join([*told, *(f"server {one}" for one in servers)])
