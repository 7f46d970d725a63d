"""Transport over torch.distributed, including its collectives: Gloo for messages, Gloo or NCCL for the collectives.

It owns process groups of its own, created from the run's store, and does not touch the script's default group. torch is
imported when the first transport is created.

**Waiting.** Gloo can only wait for sends and receives, one thread per wait: ``is_completed`` becomes true only inside
``wait``, and a wait that times out breaks its connection. Each peer therefore has one thread that waits for its frames
and, once needed, one for bodies. They report to the progress thread, which sleeps meanwhile. Bodies are sent on
request. A requested body, or an offered one whose turn has come, leaves without further conditions, so waiting in order
delays nothing.

**Collectives** are those of all ranks, or of the ranks of this host (``Place.together``). Messages then reach no other
rank either: ``_auto.AutoWithLibrary`` has the messages of the run, and carries the frames that order collectives, in
less time than a thread takes to wake for Gloo. A reduce-scatter is a reduce to the owner of
each part, an all-gather a broadcast from each: Gloo has no reduce-scatter of unequal parts, and these parts need not
lie side by side. Equal parts are staged side by side.

**NCCL** has only collectives: with ``backend=nccl`` messages still use Gloo, and the architecture must use collectives
(``native``, or ``inside=native``). Arrays are in host memory here, so they are staged through device memory, on a
separate stream.

Gloo's waits have no time limit of their own here. The session's watcher detects dead peers, and the engine's limit for
stalls covers everything else.

**The end.** A thread that returns from Gloo while the interpreter exits aborts the whole process (SIGABRT), so no
thread may be left. Peers get a moment to send their last frames; then the connections are broken, which ends every
wait.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import GroupError, PeerLost, UsageError
from ..registry import register
from ..wire.bell import DescriptorBell
from ..wire.links import CONTROL
from . import LIBRARY, Bytes, Handle, Place
from ._envelope import Call, Enveloped, immortal
from ._frames import FRAME_BYTES, HEADER_BYTES, SLOTS, Event, is_last

if TYPE_CHECKING:
    import torch
    from torch.distributed import Work

_FRAMES = 0
"""The tag of frames. Bodies use their slot."""

_FOREVER = datetime.timedelta(days=365)
_END_S = 1.0
"""How long a closing rank waits for the last frames of others, which may still need its messages."""

_END = datetime.timedelta(seconds=_END_S)

_BREAK_S = 5.0
"""How long threads may take to return after the connections are broken."""

_BREAK = SLOTS + 1
"""A tag on which no message is ever sent."""

_AHEAD = 4
"""The frames that a peer's reader may receive before the progress thread handles them."""

_POLL_S = 0.005


