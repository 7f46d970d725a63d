"""One rank under mpirun that does to its end of the transport what a test in another process says.

Commands come over a connection, one answer to each; ``wake`` alone has no answer and is done at once, also while
``poll`` waits.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Client, Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

import numpy as np

from syncline.errors import PeerError
from syncline.launch.environment import recognise
from syncline.nouns import Size, numpy_dtype
from syncline.transports import Bytes, Handle, Place, mpi
from syncline.transports.mpi import NOWHERE, Mpi, Window

WINDOW_BYTES = 64 << 20


class Rank:
    """The commands, by name."""

    def __init__(self, rank: int, world: int) -> None:
        self.place = Place(rank, world)
        self.transport: Mpi
        self._read_bytes = 0
        self._held: list[np.ndarray] = []
        self._count_reads()
        self._results: dict[int, Any] = {}
        self._borrowed: dict[int, Handle] = {}
        self._hidden: Any = None

    def open(
        self, onesided: Literal["off", "on"], timeout_s: float = 20.0, says: int | None = None, near: bool = False
    ) -> None:
        place = replace(self.place, timeout_s=timeout_s, rank=self.place.rank if says is None else says)
        if near:
            place = replace(place, together=tuple(range(place.world)))
        self.transport = Mpi(place, onesided=onesided, window=Size(WINDOW_BYTES))
        self._results.clear()

    def hide_window(self) -> None:
        """As where this process alone has failed to make it; hidden again, it is back, as MPI's end wants it."""
        shared = mpi._communicator
        shared._onesided, self._hidden = self._hidden, shared._onesided

    def hosts(self) -> int:
        """How many communicators of hosts there are."""
        return len(mpi._communicator._inside)

    def send(self, number: int, dst: int, tag: int, data: bytes, priority: float) -> None:
        array = np.frombuffer(data, np.uint8)
        if number % 3:  # bodies are read where they lie in the transport's own memory
            own = self.transport.allocate(array.size)
            own[:] = array
            array = own
        self._results[number] = array[:0]
        self.transport.send(dst, tag, array, priority, owner=number)

    def recv(self, number: int, src: int, tag: int, nbytes: int) -> None:
        self._results[number] = np.zeros(nbytes, np.uint8)
        self.transport.recv(src, tag, self._results[number], owner=number)

    def adds_from(self, src: int, name: str) -> bool:
        return self.transport.adds_from(src, numpy_dtype(name))

    def add(self, number: int, src: int, tag: int, into: np.ndarray) -> None:
        self._results[number] = into.view(np.uint8)
        self.transport.add(src, tag, into, owner=number)

    def borrow(self, number: int, src: int, tag: int, nbytes: int) -> None:
        self.transport.borrow(src, tag, nbytes, owner=number)

    def release(self, number: int) -> None:
        self.transport.release(self._borrowed.pop(number))

    def allreduce(self, number: int, key: int, array: np.ndarray) -> None:
        self._results[number] = array
        self.transport.allreduce(key, array, owner=number)

    def reduce_scatter(self, number: int, key: int, parts: list[np.ndarray]) -> None:
        self._results[number] = parts
        self.transport.reduce_scatter(key, parts, owner=number)

    def all_gather(self, number: int, key: int, parts: list[np.ndarray]) -> None:
        self._results[number] = parts
        self.transport.all_gather(key, parts, owner=number)

    def together(self) -> tuple[int, ...]:
        return self.transport.together

    def poll(self, timeout: float) -> list[tuple[int, int, Any, Any]]:
        return [self._told(handle) for handle in self.transport.poll(timeout)]

    def _told(self, handle: Handle) -> tuple[int, int, Any, Any]:
        if handle.error is not None:
            return handle.owner, handle.nbytes, None, error_of(handle.error)
        if handle.kind == "borrow":
            self._borrowed[handle.owner] = handle
            return handle.owner, handle.nbytes, handle.payload, None
        found = self._results.pop(handle.owner)
        whole = handle.peer < 0 or handle.kind == "add"
        return handle.owner, handle.nbytes, found if whole else found[: handle.nbytes], None

    def idle(self) -> bool:
        return self.transport.idle

    def traffic(self) -> tuple[dict[int, int], dict[int, int]]:
        sent, received = self.transport.traffic()
        return dict(sent), dict(received)

    def moved_bytes(self) -> int:
        return self.transport.moved_bytes

    def close(self) -> None:
        self.transport.close()

    def read(self) -> int:
        """Bytes that have been read through the window since the start."""
        return self._read_bytes

    def _count_reads(self) -> None:
        read = Window.read

        def counted(window: Window, into: Bytes, rank: int, place: int) -> Any:
            self._read_bytes += into.nbytes
            return read(window, into, rank, place)

        Window.read = counted  # type: ignore[method-assign]

    def hold(self, nbytes: int, keep: bool) -> tuple[bool, bool]:
        """Allocate and write memory, and keep it or not; whether it lies in the window, and was zero."""
        memory = self.transport.allocate(nbytes)
        zeroed = not memory.any()
        memory[:] = 7
        if keep:
            self._held.append(memory)
        window = self.transport._window
        return window is not None and window.place_of(memory) != NOWHERE, zeroed

    def let_go(self) -> None:
        self._held.clear()

    def holds(self) -> tuple[int, int]:
        """Open descriptors and threads."""
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def error_of(error: Exception) -> tuple[str, str, int]:
    return type(error).__name__, str(error), error.rank if isinstance(error, PeerError) else -1


def hear(line: Connection, orders: SimpleQueue[Any], rank: Rank) -> None:
    while True:
        try:
            order = line.recv()
        except EOFError:
            orders.put(None)
            return
        if order[0] == "wake":
            rank.transport.wake()
        else:
            orders.put(order)


def main(address: str) -> None:
    found = recognise()
    rank, orders = Rank(found.rank, found.world), SimpleQueue[Any]()
    with Client(address, authkey=os.environ["TEST_KEY"].encode()) as line:
        line.send(found.rank)
        threading.Thread(target=hear, args=(line, orders, rank), daemon=True).start()
        while (order := orders.get()) is not None:
            name, *arguments = order
            try:
                line.send((True, getattr(rank, name)(*arguments)))
            except Exception as error:
                line.send((False, error_of(error)))


if __name__ == "__main__":
    main(sys.argv[1])
