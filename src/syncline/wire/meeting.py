"""The rendezvous protocol as a state machine, and the records that it exchanges. No sockets, threads or clocks.

Authenticated processes meet at process 0:

    meeting -> process r    welcome             the key that authenticates connections, if the run has no secret
    process r -> meeting    record              its description (``Member``): first, and once
    meeting -> process r    roll                all records (``Roll``), once all processes have come
    process r -> meeting    set, get, add       notes by which the processes of a message library find each other;
    meeting -> process r    value or nothing    each is answered before the next is read
    process r -> meeting    through             it is connected to all others
    meeting -> process r    over                all processes are connected

At any time a process may send ``fault`` because it cannot join, and the meeting because the run does not start. All
processes receive the first fault, late ones too. ``late`` means that a process's time is over; the meeting then names
the missing processes.

A frame is a kind (1 byte), a length (4 bytes) and a body of that length. Each kind has a maximum length, which is
checked before any byte is stored. A record is checked field by field. A process speaks for its own rank only and writes
only its own notes, whose size is limited. A process that breaks a rule ends the start for all and is named.
"""

from __future__ import annotations

import enum
import json
import re
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from ..errors import RollCallError
from .reports import in_bytes


@dataclass(frozen=True)
class Member:
    """A process's description of itself.

    ``index`` counts workers, then servers. ``world`` is the number of processes as this one knows it. Processes with
    the same ``machine`` can share memory; processes with the same ``pid_space`` see each other's pids. All must agree
    on ``terms`` (version, strategy). ``mask`` has a bit for each core that the process may use, in hexadecimal.
    """

    index: int
    world: int
    host: str
    machine: str
    pid: int
    pid_space: str
    address: str
    port: int
    unix: str
    terms: dict[str, str]
    mask: str = "1"

    @property
    def cores(self) -> int:
        """The number of cores that the process may use."""
        return int(self.mask, 16).bit_count()

    @property
    def where(self) -> str:
        """Host and process, for messages."""
        return f"{self.host}, pid {self.pid}"

    def to_text(self) -> str:
        """The record as JSON."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Roll:
    """The group as one process sees it after the roll call."""

    index: int
    members: tuple[Member, ...]
    run: str
    secret: bytes

    @property
    def hosts(self) -> int:
        """The number of hosts. Processes of one host can share memory."""
        return len({member.machine for member in self.members})

    @property
    def crowded(self) -> bool:
        """Whether a host has more processes than cores that these processes may use."""
        processes = Counter(member.machine for member in self.members)
        masks = dict.fromkeys(processes, 0)
        for member in self.members:
            masks[member.machine] |= int(member.mask, 16)
        return any(count > masks[machine].bit_count() for machine, count in processes.items())

    @property
    def near(self) -> frozenset[int]:
        """The other processes of this process's host."""
        here = self.members[self.index].machine
        return frozenset(peer.index for peer in self.members if peer.machine == here and peer.index != self.index)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The host number of every process. Hosts are numbered in order of appearance."""
        order: dict[str, int] = {}
        return tuple(order.setdefault(member.machine, len(order)) for member in self.members)

    def name(self, index: int) -> str:
        """The name of a process in messages."""
        return f"rank {index} ({self.members[index].where})"


_MASK = re.compile("[0-9a-f]{1,2048}")
"""A mask of up to 8192 cores, the maximum of Linux."""
_KINDS: Mapping[str, type] = {"int": int, "str": str, "dict[str, str]": dict}


def read_member(text: str | bytes) -> Member:
    """The process that a text describes. Raises RollCallError for other text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return check_member(found)


def check_member(found: Any) -> Member:
    """The process that decoded JSON describes. Raises RollCallError for other values."""
    names = {one.name: _KINDS[str(one.type)] for one in fields(Member)}
    right = isinstance(found, dict) and found.keys() == names.keys()
    if not right or any(type(found[name]) is not kind for name, kind in names.items()):
        raise _unknown()
    terms: dict[Any, Any] = found["terms"]
    numbers = (found["index"], found["world"], found["pid"], found["port"])
    if not all(0 <= number < 1 << 32 for number in numbers) or found["port"] >= 1 << 16:
        raise _unknown()
    if not all(isinstance(value, str) for value in terms.values()) or not _MASK.fullmatch(found["mask"]):
        raise _unknown()
    # Messages show these texts, which must not control a terminal or begin a line.
    shown = {name: printable(found[name]).replace("\n", "\N{REPLACEMENT CHARACTER}") for name in ("host", "address")}
    return Member(**found | shown)


