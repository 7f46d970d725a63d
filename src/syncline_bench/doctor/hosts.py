"""Checks the hosts of a job pairwise: reachability, bandwidth, clocks, MTU and equal versions.

Owns the course of the check, and the judgement on all hosts' results (``judged``, which is pure). The ranks meet at
rank 0 as in a training. The first rank of each host checks the host, and calls the first ranks of all other hosts at
the addresses on which a training would listen. Then pairs of hosts take turns. In each direction, the sender asks for
the receiver's clock and fills the link until the receiver has timed what arrives.

Ranks leave results as notes in the meeting. Rank 0 waits for each note with a time limit, names the hosts that do not
answer, and judges the others. A fault of one host therefore hides no fault of another.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from syncline.errors import GroupError, HandshakeError, SynclineError
from syncline.launch.child import end_with_launcher
from syncline.launch.connecting import make_room
from syncline.launch.environment import Environment
from syncline.launch.rendezvous import Joined, Rendezvous
from syncline.version import __version__
from syncline.wire.handshake import run_id
from syncline.wire.listener import Listener, dial, read_exactly
from syncline.wire.meeting import printable

from ..lab.lab import arrival_rate, fill
from ..report import units
from .checks import INTERFACE, LIMIT_S, Finding, Status, Way, checks_of, cores, examined, interfaces, versions_here, way

T = TypeVar("T")

wall_clock: Callable[[], float] = time.time
"""The clock whose offset between hosts is measured."""

_DIAL_S = 3.0
_TURN_S = 10.0
"""How long one end of a pair waits for the other, which an earlier pair may delay."""
_STALL_S = 2.0
_SLICE_S = 0.05
"""Of a stream four slices are timed. TCP finds the rate in the first; the best of the others counts."""
_ASKED = 8
_POLL_S = 0.02
_SPARE_S = 10.0
_SAME_VERSION = "run the same version of Syncline on all hosts"

_SLOW = 0.5
"""The share of the fastest link's rate below which a link is slow."""
_CLOCK_S = 0.1
_CLOCK = struct.Struct("<d")

Pair = tuple[int, int]
"""Two hosts, the sender first, by the ranks that check them."""


class Offset(NamedTuple):
    """How far the receiver's clock is ahead of the sender's, and the time there and back, in seconds."""

    ahead_s: float
    trip_s: float


@dataclass
class Seen:
    """The results of the rank that checks a host: the host, its findings, and the hosts that it could not call."""

    rank: int
    host: str
    way: Way
    versions: Mapping[str, str]
    findings: Sequence[Finding]
    unreached: Mapping[int, str]

    def to_json(self) -> bytes:
        """The note for rank 0."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes, ranks: Collection[int]) -> Seen:
        """Read a note. Raises ValueError for other text, and for ranks that are not among ``ranks``."""
        told = _parsed(text, dict)
        found = cls(
            _rank(told.get("rank"), ranks),
            _line(told.get("host")),
            _made(Way, told.get("way")),
            {_line(name): _line(version) for name, version in _of(told.get("versions"), dict).items()},
            [_made(Finding, one) for one in _of(told.get("findings"), list)],
            {_rank(_whole(peer), ranks): _line(why) for peer, why in _of(told.get("unreached"), dict).items()},
        )
        if any(one.status not in get_args(Status) for one in found.findings):
            raise ValueError("a finding has an unknown status")
        return found


@dataclass
class Links:
    """The rates in bits/s of all pairs that were measured, None if the stream stalled, and the clocks."""

    rates: dict[Pair, float | None] = field(default_factory=dict)
    clocks: dict[Pair, Offset] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The note for rank 0."""
        rates = [[*pair, rate] for pair, rate in self.rates.items()]
        return json.dumps([rates, [[*pair, *offset] for pair, offset in self.clocks.items()]]).encode()

    def add_json(self, text: bytes, rank: int, ranks: Collection[int]) -> None:
        """Add the note of a rank, on its links from and to ``ranks``. Raises ValueError for other text."""
        rates, clocks = _parsed(text, list)
        heard, own = Links(), {rank} & set(ranks)
        for source, target, rate in _rows(rates):
            pair = _rank(source, ranks), _rank(target, own)
            heard.rates[pair] = None if rate is None else _measured(rate, 0.0)
        for source, target, ahead_s, trip_s in _rows(clocks):
            pair = _rank(source, own), _rank(target, ranks)
            heard.clocks[pair] = Offset(_measured(ahead_s), _measured(trip_s, 0.0))
        self.rates |= heard.rates
        self.clocks |= heard.clocks


