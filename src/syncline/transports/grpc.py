"""Transport over gRPC: a bidirectional stream between every two ranks, through grpcio's synchronous interface.

Owns a server (in every rank but the last), a channel to every lower rank, and the streams in them, whose messages are
plain bytes: no generated code, no serializers. grpc is loaded when the first transport is made.

**Messages.** A stream carries frames, each one message, and bodies in slices of 1 MiB, so that neither waits for more
than a slice of the other. Bodies are asked for: then every slice has its place when it comes, and gRPC's flow control
never holds back a frame behind a body that nobody takes. Sending is bounded by that flow control: gRPC asks for the
next message when it has taken the last one.

**Threads.** Each stream has one of gRPC's that asks for messages to send, and one of ours that takes what has come. A
frame is handed to the progress thread where gRPC deserializes it, which saves a change of threads: the progress thread
is told before the stream's own thread wakes up.

**Who copies what how often.** grpcio has no way to lend memory, either way. A body is copied from the array into a
message (Python's bytes), from there into gRPC's memory, and into the kernel; at the receiver out of the kernel, into
bytes piece by piece, together into one message, and into the array: seven times, of which the kernel makes two and
Python, which holds the interpreter lock meanwhile, four. HTTP/2 adds 9 bytes to every frame of its own.

**Who is let in.** The first messages of a stream are the proof of ``wire.handshake`` on both sides, over a number that
the server has drawn and told in the store: whoever listens in cannot use it again. Each of its messages has one size.
Another version has another name for the stream, which gRPC refuses. Before the proof a stranger holds a connection, a
thread and at most one slice of memory, for five seconds; at most sixteen have a stream. The server stops to listen when
all are connected. Nothing is encrypted, as over ``tcp``: whoever can read or change packets of the network reads and
changes what ranks send.

**Settings.** Frames of HTTP/2 may be as large as a slice, which spares headers. The window grows by gRPC's own
estimate of the bandwidth-delay product, its default. A proxy in the environment is not for ranks. There are no pings:
the session's watcher finds who hangs. A port is not shared (SO_REUSEPORT), or another process could take half of the
callers.

**The end.** A rank that ends sends what it was given and then its last frame; a peer that sees that ends its side of
the stream. So nothing is cancelled that is on its way, unless a peer does not react for a second.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import secrets
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import GroupError, HandshakeError, ProtocolError, UsageError
from ..kernels.cpu import add_all_into
from ..registry import register
from ..wire import handshake
from ..wire.links import broken
from ..wire.listener import Refusals
from . import Bytes, Place
from ._bell import Bell
from ._envelope import Enveloped
from ._frames import END, Event

log = logging.getLogger("syncline.wire")

_OLDEST = (1, 80)
_REMEDY = "pip install --upgrade 'syncline[grpc]'"

_METHOD = f"/syncline/{handshake.MAGIC.decode()}"
_PURPOSE = "grpc"

_SLICE_BYTES = 1 << 20
_SLICE = struct.Struct("<BxHxxxxQ")
"""What a slice begins with: 0, which no frame begins with, its body's slot, and its place in the body."""

_STRANGERS = 16
"""Streams beside those of ranks that may be in their handshake."""

_CONNECTIONS = 256
"""Connections beside those of ranks: without a stream they are closed when the time of a handshake is over."""

_AHEAD = 64
"""Frames that may come from a peer before the progress thread looks at them."""

_HANDSHAKE_S = 5.0

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _SLICE.size + _SLICE_BYTES),
    ("grpc.max_send_message_length", _SLICE.size + _SLICE_BYTES),
    ("grpc.max_concurrent_streams", 1),
    ("grpc.server_handshake_timeout_ms", int(1000 * _HANDSHAKE_S)),
    ("grpc.max_connection_idle_ms", int(1000 * _HANDSHAKE_S)),
    ("grpc.http2.max_frame_size", _SLICE_BYTES),
)

_END_S = 1.0
"""How long a rank that ends waits for its peers to see that."""

_POLL_S = 0.005
_AGAIN_S = 0.1
_FOREVER_S = 365 * 86400.0


def load() -> Any:
    """The module grpc; UsageError where it is missing or too old.

    Its log, which goes to stderr by itself, is off unless the script has loaded grpc before, or has set its level.
    """
    quiet = "grpc" not in sys.modules and "GRPC_VERBOSITY" not in os.environ
    if quiet:
        os.environ["GRPC_VERBOSITY"] = "NONE"
    try:
        import grpc
    except ImportError as error:
        raise UsageError(f"transport=grpc needs grpcio ({error}): {_REMEDY}") from None
    finally:
        if quiet:
            del os.environ["GRPC_VERBOSITY"]
    version = getattr(grpc, "__version__", "0")
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise UsageError(f"transport=grpc needs grpcio {needed} or newer, here is {version}: {_REMEDY}")
    return grpc


