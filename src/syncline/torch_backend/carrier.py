"""What reducers ask for, carried by any process group of torch: messages between ranks, and sums, each in a lane.

A lane is a thread with a process group of its own, made once. What is given to it is done there one after the other. So
where all ranks give the same things to the same lanes in the same order, each lane's collectives and messages follow
each other alike on all ranks, however far these are apart and whatever the other lanes do: nothing can come between,
and nothing can wait in a circle, since a lane waits for the same lane of others alone.

Payloads are in the CPU's memory; a group that moves tensors of its device only gets copies there. A receive has to know
its size beforehand: where reducers do not, sizes travel before payloads.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..compression.reducers import Bytes, Message, Reducer, Round
from ..engine.reducing import OPEN
from ..errors import PeerError
from ..frameworks.torch.storage import as_torch

LANES = 2
"""A bucket is encoded while the messages of the one before travel; each lane costs a process group of its own."""

_END_S = 2.0
"""How long a lane may take to end; one that waits for a rank that is gone takes longer, and is left alone."""


class Carrier:
    """A group with the ranks, backend and time limit of ``group``, for reducers alone; all ranks make it."""

    def __init__(self, group: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._ranks = ranks
        self.rank, self.world = dist.get_rank(group), len(ranks)
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self._group = dist.new_group(
            ranks, _limit(group, self._device), dist.get_backend(group), use_local_synchronization=True
        )

    def begin(self, asked: Round, piece: int) -> Callable[[], list[int]]:
        """Begin to send and receive the messages of a round; what waits for them, and says how long each is that came.

        Rounds of several pieces may be under way, told apart by the ``piece``; all ranks finish them in one order.
        """
        if self._device.type != "cpu":  # NCCL matches messages by their order, and sends only while others receive
            lengths = self._swap(asked)
            return lambda: lengths
        sizes, bodies = 2 * piece, 2 * piece + 1
        lengths = [message.data.size for message in asked.receives]
        told = {
            place: self._receive(np.zeros(8, np.uint8), message.peer, sizes)
            for place, message in enumerate(asked.receives)
            if not message.exact
        }
        works = [
            (self._send(np.array([message.data.size]).view(np.uint8), message.peer, sizes), message)
            for message in asked.sends
            if not message.exact
        ]
        works += [
            (self._send(message.data, message.peer, bodies), message) for message in asked.sends if message.data.size
        ]
        coming = [
            self._receive(message.data, message.peer, bodies)
            for message in asked.receives
            if message.exact and message.data.size
        ]

        def finish() -> list[int]:
            for place, end in told.items():
                message, length = asked.receives[place], int(end().view(np.int64)[0])
                lengths[place] = _checked(length, message)
                if length:
                    coming.append(self._receive(message.data[:length], message.peer, bodies))
            for end in coming:
                end()
            for work, message in works:
                _wait(work, "sending to", message.peer)
            return lengths

        return finish

    def _send(self, data: Bytes, peer: int, tag: int) -> Any:
        return dist.isend(torch.from_numpy(data), self._ranks[peer], group=self._group, tag=tag)

    def _receive(self, place: Bytes, peer: int, tag: int) -> Callable[[], Bytes]:
        """Begin to receive into ``place``; what waits for it."""
        work: Any = dist.irecv(torch.from_numpy(place), self._ranks[peer], group=self._group, tag=tag)

        def end() -> Bytes:
            _wait(work, "receiving from", peer)
            return place

        return end

    def _swap(self, asked: Round) -> list[int]:
        """Send and receive the messages of a round; the lengths of those that came."""
        sent = [torch.tensor([message.data.size]) for message in asked.sends]
        came = [torch.zeros(1, dtype=torch.int64) for _ in asked.receives]
        self._move(asked, sent, came)
        lengths = [_checked(int(size), message) for size, message in zip(came, asked.receives, strict=True)]
        bodies = [torch.from_numpy(message.data) for message in asked.sends]
        places = [
            torch.from_numpy(message.data[:length]) for message, length in zip(asked.receives, lengths, strict=True)
        ]
        self._move(asked, bodies, places)
        return lengths

    def add(self, array: NDArray[Any]) -> None:
        """Replace an array by its sum over the ranks."""
        flat = as_torch(array, getattr(torch, array.dtype.name))
        there = flat.to(self._device)
        dist.all_reduce(there, group=self._group)
        if there is not flat:
            flat.copy_(there)

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on all."""
        size = torch.tensor([len(data)], device=self._device)
        sizes = [torch.zeros_like(size) for _ in range(self.world)]
        dist.all_gather(sizes, size, group=self._group)
        widest = max(1, *(int(one) for one in sizes))
        mine = torch.zeros(widest, dtype=torch.uint8)
        mine[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        rows = [torch.zeros(widest, dtype=torch.uint8, device=self._device) for _ in range(self.world)]
        dist.all_gather(rows, mine.to(self._device), group=self._group)
        return [row.cpu()[: int(one)].numpy().tobytes() for row, one in zip(rows, sizes, strict=True)]

    def _move(self, asked: Round, out: list[torch.Tensor], into: list[torch.Tensor]) -> None:
        """Send and receive tensors that are not empty, all at the same time."""
        there = [tensor if self._device.type == "cpu" else tensor.to(self._device) for tensor in into]
        calls = [
            dist.P2POp(dist.isend, tensor.to(self._device), self._ranks[message.peer], self._group)
            for message, tensor in zip(asked.sends, out, strict=True)
            if tensor.numel()
        ]
        calls += [
            dist.P2POp(dist.irecv, tensor, self._ranks[message.peer], self._group)
            for message, tensor in zip(asked.receives, there, strict=True)
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
        for tensor, place in zip(there, into, strict=True):
            if tensor is not place:
                place.copy_(tensor)


def _checked(length: int, message: Message) -> int:
    """The length of a message that is to come, if there is room for it."""
    if not 0 <= length <= message.data.size:
        raise RuntimeError(f"rank {message.peer} sends {length} bytes where {message.data.size} fit")
    return length


def _wait(work: Any, verb: str, peer: int) -> None:
    """Wait for a message; raises PeerError, which names the other end, where it is gone or the limit is over."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerError(f"{verb} rank {peer}: {error}", rank=peer) from error


def _limit(group: Any, device: torch.device) -> Any:
    """The time limit of a group, which torch only tells of the backend within; None where it does not."""
    backend = group._get_backend(device)
    return getattr(backend, "timeout", None) or getattr(getattr(backend, "options", None), "_timeout", None)


Task = Callable[[Carrier], None]


class Lanes:
    """The lanes of the ranks of ``group``, all of which make them; they end with this object."""

    def __init__(self, group: Any) -> None:
        self._carriers = [Carrier(group) for _ in range(LANES)]
        self.rank, self.world = self._carriers[0].rank, self._carriers[0].world
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in self._carriers]
        self._threads: dict[int, threading.Thread] = {}
        weakref.finalize(self, _end, self._queues, self._threads)

    def add(self, number: int, task: Task) -> None:
        """Do something in lane ``number`` (of any size) behind what that has; a task deals with its own errors."""
        lane = number % len(self._queues)
        self._queues[lane].put(task)
        if lane not in self._threads:
            what = self._queues[lane], self._carriers[lane]
            self._threads[lane] = threading.Thread(target=_run, args=what, name=f"syncline-hook-{lane}", daemon=True)
            self._threads[lane].start()

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, on all; while no lane has anything to do."""
        return self._carriers[0].gather(data)


def _run(queue: SimpleQueue[Task | None], carrier: Carrier) -> None:
    while (task := queue.get()) is not None:
        task(carrier)
        del task  # it may hold what holds these lanes


def _end(queues: Sequence[SimpleQueue[Task | None]], threads: Mapping[int, threading.Thread]) -> None:
    """End the threads, and see them end: one that let go of its group while the interpreter ends would abort it."""
    for queue in queues:
        queue.put(None)
    for thread in threads.values():
        if thread is not threading.current_thread():
            thread.join(_END_S)


def drive(pieces: Sequence[Callable[[], Reducer]], carrier: Carrier) -> None:
    """Let reducers compute, each while the messages of others travel, and carry what they ask for."""
    begun, under_way = 0, deque[tuple[int, Reducer, Callable[[], list[int]]]]()
    while begun < len(pieces) or under_way:
        if begun < len(pieces) and len(under_way) < OPEN:
            number, reducer, lengths = begun, pieces[begun](), None
            begun += 1
        else:
            number, reducer, finish = under_way.popleft()
            lengths = finish()
        if (waits := _advance(number, reducer, lengths, carrier)) is not None:
            under_way.append((number, reducer, waits))


def _advance(number: int, reducer: Reducer, lengths: Any, carrier: Carrier) -> Callable[[], list[int]] | None:
    """Let a reducer go on until it has to wait; what waits, None at its end."""
    while True:
        try:
            asked = reducer.send(lengths)
        except StopIteration:
            return None
        if not isinstance(asked, Round):
            carrier.add(asked.array)
        elif asked.sends or asked.receives:
            return carrier.begin(asked, number)
        lengths = []