_MOST = 1e15
"""The greatest number that a note may contain, in bits/s or seconds."""


def _parsed(text: bytes, kind: type) -> Any:
    """The JSON of a note. Its values are of no known types yet."""
    try:
        return _of(json.loads(text), kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _of(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.40} is no {kind.__name__}")
    return value


def _rows(value: Any) -> list[list[Any]]:
    return [_of(row, list) for row in _of(value, list)]


def _line(value: Any) -> str:
    """A text of another host, which must not control a terminal or begin a line."""
    return printable(_of(value, str)).replace("\n", " ")


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(f"{text!r:.40} is no rank")
    return int(text)


def _rank(value: Any, ranks: Collection[int]) -> int:
    if _of(value, int) not in ranks:
        raise ValueError(f"rank {value!r:.40} checks no host")
    return int(value)


def _measured(value: Any, least: float = -_MOST) -> float:
    if type(value) not in (int, float) or not least <= value <= _MOST:
        raise ValueError(f"{value!r:.40} is no measurement")
    return float(value)


def _made(kind: type[T], told: Any) -> T:
    """A value of a class of plain fields."""
    kinds = get_type_hints(kind)
    if _of(told, dict).keys() != kinds.keys():
        raise ValueError(f"{told!r:.40} is no {kind.__name__}")
    plain = {name: _of(told[name], each) if each in (int, bool) else _line(told[name]) for name, each in kinds.items()}
    return kind(**plain)


def findings(environment: Environment, timeout_s: float) -> list[Finding] | None:
    """Check the hosts of this rank's job together with all other ranks. Returns the findings on rank 0, else None.

    The ranks have ``timeout_s`` to come. Raises GroupError on other ranks that cannot take part.
    """
    end_with_launcher(environment)
    known, asked = interfaces(), os.environ.get(INTERFACE)
    here = way(environment, asked, known)
    run = f"{environment.run_id}/doctor"
    point = Rendezvous(environment)
    with suppress(SynclineError):  # the check of limits says so
        make_room(environment.world)
    try:
        with point.join(run, None, None if here.fault else asked, timeout_s) as joined:
            here = way(joined.environment, asked, known)  # under mpirun the address of rank 0 is known from here on
            with closing(_Ranks(joined, run, here, known)) as ranks:
                return ranks.check()
    except GroupError as error:
        if environment.rank:
            raise
        alone = examined(checks_of(environment.world, here, known))
        remedy = "Start the ranks that are missing, let their hosts reach rank 0, or give more time with --timeout."
        return [*alone, Finding("reach", "fail", str(error), remedy)]
    finally:
        point.close()


class _Ranks:
    """One rank's part in the check, once it is in the meeting."""

    def __init__(self, joined: Joined, run: str, here: Way, known: Mapping[str, str]) -> None:
        self._client, self._rank, self._run = joined.client, joined.environment.rank, run
        self._here, self._known = here, known
        self._seen: list[Seen] = []
        self._links = Links()
        self._out: dict[int, socket.socket] = {}  # connections to other hosts
        self._faults: list[Finding] = []
        self._doors = Listener(here.address, run_id(run), joined.secret, self._rank, joined.environment.world)
        with ExitStack() as undo:
            undo.callback(self._doors.close)
            terms = {"version": __version__, "command": "doctor"}
            self._roll = self._client.call_roll(self._doors.describe(terms), run, joined.secret)
            undo.pop_all()
        self._leads = [self._roll.nodes.index(node) for node in range(self._roll.hosts)]

    def close(self) -> None:
        """Close the doors and the connections."""
        self._doors.close()
        for sock in self._out.values():
            sock.close()

    def check(self) -> list[Finding] | None:
        """Check, and return the findings on rank 0, None on other ranks."""
        notes_s = LIMIT_S + _SPARE_S + len(self._leads) * 10 * _SLICE_S
        # A host with a bad link stalls with each other host in turn. Rank 0 gives up first, and names late ranks.
        limit_s = (3 if self._rank == 0 else 4) * notes_s + 2 * _STALL_S * len(self._leads)
        self._client.limit(time.monotonic() + limit_s, limit_s)
        if self._rank:
            if self._rank in self._leads:
                self._take_part(notes_s)
        else:
            try:
                self._take_part(notes_s)
            except GroupError as error:  # a rank has ended: the others' results so far still count
                self._faults.append(Finding("reach", "fail", str(error), "Look at the output of that rank."))
            self._client.limit(time.monotonic() + _STALL_S, _STALL_S)
        with suppress(GroupError):  # rank 0 does not wait for ranks that it has named
            self._client.through()
        return [*judged(self._seen, self._links, len(self._leads)), *self._faults] if self._rank == 0 else None

    def _take_part(self, notes_s: float) -> None:
        unreached = self._call()
        me = self._roll.members[self._rank]
        mine = Seen(self._rank, me.host, self._here, versions_here(), self._examine(), unreached)
        self._client.set(f"seen/{self._rank}", mine.to_json())
        if self._rank == 0:
            self._hear("seen", notes_s, self._add_seen)
            unmet = [(one.rank, peer) for one in self._seen for peer in one.unreached]
            self._client.set("reached/0", json.dumps([[one.rank for one in self._seen], unmet]).encode())
        try:
            there, failed = read_reached(self._reached(2 * notes_s), self._leads)
        except ValueError as error:
            raise GroupError(f"what rank 0 says about the hosts makes no sense ({error}): {_SAME_VERSION}") from None
        if self._rank in there:
            self._measure(there, failed)
        self._client.set(f"links/{self._rank}", self._links.to_json())
        if self._rank == 0:
            seen = [one.rank for one in self._seen]
            self._hear("links", notes_s, lambda lead, note: self._links.add_json(note, lead, seen))

    def _add_seen(self, lead: int, note: bytes) -> None:
        seen = Seen.from_json(note, self._leads)
        if seen.rank != lead:
            raise ValueError(f"it is of rank {seen.rank}")
        self._seen.append(seen)

    def _hear(self, name: str, limit_s: float, add: Callable[[int, bytes], None]) -> None:
        """Add the notes as they come. A note that makes no sense is a finding, and the others still count."""
        for lead, note in self._notes(name, limit_s):
            try:
                add(lead, note)
            except ValueError as error:
                text = f"what {self._roll.name(lead)} has found makes no sense: {error}"
                self._faults.append(Finding("reach", "fail", text, _SAME_VERSION.capitalize() + "."))

    def _examine(self) -> list[Finding]:
        """This host's own findings. Hosts that are one machine, such as those of a lab, share its cores and memory."""
        members, me = self._roll.members, self._roll.members[self._rank]
        here = [member for member in members if member.machine == me.machine]
        usable = 0
        for member in here:
            usable |= int(member.mask, 16)
        bits = {core for core in range(usable.bit_length()) if usable >> core & 1}
        ours = {member.pid for member in members if member.pid_space == me.pid_space}
        checks = checks_of(len(members), self._here, self._known, partial(cores, len(here), bits, ours))
        if any(members[lead].pid_space == me.pid_space for lead in self._leads if lead < self._rank):
            del checks["cores"], checks["memory"]
        return examined(checks)

    def _call(self) -> dict[int, str]:
        """Call all other hosts. Returns the reasons of those that cannot be reached."""

        def call(peer: int) -> socket.socket | str:
            member = self._roll.members[peer]
            where = member.address, member.port
            try:
                return dial(where, run_id(self._run), self._roll.secret, self._rank, peer, "data", _DIAL_S)
            except (OSError, HandshakeError) as error:
                return getattr(error, "strerror", None) or str(error)

        peers = [lead for lead in self._leads if lead != self._rank]
        with ThreadPoolExecutor(32) as pool:
            answers = dict(zip(peers, pool.map(call, peers), strict=True))
        self._out = {peer: answer for peer, answer in answers.items() if not isinstance(answer, str)}
        return {peer: answer for peer, answer in answers.items() if isinstance(answer, str)}

    def _reached(self, limit_s: float) -> bytes:
        """Rank 0's note on the hosts that are there, and pairs without a connection. GroupError after ``limit_s``."""
        deadline = time.monotonic() + limit_s
        while (note := self._client.get("reached/0")) is None:
            if time.monotonic() > deadline:
                raise GroupError(f"rank 0 has not named the hosts within {limit_s:.0f} s: see whether it is stopped")
            time.sleep(_POLL_S)
        return note

    def _notes(self, name: str, limit_s: float) -> Iterator[tuple[int, bytes]]:
        """The notes of the ranks that check hosts. A finding names the ranks that owe a note after ``limit_s``."""
        waiting, deadline = list(self._leads), time.monotonic() + limit_s
        while waiting and time.monotonic() < deadline:
            for lead in list(waiting):
                note = self._client.get(f"{name}/{lead}")
                if note is not None:
                    waiting.remove(lead)
                    yield lead, note
            time.sleep(_POLL_S if waiting else 0.0)
        for lead in waiting:
            text = f"{self._roll.name(lead)} has not answered within {limit_s:.0f} s"
            remedy = f"See whether {self._roll.members[lead].host} is overloaded or the process is stopped."
            self._faults.append(Finding("reach", "fail", text, remedy))

    def _measure(self, there: Sequence[int], failed: Collection[Pair]) -> None:
        """Take turns with the other hosts that are ``there``. The lower rank of a pair sends first."""
        callers = {peer for peer in there if peer != self._rank and (peer, self._rank) not in failed}
        came: dict[int, socket.socket] = {}
        deadline = time.monotonic() + _DIAL_S
        while callers - came.keys() and time.monotonic() < deadline:
            came |= self._doors.take(callers - came.keys(), "data", _DIAL_S)
        for peer in partners(self._rank, self._leads):
            low, high = sorted((self._rank, peer))
            for pair in ((low, high), (high, low)):
                sock = self._out.get(peer) if pair[0] == self._rank else came.get(peer)
                if peer in there and sock is not None:
                    with closing(sock), suppress(OSError, SynclineError):  # rank 0 judges missing results
                        self._send(sock, pair) if pair[0] == self._rank else self._receive(sock, pair)

    def _send(self, sock: socket.socket, pair: Pair) -> None:
        self._links.clocks[pair] = min((_ask(sock) for _ in range(_ASKED)), key=lambda offset: offset.trip_s)
        sock.settimeout(_STALL_S)
        fill(sock)

    def _receive(self, sock: socket.socket, pair: Pair) -> None:
        for _ in range(_ASKED):
            read_exactly(sock, 1, time.monotonic() + _TURN_S)
            sock.sendall(_CLOCK.pack(wall_clock()))
        self._links.rates[pair] = None
        sock.settimeout(_STALL_S)
        arrival_rate(sock, _SLICE_S)
        self._links.rates[pair] = 8 * max(arrival_rate(sock, _SLICE_S) for _ in range(3))


def _ask(sock: socket.socket) -> Offset:
    """Ask for the other end's clock once."""
    before, begun = wall_clock(), time.perf_counter()
    sock.sendall(b"?")
    (theirs,) = _CLOCK.unpack(read_exactly(sock, _CLOCK.size, time.monotonic() + _TURN_S))
    trip_s = time.perf_counter() - begun
    return Offset(theirs - before - trip_s / 2, trip_s)


def read_reached(note: bytes, ranks: Collection[int]) -> tuple[list[int], set[Pair]]:
    """The ranks that are there, and the pairs without a connection. Raises ValueError for other text."""
    there, failed = _parsed(note, list)
    pairs = {(_rank(source, ranks), _rank(target, ranks)) for source, target in _rows(failed)}
    return [_rank(rank, ranks) for rank in _of(there, list)], pairs


def partners(rank: int, ranks: Sequence[int]) -> Iterator[int]:
    """The partners of ``rank`` in turn, so that each pair of ``ranks`` meets once and all pairs of a turn are disjoint.

    This is the circle method of round-robin tournaments: the first player stays, the others move on by one place.
    """
    places: list[int | None] = [*ranks, *([None] * (len(ranks) % 2))]
    for _ in range(len(places) - 1):
        partner = places[-1 - places.index(rank)]
        if partner is not None:
            yield partner
        places[1:] = [places[-1], *places[1:-1]]


# The judgement.


def judged(seen: Sequence[Seen], links: Links, hosts: int) -> list[Finding]:
    """The findings on those of the job's ``hosts`` that have answered, and on the links between them."""
    names = {one.rank: one.host for one in seen}
    if len({*names.values()}) < len(names):
        names = {rank: f"{host} (rank {rank})" for rank, host in names.items()}
    own = [*_own(seen, names)] if len(seen) > 1 else [one for host in seen for one in host.findings]
    if hosts == 1:
        return [*own, Finding("reach", "ok", "all ranks are on this host, so there is no link between hosts to check")]
    if len(seen) == 1:
        return own  # the silent hosts are faults of their own
    between = (_reach, _bandwidth, _clocks, _mtu, _same_versions)
    return [*own, *(finding for judge in between for finding in judge(seen, names, links))]


Names = Mapping[int, str]


def _own(seen: Sequence[Seen], names: Names) -> Iterator[Finding]:
    """The hosts' own findings. Hosts without a fault share a line for each check."""
    for check in dict.fromkeys(one.check for host in seen for one in host.findings):
        told = [(names[host.rank], one) for host in seen for one in host.findings if one.check == check]
        for name, one in told:
            if one.status != "ok":
                yield replace(one, text=f"{name}: {one.text}")
        well = {name: one for name, one in told if one.status == "ok"}
        if well:
            (name, one), *others = well.items()
            more = f"; ok too: {_listed([other for other, _ in others])}" if others else ""
            yield replace(one, text=f"{name}: {one.text}{more}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + f" and {len(names) - 8} more" * (len(names) > 8)


def _reach(seen: Sequence[Seen], names: Names, links: Links) -> Iterator[Finding]:
    for one in seen:
        failed = [(names[other.rank], other.unreached[one.rank]) for other in seen if one.rank in other.unreached]
        if not failed:
            continue
        name, taken = names[one.rank], one.way
        text = (
            f"{_listed([other for other, _ in failed])} cannot reach {name} at {taken.address}"
            f" ({taken.interface or 'an interface'}: {taken.why}): {failed[0][1]}"
        )
        remedy = f"Open the firewall of {name} for TCP from the other hosts, or set {INTERFACE} there."
        if taken.asked and not taken.usual.startswith(f"{taken.interface} "):
            remedy = f"Set {INTERFACE} on {name} to an interface that other hosts reach, such as {taken.usual}."
        yield Finding("reach", "fail", text, remedy)
    if not any(one.unreached for one in seen):
        trips = [offset.trip_s for offset in links.clocks.values()]
        longest = f", in at most {units.seconds(max(trips))} there and back" if trips else ""
        yield Finding("reach", "ok", f"all {len(seen)} hosts reach each other{longest}")


def _bandwidth(seen: Sequence[Seen], names: Names, links: Links) -> Iterator[Finding]:
    rates = {pair: rate for pair, rate in links.rates.items() if rate is not None}
    if not rates:
        return
    top = max(rates.values())
    slow = {pair: rate for pair, rate in rates.items() if rate < _SLOW * top}
    if not slow:
        text = f"streams between pairs of hosts carry {units.link_rate(min(rates.values()))} to {units.link_rate(top)}"
        yield Finding("bandwidth", "ok", text)
    for one in seen if len(seen) > 2 else ():  # of two hosts neither can be told from its link to the other
        words = []
        for end, verb in enumerate(("sends", "receives")):
            best = max((rate for pair, rate in rates.items() if pair[end] == one.rank), default=top)
            if best < _SLOW * top:
                words.append(f"{verb} at most {units.link_rate(best)}")
                slow = {pair: rate for pair, rate in slow.items() if pair[end] != one.rank}
        if words:
            name, interface = names[one.rank], one.way.interface
            text = f"{name} {' and '.join(words)} on {interface}, and other pairs carry {units.link_rate(top)}"
            remedy = f"Check cable, switch port and negotiated speed of {interface} on {name} with ethtool."
            yield Finding("bandwidth", "warn", text, remedy)
    for (source, target), rate in slow.items():
        text = f"{names[source]} sends {units.link_rate(rate)} to {names[target]}, another pair {units.link_rate(top)}"
        remedy = f"Check the links and switches between {names[source]} and {names[target]}."
        yield Finding("bandwidth", "warn", text, remedy)


def _clocks(seen: Sequence[Seen], names: Names, links: Links) -> Iterator[Finding]:
    first = seen[0].rank
    offsets = {first: Offset(0.0, 0.0)}
    for (source, target), (ahead_s, trip_s) in links.clocks.items():
        if source == first:
            offsets[target] = Offset(ahead_s, trip_s)
        elif target == first:
            offsets.setdefault(source, Offset(-ahead_s, trip_s))
    usual = statistics.median_low(offsets.values())
    right = True
    for rank, (ahead_s, trip_s) in offsets.items():
        off_s = ahead_s - usual.ahead_s
        if abs(off_s) > _CLOCK_S + (trip_s + usual.trip_s) / 2:  # an answer may take all of its time on one way
            right = False
            where = "ahead of" if off_s > 0 else "behind"
            others = names[first] if len(offsets) == 2 else "most others"
            text = f"the clock of {names[rank]} is {units.seconds(abs(off_s))} {where} that of {others}"
            yield Finding("clocks", "warn", text, f"Start a time service such as chrony on {names[rank]}.")
    if right and len(offsets) > 1:
        most = max(abs(offset.ahead_s - usual.ahead_s) for offset in offsets.values())
        yield Finding("clocks", "ok", f"the clocks of {len(offsets)} hosts differ by {units.seconds(most)} at most")


def _mtu(seen: Sequence[Seen], names: Names, links: Links) -> Iterator[Finding]:
    stalled = [pair for pair, rate in links.rates.items() if rate is None]
    for source, target in stalled:
        text = f"{names[target]} receives small messages of {names[source]}, but a large one stalls"
        remedy = f"Set one MTU on all interfaces and switches between {names[source]} and {names[target]}."
        yield Finding("mtu", "fail", text, remedy)
    missed = {peer for one in seen for peer in one.unreached}
    known = [one for one in seen if one.way.mtu and one.rank not in missed]
    ((usual, _),) = Counter(one.way.mtu for one in known).most_common(1) or [(0, 0)]
    if stalled and known:  # most hosts may have frames that a switch does not pass on
        usual = min(one.way.mtu for one in known)
    for one in known:
        if one.way.mtu != usual:
            name, interface = names[one.rank], one.way.interface
            text = f"{interface} of {name} has MTU {one.way.mtu}, other hosts have {usual}"
            yield Finding("mtu", "warn", text, f"Run ip link set {interface} mtu {usual} on {name}.")
    if usual and all(one.way.mtu == usual for one in known):
        yield Finding("mtu", "ok", f"the interfaces of {len(known)} hosts have MTU {usual}")


def _same_versions(seen: Sequence[Seen], names: Names, links: Links) -> Iterator[Finding]:  # noqa: ARG001
    for package in dict.fromkeys(name for one in seen for name in one.versions):
        found: dict[str, list[str]] = {}
        for one in seen:
            found.setdefault(one.versions.get(package, "missing"), []).append(names[one.rank])
        if len(found) > 1:
            text = "; ".join(f"{version} on {_listed(hosts)}" for version, hosts in found.items())
            remedy = f"Install the same version of {package} on all hosts."
            yield Finding("versions", "warn", f"{package} differs: {text}", remedy)
