"""Carries reducers over any process group of torch: messages between ranks and sums, in lanes.

A lane is a thread with its own process group, created once, that runs its tasks one after the other. If all ranks
submit the same tasks to the same lanes in the same order, the collectives and messages of a lane have one order on all
ranks, however far apart the ranks are and whatever the other lanes do. Nothing can interleave with them, and no
circular wait is possible, because a lane waits only for the same lane of other ranks.

Payloads are in CPU memory; a group that only moves device tensors gets copies on the device. A receive must know its
size in advance; if a reducer does not, sizes are exchanged before payloads.
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

from ..compression.reducers import Bytes, Message, Reducer, Round, Sum
from ..engine.reducing import OPEN
from ..errors import PeerError, UsageError
from ..frameworks.torch.storage import as_torch

LANES = 2
"""The number of lanes: one bucket is encoded while another's messages travel, but each lane needs a process group."""

_END_S = 2.0
"""The time for a lane to end. One that waits for a rank that is gone takes longer and is abandoned."""


class Carrier:
    """A group with the ranks, backend and time limit of ``group``, used only for reducers. Collective."""

    def __init__(self, group: Any) -> None:
        ranks = dist.get_process_group_ranks(group)
        self._ranks = ranks
        self.rank, self.world = dist.get_rank(group), len(ranks)
        self._device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
        self._group = dist.new_group(
            ranks, _limit(group, self._device), dist.get_backend(group), use_local_synchronization=True
        )

    def begin(self, asked: Round, piece: int) -> Callable[[], list[int]]:
        """Start the messages of a round. The returned function waits and returns the length of each received message.

        Rounds of several pieces may be in flight, distinguished by ``piece``; all ranks finish them in one order.
        """
        if self._device.type != "cpu":  # NCCL matches messages by their order, and sends only while its peer receives
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
        """Start to receive into ``place``. The returned function waits."""
        work: Any = dist.irecv(torch.from_numpy(place), self._ranks[peer], group=self._group, tag=tag)

        def end() -> Bytes:
            _wait(work, "receiving from", peer)
            return place

        return end

    def _swap(self, asked: Round) -> list[int]:
        """Exchange the messages of a round. Returns the lengths of the received ones."""
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
        """The bytes of every rank, on all ranks."""
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
        """Send and receive all non-empty tensors concurrently."""
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
    """The length of an incoming message; ProtocolError if there is no room for it."""
    if not 0 <= length <= message.data.size:
        raise RuntimeError(f"rank {message.peer} sends {length} bytes, but the buffer has room for {message.data.size}")
    return length


def _wait(work: Any, verb: str, peer: int) -> None:
    """Wait for a message. PeerError names the peer if it is gone or the time limit is over."""
    try:
        work.wait()
    except RuntimeError as error:
        raise PeerError(f"{verb} rank {peer}: {error}", rank=peer) from error


def _limit(group: Any, device: torch.device) -> Any:
    """The time limit of a group, which torch only reveals through its inner backend; None if it does not."""
    backend = group._get_backend(device)
    return getattr(backend, "timeout", None) or getattr(getattr(backend, "options", None), "_timeout", None)


Task = Callable[[Carrier], None]


class Lanes:
    """The lanes of the ranks of ``group``. Created collectively; they end with this object."""

    def __init__(self, group: Any) -> None:
        self._carriers = [Carrier(group) for _ in range(LANES)]
        self.rank, self.world = self._carriers[0].rank, self._carriers[0].world
        self._queues: list[SimpleQueue[Task | None]] = [SimpleQueue() for _ in self._carriers]
        self._threads: dict[int, threading.Thread] = {}
        weakref.finalize(self, _end, self._queues, self._threads)

    def add(self, number: int, task: Task) -> None:
        """Submit a task to lane ``number`` (taken modulo the number of lanes). Tasks handle their own errors."""
        lane = number % len(self._queues)
        self._queues[lane].put(task)
        if lane not in self._threads:
            what = self._queues[lane], self._carriers[lane]
            self._threads[lane] = threading.Thread(target=_run, args=what, name=f"syncline-hook-{lane}", daemon=True)
            self._threads[lane].start()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, on all ranks. Call while all lanes are empty."""
        return self._carriers[0].gather(data)


def _run(queue: SimpleQueue[Task | None], carrier: Carrier) -> None:
    while (task := queue.get()) is not None:
        task(carrier)
        del task  # the task may hold a reference to these lanes


def _end(queues: Sequence[SimpleQueue[Task | None]], threads: Mapping[int, threading.Thread]) -> None:
    """End the threads and wait: one that releases its group while the interpreter exits would abort it."""
    for queue in queues:
        queue.put(None)
    for thread in threads.values():
        if thread is not threading.current_thread():
            thread.join(_END_S)


def drive(pieces: Sequence[Callable[[], Reducer]], carrier: Carrier) -> None:
    """Run reducers, each while the messages of others travel."""
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
    """Run a reducer until it has to wait. Returns the function that waits, None at its end."""
    while True:
        try:
            asked = reducer.send(lengths)
        except StopIteration:
            return None
        if isinstance(asked, Sum):
            carrier.add(asked.array)
        elif not isinstance(asked, Round) or asked.totals or asked.after is not None:
            raise UsageError(f"a process group of torch carries messages and sums only, not {asked}")
        elif asked.sends or asked.receives:
            return carrier.begin(asked, number)
        lengths = []
