"""Workers that another launcher adds to an elastic run (``syncline run --join``), and the connection of the launchers.

    joining launcher                                   launcher of the run
    ----------------                                   -------------------
    handshake (``wire.handshake``)  <------------->    proves the run's secret
    {workers, version}              -------------->
                                    <--------------    {numbers, ...} or {refused}
    {from, packet}, {ended, status} -------------->    as if the worker had a line there
                                    <--------------    {to, packet}, {stop}, {over}

The joining launcher (``Guest``) starts the workers, and passes packets between their lines and the connection. The
other one (``Reception``) gives each a number, and its ``Relay`` treats them as its own processes. If a launcher ends,
the other one sees the end of the connection: the workers of a guest are lost to the run, and end with it.

A frame is its length in four bytes, and a JSON object of at most ``FRAME_BYTES``. Neither end ever waits for the other:
what a connection does not take is kept, up to a limit, beyond which the connection ends. With ``tls`` both launchers
encrypt the connection, as the workers do theirs. Neither secret nor keys are on it: each process makes its certificate.
"""

from __future__ import annotations

import json
import selectors
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import GroupError, HandshakeError, ProtocolError, SecretError, UsageError
from ..version import __version__
from ..wire.bell import DescriptorBell
from ..wire.handshake import Hello, run_id
from ..wire.listener import Doors, dial, open_door
from ..wire.reports import say
from ..wire.tls import credentials
from .relay import PACKET_BYTES, Lines, Relay

FRAME_BYTES = PACKET_BYTES + 4096
"""The most bytes of a frame, beside its length: a packet with its sender."""
HELD_BYTES = 4 << 20
"""The most bytes that are kept for an end that takes none."""

TOLD = ("SYNCLINE_STRATEGY", "SYNCLINE_CHECK_REPLICAS", "SYNCLINE_CHECK_FINITE", "SYNCLINE_TUNING")
"""The variables in which all workers of a run must agree: a joining launcher takes them over."""

_PURPOSE = "join"
_ANY_RUN = run_id("syncline run --join")
_LENGTH = struct.Struct("!I")
_LAUNCHER = 0  # in the handshake, and in the certificates of launchers
_ANSWER_S = 10.0
_UNDECIDED = 16
"""So many callers may have proved the secret and not yet asked."""
_ALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2), (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 8_000),
)  # fmt: skip
"""A host that falls silent loses its connection after 8 s, the default of ``liveness`` between workers, or 8 s after
the first data that it does not confirm: within 16 s."""

Frame = Mapping[str, Any]


class Frames:
    """Cuts a stream of bytes into frames. Raises ProtocolError for what is none."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete with these bytes."""
        self._data += data
        found: list[Frame] = []
        while len(self._data) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._data)
            if size > FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes: at most {FRAME_BYTES} are allowed", rank=-1)
            end = _LENGTH.size + size
            if len(self._data) < end:
                break
            try:
                frame = json.loads(self._data[_LENGTH.size : end])
            except (ValueError, RecursionError) as error:
                raise ProtocolError("a frame that is not JSON", rank=-1) from error
            if not isinstance(frame, dict):
                raise ProtocolError("a frame that is no JSON object", rank=-1)
            found.append(frame)
            del self._data[:end]
        return found


def in_frame(frame: Frame) -> bytes:
    """The bytes of a frame."""
    data = json.dumps(frame).encode()
    return _LENGTH.pack(len(data)) + data


