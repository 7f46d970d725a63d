"""Transport over UCX, through ucxx: shared memory and TCP everywhere, RDMA where the hardware supports it.

It owns one context and one worker per transport, and an endpoint to every peer. UCX's environment variables
(``UCX_TLS``, ``UCX_NET_DEVICES`` and so on) select networks and protocols. ucxx sets some of them for GPUs; these are
reset, because all data here are in host memory. UCX prints nothing unless ``UCX_LOG_LEVEL`` asks for it; this
transport's errors contain the cause.

**Messages** are tagged. A tag is (key, sender's rank, slot). Frames use slot 0, and their receives are posted ahead. A
body uses the slot that its frame announces, and UCX's rendezvous holds it back until its receive is posted. The
receiver reads it directly from the sender's memory if the kernel (CMA) or the network card allows it.

**Strangers.** Addresses are exchanged over the rendezvous, whose members are authenticated. Each receiver's key is
derived from the run's secret, so a stranger that finds the address can match a receive only by guessing. UCX keeps
unmatched messages. A wrong key differs from the receiver's in at least one bit, so one probe per bit finds exactly
these messages; every ``_SWEEP_S`` they are counted and discarded. The key has all bits that ranks and slots leave: 47
with two ranks, 38 with a thousand. The run ends after ``_MOST_STRANGE`` such messages. That many guesses find the key
of one of a thousand ranks with probability 2**-18, and of one of two ranks with 2**-27. UCX listens on the host's
networks and neither encrypts nor authenticates: an eavesdropper on the network learns the keys.

**Waiting.** A waiting rank polls a few times, arms the worker, and sleeps on its descriptor and the bell's.

**Ends.** UCX can detect the death of peers, but then disables its fast paths through memory (1.2 instead of 3.8 GB/s
where this was written), so this is off. A rank that ends sends a last frame, which is acknowledged, so that a closing
socket loses nothing. The session's watcher, or a failing send, detects a rank that dies. No rank waits longer than
``_END_S`` for a peer at its end.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..errors import GroupError, HandshakeError, ProtocolError, UsageError
from ..registry import register
from ..wire.bell import DescriptorBell
from ..wire.links import broken
from . import Bytes, Place
from ._envelope import Enveloped, immortal
from ._frames import FRAME_BYTES, SLOTS, Event

log = logging.getLogger("syncline.wire")

_OLDEST = (0, 52)
_INSTALL = "pip install 'syncline[ucx]'"

_HELLO, _BYE = SLOTS + 1, SLOTS + 2
"""Slots that no body uses: a rank's first message, and the acknowledgement of its last."""

_AHEAD = 4
"""The frames of a peer that UCX may receive before they are handled."""

_PIECE_BYTES = 1024 * 1024
"""The size of a piece of a body: it fits the cache while it is added."""

_EAGER_S = 300e-6
_CHECK_S = 0.05
_END_S = 1.0
"""How long a closing rank waits for acknowledgements, and then for UCX to deliver its messages."""

_TAG_BITS, _SLOT_BITS = 64, 16
"""The lowest bits of a tag are the slot, then comes the sender; the key has the rest."""

_SWEEP_S = 0.05
_MOST_STRANGE = 2**20
"""This many messages of strangers end the run, because they could eventually guess the key."""

_PROGRESS = 256
"""The most UCX progress calls before this rank handles its own work again."""

_TRUNCATED = -9
"""UCS_ERR_MESSAGE_TRUNCATED."""

