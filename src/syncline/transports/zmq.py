"""Transport over ZeroMQ, through pyzmq: one PAIR socket per peer, in a context of its own.

Ranks that share a kernel and a network namespace connect over ``ipc`` (a UNIX socket without a name in the file
system), all others over TCP. A rank listens for the higher ranks and connects to the lower ones.

**Copies.** A body is sent in slices: small enough to be in the cache when the receiver takes them, large enough that
the cost per slice is low. libzmq's thread writes a slice from the sender's memory (``zmq_msg_init_data``, called
through ctypes, because pyzmq offers it only with a thread that waits for every message) and reads it into memory that
it allocates per message. The receiver copies it into place or adds it from there. Beyond the kernel's two copies that
is one copy for a received body and none for an added one. libzmq does not report that it has sent a body; the receiver
does (TAKEN), and until then the memory must not change.

**Waiting** uses ``zmq_poll``, without the interpreter lock. libzmq's own thread moves the data meanwhile.

**Strangers.** A PAIR socket accepts the first peer that connects, so libzmq's handshake must keep strangers out: by the
password that the listener has published in the rendezvous store (PLAIN), or with ``curve=on`` by the connecting rank's
public key, published there too. Both ends then authenticate as on every connection (``wire.handshake``) in the first
messages. During startup the waiting thread answers libzmq's authentication requests (ZAP); afterwards nothing answers
them, so later connections are refused. (libzmq cannot close a listener without its connections.) CURVE (curvezmq.org)
encrypts and authenticates all data, at three to five times the processor time (figures: docs/reference/bench.md).
Without it data are as open as over ``tcp``.

**The end.** libzmq would reconnect by itself, to whatever listens at that address by then; its reconnect interval is
therefore longer than any run. The socket's monitor reports the end of a connection. The last messages may take
``_LINGER_S`` to leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import hmac
import json
import math
import secrets
import select
import struct
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import GroupError, HandshakeError, ProtocolError, UsageError
from ..registry import register
from ..wire import handshake
from ..wire.bell import DescriptorBell
from ..wire.links import broken
from ..wire.scratch import address_of
from . import Bytes, Place
from ._envelope import Body, Enveloped
from ._frames import FRAME_BYTES, HEADER_BYTES, Event, read

if TYPE_CHECKING:
    import zmq

_SLICE_BYTES = 1 << 20
_SEALED_BYTES = 256
"""The most bytes that CURVE adds to a message."""
_WAITING_SLICES = 8
"""Messages that libzmq reads ahead of this rank; more would not fit the cache."""

_BODY, _TAKEN, _PASSED = 8, 9, 10
"""Frames that only this transport uses.

_BODY: the slices of a body follow. _TAKEN: a body, or with slot 0 a frame, has arrived, and its memory is free again.
_PASSED: request for a _TAKEN, sent behind a frame.
"""

_SMALL_BYTES = 64
"""Frames up to this size count as sent at once, because they delay nothing."""

_LINGER_S = 1.0
_PART_S = 0.05
"""How long a listener waits for peers that end with it. A connecting socket without its peer lingers to the limit."""
_NEVER_MS = 1 << 30
_LOOK_MS = 50
_READS = 64
"""The most messages of one peer that are taken before the next peer's turn."""

_MOST_MS = 2**31 - 1
_OLDEST = 27
_PURPOSE = "data"
_EVENT = struct.Struct("=HI")
"""An event of a monitor: its kind and its connection."""


def load(curve: bool = False) -> Any:
    """The module ``zmq``. UsageError if it is missing, too old, or lacks the required encryption."""
    try:
        import zmq
    except ImportError as error:
        raise UsageError(f"transport=zmq needs pyzmq ({error}): pip install 'syncline[zmq]'") from None
    if zmq.pyzmq_version_info()[0] < _OLDEST:
        raise UsageError(
            f"transport=zmq needs pyzmq {_OLDEST} or newer, but this is {zmq.pyzmq_version()}: pip install -U"
            " 'syncline[zmq]'"
        )
    if curve and not zmq.has("curve"):
        raise UsageError(
            f"transport=zmq(curve=on) needs a libzmq that was built with CURVE, but this one ({zmq.zmq_version()}) was"
            " not:"
            " pip install --force-reinstall 'syncline[zmq]' brings one, or leave out curve=on"
        )
    return zmq