@dataclass
class _Body:
    """A body that leaves or comes, and how much of it has; one that comes may be added to what is there."""

    slot: int
    data: Bytes
    done: Event
    at: int = 0
    adds: np.dtype[Any] | None = None

    def take(self, message: bytes) -> None:
        """The next slice has come."""
        data = np.frombuffer(message, np.uint8, offset=_SLICE.size)
        into = self.data[self.at : self.at + data.size]
        if self.adds is None:
            into[:] = data
        else:
            add_all_into(into.view(self.adds), [data.view(self.adds)])
        self.at += data.size


@dataclass(eq=False)
class _Stream:
    """One end of a stream: what waits to be sent, and where what comes goes.

    ``tell`` hands something to the progress thread. Sending is an iterator, which a thread of gRPC's drives.
    """

    tell: Callable[[Event], None]
    frame_came: Callable[[int, bytes], None]
    ended: Callable[[int, Exception | None], None]
    peer: int = -1
    proved: bool = False
    cancel: Callable[[], Any] = lambda: None
    given: int = 0  # messages and bodies that were put here
    sent: int = 0  # of them those that gRPC has sent
    over: threading.Event = field(default_factory=threading.Event)
    _frames: deque[tuple[bytes, Event | None]] = field(default_factory=deque)
    _bodies: deque[_Body] = field(default_factory=deque)
    _last: bytes | None = None
    _stopped: bool = False
    _bell: Bell = field(default_factory=Bell)
    _leaving: threading.Lock = field(default_factory=threading.Lock)  # bodies are read
    _coming: threading.Lock = field(default_factory=threading.Lock)  # receives are written
    _into: dict[int, _Body] = field(default_factory=dict)

    # Sending.

    def put(self, frame: bytes, done: Event | None) -> None:
        """Send a frame before all bodies; ``done`` when gRPC has it."""
        self.given += 1
        self._frames.append((frame, done))
        self._bell.ring()

    def push(self, body: _Body) -> None:
        """Send a body."""
        self.given += 1
        self._bodies.append(body)
        self._bell.ring()

    @property
    def waits(self) -> bool:
        """Whether something that was put here has not been sent."""
        return self.given != self.sent

    def finish(self, frame: bytes) -> None:
        """Send a last frame, behind everything; what still comes goes nowhere."""
        with self._coming:
            self._last = frame
            self._into.clear()
        self._bell.ring()

    @property
    def finishes(self) -> bool:
        """Whether the last frame is on its way."""
        return self._last is not None and not self._stopped

    def stop(self) -> None:
        """Send nothing any more, and touch no memory of others."""
        self._stopped = True
        with self._leaving:
            self._bodies.clear()
        with self._coming:
            self._into.clear()
        self._bell.ring()

    def messages(self) -> Iterator[bytes]:
        """What gRPC is to send, one after the other."""
        while not self._stopped:
            if self._frames:
                message, done = self._frames.popleft()
                if done is not None:
                    self.tell(done)
                yield message
                self.sent += 1
            elif (slice_ := self._next_slice()) is not None:
                message, ends = slice_
                yield message
                self.sent += ends
            elif self._last is not None:
                yield self._last
                return
            else:
                self._bell.wait(_FOREVER_S)

    def _next_slice(self) -> tuple[bytes, bool] | None:
        """A slice of the first body, and whether it is its last one; None where there is no body."""
        with self._leaving:
            if not self._bodies:
                return None
            body = self._bodies[0]
            piece = body.data[body.at : body.at + _SLICE_BYTES]
            message = b"".join((_SLICE.pack(0, body.slot, body.at), memoryview(piece)))
            body.at += piece.nbytes
            ends = body.at == body.data.nbytes
            if ends:
                self._bodies.popleft()
                self.tell(body.done)
        return message, ends

    # Receiving.

    def pull(self, body: _Body) -> None:
        """A body that is about to come."""
        with self._coming:
            self._into[body.slot] = body

    def come(self, message: bytes) -> bytes | bool:
        """Called by gRPC for each message: frames go to the progress thread at once, slices to ``take``."""
        if not self.proved or message[:1] == b"\0":
            return message
        self.frame_came(self.peer, message)
        return message[:1] != bytes([END]) or b""

    def take(self, messages: Iterator[Any]) -> None:
        """The thread that takes what comes, until the stream ends."""
        frames, fault = 0, None
        try:
            for message in messages:
                if message is True:
                    frames += 1
                    if frames % _AHEAD == 0:
                        self._wait_for_progress()
                elif message:
                    self._take_slice(message)
                else:
                    self.stop()  # the peer has ended its part, and takes nothing more
        except ProtocolError as error:
            fault = error
            self.cancel()
        except Exception as error:  # the stream is broken, as it is when a rank dies
            log.debug("the stream with rank %d has ended: %s", self.peer, error)
        self.stop()
        self.tell(partial(self.ended, self.peer, fault))
        self.over.set()

    def _take_slice(self, message: bytes) -> None:
        if len(message) <= _SLICE.size:
            raise broken(self.peer, f"a slice of {len(message)} bytes came")
        _, slot, at = _SLICE.unpack_from(message)
        if slot not in self._into:
            self._wait_for_progress()  # which may be about to say where it goes
        with self._coming:
            if self._stopped or self._last is not None:
                return
            body = self._into.get(slot)
            end = at + len(message) - _SLICE.size
            wanted = body is not None and at == body.at and end in (body.data.nbytes, at + _SLICE_BYTES)
            if body is None or not wanted or end > body.data.nbytes:
                raise broken(self.peer, f"bytes {at} to {end} of a body came that nobody has asked for (slot {slot})")
            body.take(message)
            if end == body.data.nbytes:
                del self._into[slot]
                self.tell(body.done)

    def _wait_for_progress(self) -> None:
        """Wait until the progress thread has acted on all that was told so far, or there is an end."""
        reached = threading.Event()
        self.tell(reached.set)
        while not (self._stopped or self._last is not None or reached.wait(_POLL_S)):
            pass