class Link:
    """One end of the connection of two launchers. ``name`` says in messages where the other end is."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self.name, self._sock = name, sock
        self._frames, self._held = Frames(), bytearray()
        self._early: list[Frame] = []  # came with the one that was waited for
        self._selector: selectors.BaseSelector | None = None
        for option in _ALIVE:
            sock.setsockopt(*option)
        sock.setblocking(False)

    def attach(
        self, selector: selectors.BaseSelector, heard: Callable[[Frame], None], ended: Callable[[str], None]
    ) -> None:
        """From now on call ``heard`` for each frame, and ``ended`` with a reason when no more can come."""
        self._selector, self._heard, self._ended = selector, heard, ended
        selector.register(self._sock, selectors.EVENT_READ, self._turn)
        self._flush()
        while self._early:
            heard(self._early.pop(0))

    def _turn(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        why = ""
        try:
            if self._sock.fileno() < 0:
                return
            data = self._sock.recv(FRAME_BYTES)  # once a turn: an end that sends without a pause must not hold the loop
            for frame in self._frames.feed(data):
                self._heard(frame)
            if data:
                return
            why = "its connection has ended"
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            why = getattr(error, "strerror", None) or str(error)
        if self._sock.fileno() >= 0:
            self.close()
            self._ended(why)

    def send(self, frame: Frame) -> None:
        """Send a frame, at once or as soon as the other end takes it."""
        if self._sock.fileno() < 0:
            return
        self._held += in_frame(frame)
        self._flush()

    def pass_on(self, frame: Frame) -> None:
        """Send a frame with what another process has said; nothing if it is too long in this form."""
        if len(in_frame(frame)) <= _LENGTH.size + FRAME_BYTES:
            self.send(frame)

    @property
    def address(self) -> str:
        """This machine's address on the way to the other end."""
        return str(self._sock.getsockname()[0])

    def _flush(self) -> None:
        try:
            while self._held:
                del self._held[: self._sock.send(self._held)]
        except BlockingIOError:
            pass
        except OSError:
            self._held = bytearray()  # the traceback may still hold a view of the old one
        if len(self._held) > HELD_BYTES:
            self.cut()
        if self._selector is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._held else 0)
            self._selector.modify(self._sock, events, self._turn)

    def cut(self) -> None:
        """End the connection. The selector will tell so."""
        self._held = bytearray()
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout_s: float) -> Frame:
        """The next frame of a link that is not attached. Raises GroupError without one within the time."""
        deadline = time.monotonic() + timeout_s
        self._sock.settimeout(timeout_s)
        try:
            while time.monotonic() < deadline:
                data = self._sock.recv(_LENGTH.size + FRAME_BYTES)
                found = self._frames.feed(data)
                if found:
                    first, *self._early = found
                    return first
                if not data:
                    break
        except (OSError, ProtocolError) as error:
            raise GroupError(f"the launcher at {self.name} gives no answer: {error}") from error
        finally:
            self._sock.setblocking(False)
        raise GroupError(f"the launcher at {self.name} gives no answer: has its run ended?")

    def close(self) -> None:
        """Close the connection. Callable repeatedly."""
        if self._sock.fileno() >= 0:
            if self._selector is not None:
                self._selector.unregister(self._sock)
            self._sock.close()


