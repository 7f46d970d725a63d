"""Transport over gRPC: a bidirectional stream between every two ranks, through grpcio's synchronous interface.

It owns a server (in every rank but the last), a channel to every lower rank, and their streams. Messages are plain
bytes, without generated code or serializers. grpc is imported when the first transport is created.

**Messages.** A stream carries frames, one per message, and bodies in slices of 1 MiB, so that neither waits longer than
a slice for the other. Bodies are sent on request. Every slice then has a destination when it arrives, and gRPC's flow
control never holds a frame back behind a body without a receive. This flow control also limits sending: gRPC asks for
the next message when it has taken the last one.

**Threads.** Each stream has a gRPC thread that asks for messages to send, and a thread of this transport that handles
received messages. Frames go to the progress thread from gRPC's deserializer, before the stream's own thread wakes up,
which saves a context switch.

**Copies.** grpcio cannot lend memory in either direction. A body is copied from the array into a message (Python
bytes), into gRPC's memory, and into the kernel; at the receiver out of the kernel, into bytes piece by piece, joined
into one message, and into the array. Of these seven copies the kernel makes two, and Python makes four while it holds
the interpreter lock. HTTP/2 adds 9 bytes to each of its frames.

**Authentication.** The first messages of a stream are the proof of ``wire.handshake`` on both sides, over a random
number that the server has published in the store, so that an eavesdropper cannot replay it. Each of these messages has
a fixed size. Another version uses another stream name, which gRPC refuses. Before the proof a stranger can hold a
connection, a thread and at most one slice of memory for five seconds; at most sixteen strangers have a stream. The
server stops listening when all ranks are connected. Data are not encrypted, as with ``tcp``: whoever controls the
network can read and change them.

**Settings.** HTTP/2 frames may be as large as a slice, which saves headers. The flow-control window grows by gRPC's
default, an estimate of the bandwidth-delay product. Proxies from the environment are ignored. There are no keepalive
pings, because the session's watcher detects hanging ranks. Ports are not shared (SO_REUSEPORT), or another process
could receive half of the connections.

**The end.** A rank that ends sends its queued messages and then its last frame. The peer then ends its side of the
stream. Nothing in transit is cancelled, unless a peer does not react for a second.
"""

from __future__ import annotations

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

from ..errors import GroupError, HandshakeError, ProtocolError, UsageError
from ..registry import register
from ..wire import handshake
from ..wire.bell import Bell
from ..wire.links import broken
from ..wire.listener import Refusals
from . import Bytes, Place
from ._envelope import Body, Enveloped, immortal
from ._frames import END, Event

log = logging.getLogger("syncline.wire")

_OLDEST = (1, 80)
_REMEDY = "pip install --upgrade 'syncline[grpc]'"

_METHOD = f"/syncline/{handshake.MAGIC.decode()}"
_PURPOSE = "grpc"

_SLICE_BYTES = 1 << 20
_SLICE = struct.Struct("<BxHxxxxQ")
"""The head of a slice: 0, which begins no frame, its body's slot, and its offset in the body."""

_STRANGERS = 16
"""The number of unauthenticated streams, in addition to the ranks' streams."""

_CONNECTIONS = 256
"""The number of connections in addition to the ranks'. Without a stream they close when the handshake's time is
over."""

_AHEAD = 64
"""The frames that may arrive from a peer before the progress thread handles them."""

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
"""How long a closing rank waits for its peers to notice."""

_POLL_S = 0.005
_AGAIN_S = 0.1
_FOREVER_S = 365 * 86400.0