_OUR_SETTINGS = {"UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "fatal"}
"""Defaults while the libraries are loaded; the user's settings take precedence."""

_ENVIRONMENT = threading.Lock()  # process-wide, like the environment


def load() -> Any:
    """The parts of ucxx that are used here. UsageError if it is missing or too old."""
    if sys.version_info < (3, 11):
        version = ".".join(map(str, sys.version_info[:2]))
        raise UsageError(f"transport=ucx needs Python 3.11 or newer, but this is {version}: ucxx has no older packages")
    try:
        with _quietly():
            import ucxx
            from ucxx._lib import libucxx
            from ucxx._lib.arr import Array
            from ucxx.types import Tag, TagMask
    except ImportError as error:
        why = "" if isinstance(error, ModuleNotFoundError) and error.name == "ucxx" else f" ({error})"
        raise UsageError(f"transport=ucx needs ucxx with UCX{why}: {_INSTALL}") from error
    except OSError as error:
        raise UsageError(
            f"transport=ucx: ucxx's UCX does not load beside another one ({_said(error)}). MPI libraries bring"
            " their own: under mpirun set MASTER_ADDR and MASTER_PORT, so that processes meet without it, or use"
            " transport=mpi"
        ) from error
    if _numbers(ucxx.__version__) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        raise UsageError(f"transport=ucx needs ucxx {oldest} or newer, but {ucxx.__version__} is installed: {_INSTALL}")
    return SimpleNamespace(lib=libucxx, Array=Array, Tag=Tag, TagMask=TagMask, version=ucxx.__version__)


@contextmanager
def _quietly() -> Iterator[None]:
    """Load and start the libraries with the user's settings and restore the environment.

    Only one thread at a time: another one would mistake these settings for the user's, or miss them.
    """
    with _ENVIRONMENT:
        before = dict(os.environ)
        os.environ.update({name: value for name, value in _OUR_SETTINGS.items() if name not in before})
        try:
            yield
        finally:
            for name in [name for name in os.environ if name.startswith("UCX") and name not in before]:
                del os.environ[name]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


@dataclass(frozen=True)
class _Request:
    """An operation of UCX and the memory that it uses."""

    peer: int
    request: Any
    memory: Bytes
    done: Event
    sends: bool


@dataclass
class _Library:
    """This rank's UCX objects."""

    context: Any
    worker: Any
    endpoints: dict[int, Any] = field(default_factory=dict)


@register("transports", "ucx", connection="own", one_host=False)
class Ucx(Enveloped):
    """Tagged messages over UCX: shared memory, TCP or RDMA."""

    name = "ucx"
    asks = False
    answers = False
    adds = True
    piece_bytes = _PIECE_BYTES

    def __init__(self, place: Place) -> None:
        self._ucx = load()
        self._library = _opened(self._ucx)
        self._door = DescriptorBell()
        super().__init__(place.rank, place.world, self._door)
        self._keys = [_key(place, rank) for rank in range(place.world)]
        self._swept = time.monotonic()
        self._strange = 0  # messages of strangers so far
        self._swept_away: list[Any] = []  # requests of strangers' messages that are being discarded
        self._nowhere = np.zeros(1, np.uint8)
        self._requests: list[_Request] = []
        self._frames: dict[int, deque[_Request]] = {peer: deque() for peer in self._peers}
        self._answered: set[int] = set()  # peers that have ended and have read everything from this rank
        self._poll = select.poll()
        self._poll.register(self._library.worker.epoll_file_descriptor, select.POLLIN)
        self._poll.register(self._door.fileno(), select.POLLIN)
        self._acted = False
        try:
            self._connect(place)
        except BaseException:
            self._operations.closed = True
            self._free()
            raise

    # The methods of the envelope

    def _move(self, timeout: float) -> None:
        self._spin(timeout, _EAGER_S, self._turn, lambda _, left: self._sleep(left))

    def _sleep(self, seconds: float) -> bool:
        """Sleep until UCX has work or the bell rings. Returns at once if UCX has work already."""
        if self._library.worker.arm():
            self._poll.poll(min(seconds * 1e3, 2**31 - 1))
        return False  # the next turn of the loop reads the bell

    def _leave(self) -> None:
        """Wait briefly for the acknowledgements of the remaining peers, then free everything."""
        if self._forked:
            immortal(self._library)  # its destructor would close connections in the parent's name
            immortal([self._requests, self._frames, self._swept_away])
            return
        deadline = time.monotonic() + _END_S
        while not self._all_answered() and time.monotonic() < deadline:
            with suppress(ProtocolError, HandshakeError):  # the sender is lost by that, and strangers no longer matter
                self._wait_for(self._all_answered, deadline, lambda: None)
        self._free()

    def _all_answered(self) -> bool:
        return {*self._peers} <= self._answered | self._operations.gone

    def _ended(self, peer: int, begun: int) -> None:
        self._complete()  # first complete what the peer sent and received before its end
        self._send(peer, _BYE, np.zeros(1, np.uint8), lambda: None)
        super()._ended(peer, begun)

    # Messages

    def _tag(self, src: int, dst: int, slot: int) -> Any:
        return self._ucx.Tag(self._keys[dst] | src << _SLOT_BITS | slot)

    def _send(self, peer: int, slot: int, data: Bytes, done: Event) -> None:
        endpoint, tag = self._library.endpoints[peer], self._tag(self.rank, peer, slot)
        request = endpoint.tag_send(self._ucx.Array(data), tag)
        self._sending[peer] += 1
        self._requests.append(_Request(peer, request, data, done, True))

    def _receive(self, peer: int, slot: int, into: Bytes, done: Event) -> None:
        self._requests.append(self._posted(peer, slot, into, done))

    def _posted(self, peer: int, slot: int, into: Bytes, done: Event) -> _Request:
        tag = self._tag(peer, self.rank, slot)
        return _Request(peer, self._library.worker.tag_recv(self._ucx.Array(into), tag), into, done, False)

    def _await_frame(self, peer: int) -> None:
        frame = self.scratch.take(FRAME_BYTES)
        came = partial(self._read_frame, peer, frame)
        self._frames[peer].append(self._posted(peer, 0, frame[:FRAME_BYTES], came))

    def _turn(self) -> bool:
        """Let UCX make progress and handle completions. Returns whether there were any."""
        self._acted = False
        worker = self._library.worker
        for _ in range(_PROGRESS):
            if not worker.progress_once():
                break
        if time.monotonic() - self._swept > _SWEEP_S:
            self._sweep()
        self._complete()
        for frames in self._frames.values():
            while frames and frames[0].request.completed:  # in the order in which they were posted
                self._finish_request(frames.popleft())
        return self._acted

    def _sweep(self) -> None:
        """Discard the messages of strangers. HandshakeError if there were too many."""
        ucx, worker, key = self._ucx, self._library.worker, self._keys[self.rank]
        # any message, of a rank or of a stranger
        before, lies = self._strange, worker.tag_probe(ucx.Tag(0), ucx.TagMask(0)).matched
        for bit in range(_key_at(self.world), _TAG_BITS) if lies else ():
            other, mask = ucx.Tag(~key & 1 << bit), ucx.TagMask(1 << bit)
            while (found := worker.tag_probe(other, mask, remove=True)).matched:
                # Received into too little memory: UCX then frees its copy and requests nothing that is still to come.
                self._swept_away.append(worker.tag_recv_with_handle(ucx.Array(self._nowhere), found))
                self._strange += 1
        self._swept_away = [request for request in self._swept_away if not request.completed]
        self._swept = time.monotonic()
        if not before and self._strange:
            log.warning("rank %d discards messages that strangers to the run send to its UCX address", self.rank)
        if before < self._strange >= _MOST_STRANGE:
            raise HandshakeError(
                f"strangers to the run have sent {self._strange} messages to the UCX address of rank {self.rank}, as if"
                " to guess its key: keep them from the networks that UCX_NET_DEVICES names, or use transport=tcp"
            )

    def _complete(self) -> None:
        """Finish the operations that UCX has completed."""
        ended: list[_Request] = []
        waiting: list[_Request] = []
        for one in self._requests:
            (ended if one.request.completed else waiting).append(one)
        self._requests = waiting
        for one in ended:
            self._finish_request(one)

    def _finish_request(self, one: _Request) -> None:
        self._acted = True
        if one.sends:
            self._sending[one.peer] -= 1
        status = one.request.status
        if status == 0:
            one.done()
            return
        self._lose(one.peer)
        if status == _TRUNCATED:
            raise broken(one.peer, f"more than {one.memory.nbytes} bytes came, which is the maximum")

    # Beginning and end

    def _connect(self, place: Place) -> None:
        """Publish this rank's address, read those of the others, and exchange a first message with each over UCX."""
        ucx, worker = self._ucx, self._library.worker
        version = ".".join(map(str, ucx.lib.get_ucx_version()))
        place.store.set(f"{place.key}/{self.rank}", f"{version} ".encode() + bytes(worker.address))
        deadline = time.monotonic() + place.timeout_s
        heard: set[int] = set()
        for peer in self._peers:
            late = f"rank {peer} has not published its UCX address within {place.timeout_s:.0f} s"
            theirs, _, address = place.read(str(peer), deadline, late).partition(b" ")
            try:
                known = ucx.lib.UCXAddress.create_from_buffer(address)
                self._library.endpoints[peer] = worker.create_endpoint_from_worker_address(known, False)
            except Exception as error:
                what = f"UCX {version} here cannot reach rank {peer} (UCX {theirs.decode()}): {_said(error)}"
                raise GroupError(f"{what}; do UCX_TLS and UCX_NET_DEVICES leave them a common network?") from error
            self._receive(peer, _HELLO, np.zeros(1, np.uint8), partial(heard.add, peer))
            self._receive(peer, _BYE, np.zeros(1, np.uint8), partial(self._answered.add, peer))
            for _ in range(_AHEAD):
                self._await_frame(peer)
        for peer in self._peers:
            self._send(peer, _HELLO, np.zeros(1, np.uint8), lambda: None)
        self._wait_for(lambda: {*self._peers} <= heard | self._operations.gone, deadline, place.check)
        missing = min({*self._peers} - heard, default=None)
        if missing is not None:
            raise GroupError(
                f"rank {missing} does not answer over UCX within {place.timeout_s:.0f} s: is a firewall between the"
                " hosts, or do UCX_TLS and UCX_NET_DEVICES name different networks?"
            )

    def _wait_for(self, holds: Callable[[], bool], deadline: float, check: Callable[[], None]) -> None:
        """Let UCX make progress until ``holds()`` or the time is up."""
        while not holds() and (left := deadline - time.monotonic()) > 0:
            check()
            if not self._turn():
                self._sleep(min(left, _CHECK_S))

    def _free(self) -> None:
        """Close UCX without waiting long for any peer."""
        library, deadline = self._library, time.monotonic() + _END_S
        for frames in self._frames.values():
            frames.clear()  # dropping a request cancels it
        kept, self._requests = [*self._requests, *self._swept_away], []
        closing = [endpoint.close() for endpoint in library.endpoints.values()]
        while not all(request.completed for request in closing) and time.monotonic() < deadline:
            if not library.worker.progress_once():
                self._sleep(0.01)
        del closing
        kept.clear()
        self._swept_away.clear()
        if self._strange:
            log.warning("rank %d has thrown away %d messages of strangers to the run", self.rank, self._strange)
        library.endpoints.clear()
        # The worker's destructor would receive all unmatched messages and wait for senders that are gone.
        every = self._ucx.Tag(0), self._ucx.TagMask(0)
        while library.worker.tag_probe(*every, remove=True).matched:
            pass
        library.worker = library.context = None
        self._door.close()


def _opened(ucx: Any) -> _Library:
    """A context and a worker. UsageError if UCX cannot provide what the environment asks for."""
    lib = ucx.lib
    try:
        with _quietly():
            context = lib.UCXContext({}, (lib.Feature.TAG, lib.Feature.WAKEUP))
        worker = lib.UCXWorker(context)
        worker.init_blocking_progress_mode()
    except Exception as error:
        asked = ", ".join(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("UCX_"))
        hint = f"it lacks something that is asked for ({asked}), or is damaged" if asked else "is it damaged?"
        raise UsageError(f"transport=ucx: UCX does not start ({_said(error)}); {hint}. {_INSTALL}") from error
    return _Library(context, worker)


def _key_at(world: int) -> int:
    """The number of bits of a tag below the key, in a run of ``world`` ranks."""
    return _SLOT_BITS + (world - 1).bit_length()


def _key(place: Place, dst: int) -> int:
    """The upper bits of all tags to one rank, a secret of the run."""
    text = f"syncline ucx {place.key} {dst}".encode()
    digest = hmac.digest(place.secret, text, hashlib.sha256)
    at = _key_at(place.world)
    return int.from_bytes(digest[: _TAG_BITS // 8], "big") >> at << at


def _said(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