class Reception:
    """The place of a launcher at which others join its run: a listening socket at ``address``.

    ``relay`` gets their workers. Callers prove the ``secret``. ``tls`` is as in ``syncline.init``.
    """

    def __init__(self, relay: Relay, secret: str, address: str, refuses: str = "", tls: str | None = None) -> None:
        sealing = credentials(tls, secret.encode(), _ANY_RUN, _LAUNCHER)
        try:
            door = open_door(address)
        except OSError as error:
            raise UsageError(f"cannot listen on {address}: {error.strerror}; give another --interface") from error
        self._relay, self._refuses = relay, refuses
        self.secret = secret
        host = f"[{address}]" if ":" in address else address
        self.place = f"{host}:{door.getsockname()[1]}"
        """The address to join by."""
        self._came: deque[tuple[socket.socket, str]] = deque()
        self._bell = DescriptorBell()
        self._guests: dict[Link, set[int]] = {}  # the numbers of their workers
        proof = secret.encode()
        self._doors = Doors([door], _ANY_RUN, proof, _LAUNCHER, self._admit, check=_check_purpose, tls=sealing)

    def _admit(self, said: Hello, sock: socket.socket, origin: str) -> None:  # noqa: ARG002
        """Take a caller that has proved the secret. Called by the thread of the doors."""
        self._came.append((sock, origin))
        self._bell.ring()

    def attach(self, selector: selectors.BaseSelector, environ: Mapping[str, str]) -> None:
        """Serve callers from now on. ``environ`` is that of the run's processes."""
        self._selector = selector
        self._told = {name: environ.get(name, "") for name in TOLD}
        self._run = environ["SYNCLINE_RUN_ID"]
        selector.register(self._bell, selectors.EVENT_READ, self._take)

    def _take(self, _: int) -> None:
        self._bell.rang()
        while self._came:
            link = Link(*self._came.popleft())
            self._guests[link] = set()
            link.attach(self._selector, partial(self._heard, link), partial(self._lost, link))
        undecided = [link for link, numbers in self._guests.items() if not numbers]
        for link in undecided[:-_UNDECIDED]:
            link.cut()

    def _heard(self, link: Link, frame: Frame) -> None:
        """Handle a frame of a joining launcher. A frame of no known form ends the connection."""
        numbers = self._guests[link]
        match frame:
            case {"workers": int(workers), "version": str(version)} if not numbers and workers > 0:
                self._answer(link, workers, version)
            case {"from": int(number), "packet": dict(packet)} if number in numbers:
                self._relay.obey(number, packet)
            case {"ended": int(number), "status": int(status)} if number in numbers:
                self._note_end(link, number, status)
            case _ if "from" in frame or "ended" in frame:
                pass  # of a worker whose end is known
            case _:
                raise ProtocolError(f"a frame of no known form: {frame!r:.100}", rank=-1)

    def _answer(self, link: Link, workers: int, version: str) -> None:
        refused = self._refuses or self._relay.refusal(workers)
        if version != __version__:
            refused = f"this run has version {__version__} of Syncline, and the launcher that joins has {version:.40}"
        who = f"{workers} worker{'s' * (workers > 1)} of the launcher at {link.name}"
        if refused:
            say(f"syncline: refused {who}: {refused}\n")
            link.send({"refused": refused})
            return
        found = [self._relay.admit(link.pass_on) for _ in range(workers)]
        self._guests[link] |= set(found)
        say(f"syncline: {who} join: {', '.join(map(str, found))}\n")
        link.send({"numbers": found, "run": self._run, "told": self._told, **self._relay.limits})

    def _note_end(self, link: Link, number: int, status: int) -> None:
        self._guests[link].discard(number)
        self._relay.note_end(number, status, time.monotonic())
        self._relay.drop(number)

    def _lost(self, link: Link, why: str) -> None:
        numbers = sorted(self._guests[link])
        if numbers:
            say(f"syncline: lost the launcher at {link.name} with workers {', '.join(map(str, numbers))}: {why}\n")
        for number in numbers:
            self._note_end(link, number, 1)
        del self._guests[link]

    def stop(self, number: int) -> None:
        """Let the workers of other launchers end by a signal. After SIGKILL they are not waited for."""
        for link in [*self._guests]:
            link.send({"stop": int(number)})
            if number == signal.SIGKILL:
                link.cut()

    def close(self) -> None:
        """Let nobody join any more, and tell those that have that the run is over."""
        self._doors.close()
        for sock, _ in self._came:
            sock.close()
        for link in self._guests:
            link.send({"over": True})
            link.close()
        self._bell.close()


def _check_purpose(said: Hello) -> None:
    if said.purpose != _PURPOSE:
        raise HandshakeError(f"it comes for {said.purpose!r}, and here launchers join a run")


