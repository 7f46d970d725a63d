"""All ends of a transport in one process, and examples for its laws: numbers of ends, and messages between them.

``network_of`` makes the ends from a strategy's text. ``Ends`` drives them until something is done.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import registry
from ..errors import UsageError
from ..strategy.grammar import read_part
from ..strategy.words import bind
from ..transports import INLINE_BYTES, Adds, Bytes, Handle, HasAllreduce, HasCollectives, MemoryStore, Place, Transport
from .laws import require

LIMIT_S = 20.0
"""The time limit for everything that must happen."""

_TURN_S = 0.0005

Network = Callable[[int], AbstractContextManager[Sequence[Transport]]]
"""Makes the ends of a number of processes, by rank, and closes them, even if some are closed already."""


def network_of(text: str) -> Network:
    """The ends of a registered transport, all in this process. UsageError for one that cannot connect them."""
    part = bind("transports", read_part(text))
    entry = registry.get("transports", part.name)

    @contextmanager
    def network(world: int) -> Iterator[Sequence[Transport]]:
        ends = _made(entry, part.arguments, world)
        try:
            yield ends
        finally:
            together(ends, lambda end: end.close())

    return network


def _made(entry: registry.Entry, arguments: Mapping[str, Any], world: int) -> list[Transport]:
    connection, hub = entry.capabilities.get("connection"), entry.capabilities.get("hub")
    if connection == "own":
        store = MemoryStore()
        places = [Place(rank, world, store, timeout_s=LIMIT_S) for rank in range(world)]
        return together(places, lambda place: entry.target(place, **arguments))
    if connection in ("tcp", "unix"):
        socks = connected(world, lambda *_: connection == "unix")
        return [entry.target(rank, mine, **arguments) for rank, mine in enumerate(socks)]
    if hub is not None:
        inside = hub(world)
        return [entry.target(inside, rank, **arguments) for rank in range(world)]
    raise UsageError(f"transport={entry.name} has connection={connection!r}: it must be 'tcp', 'unix' or 'own'")


def connected(world: int, is_unix: Callable[[int, int], bool]) -> list[dict[int, socket.socket]]:
    """Every process's connections to all others, over UNIX sockets or TCP."""
    found: list[dict[int, socket.socket]] = [{} for _ in range(world)]
    for low in range(world):
        for high in range(low + 1, world):
            if is_unix(low, high):
                found[low][high], found[high][low] = socket.socketpair()
            else:
                with socket.create_server(("127.0.0.1", 0)) as door:
                    found[low][high] = socket.create_connection(door.getsockname(), LIMIT_S)
                    found[high][low], _ = door.accept()
    return found


def together(items: Sequence[Any], call: Callable[[Any], Any]) -> list[Any]:
    """The results of a call for each item, all at once in threads, for calls that wait for each other."""
    with ThreadPoolExecutor(max(1, len(items))) as threads:
        return list(threads.map(call, items))


class Ends:
    """The open ends of one network, driven by the waiting thread. ``told`` are the handles that polls returned."""

    def __init__(self, ends: Sequence[Transport]) -> None:
        self.ends = list(ends)
        self.told: dict[Handle, None] = {}

    def poll(self, end: Transport, timeout: float = _TURN_S) -> list[Handle]:
        """The completed handles of one end; checks that each is done and returned once."""
        found = end.poll(timeout)
        for handle in found:
            require(handle.done, f"poll returned {handle}, which is not done")
            require(handle not in self.told, f"poll returned {handle} twice")
            self.told[handle] = None
        return found

    def turn(self, times: int = 5) -> None:
        """Let all ends make progress once."""
        for _ in range(times):
            for end in self.ends:
                self.poll(end)

    def wait(self, *handles: Handle) -> None:
        """Drive until all handles are done. Raises the first error."""
        missing = set(handles)
        self.until(lambda: missing <= self.told.keys(), lambda: missing - self.told.keys())
        for handle in handles:
            if handle.error is not None:
                raise handle.error

    def until(self, holds: Callable[[], bool], missing: Callable[[], object]) -> None:
        """Drive until ``holds()``. AssertionError with ``missing()`` after the time limit."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            require(time.monotonic() < deadline, f"not done within {LIMIT_S:g} s: {missing()}")
            self.turn(1)

    def close(self, rank: int) -> None:
        """Close one end and drive it no more."""
        end = next(end for end in self.ends if end.rank == rank)
        self.ends.remove(end)
        end.close()


def in_time(call: Callable[[], Any], what: str) -> Any:
    """The result of a call in a thread. AssertionError if it does not return; the thread is then abandoned."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    require(not thread.is_alive(), f"{what} has not come back within {LIMIT_S:g} s")
    if raised:
        raise raised[0]
    return found[0]