class _Lender:
    """Sends memory without a copy, through the libzmq that pyzmq has loaded."""

    def __init__(self, path: str) -> None:
        library = ctypes.PyDLL(path)  # these calls do not block, so the interpreter lock is kept
        self._begin, self._send, self._close = library.zmq_msg_init_data, library.zmq_msg_send, library.zmq_msg_close
        self._begin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        self._send.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
        self._close.argtypes = [ctypes.c_void_p]
        self._memory = (ctypes.c_uint64 * 8)()
        self._message = ctypes.addressof(self._memory)

    def send(self, socket: zmq.Socket[bytes], data: Bytes, flags: int) -> None:
        """Pass memory to libzmq. It is dropped if the peer is gone."""
        self._begin(self._message, address_of(data), data.nbytes, None, None)
        if self._send(self._message, socket.underlying, flags) < 0:
            self._close(self._message)


class _Copier:
    """Sends a copy, if pyzmq does not reveal its libzmq."""

    def send(self, socket: zmq.Socket[bytes], data: Bytes, flags: int) -> None:
        import zmq

        with contextlib.suppress(zmq.Again):
            socket.send(data, flags)


@lru_cache(maxsize=1)
def _sender() -> _Lender | _Copier:
    try:
        from zmq.backend.cython import _zmq

        return _Lender(_zmq.__file__)
    except (ImportError, OSError, AttributeError):
        return _Copier()


