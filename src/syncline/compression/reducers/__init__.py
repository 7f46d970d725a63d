"""Reducers: how the compressed gradients of the ranks become one average, one file per way.

A reducer is a generator that computes and asks: it yields what has to travel (``Round``: messages to and from named
processes; ``Sum``: an array to be summed over the workers by the architecture's plan) and goes on when that has
happened. It knows codecs and states, and neither transports nor threads: ``engine.reducing`` drives it, in a
test a loop does.

    summed    payloads that can be added are summed by the plan, like gradients
    owners    every part has an owner, who decodes and adds all payloads and encodes the sum again for all
    pulled    owners hold weights, and encode how an update has changed them, for all
    gathered  every rank sends its payload to all and adds up what comes
    merged    payloads meet on a binomial tree, two becoming one of the same size; the last one goes back to all
    rounds    the codec itself alternates between computing and sums

What is reduced is a list of ``Part``: tensors, or slices of them, with their codecs and states. Results are sums over
the workers, and all workers decode the same bits. Owners and all-gathers add in rank order, from codes that are cut at
blocks and tensors, and so does a tree in its own order: there nothing depends on which parts share a bucket, on timing,
or on who owns what. Where a plan sums, payloads are what they are without it; in which order one element is added may
depend on its place in the bucket, as it does for gradients that are not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...codecs import Codec, Floats, State
from ...errors import SynclineError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Message:
    """Bytes to or from a process. A received message may be shorter than ``data``."""

    peer: int
    data: Bytes


@dataclass(frozen=True)
class Round:
    """Messages that travel at the same time; the answer is the length of each received one, in bytes, in order."""

    sends: Sequence[Message]
    receives: Sequence[Message]


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
class Part:
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

    def cut(self, start: int, stop: int) -> Part:
        """Elements ``start`` to ``stop``, counted from this part's first."""
        held = self.held and self.held.cut(start, stop)
        return Part(self.name, self.codec, self.array[start:stop], self.state, self.again, self.start + start, held)


class Room(Protocol):
    """Where buffers come from."""

    def take(self, nbytes: int) -> Bytes:
        """A buffer of at least that size."""
        ...

    def give(self, buffer: Bytes) -> None:
        """Back to where it came from."""
        ...


@dataclass(frozen=True)
class Place:
    """This process among those that reduce. ``owners`` are the processes that own parts, in the order of parts.

    ``report`` is told the name of a tensor whose gradient here is not finite.
    """

    index: int
    workers: int
    owners: tuple[int, ...]
    room: Room
    report: Callable[[str], None] = lambda _: None

    @property
    def works(self) -> bool:
        """False in a process that only serves."""
        return self.index < self.workers

    @property
    def owner(self) -> int:
        """This process's number among the owners, -1 for one that owns nothing."""
        return self.owners.index(self.index) if self.index in self.owners else -1

    def others(self) -> list[int]:
        """The other workers, beginning after this one, so that not all turn to the same one first."""
        turned = ((self.index + k) % self.workers for k in range(1, self.workers + 1))
        return [worker for worker in turned if worker != self.index]


class ReduceError(SynclineError):
    """A payload that cannot be used: whose it was, of which codec, and what is wrong with it."""


def pieces(parts: Sequence[Part], place: Place, *, served: bool = False) -> list[Callable[[], Reducer]]:
    """What has to be done for a bucket: reducers that may run at the same time, in this order on all processes.

    Where the gradients go through servers (``served``), every codec's payloads do.
    """
    from . import gathered, merged, owners, rounds, summed

    by: dict[str, list[Part]] = {}
    for part in parts:
        if part.array.size:
            by.setdefault("owner" if served else part.codec.combine, []).append(part)
    chain: list[Callable[[], Reducer]] = []
    if "sum" in by:
        chain += [lambda found=found: summed.reduce(found, place) for found in summed.alike(by["sum"])]  # type: ignore[misc]
    if "rounds" in by:
        chain.append(lambda: rounds.reduce(by["rounds"], place))
    found: list[Callable[[], Reducer]] = [lambda: _one_by_one(chain)] if chain else []
    found += owners.pieces(by.get("owner", []), place)
    found += gathered.pieces(by.get("gather", []), place)
    found += merged.pieces(by.get("merge", []), place)
    return found


def _one_by_one(chain: Sequence[Callable[[], Reducer]]) -> Reducer:
    """Sums of one bucket follow one another: plans tell their messages apart by the bucket alone."""
    for reducer in chain:
        yield from reducer()