@register("transports", "torch", connection="own", one_host=False, allreduce=True, collectives=True, inside="auto")
class Torch(Enveloped):
    """Messages over torch.distributed (Gloo); Gloo's or NCCL's own collectives as native."""

    name = "torch"
    asks = True
    answers = True  # the peer's reader ends with it
    allreduce = Enveloped._allreduce
    reduce_scatter = Enveloped._reduce_scatter
    all_gather = Enveloped._all_gather

    def __init__(self, place: Place, *, backend: Literal["gloo", "nccl"] = "gloo") -> None:
        together = place.together
        super().__init__(
            place.rank, place.world, DescriptorBell() if together else None, together, apart=bool(together)
        )
        self._carrier = place.carrier
        self._unexplained: list[Event] = []  # failures that the carrier's next frames may explain
        self._group = _gloo(place)
        self._number = {rank: number for number, rank in enumerate(self.together)}  # in the group
        self._start: Any = _nccl(place).start if backend == "nccl" else partial(_start, self._group)
        self._waiters: dict[int, _Waiter] = {}
        self._leaving: set[int] = set()  # peers that have sent their last frame
        self._spare: dict[int, SimpleQueue[Bytes | None]] = {peer: SimpleQueue() for peer in self._peers}
        self._readers: dict[int, threading.Thread] = {}
        for peer in self._peers:
            if self._carrier is not None:
                self._await_carried(peer)
                continue
            for _ in range(_AHEAD):
                self._await_frame(peer)
            self._readers[peer] = threading.Thread(target=self._read, args=(peer,), name="syncline-reader", daemon=True)
            self._readers[peer].start()

    def _receive(self, peer: int, slot: int, into: Bytes, done: Event) -> None:
        with self._reported(peer):
            self._wait(peer, self._group.recv([_tensor(into)], self._number[peer], slot), done)

    def _collect(self, call: Call, handle: Handle) -> None:
        try:
            wait = self._start(call)
        except UsageError as error:
            self._finish(handle, error)
            return

        def failed(error: Exception, again: bool = False) -> None:
            left = (self._operations.gone | self._leaving).intersection(self.together)
            if self._carrier is not None and not left and not again:
                self._unexplained.append(partial(failed, error, True))
                return
            self._finish(handle, _broken(min(left, default=-1), handle.kind, error))

        self._waiter(-1).add(wait, lambda: self._finish(handle), failed)

    def _leave(self) -> None:
        """End all threads: by the peers' last frames, or else by breaking the connections."""
        if self._forked:
            immortal(self._group)  # its destructor would wait for threads that only the parent has
            immortal(self._start)
            return
        for spare in self._spare.values():
            spare.put(None)
        for waiter in self._waiters.values():
            waiter.end()
        threads = [*self._readers.values(), *(waiter.thread for waiter in self._waiters.values())]
        if not _all_ended(threads, _END_S):
            _break_connections(self._group, [self._number[peer] for peer in self._peers])
            _all_ended(threads, _BREAK_S)
        self._group = self._start = None  # this closes the connections
        if isinstance(self.bell, DescriptorBell):
            self.bell.close()

    def _put(self, peer: int, frame: Bytes, done: Event) -> None:
        if self._carrier is None:
            super()._put(peer, frame, done)
            return
        self._carrier.send(peer, LIBRARY, frame, CONTROL, self)
        self._carrier.settle()  # it leaves now, not after the start of the collective whose turn it is
        done()  # the carrier keeps the frame

    def _await_carried(self, peer: int) -> None:
        assert self._carrier is not None
        frame = self.scratch.take(HEADER_BYTES)
        self._carrier.recv(peer, LIBRARY, frame[:HEADER_BYTES], self).note = frame

    def carried(self, handle: Handle) -> None:
        """Handle the end of an operation of the carrier whose owner is this transport."""
        if handle.kind == "send" or self._operations.closed:
            return
        peer, frame = handle.peer, handle.note
        if handle.error is not None:
            self._lose(peer)
            return
        self._await_carried(peer)
        self._came(peer, frame, handle.nbytes)

    def fileno(self) -> int:
        """A descriptor that is readable when ``poll`` has something to do. Only among ranks of one host."""
        assert isinstance(self.bell, DescriptorBell)
        return self.bell.fileno()

    def settle(self) -> bool:
        self.bell.rang()
        return bool(self._events or self._unexplained or self._operations.completed)

    def poll(self, timeout: float) -> list[Handle]:
        late, self._unexplained = self._unexplained, []
        for failed in late:
            failed()
        return super().poll(timeout)

    def _send(self, peer: int, slot: int, data: Bytes, done: Event) -> None:
        def sent(_data: Bytes = data) -> None:  # the default argument keeps the memory alive while Gloo reads it
            self._sending[peer] -= 1
            done()

        # Gloo may not report the failure of a send that coincides with the peer closing the connection.
        within = _END if slot == _FRAMES and is_last(data) else _FOREVER
        with self._reported(peer):
            work = self._group.send([_tensor(data)], self._number[peer], slot)
            self._sending[peer] += 1
            self._wait(peer, work, sent, within)

    @contextlib.contextmanager
    def _reported(self, peer: int) -> Any:
        """Treat an operation that Gloo refuses, because the connection is broken, as the loss of the peer."""
        try:
            yield
        except RuntimeError:
            self._tell_progress(lambda: self._lose(peer))

    def _wait(self, peer: int, work: Work, done: Callable[[], None], within: datetime.timedelta = _FOREVER) -> None:
        self._waiter(peer).add(lambda: work.wait(within), done, lambda _: self._lose(peer))

    def _waiter(self, peer: int) -> _Waiter:
        if peer not in self._waiters:
            self._waiters[peer] = _Waiter(self._tell_progress)
        return self._waiters[peer]

    def _ended(self, peer: int, begun: int) -> None:
        ended = super()._ended
        self._leaving.add(peer)
        if peer in self._waiters:  # requested bodies may just have left
            self._waiter(peer).add(lambda: None, lambda: ended(peer, begun), lambda _: None)
        else:
            ended(peer, begun)

    def _read(self, peer: int) -> None:
        """The thread that receives a peer's frames, until the peer ends or this transport is closed."""
        group, number, spare = self._group, self._number[peer], self._spare[peer]
        while (frame := spare.get()) is not None:
            try:
                group.recv([_tensor(frame)], number, _FRAMES).wait(_FOREVER)
            except RuntimeError:
                self._tell_progress(lambda: self._lose(peer))
                return
            self._tell_progress(lambda frame=frame: self._read_frame(peer, frame))  # type: ignore[misc]
            if is_last(frame):
                return

    def _await_frame(self, peer: int) -> None:
        self._spare[peer].put(self.scratch.take(FRAME_BYTES))