@dataclass
class _Line:
    """A peer's socket, its monitor, and the number ``fd`` of its connection inside libzmq.

    A refused stranger may have had the same number before, so it is valid only once libzmq has accepted the peer.
    """

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    monitor_fd: int
    fd: int = -1
    is_in: bool = False
    body: Body | None = None
    pulls: dict[int, Body] = field(default_factory=dict)
    pushes: dict[int, Body] = field(default_factory=dict)
    frames: deque[Event] = field(default_factory=deque)

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket. The last messages may take ``linger_s`` to leave."""
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(round(linger_s * 1e3))


@register("transports", "zmq", connection="own", encrypts="curve", one_host=False, package="zmq")
class Zmq(Enveloped):
    """Messages over ZeroMQ: UNIX sockets inside a host, TCP between hosts; ``curve`` encrypts them."""

    name = "zmq"
    asks = True
    answers = False
    adds = True

    def __init__(self, place: Place, *, curve: Literal["off", "on"] = "off") -> None:
        self._zmq = load(curve == "on")
        self._ring = DescriptorBell()
        super().__init__(place.rank, place.world, self._ring)
        self._events_option, self._pollin, self._dontwait = map(
            int, (self._zmq.EVENTS, self._zmq.POLLIN, self._zmq.DONTWAIT)
        )
        self._sender = _sender()
        self._landing: Bytes = np.zeros(FRAME_BYTES, np.uint8)
        self._kept: list[Body] = []  # memory that libzmq may still read
        self._aside = select.epoll()  # the bell and the monitors of connections
        self._aside.register(self._ring, select.EPOLLIN)
        self._lines: dict[int, _Line] = {}
        self._context: zmq.Context[Any] = self._zmq.Context()
        try:
            self._lines = _Start(self._zmq, place, self._context, curve == "on").lines()
        except BaseException:
            self._leave()
            raise
        for line in self._lines.values():
            self._aside.register(line.monitor_fd, select.EPOLLIN)
        self._watched = self._watch()
        self._look()  # a monitor makes its descriptor readable only after it was once found empty

    def close(self) -> None:
        """Peers that have ended already get no last frame, because sending it would wait for them."""
        if not self._operations.closed and not self._forked:
            with contextlib.suppress(ProtocolError):
                self._look()
        super().close()

    def _put(self, peer: int, frame: Bytes, done: Event) -> None:
        if self._outbox.ranked and frame.nbytes > _SMALL_BYTES and peer in self._lines:
            self._write(peer, frame)
            self._write(peer, self._frame(peer, _PASSED))
            self._lines[peer].frames.append(done)
            self._sending[peer] += 1
        else:
            self._write(peer, frame)
            done()

    def _write(self, peer: int, frame: Bytes) -> None:
        if peer in self._lines:
            with contextlib.suppress(self._zmq.Again):  # the peer is gone, which its monitor is about to report
                self._lines[peer].socket.send(frame, self._dontwait)

    def _push(self, peer: int, body: Body) -> None:
        line, data = self._lines[peer], body.data
        line.pushes[body.slot] = body
        self._sending[peer] += 1
        self._write(peer, self._frame(peer, _BODY, slot=body.slot, size=data.nbytes))
        for at in range(0, data.nbytes, _SLICE_BYTES):
            self._sender.send(line.socket, data[at : at + _SLICE_BYTES], self._dontwait)

    def _pull(self, peer: int, body: Body) -> None:
        self._lines[peer].pulls[body.slot] = body

    def _move(self, timeout: float) -> None:
        found = self._zmq.zmq_poll(self._watched, min(math.ceil(timeout * 1e3), _MOST_MS))
        ready = {item for item, _ in found}
        for peer, line in list(self._lines.items()):
            if line.socket in ready:
                self._read(peer, line)
        if self._aside.fileno() in ready:
            self._look()

    def _leave(self) -> None:
        """Let the last messages leave, then free libzmq. In a forked child libzmq detects the fork itself."""
        if self._forked:
            return
        deadline = time.monotonic() + _PART_S
        while any(peer > self.rank for peer in self._lines) and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(ProtocolError):
                self._move(left)
        for line in self._lines.values():
            line.close(_LINGER_S)
        self._lines.clear()
        self._context.term()
        self._aside.close()
        self._ring.close()

    def _lose(self, peer: int) -> None:
        super()._lose(peer)
        line = self._lines.pop(peer, None)
        if line is not None:
            self._kept += line.pushes.values()
            self._aside.unregister(line.monitor_fd)
            line.close()
            self._watched = self._watch()

    def _watch(self) -> list[tuple[Any, int]]:
        return [(item, self._pollin) for item in (*(line.socket for line in self._lines.values()), self._aside)]

    def _has_come(self, socket: Any) -> bool:
        """Whether a message has arrived. Testing is cheaper than catching an exception."""
        return bool(socket.getsockopt(self._events_option) & self._pollin)

    def _look(self) -> None:
        """Handle the bell and events of connections. Connections of strangers also end here."""
        self._ring.rang()
        for peer, line in list(self._lines.items()):
            ended = False
            while self._has_come(line.monitor):
                told, _ = line.monitor.recv_multipart(self._dontwait)
                what, fd = _EVENT.unpack(told)
                line.is_in = line.is_in or what == self._zmq.EVENT_HANDSHAKE_SUCCEEDED
                ended = ended or (line.is_in and fd == line.fd and what == self._zmq.EVENT_DISCONNECTED)
            if ended:
                while self._read(peer, line):  # receive what came before the end
                    pass
                self._lose(peer)

    def _read(self, peer: int, line: _Line) -> bool:
        """Receive from a peer, up to a budget. Returns whether there may be more."""
        try:
            for _ in range(_READS):
                if line.body is None:
                    self._take_frame(peer, line)
                else:
                    self._read_slice(peer, line, line.body)
                if peer not in self._lines or not self._has_come(line.socket):
                    return False  # the peer has ended, or all is received
        except self._zmq.Again:
            return False
        except ProtocolError:
            self._lose(peer)
            raise
        return True

    def _take_frame(self, peer: int, line: _Line) -> None:
        """Receive one frame. Raises Again if none has arrived."""
        landing = self._landing
        nbytes = line.socket.recv_into(landing, flags=self._dontwait)
        if nbytes > FRAME_BYTES:
            raise broken(peer, f"a frame of {nbytes} bytes came")
        if nbytes != HEADER_BYTES or not _BODY <= landing[0] <= _PASSED:
            frame = self.scratch.take(nbytes)
            frame[:nbytes] = landing[:nbytes]
            self._came(peer, frame, nbytes)
            return
        self._received[peer] += nbytes
        kind, slot, _, size = read(peer, landing, nbytes)
        if kind == _BODY and slot in line.pulls and line.pulls[slot].data.nbytes == size:
            line.body = line.pulls.pop(slot)
        elif kind == _TAKEN and (slot in line.pushes if slot else line.frames):
            done = line.pushes.pop(slot).done if slot else line.frames.popleft()
            self._sending[peer] -= 1
            done()
        elif kind == _PASSED:
            self._write(peer, self._frame(peer, _TAKEN))
        else:
            raise broken(peer, f"a frame of kind {kind} came (slot {slot}, {size} bytes) that has no meaning now")

    def _read_slice(self, peer: int, line: _Line, body: Body) -> None:
        """Receive the next slice of a body. Raises Again if none has arrived."""
        into = body.data[body.at : body.at + _SLICE_BYTES]
        if body.adds is None:
            nbytes = line.socket.recv_into(into, flags=self._dontwait)
        else:
            came = line.socket.recv(self._dontwait, copy=False)
            nbytes = len(came)
            if nbytes == into.nbytes:
                body.put(body.at, np.frombuffer(came.buffer, np.uint8))
        if nbytes != into.nbytes:
            raise broken(peer, f"{nbytes} bytes of a body came where {into.nbytes} were expected")
        body.at += nbytes
        if body.at == body.data.nbytes:
            line.body = None
            self._write(peer, self._frame(peer, _TAKEN, slot=body.slot))
            body.done()


class _Start:
    """Forms the connections of one rank. The module's docstring describes the authentication."""

    def __init__(self, zmq: Any, place: Place, context: zmq.Context[Any], curve: bool) -> None:
        self._zmq, self._place, self._context = zmq, place, context
        self._peers = [peer for peer in range(place.world) if peer != place.rank]
        self._deadline = time.monotonic() + place.timeout_s
        self._keys: tuple[bytes, bytes] | None = zmq.curve_keypair() if curve else None
        self._token = secrets.token_hex(16)
        self._notes: dict[int, _Note] = {}
        self._lines: dict[int, _Line] = {}
        context.set(zmq.MAX_SOCKETS, 64 + 4 * place.world)
        self._door = context.socket(zmq.REP)

    def lines(self) -> dict[int, _Line]:
        """An authenticated connection to every peer. GroupError names a missing rank; nothing stays open then."""
        rank = self._place.rank
        try:
            self._door.bind("inproc://zeromq.zap.01")
            at = {peer: self._listen(peer) for peer in self._peers if peer > rank}
            self._exchange_notes(_Note(at, self._token, "" if self._keys is None else self._keys[0].decode()))
            for peer in range(rank):
                self._dial(peer)
            for peer in self._peers:  # in the same order everywhere, so that no circle of ranks waits
                self._prove(peer, self._lines[peer])
        except BaseException as error:
            for line in self._lines.values():
                line.close()
            if isinstance(error, self._zmq.ZMQError):
                raise GroupError(f"ZeroMQ cannot connect: {error}; give another interface=") from error
            raise
        finally:
            self._door.close(0)
        return self._lines

    def _open(self, peer: int) -> zmq.Socket[bytes]:
        """A socket for a peer, with a monitor for its end."""
        library = self._zmq
        socket: zmq.Socket[bytes] = self._context.socket(library.PAIR)
        for option, value in (
            (library.LINGER, 0),  # a process that ends without close() waits for nothing
            (library.SNDHWM, 0),
            (library.RCVHWM, _WAITING_SLICES),
            (library.MAXMSGSIZE, _SLICE_BYTES + _SEALED_BYTES),
            (library.RECONNECT_IVL, _NEVER_MS),
            (library.HANDSHAKE_IVL, round(max(1.0, self._place.timeout_s) * 1e3)),
            (library.IPV6, int(":" in self._place.address)),
        ):
            socket.setsockopt(option, value)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys
        monitor = socket.get_monitor_socket(library.EVENT_DISCONNECTED | library.EVENT_HANDSHAKE_SUCCEEDED)
        monitor_fd = monitor.getsockopt(library.FD)
        assert isinstance(monitor_fd, int)
        self._lines[peer] = _Line(socket, monitor, monitor_fd)
        return socket

    def _listen(self, peer: int) -> str:
        """Listen for one peer. Returns the address."""
        socket = self._open(peer)
        socket.zap_domain = b"%d" % peer
        if self._keys is None:
            socket.plain_server = True
        else:
            socket.curve_server = True
        address = self._place.address
        host = f"[{address}]" if ":" in address else address
        near = peer in self._place.near
        socket.bind(f"ipc://@syncline-{secrets.token_hex(12)}" if near else f"tcp://{host}:*")
        where = socket.getsockopt(self._zmq.LAST_ENDPOINT)
        assert isinstance(where, bytes)
        return where.rstrip(b"\0").decode()

    def _dial(self, peer: int) -> None:
        note, rank = self._notes[peer], self._place.rank
        if rank not in note.at:
            raise broken(peer, f"its note of the start does not say where rank {rank} connects")
        socket = self._open(peer)
        if self._keys is None:
            socket.plain_username, socket.plain_password = b"%d" % rank, note.token.encode()
        else:
            socket.curve_serverkey = note.key.encode()
        socket.connect(note.at[rank])

    def _exchange_notes(self, mine: _Note) -> None:
        place = self._place
        place.store.set(f"{place.key}/{place.rank}", json.dumps(asdict(mine)).encode())
        for peer in self._peers:
            self._notes[peer] = _Note.read(peer, place.read(str(peer), self._deadline, self._late(peer)))

    def _prove(self, peer: int, line: _Line) -> None:
        """Exchange the four messages of ``wire.handshake``. Raises HandshakeError."""
        rank, secret = self._place.rank, self._place.secret
        run = handshake.run_id(self._token if peer > rank else self._notes[peer].token)
        try:
            if peer < rank:
                said = handshake.hello(run, rank, peer, _PURPOSE)
                line.socket.send(said.raw)
                reply = self._hear(peer, line)
                line.socket.send(handshake.check_answer(secret, said, reply))
                if self._hear(peer, line) != handshake.WELCOME:
                    raise HandshakeError("it does not speak this protocol")
                return
            said = handshake.read_hello(self._hear(peer, line))
            if (said.run, said.source, said.target, said.purpose) != (run, peer, rank, _PURPOSE):
                raise HandshakeError(f"it says that it is rank {said.source} and calls rank {said.target}")
            reply = handshake.answer(secret, said)
            line.socket.send(reply)
            handshake.check_proof(secret, said, reply, self._hear(peer, line))
            line.socket.send(handshake.WELCOME)
        except HandshakeError as error:
            raise type(error)(f"rank {peer} over ZeroMQ: {error}") from error

    def _hear(self, peer: int, line: _Line) -> bytes:
        """A peer's next message. Answers authentication requests meanwhile."""
        zmq = self._zmq
        while True:
            ready = dict(zmq.zmq_poll([(line.socket, zmq.POLLIN), (self._door, zmq.POLLIN)], _LOOK_MS))
            if self._door in ready:
                self._answer_door()
            if line.socket in ready:
                frame = line.socket.recv(copy=False)
                line.fd = frame.get(zmq.SRCFD)
                return bytes(frame.bytes)
            self._go_on(peer)

    def _answer_door(self) -> None:
        """Answer one ZAP request (rfc.zeromq.org/spec/27): is this caller the peer that the socket is for?"""
        version, number, domain, _, _, mechanism, *credentials = self._door.recv_multipart()
        peer = int(domain)
        if self._keys is not None and mechanism == b"CURVE" and len(credentials) == 1:
            from zmq.utils import z85

            wanted, shown = [self._notes[peer].key.encode()], [z85.encode(credentials[0])]
        else:
            wanted, shown = [domain, self._token.encode()], credentials
        known = len(shown) == len(wanted) and all(map(hmac.compare_digest, shown, wanted))
        code, text = (b"200", b"") if known else (b"400", b"not of this run")
        self._door.send_multipart([version, number, code, text, b"", b""])

    def _go_on(self, peer: int) -> None:
        """Raise if startup must end: another rank has failed, or the time for a peer is over."""
        self._place.check()
        if time.monotonic() > self._deadline:
            raise GroupError(self._late(peer))

    def _late(self, peer: int) -> str:
        return (
            f"no ZeroMQ connection with rank {peer} within {self._place.timeout_s:.0f} s: check that hosts reach"
            " each other on the addresses of interface=, on any port"
        )


@dataclass(frozen=True)
class _Note:
    """A rank's entry in the store: an address for each higher rank, a password, and a public key (CURVE), if any."""

    at: dict[int, str]
    token: str
    key: str

    @classmethod
    def read(cls, peer: int, text: bytes) -> _Note:
        """Parse; raises ProtocolError for text that no rank of this version writes."""
        try:
            told = json.loads(text)
            at = {int(rank): str(where) for rank, where in told["at"].items()}
            return cls(at, str(told["token"]), str(told["key"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise broken(peer, f"its note of the start makes no sense ({error})") from None
