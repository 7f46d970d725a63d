"""Examples for laws of transports: the ends of a network, and messages between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...transports import INLINE_BYTES, Adds, Bytes, HasAllreduce
from ..network import Ends, Network, numbers

SIZES = (0, 1, 7, 4095, 4096, 4097, INLINE_BYTES, INLINE_BYTES + 1, 1_000_003, 9_000_001)
"""Sizes of messages, near those at which transports change their methods."""


@dataclass(frozen=True)
class Subject:
    """A transport: its network, the limit of bytes ahead of urgent messages, and the types of its allreduce."""

    network: Network
    ahead_bytes: float
    adds: tuple[str, ...]

    @cached_property
    def _offers(self) -> tuple[bool, bool]:
        with self.network(2) as ends:
            end = ends[0]
            return isinstance(end, Adds) and end.adds_from(1, np.dtype(np.float32)), isinstance(end, HasAllreduce)

    @property
    def adds_messages(self) -> bool:
        """Whether it adds received data to an array."""
        return self._offers[0]

    @property
    def has_allreduce(self) -> bool:
        """Whether it has its own allreduce."""
        return self._offers[1]


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
