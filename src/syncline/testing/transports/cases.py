"""What laws of transports are tried on: the ends of a network, and messages between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...transports import INLINE_BYTES, Adds, Bytes, HasAllreduce
from ..network import Ends, Network, numbers

SIZES = (0, 1, 7, 4095, 4096, 4097, INLINE_BYTES, INLINE_BYTES + 1, 1_000_003, 9_000_001)
"""Bytes of messages, about those at which transports change their ways."""


@dataclass(frozen=True)
class Subject:
    """A transport: what makes its ends, how much goes before what is more urgent, and what its allreduce adds."""

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
        """Whether it adds what comes in to an array."""
        return self._offers[0]

    @property
    def has_allreduce(self) -> bool:
        """Whether there is an allreduce of its own."""
        return self._offers[1]


@dataclass(frozen=True)
class Case:
    """A transport, how many processes, and messages: so long, out of memory of the transport's own where ``shared``.

    ``dtype`` is the element type of what is summed.
    """

    subject: Subject
    processes: int = 2
    sizes: tuple[int, ...] = ()
    shared: bool = False
    dtype: str = "float32"
    seed: int = 0

    @contextmanager
    def open(self) -> Iterator[Ends]:
        """The ends of a new network."""
        with self.subject.network(self.processes) as ends:
            yield Ends(ends)

    def draw(self) -> np.random.Generator:
        """For what a law chooses."""
        return np.random.default_rng([self.seed, 1])

    def messages(self) -> list[Bytes]:
        """What is sent, all of them different."""
        return [numbers(size, self.seed + number) for number, size in enumerate(self.sizes)]

    def __str__(self) -> str:
        sizes = f" and messages of {', '.join(map(str, self.sizes))} bytes" if self.sizes else ""
        what = f"{sizes}{' in memory of its own' if self.shared else ''}"
        return f"{self.processes} processes{what} (seed {self.seed})"


Cases = Callable[[Subject, int, int], Iterator[Case]]


def between(processes: int) -> Cases:
    """One network of so many processes."""

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
    """Up to so many messages of these sizes, in any order."""

    def cases(subject: Subject, seed: int, count: int) -> Iterator[Case]:
        draw = np.random.default_rng(seed)
        for _ in range(count):
            chosen = draw.choice(sizes, draw.integers(1, most + 1))
            yield Case(subject, sizes=tuple(map(int, chosen)), seed=int(draw.integers(0, 2**32)))

    return cases