def load() -> Any:
    """The module grpc. UsageError if it is missing or too old.

    Its log to stderr is turned off, unless the script imported grpc before or has set the level.
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
        raise UsageError(f"transport=grpc needs grpcio {needed} or newer, but {version} is installed: {_REMEDY}")
    return grpc


@dataclass(eq=False)
class _Stream:
    """One end of a stream: the queue of messages to send, and the destinations of received ones.

    ``tell`` calls an event in the progress thread. Sending is an iterator that a gRPC thread drives.
    """

    tell: Callable[[Event], None]
    frame_came: Callable[[int, bytes], None]
    ended: Callable[[int, Exception | None], None]
    peer: int = -1
    proved: bool = False
    cancel: Callable[[], Any] = lambda: None
    given: int = 0  # messages and bodies that were put here
    sent: int = 0  # how many of these gRPC has sent
    over: threading.Event = field(default_factory=threading.Event)
    _frames: deque[tuple[bytes, Event | None]] = field(default_factory=deque)
    _bodies: deque[Body] = field(default_factory=deque)
    _last: bytes | None = None
    _stopped: bool = False
    _bell: Bell = field(default_factory=Bell)
    _leaving: threading.Lock = field(default_factory=threading.Lock)  # held while bodies are read
    _coming: threading.Lock = field(default_factory=threading.Lock)  # held while received data are written
    _into: dict[int, Body] = field(default_factory=dict)

    # Sending

    def put(self, frame: bytes, done: Event | None) -> None:
        """Send a frame before all bodies. ``done`` is called when gRPC has it."""
        self.given += 1
        self._frames.append((frame, done))
        self._bell.ring()

    def push(self, body: Body) -> None:
        """Send a body."""
        self.given += 1
        self._bodies.append(body)
        self._bell.ring()

    @property
    def waits(self) -> bool:
        """Whether anything put here has not been sent."""
        return self.given != self.sent

    def finish(self, frame: bytes) -> None:
        """Send a last frame after everything else. Bodies that still arrive are dropped."""
        with self._coming:
            self._last = frame
            self._into.clear()
        self._bell.ring()

    @property
    def finishes(self) -> bool:
        """Whether the last frame is on its way."""
        return self._last is not None and not self._stopped

    def stop(self) -> None:
        """Stop sending and stop using the callers' memory."""
        self._stopped = True
        with self._leaving:
            self._bodies.clear()
        with self._coming:
            self._into.clear()
        self._bell.ring()

    def messages(self) -> Iterator[bytes]:
        """The messages that gRPC sends, in order."""
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
        """A slice of the first body, and whether it is the body's last. None if there is no body."""
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

    # Receiving

    def pull(self, body: Body) -> None:
        """Register the destination of a body that is about to arrive."""
        with self._coming:
            self._into[body.slot] = body

    def come(self, message: bytes) -> bytes | bool:
        """Called by gRPC for each message. Frames go to the progress thread at once, slices to ``take``."""
        if not self.proved or message[:1] == b"\0":
            return message
        self.frame_came(self.peer, message)
        return message[:1] != bytes([END]) or b""

    def take(self, messages: Iterator[Any]) -> None:
        """The thread that handles received messages until the stream ends."""
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
                    self.stop()  # the peer has ended and receives nothing more
        except ProtocolError as error:
            fault = error
            self.cancel()
        except Exception as error:  # the stream is broken, for example because a rank died
            log.debug("the stream with rank %d has ended: %s", self.peer, error)
        self.stop()
        self.tell(partial(self.ended, self.peer, fault))
        self.over.set()

    def _take_slice(self, message: bytes) -> None:
        if len(message) <= _SLICE.size:
            raise broken(self.peer, f"a slice of {len(message)} bytes came")
        _, slot, at = _SLICE.unpack_from(message)
        if slot not in self._into:
            self._wait_for_progress()  # the progress thread may be about to register its destination
        with self._coming:
            if self._stopped or self._last is not None:
                return
            body = self._into.get(slot)
            end = at + len(message) - _SLICE.size
            wanted = body is not None and at == body.at and end in (body.data.nbytes, at + _SLICE_BYTES)
            if body is None or not wanted or end > body.data.nbytes:
                raise broken(self.peer, f"bytes {at} to {end} of a body came that nobody has asked for (slot {slot})")
            body.put(at, np.frombuffer(message, np.uint8, offset=_SLICE.size))
            body.at = end
            if end == body.data.nbytes:
                del self._into[slot]
                self.tell(body.done)

    def _wait_for_progress(self) -> None:
        """Wait until the progress thread has handled all earlier events, or for the end."""
        reached = threading.Event()
        self.tell(reached.set)
        while not (self._stopped or self._last is not None or reached.wait(_POLL_S)):
            pass