def raised(call: Callable[[], Any], kind: type[Exception]) -> Exception:
    """The error of type ``kind`` that a call must raise."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def numbers(nbytes: int, seed: int = 0) -> Bytes:
    """``nbytes`` bytes with varying values."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


SIZES = (0, 1, 7, 4095, 4096, 4097, INLINE_BYTES, INLINE_BYTES + 1, 1_000_003, 9_000_001)
"""Sizes of messages, near those at which transports change their methods."""


@dataclass(frozen=True)
class Subject:
    """A transport: its network, the limit of bytes ahead of urgent messages, and the types of its allreduce."""

    network: Network
    ahead_bytes: float
    adds: tuple[str, ...]

    @cached_property
    def _offers(self) -> tuple[bool, bool, bool]:
        with self.network(2) as ends:
            end = ends[0]
            adds = isinstance(end, Adds) and end.adds_from(1, np.dtype(np.float32))
            return adds, isinstance(end, HasAllreduce), isinstance(end, HasCollectives)

    @property
    def adds_messages(self) -> bool:
        """Whether it adds received data to an array."""
        return self._offers[0]

    @property
    def has_allreduce(self) -> bool:
        """Whether it has its own allreduce."""
        return self._offers[1]

    @property
    def has_halves(self) -> bool:
        """Whether it also has the halves of an allreduce."""
        return self._offers[2]


@dataclass(frozen=True)
class Case:
    """A transport, a number of processes, and the sizes of messages, from the transport's memory if ``shared``.

    ``dtype`` is the element type of sums.
    """

    subject: Subject
    processes: int = 2
    sizes: tuple[int, ...] = ()
    shared: bool = False
    dtype: str = "float32"
    seed: int = 0

    @contextmanager
    def open(self) -> Iterator[Ends]:
        """Open a new network."""
        with self.subject.network(self.processes) as ends:
            yield Ends(ends)

    def draw(self) -> np.random.Generator:
        """A random generator for choices of a law."""
        return np.random.default_rng([self.seed, 1])

    def messages(self) -> list[Bytes]:
        """The messages, all different."""
        return [numbers(size, self.seed + number) for number, size in enumerate(self.sizes)]

    def __str__(self) -> str:
        sizes = f" and messages of {', '.join(map(str, self.sizes))} bytes" if self.sizes else ""
        what = f"{sizes}{' in memory of its own' if self.shared else ''}"
        return f"{self.processes} processes{what} (seed {self.seed})"


Cases = Callable[[Subject, int, int], Iterator[Case]]


def between(processes: int) -> Cases:
    """One network of ``processes`` processes."""

    def cases(subject: Subject, seed: int, count: int) -> Iterator[Case]:  # noqa: ARG001
        yield Case(subject, processes, seed=seed)

    return cases


def each(*sizes: int, shared: tuple[bool, ...] = (False,)) -> Cases:
    """Two processes and one message of each size."""

    def cases(subject: Subject, seed: int, count: int) -> Iterator[Case]:  # noqa: ARG001
        for size in sizes:
            for memory in shared:
                yield Case(subject, sizes=(size,), shared=memory, seed=seed)

    return cases


def drawn(*sizes: int, most: int) -> Cases:
    """Random numbers of messages of these sizes, in random order."""

    def cases(subject: Subject, seed: int, count: int) -> Iterator[Case]:
        draw = np.random.default_rng(seed)
        for _ in range(count):
            chosen = draw.choice(sizes, draw.integers(1, most + 1))
            yield Case(subject, sizes=tuple(map(int, chosen)), seed=int(draw.integers(0, 2**32)))

    return cases