class _Waiter:
    """A thread that waits for one operation after the other and reports the end of each."""

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self._tell = tell
        self._queue: SimpleQueue[tuple[Callable[[], Any], Event, Callable[[Exception], None]] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="syncline-waiter", daemon=True)
        self.thread.start()

    def add(self, wait: Callable[[], Any], done: Event, failed: Callable[[Exception], None]) -> None:
        """Wait, then have ``done`` or ``failed`` called in the progress thread."""
        self._queue.put((wait, done, failed))

    def end(self) -> None:
        """End the thread after all waits."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            wait, done, failed = item
            try:
                wait()
            except Exception as error:
                self._tell(lambda failed=failed, error=error: failed(error))  # type: ignore[misc]
            else:
                self._tell(done)


def _start(group: Any, call: Call) -> Callable[[], Any]:
    """Start a collective of a process group on arrays in host memory. The returned function waits for the end."""
    tensors = _tensors(call)
    works = [_issued(group, call, part, tensor) for part, (tensor, _) in tensors]

    def wait() -> None:
        for work in works:
            work.wait(_FOREVER)
        for _, (_, write_back) in tensors:
            write_back()

    return wait


def _tensors(call: Call) -> list[tuple[int, tuple[torch.Tensor, Callable[[], None]]]]:
    """The parts of a collective that are not empty, each with its number, as tensors that libraries can move or add."""
    parts = [(number, part) for number, part in enumerate(call.parts) if part.size]
    if call.goal == "all_gather":
        return [(number, (_tensor(part.view(np.uint8)), lambda: None)) for number, part in parts]
    return [(number, _summable(part)) for number, part in parts]


def _issued(group: Any, call: Call, part: int, tensor: torch.Tensor) -> Work:
    """Start the library's work on one part, which belongs to the group's rank of that number."""
    from torch import distributed

    if call.goal == "allreduce":
        options: Any = distributed.AllreduceOptions()
        options.timeout = _FOREVER
        return group.allreduce([tensor], options)  # type: ignore[no-any-return]
    reduces = call.goal == "reduce_scatter"
    options = distributed.ReduceOptions() if reduces else distributed.BroadcastOptions()
    options.rootRank, options.timeout = part, _FOREVER
    return (group.reduce if reduces else group.broadcast)([tensor], options)  # type: ignore[no-any-return]


def _issued_whole(group: Any, call: Call, whole: torch.Tensor, mine: torch.Tensor) -> Work:
    """Start a collective of equal parts that lie side by side in ``whole``, with this rank's ``mine`` among them."""
    from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

    if call.goal == "reduce_scatter":
        options: Any = ReduceScatterOptions()
        options.timeout = _FOREVER
        return group._reduce_scatter_base(mine, whole, options)  # type: ignore[no-any-return]
    options = AllgatherOptions()
    options.timeout = _FOREVER
    return group._allgather_base(whole, mine, options)  # type: ignore[no-any-return]