class _Threads(Executor):
    """A thread per stream: with a thread pool the interpreter could not exit while a stream is open."""

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
    """A stream that this rank has opened to a lower one: its address and state."""

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
        self._streams: dict[int, _Stream] = {}
        self._calls: dict[int, _Call] = {}
        self._server: Any = None
        self._token = secrets.token_bytes(handshake.RUN_BYTES)
        self._guests: dict[_Stream, float] = {}  # unauthenticated streams, with their deadlines
        self._refusals = Refusals(log)
        self._meeting = threading.Lock()  # guards guests, refusals and streams during startup
        try:
            self._connect()
        except BaseException:
            self._leave()
            raise

    # The methods of the envelope

    def _put(self, peer: int, frame: Bytes, done: Event) -> None:
        if frame[0] == END:
            self._streams[peer].finish(frame.tobytes())
        else:
            self._streams[peer].put(frame.tobytes(), done if self._outbox.ranked else None)

    def _push(self, peer: int, body: Body) -> None:
        self._streams[peer].push(body)

    def _pull(self, peer: int, body: Body) -> None:
        self._streams[peer].pull(body)

    def _leave(self) -> None:
        """Let the streams end by themselves, and cancel those that do not."""
        if self._forked:
            # Its destructor would wait for threads that only the parent has.
            immortal([self._server, self._calls, self._streams])
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
        """Whether gRPC has sent everything to the remaining peers."""
        here = [peer for peer in self._peers if peer not in self._operations.gone]
        return not any(self._streams[peer].waits or self._outbox.holds(peer) for peer in here)

    def _lose(self, peer: int) -> None:
        super()._lose(peer)
        self._streams[peer].stop()

    def _frame_came(self, peer: int, message: bytes) -> None:
        self._tell_progress(partial(self._take_message, peer, message))

    def _take_message(self, peer: int, message: bytes) -> None:
        frame = self.scratch.take(len(message))
        frame[: len(message)] = np.frombuffer(message, np.uint8)
        self._came(peer, frame, len(message))

    def _stream_ended(self, peer: int, fault: Exception | None) -> None:
        self._lose(peer)
        if fault is not None:
            raise fault

    # Startup

    def _connect(self) -> None:
        """Open the streams with all peers. Raises GroupError, or a more specific error, on failure."""
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
        """The error that names the missing ranks, with gRPC's reasons if known."""
        missing = [peer for peer in self._peers if peer not in self._streams]
        why = [f"rank {peer}: {self._calls[peer].error}" for peer in missing if peer in self._calls]
        return GroupError(
            f"rank {self.rank} has no gRPC stream with rank{'s' * (len(missing) > 1)}"
            f" {', '.join(map(str, missing))} after {self._place.timeout_s:.0f} s{': ' * bool(why)}{'; '.join(why)}"
        )

    def _listen(self) -> None:
        """Listen for the higher ranks and publish the address."""
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
        """Stop listening; open streams stay. gRPC waits for their end in a daemon thread."""
        self._send_away(math.inf)
        stop = threading.Thread(target=self._server.stop, args=(_FOREVER_S,), name="syncline-door", daemon=True)
        stop.start()
        stop.join()

    def _send_away(self, now: float) -> None:
        """Cancel the streams whose time to authenticate is over."""
        with self._meeting:
            for guest in [guest for guest, until in self._guests.items() if until <= now]:
                del self._guests[guest]
                guest.cancel()

    # The server's side of a stream

    def _serve(self, details: Any) -> Any:
        """The handler for an incoming call. gRPC refuses the stream names of other versions."""
        if details.method != _METHOD:
            return None
        stream = _Stream(self._tell_progress, self._frame_came, self._stream_ended)
        return self._grpc.stream_stream_rpc_method_handler(partial(self._greet, stream), stream.come)

    def _greet(self, stream: _Stream, requests: Iterator[Any], context: Any) -> Iterator[bytes]:
        """Authenticate the caller, then send the queued messages."""
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
            return  # the caller left during the handshake
        finally:
            with self._meeting:
                self._guests.pop(stream, None)
        # Start the reader before the welcome: if the caller has left meanwhile, gRPC does not resume this generator.
        threading.Thread(target=stream.take, args=(requests,), name="syncline-reader", daemon=True).start()
        yield handshake.WELCOME
        yield from stream.messages()
        stream.over.wait(_END_S)  # first handle what the peer has sent

    def _join(self, peer: int, stream: _Stream) -> None:
        """Add an authenticated rank. HandshakeError if it is not expected."""
        with self._meeting:
            if not self.rank < peer < self.world or peer in self._streams:
                raise HandshakeError(f"it says that it is rank {peer}, which is not expected")
            if self._guests.pop(stream, None) is None:
                raise HandshakeError("it took too long")
            stream.peer, stream.proved = peer, True
            self._streams[peer] = stream
        self.bell.ring()

    # The caller's side of a stream

    def _call_lower_ranks(self) -> None:
        """Call the ranks whose address is known, and retry those that did not answer. Raises final errors."""
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
        """The caller's messages: its proof, then the queued messages."""
        yield said.raw
        proved = proof.get()
        if proved is not None:
            yield proved
            yield from stream.messages()

    def _run_call(self, call: _Call, said: handshake.Hello, proof: SimpleQueue[bytes | None]) -> None:
        """The thread of a stream that was opened here: authenticates both sides, then handles received messages."""
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
        """The time of the next attempt. Raises the error of a call that can never succeed."""
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
