"""Lines between the launcher and the processes of an elastic run, over which these agree on the run's members.

The launcher relays packets between processes, tells all when one has ended, and favours one half of a view if each of
two halves could go on (``membership``). Each process inherits one end of a socket pair, so the sender of a packet is
known. A packet is a JSON object. A packet that a full socket does not take is lost, which the protocol allows.

A process has the number of its line, which no other process of the run gets. A replacement for a lost process has the
next number, and asks to join through its line. The launcher passes that on to the first member.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import socket
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from ..errors import GroupError, UsageError

VARIABLE = "SYNCLINE_ELASTIC"
"""The environment variable with the descriptor of a process's end and numbers: its own, the number of processes at the
start, and the least and the greatest number of workers (0: nobody joins). In a run with servers two more follow: the
number of these at the start, and 1 for a server that joins. A user may set it to LEAST or LEAST:MOST, which then holds
for ``syncline run`` and for ``syncline.init``."""

_LINE = re.compile(r"\d{1,9}(:\d{1,9}){4}(:\d{1,9}:[01])?", re.ASCII)
_NAME = re.compile(r"([0-9]{1,9})@([^@\s]{1,300}):([0-9]{1,5})")

PACKET_BYTES = 1 << 16


Range = tuple[int, int | None]
"""The least and the greatest number of workers of an elastic run; None for the number that the launcher allows."""


def read_range(text: str, name: str) -> Range:
    """The numbers in a text. Raises UsageError, which begins with ``name``, for other texts."""
    least, colon, most = text.partition(":")
    if not _is_number(least) or (colon and not _is_number(most)) or int(least) < 1:
        raise UsageError(f"{name} {text} is not LEAST or LEAST:MOST, two numbers of workers from 1")
    return int(least), int(most) if colon else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def range_asked(given: object) -> Range | None:
    """The numbers that a script asks for with ``init(elastic=)``, or else the user by the variable; None for none.

    Raises UsageError for other values, and for numbers that the launcher of this process does not serve.
    """
    if given is None:
        text = text_of_user()
        asked = _checked(read_range(text, f"{VARIABLE}:"), f"{VARIABLE}={text}") if text else None
    else:
        asked = _checked((given, None) if isinstance(given, int) else given, f"elastic={given!r}")
    if asked is not None:
        _check_served(asked)
    return asked


def text_of_user() -> str:
    """The variable as a user has set it. A launcher sets it otherwise, for its own processes."""
    text = os.environ.get(VARIABLE, "")
    return "" if _LINE.fullmatch(text) else text


def _checked(pair: object, said: str) -> Range:
    """The numbers if they are a range. Raises UsageError for other values; ``said`` is how they were given."""
    if isinstance(pair, tuple | list) and len(pair) == 2:
        least, most = pair
        if type(least) is int and least >= 1 and (most is None or (type(most) is int and most >= least)):
            return least, most
    raise UsageError(
        f"{said}: give the least and the greatest number of workers, two numbers from 1 in this order, such as"
        " elastic=(2, 8), or the least one alone, as elastic=2"
    )


def _check_served(asked: Range) -> None:
    """Raise UsageError if the launcher of this process does not let a run go on with these numbers of workers."""
    least, most = asked
    wanted = f"{least}:{most}" if most else str(least)
    called = f"the script asks for an elastic run of {least} to {most} workers" if most else (
        f"the script asks for an elastic run of at least {least} workers")  # fmt: skip
    numbers = _numbers()
    if numbers is None:
        raise UsageError(
            f"{called}, but its launcher lets no run go on when a worker is lost: start it with syncline run -n"
            f" {most or least} --elastic {wanted}, or leave elastic= and {VARIABLE} out"
        )
    workers = numbers.processes - numbers.servers
    if numbers.least > least:
        why = f"the launcher ends it when fewer than {numbers.least} are left"
    elif most is not None and most > max(numbers.most, workers):
        why = f"the launcher lets at most {max(numbers.most, workers)} take part"
    elif workers > (most or workers) or workers < least:
        raise UsageError(f"{called}, but {workers} were started: use syncline run -n {most or least}")
    else:
        return
    raise UsageError(f"{called}, but {why}: use syncline run --elastic {wanted}")


_PAUSE_S = 1.0
"""From the loss of a worker to the start of a replacement; twice as long after each replacement that fails."""
_STAY_S = 2.0
"""A replacement fails if it ends before it is a member, or by itself with an error within this time after that."""
_FAILURES = 3
"""After so many replacements in turn that failed, there are no more."""
_KEPT = 64
"""Of so many ended processes that are no members, and of so many views, the relay remembers how they ended."""
_SIGNALLED = 128
"""The status of a process that a signal has ended is greater."""


class Lines:
    """A launcher's ends of the lines of its processes, whose numbers at the start are ``numbers``.

    The last ``servers`` of the run's ``processes`` at the start are servers.
    """

    joins = False
    """Whether the processes join the run of another launcher."""
    failed = 0
    """The status of the first member that has ended with an error."""

    def __init__(self, numbers: Sequence[int], processes: int, least: int, most: int | None, servers: int = 0) -> None:
        self.numbers, self._processes, self._least, self._most = tuple(numbers), processes, least, most
        self._servers = servers
        self.shared: Mapping[str, str] = {}
        """Variables for the environment of all processes."""
        self._pairs: dict[int, tuple[socket.socket, socket.socket]] = {}  # by number
        for number in self.numbers:
            self._add(number)

    @property
    def away(self) -> int:
        """The number of living processes that other launchers have started."""
        return 0

    @property
    def renumbered(self) -> bool:
        """Whether ranks are no longer the numbers of processes."""
        return True

    @property
    def is_over(self) -> bool:
        """Whether the run cannot go on, so that all processes must end."""
        return False

    @property
    def trains(self) -> bool:
        """Whether a member of the latest view lives, as far as is known."""
        return True

    def _add(self, number: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._pairs[number] = ours, theirs

    def attach(
        self, selector: selectors.BaseSelector, environ: Mapping[str, str], stop: Callable[[int, int], None]
    ) -> None:
        """Serve other launchers from now on, in the loop of this one."""

    def sockets(self) -> dict[int, socket.socket]:
        """The ends of the launcher, by number."""
        return {number: ours for number, (ours, _) in self._pairs.items()}

    def inherited(self, rank: int) -> int:
        """The descriptor that a process inherits."""
        return self._pairs[rank][1].fileno()

    def environ(self, rank: int) -> dict[str, str]:
        """The variables for the environment of a process."""
        numbers = [self.inherited(rank), rank, self._processes, self._least, self._most or 0]
        numbers += [self._servers, rank >= self._processes and self.serves(rank)] if self._servers else []
        return {VARIABLE: ":".join(str(int(number)) for number in numbers)}

    def serves(self, number: int) -> bool:
        """Whether a process is a server."""
        return self._processes - self._servers <= number < self._processes

    def packets(self, number: int) -> Iterator[Mapping[str, Any]]:
        """The packets of a process that have come. A process may send nonsense, which is left out."""
        while number in self._pairs:
            try:
                data = self._pairs[number][0].recv(PACKET_BYTES)
            except OSError:
                return
            if not data:
                return
            with suppress(ValueError, RecursionError):
                packet = json.loads(data)
                if isinstance(packet, dict):
                    yield packet

    def read(self, number: int) -> None:
        """Handle the packets of a process."""

    def send(self, number: int, packet: Mapping[str, Any]) -> None:
        """Send a packet to a process of this launcher, if it has a line."""
        if number in self._pairs:
            with suppress(OSError):
                self._pairs[number][0].send(json.dumps(packet).encode())

    def stop(self, number: int) -> None:
        """Let the processes of other launchers end by a signal."""

    def due(self, now_s: float) -> float | None:
        """The seconds until a replacement must be started; None if none is wanted."""
        del now_s
        return None

    def replace(self, now_s: float) -> int:
        """Make a line for a replacement, which is started now. Returns its number."""
        raise NotImplementedError

    def note_no_start(self, now_s: float, error: OSError, rank: int | None = None) -> str:
        """Note that a replacement could not be started. Returns what the user should know."""
        raise NotImplementedError

    def note_end(self, number: int, status: int, now_s: float = 0.0) -> str:
        """Note that a process has ended, and tell the others. Returns what the user should know, if anything."""
        raise NotImplementedError

    @property
    def succeeded(self) -> bool:
        """Whether the run has reached its end."""
        raise NotImplementedError

    def drop(self, rank: int) -> None:
        """Close the line of a process whose end was noted."""
        for sock in self._pairs.pop(rank, ()):
            sock.close()

    def close(self) -> None:
        """Close both ends of every line."""
        for number in [*self._pairs]:
            self.drop(number)


class Visited(Protocol):
    """The place at which other launchers join a run (``joining.Reception``)."""

    def attach(self, selector: selectors.BaseSelector, environ: Mapping[str, str]) -> None:
        """Serve callers from now on. ``environ`` is that of the run's processes."""

    def stop(self, number: int) -> None:
        """Let the processes of other launchers end by a signal. After SIGKILL they are not waited for."""

    def close(self) -> None:
        """Let nobody join any more, and tell those that have that the run is over."""