class Guest(Lines):
    """The lines of workers that join the run of another launcher, and the connection to it."""

    joins = True

    def __init__(self, link: Link, welcome: Frame, workers: int, secret: str) -> None:
        self._link = link
        match welcome:
            case {"refused": str(why)}:
                raise GroupError(f"the run at {link.name} does not let these workers join: {why}")
            case {
                "numbers": list(numbers), "run": str(run), "told": dict(told),
                "processes": int(processes), "least": int(least), "most": int(most), "servers": int(servers),
            } if _are_numbers(numbers, workers) and _are_texts(told):  # fmt: skip
                super().__init__(numbers, processes, least, most, servers)
            case _:
                raise ProtocolError(f"the launcher at {link.name} gives an answer of no known form", rank=-1)
        self.shared = {**told, "SYNCLINE_RUN_ID": run, "SYNCLINE_SECRET": secret}
        self._statuses: list[int] = []
        self._over = False

    @classmethod
    def ask(cls, where: str, workers: int, secret: str, tls: str | None = None, timeout_s: float = _ANSWER_S) -> Guest:
        """Ask the launcher at ``where`` for places for workers. ``tls`` is as in ``syncline.init``.

        Raises UsageError for a text that is no address, and GroupError if that launcher cannot be reached, has another
        secret or no TLS, or lets the workers not join.
        """
        host, _, port = where.rpartition(":")
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
            raise UsageError(f"--join {where} is not HOST:PORT, the address that the launcher of the run has printed")
        place, proof = (host.removeprefix("[").removesuffix("]"), int(port)), secret.encode()
        sealing = credentials(tls, proof, _ANY_RUN, _LAUNCHER)
        try:
            sock = dial(place, _ANY_RUN, proof, _LAUNCHER, _LAUNCHER, _PURPOSE, timeout_s, tls=sealing)
        except SecretError as error:
            raise SecretError(
                f"the launcher at {where} has another secret: set SYNCLINE_SECRET to that of its run"
            ) from error
        except HandshakeError as error:
            raise GroupError(f"the launcher at {where} does not let this one in: {error}") from error
        except OSError as error:
            why = error.strerror or str(error)
            raise GroupError(f"no launcher can be reached at {where} ({why}): does its run still go on?") from error
        link = Link(sock, where)
        try:
            link.send({"workers": workers, "version": __version__})
            return cls(link, link.wait(timeout_s), workers, secret)
        except BaseException:
            link.close()
            raise

    @property
    def address(self) -> str:
        """This machine's address on the way to the other launcher."""
        return self._link.address

    def attach(
        self, selector: selectors.BaseSelector, environ: Mapping[str, str], stop: Callable[[int, int], None]
    ) -> None:
        """Pass packets on from now on. ``stop`` ends the workers by a signal, with an exit status."""
        del environ

        def lost(why: str) -> None:
            if not self._over:
                say(
                    f"syncline: the launcher at {self._link.name}, whose run these workers have joined, has ended or"
                    f" cannot be reached: {why}; they end\n"
                )
            stop(signal.SIGTERM, 0 if self.succeeded else 1)

        def heard(frame: Frame) -> None:
            match frame:
                case {"to": int(number), "packet": dict(packet)}:
                    self.send(number, packet)
                case {"stop": int(number)} if number in {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL}:
                    self._over = True
                    stop(number, 128 + number)
                case {"over": _}:
                    self._over = True

        self._link.attach(selector, heard, lost)

    def read(self, number: int) -> None:
        """Pass on the packets of a worker."""
        for packet in self.packets(number):
            with suppress(ValueError, RecursionError):  # a worker's nonsense, which must not cost the others the run
                self._link.pass_on({"from": number, "packet": packet})

    def note_end(self, number: int, status: int, now_s: float = 0.0) -> str:
        """Tell the other launcher of the end of a worker."""
        del now_s
        self.read(number)
        self._statuses.append(status)
        self._link.send({"ended": number, "status": status})
        return ""

    @property
    def succeeded(self) -> bool:
        """Whether a worker of this launcher has ended with status 0."""
        return 0 in self._statuses

    def close(self) -> None:
        """Close the lines and the connection."""
        super().close()
        self._link.close()


def _are_numbers(values: list[Any], count: int) -> bool:
    known = all(type(value) is int and 0 <= value < 1 << 31 for value in values)
    return known and len(set(values)) == len(values) == count


def _are_texts(values: dict[Any, Any]) -> bool:
    return all(name in TOLD and isinstance(value, str) for name, value in values.items())