class StagedCollectives:
    """The collectives of a library that only accepts device memory. Arrays are copied there and back on one stream.

    ``stream`` returns the context to issue work in; ``synchronize`` waits for that work. ``store`` is the group's
    store. It is kept here because the library holds only its C++ part, whose Python methods die with the Python object.
    """

    def __init__(
        self,
        group: Any,
        device: str,
        stream: Callable[[], contextlib.AbstractContextManager[Any]],
        synchronize: Callable[[], None],
        store: Any = None,
    ) -> None:
        self._group, self._device, self._stream, self._synchronize = group, device, stream, synchronize
        self._store = store

    def start(self, call: Call) -> Callable[[], Any]:
        """Start a collective in place. The returned function waits for the end."""
        tensors, whole = _tensors(call), call.goal == "allreduce"
        mine = 0 if whole else self._group.rank()
        up = [whole or part == mine or call.goal == "reduce_scatter" for part, _ in tensors]
        # A reduce-scatter gives only this rank's part a meaning, and an all-gather does not change it.
        back = [whole or (part == mine) == (call.goal == "reduce_scatter") for part, _ in tensors]
        with self._stream():
            staged, equal = self._room([host for _, (host, _) in tensors], len(call.parts))
            for needed, (_, (host, _)), one in zip(up, tensors, staged, strict=True):
                if needed:
                    one.copy_(host)
            if equal is None:
                works = [_issued(self._group, call, part, one) for (part, _), one in zip(tensors, staged, strict=True)]
            else:
                works = [_issued_whole(self._group, call, equal, staged[mine])]

        def wait() -> None:
            with self._stream():
                for work in works:
                    work.wait()  # with NCCL this makes the stream wait, not the thread
                for needed, (_, (host, _)), one in zip(back, tensors, staged, strict=True):
                    if needed:
                        host.copy_(one)
            self._synchronize()
            for needed, (_, (_, write_back)) in zip(back, tensors, strict=True):
                if needed:
                    write_back()

        return wait

    def _room(self, hosts: list[torch.Tensor], parts: int) -> tuple[Sequence[torch.Tensor], torch.Tensor | None]:
        """Device memory for the parts of a collective; if all are equally large, also as one tensor."""
        import torch

        if len({len(host) for host in hosts}) == 1 and len(hosts) == parts > 1:
            equal = torch.empty(parts * len(hosts[0]), dtype=hosts[0].dtype, device=self._device)
            return equal.view(parts, -1).unbind(), equal
        return [torch.empty_like(host, device=self._device) for host in hosts], None


def _all_ended(threads: Iterable[threading.Thread], within_s: float) -> bool:
    """Wait for threads to end. Returns whether all have."""
    deadline = time.monotonic() + within_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)


def _break_connections(group: Any, peers: Iterable[int]) -> None:
    """Make everything fail that waits in a Gloo group.

    Gloo's ``abort`` and ``shutdown`` leave sends and receives waiting, but a wait that times out closes all
    connections. Connections to peers that have gone are closed already; such a receive raises at once.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            group.recv([_tensor(np.zeros(1, np.uint8))], peer, _BREAK).wait(datetime.timedelta(milliseconds=1))


def _gloo(place: Place) -> Any:
    """A Gloo group of the ranks of the collectives, connected over the address of ``place``."""
    try:
        from torch.distributed import ProcessGroupGloo
    except ImportError:
        raise UsageError("transport=torch needs PyTorch with Gloo: pip install 'syncline[torch]'") from None
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # as torch.distributed itself does
    options._devices = [ProcessGroupGloo.create_device(hostname=place.address)]
    options._timeout = datetime.timedelta(seconds=place.timeout_s)
    options._threads = 1
    together = place.together or tuple(range(place.world))
    try:
        store = _notebook(place, f"gloo-{together[0]}")
        return ProcessGroupGloo(store, together.index(place.rank), len(together), options)
    except RuntimeError as error:
        raise GroupError(
            f"Gloo cannot connect all ranks within {place.timeout_s:.0f} s: {str(error).splitlines()[0]}"
        ) from error


def _nccl(place: Place) -> StagedCollectives:
    """NCCL on this rank's device. UsageError if there is none."""
    import torch
    from torch import distributed

    if not (torch.cuda.is_available() and distributed.is_nccl_available()):
        raise UsageError("transport=torch(backend=nccl) needs a CUDA device and PyTorch with NCCL: use transport=torch")
    device = f"cuda:{torch.cuda.current_device()}"
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = _FOREVER
    together = place.together or tuple(range(place.world))
    store = _notebook(place, f"nccl-{together[0]}")
    group = distributed.ProcessGroupNCCL(store, together.index(place.rank), len(together), options)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    collective = StagedCollectives(group, device, lambda: torch.cuda.stream(stream), stream.synchronize, store)
    # NCCL connects in its first allreduce, through the run's store, which exists only during startup.
    _in_time(place, lambda: collective.start(Call("allreduce", [np.zeros(1, np.float32)]))(), device)
    return collective