class Relay(Lines):
    """The launcher's side. The run goes on as long as ``least`` workers are left.

    With ``most`` lost processes are replaced, until as many are members as at the start; at most so many workers live
    at once. With a ``reception`` other launchers may add workers. The last ``servers`` processes are servers.
    """

    def __init__(self, processes: int, least: int, most: int | None = None, servers: int = 0) -> None:
        super().__init__(range(processes), processes, least, most, servers)
        self._serving = set(range(processes - servers, processes))  # the numbers of servers
        self._far: dict[int, Callable[[Mapping[str, Any]], None]] = {}  # ways to processes of other launchers
        self._fresh = processes  # the first number that no process has had
        self._favoured: dict[int, list[int]] = {}  # by view
        self._view = 0
        self._begun = False  # a process has called ``syncline.elastic``
        self._ended: dict[int, int] = {}  # status, by number: of members, and of the last others
        self._order = list(range(processes))  # the members by their ranks
        self._started: set[int] = set()  # the replacements that live and have not stayed long enough to be trusted
        self._joined: dict[int, float | None] = {}  # those of them that are members, and since when
        self._failures, self._next_s = 0, 0.0
        self._finished = False  # whether a process has said or shown that the training is over
        self.members = set(range(processes))
        """The numbers of the processes in the latest view."""
        self.reception: Visited | None = None

    def _lives(self, number: int) -> bool:
        return (number in self._pairs or number in self._far) and number not in self._ended

    @property
    def trains(self) -> bool:
        """Whether a member of the latest view lives."""
        return any(map(self._lives, self.members))

    # Processes of other launchers.

    @property
    def away(self) -> int:
        """The number of living processes that other launchers have started."""
        return sum(map(self._lives, self._far))

    @property
    def limits(self) -> dict[str, int]:
        """The numbers that all processes of the run know."""
        numbers = {"processes": self._processes, "least": self._least, "most": self._most or 0}
        return {**numbers, "servers": self._servers}

    def serves(self, number: int) -> bool:
        """Whether this process is a server, or replaces one."""
        return number in self._serving

    def _living(self, numbers: Iterable[int], serves: bool) -> int:
        """How many of these processes live and are servers, or workers."""
        return sum(self._lives(number) and self.serves(number) == serves for number in numbers)

    def attach(
        self, selector: selectors.BaseSelector, environ: Mapping[str, str], stop: Callable[[int, int], None]
    ) -> None:
        """Let others join, if there is a reception."""
        del stop
        if self.reception is not None:
            self.reception.attach(selector, environ)

    @property
    def may_grow(self) -> bool:
        """Whether processes may be added at all."""
        return self._most is not None

    def refusal(self, workers: int) -> str:
        """Why so many workers cannot be added; empty if they can."""
        living = self._living((*self._pairs, *self._far), serves=False)
        if self._finished or self.is_over:
            return "its training has ended"
        if living + workers > (self._most or 0):
            room = (self._most or 0) - living
            fewer = f"ask for {room} at most (-n), or " if room > 0 else ""
            return (
                f"it has {living} of at most {self._most} workers:"
                f" {fewer}start the run with --elastic {self._least}:{living + workers}"
            )
        return ""

    def admit(self, send: Callable[[Mapping[str, Any]], None]) -> int:
        """Add a process of another launcher, which ``send`` reaches. Returns its number."""
        number, self._fresh = self._fresh, self._fresh + 1
        self._far[number] = lambda packet: send({"to": number, "packet": packet})
        return number

    def stop(self, number: int) -> None:
        """At the end of the run, or if it cannot go on."""
        if self.reception is not None:
            self.reception.stop(number)

    # Replacements.

    def due(self, now_s: float) -> float | None:
        """The seconds until a replacement must be started; None if none is wanted."""
        self._look_who_stays(now_s)
        if self._most is None or self._failures >= _FAILURES or self._finished or self.is_over:
            return None
        return max(0.0, self._next_s - now_s) if self._lacks(True) or self._lacks(False) else None

    def _lacks(self, serves: bool) -> bool:
        """Whether fewer servers, or workers, than at the start are members or about to join, and one more may live."""
        first = self._servers if serves else self._processes - self._servers
        most = self._servers if serves else self._most or 0
        members = self._living({*self.members, *(self._started - self._joined.keys())}, serves)
        return members < first and self._living((*self._pairs, *self._far), serves) < most

    def replace(self, now_s: float) -> int:
        """Make a line for a replacement, which is started now: of a server, if one is lacking. Returns its number."""
        self._add(self._fresh)
        number, self._fresh = self._fresh, self._fresh + 1
        if self._lacks(True):
            self._serving.add(number)
        self._started.add(number)
        self._next_s = now_s + _PAUSE_S
        return number

    def note_no_start(self, now_s: float, error: OSError, rank: int | None = None) -> str:
        """Note that a replacement could not be started. Returns what the user should know."""
        if rank is not None:
            self._ended[rank] = 1
            self._started.discard(rank)
            self.drop(rank)
        self._failures += 1
        self._next_s = now_s + _PAUSE_S * 2**self._failures
        last = f": it was the last of {_FAILURES} tries" if self._failures >= _FAILURES else ""
        return f"no replacement for a lost process could be started ({error}){last}"

    def _look_who_stays(self, now_s: float) -> None:
        self._joined |= {number: now_s for number, since_s in self._joined.items() if since_s is None}
        for number in [number for number, since_s in self._joined.items() if now_s - (since_s or 0.0) >= _STAY_S]:
            self._failures = 0
            self._started.remove(number)
            del self._joined[number]

    def _note_loss(self, rank: int, status: int, now_s: float) -> str:
        """Plan the next start after a loss. Returns what the user should know."""
        self._look_who_stays(now_s)
        failed = False
        if rank in self._started:
            self._started.remove(rank)
            failed = self._joined.pop(rank, None) is None or 0 < status <= _SIGNALLED
            self._failures = self._failures + 1 if failed else 0
        self._next_s = max(self._next_s, now_s + _PAUSE_S * 2**self._failures)
        if self._most is None or self._failures < _FAILURES or not failed:
            return ""
        return (
            f"{_FAILURES} replacements in turn have ended before they joined, or with an error within {_STAY_S:g} s"
            " after that: no more are started"
        )

    def read(self, number: int) -> None:
        """Pass on, tell or note what they say."""
        for packet in self.packets(number):
            self.obey(number, packet)

    def obey(self, number: int, packet: Mapping[str, Any]) -> None:
        """Handle a packet of a process. It may be nonsense: that is the process's loss, not the launcher's end."""
        with suppress(ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self._obey(number, packet)

    def _obey(self, rank: int, packet: Mapping[str, Any]) -> None:
        if "to" in packet:
            self._tell(int(packet["to"]), {"from": rank, "message": packet["message"]})
        elif "begun" in packet:
            self._begun = True
            for server in self._serving:  # they know nothing of the script's calls
                self._tell(server, packet)
        elif "done" in packet:
            self._finished = True
            self._tell_others(rank, {**packet, "done": rank})
        elif "ask" in packet:
            view, half = int(packet["ask"]), [int(number) for number in packet["half"]]
            self._tell(rank, {"view": view, "half": self._favour(view, half)})
        elif "join" in packet:
            first = next(filter(self._lives, self._order), None)
            if self._finished:
                self._tell(rank, {"done": self._order[0]})
            elif first is not None and rank >= self._processes:
                self._tell(first, {"from": rank, "message": packet["join"]})
        elif (view := int(packet["view"])) > self._view:
            members = [int(member) for member in packet["members"]]
            if members and all(0 <= member < self._fresh for member in members):
                self._view, self._order, self.members = view, members, set(members)
                self._serving &= {*members, *self._pairs}
                self._joined |= dict.fromkeys(self._started & self.members - self._joined.keys())

    def _favour(self, view: int, half: list[int]) -> list[int]:
        """The half of a view that is favoured. None of one so old that this was forgotten: its successor is known."""
        if view not in self._favoured and view < self._view - _KEPT:
            return [-1]
        found = self._favoured.setdefault(view, half)
        while len(self._favoured) > _KEPT:
            del self._favoured[min(self._favoured)]
        return found

    def note_end(self, rank: int, status: int, now_s: float = 0.0) -> str:
        """Also of a process of another launcher."""
        self.read(rank)  # what it said before
        self._ended[rank] = status
        if rank in self.members:
            self.failed = self.failed or status
        others = [number for number in self._ended if number not in self.members]
        for number in others[:-_KEPT]:
            del self._ended[number]
        self._finished |= not status and rank in self.members
        self._tell_others(rank, {"ended": rank})
        return self._note_loss(rank, status, now_s)

    def drop(self, rank: int) -> None:
        """Or forget the way to it."""
        super().drop(rank)
        self._far.pop(rank, None)

    @property
    def is_over(self) -> bool:
        """Whether all members of the latest view have ended, or too many have failed for the others to go on.

        A failure before any process has called ``syncline.elastic`` is one too many: the others may wait for a process
        that never comes.
        """
        living = sum(map(self._lives, self.members))
        left = {rank for rank in self.members if self._lives(rank) or self._ended.get(rank) == 0}
        early = not self._begun and self.failed
        workers = len(left - self._serving)
        return not living or bool(early) or workers < self._least or 2 * len(left) < len(self.members)

    @property
    def renumbered(self) -> bool:
        """Whether ranks are no longer the numbers of processes."""
        return self._order != list(range(self._processes))

    @property
    def succeeded(self) -> bool:
        """Whether a member of the latest view has ended with status 0."""
        return any(self._ended.get(rank) == 0 for rank in self.members - self._serving)

    def _tell_others(self, rank: int, packet: Mapping[str, Any]) -> None:
        for other in (*self._pairs, *self._far):
            if other != rank and other not in self._ended:
                self._tell(other, packet)

    def _tell(self, rank: int, packet: Mapping[str, Any]) -> None:
        if rank in self._far:
            self._far[rank](packet)
        else:
            self.send(rank, packet)

    def close(self) -> None:
        """Close the connections, and the reception of processes that want to join."""
        super().close()
        if self.reception is not None:
            self.reception.close()


def is_relayed() -> bool:
    """Whether the launcher of this process lets a run go on when a worker is lost."""
    return _numbers() is not None


def joins() -> bool:
    """Whether the launcher has started this process as a replacement, which joins a run under way."""
    numbers = _numbers()
    return numbers is not None and numbers.number >= numbers.processes


def joins_to_serve() -> bool:
    """Whether it has started this process in place of a lost server."""
    numbers = _numbers()
    return numbers is not None and bool(numbers.serves)


def allowed() -> Range | None:
    """The least and the greatest number of members with which the launcher lets a run go on. None if it lets none.

    Without a greatest number nobody joins.
    """
    numbers = _numbers()
    return None if numbers is None else (numbers.least, numbers.most or None)


def may_grow() -> bool:
    """Whether other workers may join this one."""
    numbers = _numbers()
    return numbers is not None and numbers.most > 1


class _Numbers(NamedTuple):
    """The descriptor and the numbers in the variable."""

    fd: int
    number: int
    processes: int
    least: int
    most: int
    servers: int = 0
    serves: int = 0


def _numbers() -> _Numbers | None:
    """Those of this process. None without a valid variable."""
    text = os.environ.get(VARIABLE, "")
    return _Numbers(*map(int, text.split(":"))) if _LINE.fullmatch(text) else None


class Name(NamedTuple):
    """A process of an elastic run: its number, and the address at which it can serve a meeting as rank 0.

    Its launcher keeps that port free on its host.
    """

    number: int
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.number}@{self.host}:{self.port}"

    @classmethod
    def read(cls, text: str) -> Name | None:
        """The inverse. None for other texts."""
        found = _NAME.fullmatch(text)
        if found is None or int(found[3]) >= 1 << 16:
            return None
        return cls(int(found[1]), found[2], int(found[3]))


