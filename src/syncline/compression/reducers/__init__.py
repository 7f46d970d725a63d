"""Reducers: how the compressed gradients of the ranks become one average, one file per way.

A reducer is a generator that computes and asks: it yields what has to travel (``Round``: messages to and from named
processes; ``Sum``: an array to be summed over the workers by the architecture's plan) and goes on when that has
happened. It knows codecs and states, and neither transports nor threads: ``engine.reducing`` drives it, in a
test a loop does.

    summed    payloads that can be added are summed by the plan, like gradients
    owners    every part has an owner, who decodes and adds all payloads and encodes the sum again for all
    gathered  every rank sends its payload to all and adds up what comes
    merged    payloads meet on a binomial tree, two becoming one of the same size; the last one goes back to all
    rounds    the codec itself alternates between computing and sums

These are between workers, or between hosts, in which gradients have been summed before: ``levels``.

What else has to know of a way (its ``Way``) asks it, and no codec's name: whether the strategy's plan carries the
payloads, whether servers can stand in, what a rank computes, and who sends how many bytes to whom (``Traffic``),
without any data. ``ways`` has the table.

What is reduced are operands, parts of a bucket: tensors, or slices of them, with their codecs and states. Results are
sums over the workers, and all workers decode the same bits. Owners and all-gathers add in rank order, from codes that
are cut at blocks and tensors, and so does a tree in its own order: there nothing depends on which parts share a bucket,
on timing, or on who owns what. Where a plan sums, payloads are what they are without it; in which order one element is
added may depend on its place in the bucket, as it does for gradients that are not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...codecs import Codec, Floats, State
from ...errors import SynclineError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Message:
    """Bytes to or from a process. What is received may be shorter than ``data``, unless that is its ``exact`` size."""

    peer: int
    data: Bytes
    exact: bool = False


@dataclass(frozen=True)
class Total:
    """An array that becomes its sum with those that others send, which are of its size.

    They are added from left to right: those of the processes ``before`` this one, its own, those of the ones ``after``
    it; so it does not matter which of them adds.
    """

    array: NDArray[Any]
    before: Sequence[int]
    after: Sequence[int]

    @property
    def peers(self) -> tuple[int, ...]:
        """Those who send."""
        return (*self.before, *self.after)


@dataclass(frozen=True)
class Round:
    """Messages that travel at the same time; the answer is the length of each received one, in bytes, in order."""

    sends: Sequence[Message]
    receives: Sequence[Message]
    total: Total | None = None


@dataclass(frozen=True)
class Sum:
    """An array (one-dimensional, contiguous) that is replaced in place by its sum over all workers."""

    array: NDArray[Any]


Lengths = list[int]
Reducer = Generator[Round | Sum, Lengths, None]
"""Drive with ``send(lengths)``; after a Sum what is sent does not matter."""


@dataclass(frozen=True, eq=False)
class Held:
    """An owner's weights, of the type and size of the known ones; ``keeps`` what payloads do not say for later ones."""

    weights: NDArray[Any]
    keeps: bool

    def cut(self, start: int, stop: int) -> Held:
        """Elements ``start`` to ``stop``."""
        return Held(self.weights[start:stop], self.keeps)


@dataclass(eq=False)
class Operand:
    """Elements ``start`` to ``start + array.size`` of a tensor, where its gradient lies, and what its codec remembers.

    ``array`` is replaced by the sum over the workers. ``state`` is that of this worker's own encoding, ``again`` that
    of the second encoding by an owner; with error feedback both have residuals. ``start`` is a multiple of the codec's
    block, or 0. ``held`` is there where weights are told and not gradients, at the owner.
    """

    name: str
    codec: Codec
    array: Floats
    state: State
    again: State
    start: int = 0
    held: Held | None = None

    def cut(self, start: int, stop: int) -> Operand:
        """Elements ``start`` to ``stop``, counted from this part's first."""
        held = self.held and self.held.cut(start, stop)
        return Operand(self.name, self.codec, self.array[start:stop], self.state, self.again, self.start + start, held)