def _in_time(place: Place, connect: Callable[[], Any], device: str) -> None:
    """Connect NCCL in a thread, because its calls cannot be interrupted. GroupError if that fails or takes too long."""
    failed: list[Exception] = []

    def run() -> None:
        try:
            connect()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="syncline-nccl", daemon=True)
    thread.start()
    deadline = time.monotonic() + place.timeout_s
    while thread.is_alive() and time.monotonic() < deadline:
        place.check()
        thread.join(_POLL_S)
    if failed or thread.is_alive():
        why = str(failed[0]).splitlines()[0] if failed else f"nothing came within {place.timeout_s:.0f} s"
        raise GroupError(
            f"NCCL cannot connect all ranks (this rank uses {device}): {why}; every rank needs a GPU of its own, chosen"
            " with torch.cuda.set_device() before syncline.init()"
        ) from (failed[0] if failed else None)


def _notebook(place: Place, prefix: str) -> Any:
    """The run's store as a torch.distributed Store."""
    from torch._C._distributed_c10d import Store as TorchStore

    class Notebook(TorchStore):
        """Implements the methods that process groups call."""

        def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
            place.store.set(full(key), bytes(value))

        def get(self, key: str) -> bytes:
            return read(key, place.timeout_s, time.monotonic())

        def add(self, key: str, amount: int) -> int:
            return place.store.add(full(key), amount)

        def check(self, keys: list[str]) -> bool:
            return all(place.store.get(full(key)) is not None for key in keys)

        def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
            begun_s, limit_s = time.monotonic(), place.timeout_s if timeout is None else timeout.total_seconds()
            for key in keys:
                read(key, limit_s, begun_s)

    def read(key: str, limit_s: float, begun_s: float) -> bytes:
        late = f"not all ranks joined the process group of transport=torch within {limit_s:.0f} s"
        return place.read(f"{prefix}/{key}", begun_s + limit_s, late)

    def full(key: str) -> str:
        return f"{place.key}/{prefix}/{key}"

    return Notebook()


def _tensor(data: Bytes) -> torch.Tensor:
    import torch

    return torch.from_numpy(data)


@lru_cache(maxsize=1)
def _types() -> dict[str, torch.dtype]:
    """numpy's names of the types that Gloo and NCCL add. Unsigned integers add like signed ones."""
    import torch

    same = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
    return {name: getattr(torch, name) for name in same} | {"uint32": torch.int32, "uint64": torch.int64}


def _summable(array: NDArray[Any]) -> tuple[torch.Tensor, Callable[[], None]]:
    """A tensor that the libraries can add: the array's memory, or a wider copy; and the call that writes it back."""
    import torch

    if array.dtype.name in ("int16", "uint16"):
        wide = array.astype(np.int32)
        return torch.from_numpy(wide), lambda: np.copyto(array, wide, casting="unsafe")
    try:
        kind = _types()[array.dtype.name]
    except KeyError:
        raise UsageError(
            f"torch.distributed cannot add elements of type {array.dtype}: use ring transport=torch"
        ) from None
    return torch.from_numpy(array.view(np.uint8)).view(kind), lambda: None


def _broken(rank: int, collective: str, error: Exception) -> PeerLost:
    who = "" if rank < 0 else f"rank {rank} has ended its part: "
    return PeerLost(f"{who}the library's {collective} failed: {str(error).splitlines()[0]}", rank=rank)