class _Threads(Executor):
    """A thread for every stream: those of a pool would keep the interpreter from ending while a stream is open."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(call(*arguments, **named))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="syncline-stream", daemon=True).start()
        return future


@dataclass
class _Call:
    """A stream that this rank has opened to a lower one: where to, and how that went."""

    method: ClassVar[str] = _METHOD
    peer: int
    address: str
    run: bytes
    channel: Any
    stream: _Stream
    call: Any = None
    error: Exception | None = None
    again_at: float = 0.0


@register("transports", "grpc", connection="own", one_host=False, package="grpc")
class Grpc(Enveloped):
    """Messages over gRPC's bidirectional streams, through grpcio."""

    name = "grpc"
    asks = True
    answers = False  # its stream ends by itself
    adds = True

    def __init__(self, place: Place) -> None:
        super().__init__(place.rank, place.world)
        self._grpc = load()
        self._place = place
        self._events: deque[Event] = deque()
        self._streams: dict[int, _Stream] = {}
        self._calls: dict[int, _Call] = {}
        self._server: Any = None
        self._token = secrets.token_bytes(handshake.RUN_BYTES)
        self._guests: dict[_Stream, float] = {}  # in their handshake, with its end
        self._refusals = Refusals(log)
        self._meeting = threading.Lock()  # guests, refusals and streams while the group forms
        try:
            self._connect()
        except BaseException:
            self._leave()
            raise

    # The library's part of the envelope.

    def _put(self, peer: int, frame: Bytes, done: Event) -> None:
        if frame[0] == END:
            self._streams[peer].finish(frame.tobytes())
        else:
            self._streams[peer].put(frame.tobytes(), done if self._outbox.ranked else None)

    def _push(self, peer: int, slot: int, body: Bytes, done: Event) -> None:
        self._streams[peer].push(_Body(slot, body, done))

    def _pull(self, peer: int, slot: int, into: Bytes, done: Event) -> None:
        self._streams[peer].pull(_Body(slot, into, done))

    def _pull_sum(self, peer: int, slot: int, into: NDArray[Any], done: Event) -> None:
        self._streams[peer].pull(_Body(slot, into.view(np.uint8), done, adds=into.dtype))

    def _move(self, timeout: float) -> None:
        if not self._events:
            self.bell.wait(timeout)
        while self._events:
            self._events.popleft()()

    def _leave(self) -> None:
        """Let the streams end by themselves, and break those that do not."""
        if self._forked:
            _immortal(self._server)  # their end would wait for threads that only the parent has
            _immortal(self._calls)
            _immortal(self._streams)
            return
        deadline = time.monotonic() + _END_S
        for stream in self._streams.values():
            while stream.finishes and time.monotonic() < deadline and not stream.over.wait(_POLL_S):
                pass
            if not stream.over.is_set():
                stream.stop()
                stream.cancel()
        for call in self._calls.values():
            call.channel.close()
        if self._server is not None:
            self._server.stop(None)
        for stream in self._streams.values():
            stream.over.wait(_END_S)
        self._calls, self._server = {}, None
        self._refusals.close()

    @property
    def idle(self) -> bool:
        """True when gRPC has sent all that those who are still there are to get."""
        here = [peer for peer in self._peers if peer not in self._operations.gone]
        return not any(self._streams[peer].waits or self._outbox.holds(peer) for peer in here)

    def _lose(self, peer: int) -> None:
        super()._lose(peer)
        self._streams[peer].stop()

    def _tell_progress(self, event: Event) -> None:
        """From any thread."""
        self._events.append(event)
        self.bell.ring()

    def _frame_came(self, peer: int, message: bytes) -> None:
        self._tell_progress(partial(self._read_frame, peer, message))

    def _read_frame(self, peer: int, message: bytes) -> None:
        frame = self.scratch.take(len(message))
        frame[: len(message)] = np.frombuffer(message, np.uint8)
        self._came(peer, frame, len(message))

    def _stream_ended(self, peer: int, fault: Exception | None) -> None:
        self._lose(peer)
        if fault is not None:
            raise fault

    # How the group forms.

    def _connect(self) -> None:
        """Open the streams with all peers; GroupError, or an error of its own, where that fails."""
        place = self._place
        deadline = time.monotonic() + place.timeout_s
        if self.rank < self.world - 1:
            self._listen()
        while len(self._streams) < len(self._peers):
            place.check()
            if time.monotonic() > deadline:
                raise self._missing()
            self._call_lower_ranks()
            self._send_away(time.monotonic())
            self.bell.wait(_POLL_S)
        if self._server is not None:
            self._close_door()

    def _missing(self) -> GroupError:
        """Who has not come, and why, as far as gRPC knows."""
        missing = [peer for peer in self._peers if peer not in self._streams]
        why = [f"rank {peer}: {self._calls[peer].error}" for peer in missing if peer in self._calls]
        return GroupError(
            f"rank {self.rank} has no gRPC stream with rank{'s' * (len(missing) > 1)}"
            f" {', '.join(map(str, missing))} after {self._place.timeout_s:.0f} s{': ' * bool(why)}{'; '.join(why)}"
        )

    def _listen(self) -> None:
        """Serve the higher ranks, and tell them where."""
        grpc, place = self._grpc, self._place
        expected = self.world - 1 - self.rank
        options = (*_OPTIONS, ("grpc.max_allowed_incoming_connections", expected + _CONNECTIONS))
        self._server = grpc.server(
            _Threads(), [SimpleNamespace(service=self._serve)], None, options, expected + _STRANGERS
        )
        host = f"[{place.address}]" if ":" in place.address else place.address
        try:
            port = self._server.add_insecure_port(f"{host}:0")
        except RuntimeError as error:
            raise GroupError(f"rank {self.rank} cannot listen on {place.address} with gRPC: {error}") from error
        self._server.start()
        family = "ipv6" if ":" in host else "ipv4"
        place.store.set(f"{place.key}/grpc/{self.rank}", self._token + f"{family}:{host}:{port}".encode())

    def _close_door(self) -> None:
        """Listen no more: streams that are there stay. gRPC waits for their end in a thread as this one is."""
        self._send_away(math.inf)
        stop = threading.Thread(target=self._server.stop, args=(_FOREVER_S,), name="syncline-door", daemon=True)
        stop.start()
        stop.join()

    def _send_away(self, now: float) -> None:
        """Break the streams whose time to prove themselves is over."""
        with self._meeting:
            for guest in [guest for guest, until in self._guests.items() if until <= now]:
                del self._guests[guest]
                guest.cancel()

    # The server's side of a stream.

    def _serve(self, details: Any) -> Any:
        """What answers a stranger's call, or a rank's: gRPC refuses all but this version's."""
        if details.method != _METHOD:
            return None
        stream = _Stream(self._tell_progress, self._frame_came, self._stream_ended)
        return self._grpc.stream_stream_rpc_method_handler(partial(self._greet, stream), stream.come)

    def _greet(self, stream: _Stream, requests: Iterator[Any], context: Any) -> Iterator[bytes]:
        """Let the caller prove itself, and then send to it what there is."""
        secret = self._place.secret
        stream.cancel = context.cancel
        with self._meeting:
            self._guests[stream] = time.monotonic() + _HANDSHAKE_S
        try:
            said = handshake.read_hello(next(requests))
            if (said.run, said.target, said.purpose) != (self._token, self.rank, _PURPOSE):
                raise HandshakeError("it is looking for another rank, or another run")
            reply = handshake.answer(secret, said)
            yield reply
            handshake.check_proof(secret, said, reply, next(requests))
            self._join(said.source, stream)
        except HandshakeError as error:
            with self._meeting:
                self._refusals.add(context.peer(), str(error))
            context.abort(self._grpc.StatusCode.UNAUTHENTICATED, str(error))
        except (StopIteration, self._grpc.RpcError):
            return  # gone in the middle of it
        finally:
            with self._meeting:
                self._guests.pop(stream, None)
        # Before the welcome: where the caller has gone meanwhile, gRPC does not come back here.
        threading.Thread(target=stream.take, args=(requests,), name="syncline-reader", daemon=True).start()
        yield handshake.WELCOME
        yield from stream.messages()
        stream.over.wait(_END_S)  # what the peer has still sent is taken first

    def _join(self, peer: int, stream: _Stream) -> None:
        """A rank has proved itself; HandshakeError for one that is not expected."""
        with self._meeting:
            if not self.rank < peer < self.world or peer in self._streams:
                raise HandshakeError(f"it says that it is rank {peer}, which is not expected")
            if self._guests.pop(stream, None) is None:
                raise HandshakeError("it took too long")
            stream.peer, stream.proved = peer, True
            self._streams[peer] = stream
        self.bell.ring()

    # The caller's side.

    def _call_lower_ranks(self) -> None:
        """Call those whose address is known by now, and again those that could not answer; raises what is final."""
        place = self._place
        for peer in range(self.rank):
            call = self._calls.get(peer)
            if call is None:
                told = place.store.get(f"{place.key}/grpc/{peer}")
                if told is not None:
                    self._call(peer, told[handshake.RUN_BYTES :].decode(), told[: handshake.RUN_BYTES])
            elif call.error is not None and not call.again_at:
                call.again_at = self._again_at(call)
            elif call.again_at and time.monotonic() > call.again_at:
                call.channel.close()
                self._call(peer, call.address, call.run)

    def _call(self, peer: int, address: str, run: bytes) -> None:
        stream = _Stream(self._tell_progress, self._frame_came, self._stream_ended, peer)
        channel = self._grpc.insecure_channel(address, _OPTIONS)
        call = self._calls[peer] = _Call(peer, address, run, channel, stream)
        said = handshake.hello(run, self.rank, peer, _PURPOSE)
        proof: SimpleQueue[bytes | None] = SimpleQueue()
        streaming = channel.stream_stream(call.method, None, stream.come)
        call.call = streaming(self._introduce(stream, said, proof))
        stream.cancel = call.call.cancel
        threading.Thread(target=self._run_call, args=(call, said, proof), name="syncline-reader", daemon=True).start()

    @staticmethod
    def _introduce(stream: _Stream, said: handshake.Hello, proof: SimpleQueue[bytes | None]) -> Iterator[bytes]:
        """What the caller sends: its proof, and then what there is."""
        yield said.raw
        proved = proof.get()
        if proved is not None:
            yield proved
            yield from stream.messages()

    def _run_call(self, call: _Call, said: handshake.Hello, proof: SimpleQueue[bytes | None]) -> None:
        """The thread of a stream that was opened here: proves who this is, checks the other, and takes what comes."""
        stream = call.stream
        try:
            proof.put(handshake.check_answer(self._place.secret, said, next(call.call)))
            if next(call.call) != handshake.WELCOME:
                raise HandshakeError("it does not speak this protocol")
        except Exception as error:
            proof.put(None)
            call.call.cancel()
            stream.stop()
            call.error = error
            self.bell.ring()
            return
        with self._meeting:
            stream.proved = True
            self._streams[call.peer] = stream
        self.bell.ring()
        stream.take(call.call)

    def _again_at(self, call: _Call) -> float:
        """When to call once more; raises the error of a call that never will be answered."""
        code, error = self._grpc.StatusCode, call.error
        where = f"rank {call.peer} at {call.address}"
        if isinstance(error, HandshakeError):
            raise type(error)(f"{where}: {error}") from error
        if isinstance(error, self._grpc.RpcError):
            found = error.code()
            if found == code.UNIMPLEMENTED:
                raise HandshakeError(
                    f"{where} speaks another version of the protocol: install one version on all ranks"
                )
            if found == code.UNAUTHENTICATED:
                raise HandshakeError(f"{where} has refused rank {self.rank}: {error.details()}")
            call.error = GroupError(f"{found.name}: {error.details()}")
        return time.monotonic() + _AGAIN_S


def _immortal(value: Any) -> None:
    """Keep an object from ever being taken apart."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