class Room(Protocol):
    """Where buffers come from."""

    def take(self, nbytes: int) -> Bytes:
        """A buffer of at least that size."""
        ...

    def give(self, buffer: Bytes) -> None:
        """Back to where it came from."""
        ...


@dataclass(frozen=True)
class Participant:
    """This process among those that reduce. ``owners`` are the processes that own parts, in the order of parts.

    ``report`` is told the name of a tensor whose gradient here is not finite. ``hosts`` are the workers of each host,
    where these sum before anything is encoded (``levels``). ``called`` gives those that reduce their numbers in
    messages for people, where they are some of all. With
    ``means`` owners divide sums by the number of workers before they encode them, and who has gradients divides none.
    """

    index: int
    workers: int
    owners: tuple[int, ...]
    room: Room
    report: Callable[[str], None] = lambda _: None
    hosts: tuple[tuple[int, ...], ...] = ()
    called: tuple[int, ...] = ()
    means: bool = False

    @property
    def works(self) -> bool:
        """False in a process that only serves."""
        return self.index < self.workers

    @property
    def owner(self) -> int:
        """This process's number among the owners, -1 for one that owns nothing."""
        return self.owners.index(self.index) if self.index in self.owners else -1

    @property
    def encoders(self) -> int:
        """How many there are whose gradients are encoded: hosts where these sum before, else workers."""
        return len(self.hosts) or self.workers

    @property
    def encoder(self) -> int:
        """The number among these of the one that this process encodes for."""
        if not self.hosts:
            return self.index
        return next(number for number, ranks in enumerate(self.hosts) if self.index in ranks)

    def others(self) -> list[int]:
        """The other workers, beginning after this one, so that not all turn to the same one first."""
        turned = ((self.index + k) % self.workers for k in range(1, self.workers + 1))
        return [worker for worker in turned if worker != self.index]


class ReduceError(SynclineError):
    """A payload that cannot be used: whose it was, of which codec, and what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Flows:
    """Messages between processes that travel at the same time, as columns: source, destination, expected bytes.

    ``most_bytes`` is the greatest size of each; they are equal where the codec's payloads have a fixed one.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    most_bytes: NDArray[np.int64]

    @property
    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """All of them."""
        return self.src, self.dst, self.nbytes, self.most_bytes

    def busiest_bytes(self) -> int:
        """What the busiest port carries in one direction, ports sending and receiving at the same time."""
        if not self.nbytes.size:
            return 0
        return int(max(np.bincount(ends, self.nbytes).max() for ends in (self.src, self.dst)))


@dataclass(frozen=True)
class Summed:
    """An array of that size that the strategy's plan sums over all workers."""

    nbytes: int


Traffic = list[Flows | Summed]
"""What travels for one reducer, on all processes, step by step."""


class Computing(NamedTuple):
    """What one rank computes, counted in whole gradients: encodings, decodings (and adding), and adds of payloads."""

    encodes: float
    decodes: float
    adds: float


@dataclass(frozen=True, eq=False)
class Way:
    """One way in which payloads become one, as its file declares it.

    ``pieces`` gives the reducers of the parts that go this way, for one process, and ``traffic`` what travels for each
    of them, by the numbers of workers and the processes that own parts. ``computing`` is what the busiest of so many
    ranks computes. ``words`` say it to the user, of an ``{architecture}`` and its ``{owners}``.

    ``carrier`` is the architecture that the messages are those of, whatever the strategy asks for; None where the
    strategy's own plan sums. ``servable`` says that servers can be the owners instead, ``again`` that owners encode the
    sums again, with a residual of their own.
    """

    pieces: Callable[[Sequence[Operand], Participant], list[Callable[[], Reducer]]]
    traffic: Callable[[Sequence[Operand], int, Sequence[int]], list[Traffic]]
    computing: Callable[[int], Computing]
    words: str
    carrier: str | None = None
    servable: bool = True
    again: bool = False