class RelayLine:
    """A process's side: its ``number``, the number of ``processes`` at the start, and the ``least`` and ``most``
    workers with which the run goes on. A process with a higher number than those at the start ``joins`` the run.
    """

    def __init__(self, sock: socket.socket, number: int, processes: int, least: int, most: int) -> None:
        self._sock, self.number, self.processes, self.least, self.most = sock, number, processes, least, most
        self.joins = number >= processes
        self.place = "127.0.0.1", 0
        """The address and port that the launcher keeps free for a meeting."""
        self.kept: deque[dict[str, Any]] = deque()
        """The packets that were looked at and not received yet."""

    def name(self, number: int) -> str:
        """The name of a process of the same launcher."""
        return str(Name(number, *self.place))

    def narrow(self, asked: Range) -> None:
        """Go on with no other numbers of members than a script asks for."""
        self.least = asked[0]
        if self.most and asked[1] is not None:
            self.most = asked[1]

    @classmethod
    def inherit(cls) -> RelayLine | None:
        """The line of this process. None if its launcher has not made one."""
        numbers = _numbers()
        if numbers is None:
            return None
        try:
            if not stat.S_ISSOCK(os.fstat(numbers.fd).st_mode):
                return None
            os.set_inheritable(numbers.fd, False)
            port = os.environ.get("SYNCLINE_MEETING_PORT", "")
            host = os.environ.get("MASTER_ADDR", "") or "127.0.0.1"
            found = cls(socket.socket(fileno=numbers.fd), *numbers[1:5])
            found.place = host, int(port) if _is_number(port) else 0
            return found
        except OSError:
            return None

    def send(self, packet: Mapping[str, Any]) -> None:
        """Send a packet to the launcher."""
        with suppress(OSError):
            self._sock.send(json.dumps(packet).encode())

    def look(self) -> None:
        """Move all packets that have come to ``kept``. Does not wait."""
        self._sock.setblocking(False)
        with suppress(OSError):
            while data := self._sock.recv(PACKET_BYTES):
                if (packet := _read(data)) is not None:
                    self.kept.append(packet)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """The next packet. None after ``timeout_s``, or for nonsense. GroupError if the launcher has ended."""
        if self.kept:
            return self.kept.popleft()
        self._sock.settimeout(timeout_s)
        try:
            data = self._sock.recv(PACKET_BYTES)
        except TimeoutError:
            return None
        except OSError:
            data = b""
        if not data:
            raise GroupError("syncline run has ended, through which the remaining workers agree to go on")
        return _read(data)


def _read(data: bytes) -> dict[str, Any] | None:
    """The packet in these bytes. None for nonsense, such as a packet that was too long: it counts as lost."""
    with suppress(ValueError, RecursionError):
        packet = json.loads(data)
        return packet if isinstance(packet, dict) else None
    return None