def printable(text: str) -> str:
    """A text of another process without control characters of terminals."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _unknown() -> RollCallError:
    return RollCallError("its record does not fit this version: does it run another version of Syncline?")


class Kind(enum.IntEnum):
    """The kind of a frame."""

    RECORD = 1
    THROUGH = 2
    FAULT = 3
    LATE = 4
    SET = 5
    GET = 6
    ADD = 7
    ROLL = 8
    OVER = 9
    VALUE = 10
    NOTHING = 11
    WELCOME = 12


class State(enum.Enum):
    """The progress of a process in the meeting."""

    PROVED = "before its record"
    COME = "before the roll"
    CALLED = "while the connections are made"
    THROUGH = "after its connections stood"


SECRET_BYTES = 64
RECORD_BYTES = 1 << 14
FAULT_BYTES = 4000
KEY_BYTES = 512
VALUE_BYTES = 1 << 20
NOTES_BYTES = 2 << 20
"""The limit for the notes of one process. Each counts with its key and NOTE_BYTES more."""
NOTE_BYTES = 64
_NAMED = 16
"""The maximum number of missing processes that an error names. It counts the others."""

_HEAD = struct.Struct("<BI")
_KEY = struct.Struct("<H")
AMOUNT = struct.Struct("<q")

HEARD: Mapping[Kind, int] = {
    Kind.RECORD: RECORD_BYTES,
    Kind.THROUGH: 0,
    Kind.FAULT: FAULT_BYTES,
    Kind.LATE: 16,
    Kind.SET: _KEY.size + KEY_BYTES + VALUE_BYTES,
    Kind.GET: _KEY.size + KEY_BYTES,
    Kind.ADD: _KEY.size + KEY_BYTES + AMOUNT.size,
}
"""The kinds of frames that processes may send, with their maximum lengths."""

_MAY: Mapping[State, frozenset[Kind]] = {
    State.PROVED: frozenset({Kind.RECORD, Kind.FAULT, Kind.LATE}),
    State.COME: frozenset({Kind.FAULT, Kind.LATE}),
    State.CALLED: frozenset({Kind.SET, Kind.GET, Kind.ADD, Kind.THROUGH, Kind.FAULT, Kind.LATE}),
    State.THROUGH: frozenset({Kind.FAULT, Kind.LATE}),
}


def told(world: int) -> Mapping[Kind, int]:
    """The kinds of frames that the meeting of ``world`` processes may send, with their maximum lengths."""
    roll = (world + 1) * (RECORD_BYTES + 2)
    return {
        Kind.WELCOME: SECRET_BYTES,
        Kind.ROLL: roll,
        Kind.OVER: 0,
        Kind.FAULT: FAULT_BYTES,
        Kind.VALUE: VALUE_BYTES,
        Kind.NOTHING: 0,
    }


class Broken(Exception):
    """A frame that breaks a rule of the meeting; the text names the rule."""


def frame(kind: Kind, body: bytes = b"") -> bytes:
    """A frame as bytes."""
    return _HEAD.pack(kind, len(body)) + body


def fault_frame(text: str) -> bytes:
    """A fault, truncated to the maximum length."""
    return frame(Kind.FAULT, in_bytes(text)[:FAULT_BYTES].decode(errors="ignore").encode())


def note(key: str, value: bytes = b"") -> bytes:
    """The body of ``set``, ``get`` and ``add``. ValueError for a key or value that is too long."""
    name = key.encode()
    if len(name) > KEY_BYTES or len(value) > VALUE_BYTES:
        raise ValueError(f"a note of {len(name)} and {len(value)} bytes: {KEY_BYTES} and {VALUE_BYTES} are the maximum")
    return _KEY.pack(len(name)) + name + value


def _read_note(body: bytes) -> tuple[bytes, bytes]:
    if len(body) < _KEY.size or (size := _KEY.unpack_from(body)[0]) > min(KEY_BYTES, len(body) - _KEY.size):
        raise Broken("left a note without a key")
    return body[_KEY.size : _KEY.size + size], body[_KEY.size + size :]


class Frames:
    """Divides received bytes into frames. Raises Broken for a kind or length that ``limits`` does not allow."""

    def __init__(self, limits: Mapping[Kind, int]) -> None:
        self._limits = limits
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Append received bytes."""
        self._buffer += data

    def take(self) -> tuple[Kind, bytes] | None:
        """The next frame, or None if it is not complete."""
        if len(self._buffer) < _HEAD.size:
            return None
        number, size = _HEAD.unpack_from(self._buffer)
        if number not in self._limits:
            raise Broken(f"sent a frame of unknown kind {number}")
        kind = Kind(number)
        if size > self._limits[kind]:
            raise Broken(f"announced a {kind.name.lower()} of {size} bytes, but {self._limits[kind]} are the maximum")
        if len(self._buffer) < _HEAD.size + size:
            return None
        body = bytes(self._buffer[_HEAD.size : _HEAD.size + size])
        del self._buffer[: _HEAD.size + size]
        return kind, body


class Say(NamedTuple):
    """A frame for a caller. After the ``last`` one the caller closes the connection."""

    caller: int
    frame: bytes
    last: bool = False


@dataclass
class _Caller:
    """An authenticated connection of ``rank``."""

    rank: int
    origin: str
    state: State = State.PROVED
    member: Member | None = None
    kept_bytes: int = 0

    @property
    def name(self) -> str:
        where = self.origin if self.member is None else self.member.where
        return f"rank {self.rank} ({where})"


@dataclass
class Meeting:
    """The meeting of ``world`` processes. Callers are the numbers of their connections.

    Without a secret the meeting sends ``key`` to all processes, to authenticate their connections. ``hint`` returns
    where a rank was expected (`` (node 1)``).
    """

    world: int
    key: bytes = b""
    hint: Callable[[int], str] = lambda _: ""
    fault: str | None = None
    over: bool = False
    said: deque[Say] = field(default_factory=deque)  # to be sent
    refused: dict[int, str] = field(default_factory=dict)  # by claimed rank: the refusal
    _callers: dict[int, _Caller] = field(default_factory=dict)
    _come: dict[int, _Caller] = field(default_factory=dict)  # by rank
    _told: set[int] = field(default_factory=set)  # ranks that were sent the fault
    _notes: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)  # the writer, and the value
    _counters: dict[bytes, int] = field(default_factory=dict)

    @property
    def awaited(self) -> bool:
        """Whether any rank has not been sent the fault."""
        return len(self._told) < self.world

    def enter(self, number: int, rank: int, origin: str) -> None:
        """Handle a new authenticated connection of ``rank``; ``origin`` is for messages."""
        self._callers[number] = _Caller(rank, origin)
        if self.fault is not None:
            self._tell_fault(number)
        elif self.over:
            self._say(number, b"", last=True)  # it was authenticated before the doors were closed
        else:
            self._say(number, frame(Kind.WELCOME, self.key))

    def hear(self, number: int, kind: Kind, body: bytes) -> None:
        """Handle a caller's frame."""
        caller = self._callers[number]
        if self.fault is not None or self.over:
            return  # the caller has not read the last frame yet
        try:
            if kind not in _MAY[caller.state]:
                raise Broken(f"sent {kind.name.lower()} {caller.state.value}")
            self._obey(number, caller, kind, body)
        except Broken as broken:
            self.break_off(number, str(broken))

    def break_off(self, number: int, how: str) -> None:
        """Handle a caller that has broken a rule."""
        self.fail(
            f"{self._callers[number].name} broke the rules of the meeting: it {how}; does it run another version of"
            " Syncline?"
        )

    def leave(self, number: int) -> None:
        """Handle the end of a caller's connection."""
        caller = self._callers.pop(number)
        if caller.state is not State.PROVED and not self.over:
            self.fail(f"{caller.name} ended while the processes were meeting; see what it printed")

    def fail(self, text: str) -> None:
        """End the start. All processes are sent the text, late ones too. The first text stays."""
        if self.fault is None and not self.over:
            self.fault = printable(text)
            for number in list(self._callers):
                self._tell_fault(number)

    def missing(self, limit_s: float) -> str:
        """The error text for a process whose time is over."""
        if len(self._come) == self.world:
            late = [caller.name for _, caller in sorted(self._come.items()) if caller.state is not State.THROUGH]
            return (
                f"all processes have come, but these are not connected to all others after {limit_s:.0f} s:"
                f" {_some(late)}"
            )
        absent = [rank for rank in range(self.world) if rank not in self._come]
        notes = [f"rank {rank}{self.hint(rank)}{self._seen(rank)}" for rank in absent]
        return (
            f"after {limit_s:.0f} s {len(absent)} of {self.world} processes have not come: {_some(notes)}; see what"
            " they printed, or give more time with init(timeout=)"
        )

    def _seen(self, rank: int) -> str:
        """A note on a missing rank, for messages."""
        silent = [caller.origin for caller in self._callers.values() if caller.rank == rank]
        if silent:
            return f" (it has connected, {silent[0]}, but has not identified itself)"
        return f" ({self.refused[rank]})" if rank in self.refused else ""

    def _say(self, number: int, frame: bytes, last: bool = False) -> None:
        self.said.append(Say(number, frame, last))

    def _tell_fault(self, number: int) -> None:
        assert self.fault is not None
        self._told.add(self._callers[number].rank)
        self._say(number, fault_frame(self.fault), last=True)

    def _obey(self, number: int, caller: _Caller, kind: Kind, body: bytes) -> None:
        match kind:
            case Kind.RECORD:
                self._admit(caller, body)
            case Kind.THROUGH:
                caller.state = State.THROUGH
                if all(other.state is State.THROUGH for other in self._come.values()):
                    self.over = True
                    for each in self._callers:
                        self._say(each, frame(Kind.OVER), last=True)
            case Kind.FAULT:
                self.fail(f"{caller.name}: {body.decode(errors='replace')}")
            case Kind.LATE:
                if not body.isdigit():
                    raise Broken("sent a time limit that is not a number")
                self.fail(self.missing(int(body)))
            case _:
                self._say(number, self._answer(caller, kind, body))

    def _admit(self, caller: _Caller, body: bytes) -> None:
        """Handle a record, whose process joins unless it contradicts another."""
        try:
            member = read_member(body)
        except RollCallError as error:
            self.fail(f"{caller.name}: {error}")
            return
        if member.index != caller.rank:
            raise Broken(f"says that it is rank {member.index}")
        first = self._come.get(caller.rank)
        caller.member = member
        if first is not None and first is not caller:
            assert first.member is not None
            self.fail(
                f"rank {caller.rank} is taken by {first.member.where}; {member.where} claims it too: give every process"
                " its own"
            )
            return
        if member.world != self.world:
            self.fail(
                f"{caller.name} counts {member.world} processes, but rank 0 counts {self.world}: give all processes"
                " the same world size"
            )
            return
        if caller.rank >= self.world:
            raise Broken(f"is not one of the {self.world} processes")
        self._come[caller.rank] = caller
        caller.state = State.COME
        self._compare(caller)
        if len(self._come) == self.world and self.fault is None:
            self._call()

    def _compare(self, caller: _Caller) -> None:
        """Compare terms with rank 0's terms, as soon as rank 0 has come."""
        first = self._come.get(0)
        if first is None or first.member is None:
            return
        mine = first.member.terms
        for other in [caller] if caller is not first else list(self._come.values()):
            assert other.member is not None
            theirs = other.member.terms
            for term in sorted(mine.keys() | theirs.keys()):
                if theirs.get(term) != mine.get(term):
                    self.fail(
                        f"{other.name} has {term} {theirs.get(term)!r}, but {first.name} has {mine.get(term)!r}: all"
                        " ranks need the same"
                    )
                    return

    def _call(self) -> None:
        members = [self._come[rank].member for rank in range(self.world)]
        texts = [member.to_text() for member in members if member is not None]
        roll = frame(Kind.ROLL, f"[{','.join(texts)}]".encode())
        for number, caller in self._callers.items():
            if caller.state is State.COME:
                caller.state = State.CALLED
                self._say(number, roll)  # all callers share these bytes

    def _answer(self, caller: _Caller, kind: Kind, body: bytes) -> bytes:
        """The answer about a note. Only its writer may write it again, and it counts against the writer's limit."""
        key, rest = _read_note(body)
        if kind is Kind.GET:
            if rest:
                raise Broken("asked for a note with a value")
            return frame(Kind.VALUE, self._notes[key][1]) if key in self._notes else frame(Kind.NOTHING)
        if kind is Kind.SET:
            owner, before = self._notes.get(key, (caller.rank, None))
            if owner != caller.rank:
                raise Broken(f"wrote over a note of rank {owner}")
            self._charge(caller, len(rest) - len(before) if before is not None else len(key) + len(rest) + NOTE_BYTES)
            self._notes[key] = caller.rank, rest
            return frame(Kind.VALUE)
        if len(rest) != AMOUNT.size:
            raise Broken("asked to add a value that is not a number")
        if key not in self._counters:
            self._charge(caller, len(key) + NOTE_BYTES)
        count = self._counters.get(key, 0) + AMOUNT.unpack(rest)[0]
        if not -(1 << 63) <= count < 1 << 63:
            raise Broken("counted beyond the limit")
        self._counters[key] = count
        return frame(Kind.VALUE, AMOUNT.pack(count))

    def _charge(self, caller: _Caller, nbytes: int) -> None:
        caller.kept_bytes += nbytes
        if caller.kept_bytes > NOTES_BYTES:
            raise Broken(f"left more than {NOTES_BYTES} bytes in notes")


def read_roll(body: bytes, world: int) -> tuple[Member, ...]:
    """The members of a roll. Raises RollCallError for anything but a roll of ``world`` processes."""
    try:
        members = tuple(check_member(member) for member in json.loads(body))
        if [member.index for member in members] != list(range(world)):
            raise ValueError
        return members
    except (ValueError, TypeError, RecursionError) as error:
        raise RollCallError("the roll does not fit this version: does rank 0 run another version?") from error


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
