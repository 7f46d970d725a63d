"""Reducers combine the compressed gradients of all ranks into one sum, in one of five ways.

A reducer is a generator that alternates between computing and communicating. It yields the next communication (a
``Round`` of messages to and from named processes, a ``Sum`` of an array over the workers by the architecture's plan, or
a ``HostCollective`` of the message library) and resumes after it. Reducers use codecs and states, but neither
transports nor threads: ``engine.reducing`` drives them, or a loop in a test.

    summed    the plan sums payloads that can be added, as it sums gradients
    owners    every part has an owner, which decodes and adds all payloads and encodes the sum for all
    gathered  every rank sends its payload to all ranks and adds the payloads that it receives
    merged    payloads are merged pairwise along a binomial tree; the root returns the last one to all
    rounds    the codec itself alternates between computing and sums

All of these work between workers, or between hosts that have already summed their gradients (``levels``).

Other code asks a reducer's ``Way`` instead of testing the codec's name: whether the strategy's plan carries the
payloads, whether servers can take part, what a rank computes, and how many bytes each process sends to which process
(``Traffic``), all without data. ``ways`` maps codecs to their ``Way``.

The operands are parts of a bucket: tensors or slices of them, with their codecs and states. The results are sums over
the workers, and all workers decode the same bits. Owners and all-gathers add in rank order, trees in tree order, and
parts are cut only at blocks and tensors. Their results therefore do not depend on the grouping of parts into buckets,
on timing, or on ownership. If a plan sums, the payloads are just as independent, but the order in which one
element is added may depend on its place in the bucket, as it does without compression.

Gradients may also lie on a device (``Device``). The reducers of ``summed``, ``owners`` and ``gathered`` then encode and
decode there, and only payloads come to the host and go back. They queue that work in the device's streams and wait for
it only before a payload travels, in a separate round. A payload is therefore decoded after the encoding that read the
same memory, and later work in the queue finds complete results.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...codecs import Codec, Floats, State
from ...errors import SynclineError
from ...wire.scratch import Scratch

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Message:
    """Bytes to or from a process. A received message may be shorter than ``data`` unless ``exact`` is set."""

    peer: int
    data: Bytes
    exact: bool = False


@dataclass(frozen=True)
class Total:
    """An array that is replaced by its sum with the arrays of the same size that others send.

    The addends are added from left to right: from the processes ``before`` this one, from this one, then from the
    processes ``after`` it. The result therefore does not depend on which process adds.
    """

    array: NDArray[Any]
    before: Sequence[int]
    after: Sequence[int]

    @property
    def peers(self) -> tuple[int, ...]:
        """The senders, in the order of addition."""
        return (*self.before, *self.after)


class Queue(Protocol):
    """A stream of a device: work in order. Neither call waits for the device, unless a codec has to."""

    def run(self, act: Callable[[], None]) -> None:
        """Call ``act``, whose work on the device is queued."""
        ...

    def then(self, call: Callable[[], None]) -> None:
        """Call ``call``, from any thread, when everything that has been queued so far is done."""
        ...


class Device(Protocol):
    """A device that encodes and decodes gradients in its memory.

    ``room`` has host memory to and from which the device copies by itself. ``encoding`` reads gradients, and
    ``decoding`` overwrites them.
    """

    room: Scratch
    encoding: Queue
    decoding: Queue

    def after_decoding(self, call: Callable[[], None]) -> None:
        """Call ``call`` in the calling thread, some time after all work that ``decoding`` has now."""
        ...


@dataclass(frozen=True)
class Round:
    """Messages that travel concurrently. The answer is the lengths of the received messages in bytes, in order.

    A round with ``after`` has no messages: it ends when everything that has been queued there is done.
    """

    sends: Sequence[Message]
    receives: Sequence[Message]
    totals: Sequence[Total] = ()
    after: Queue | None = None


@dataclass(frozen=True)
class Sum:
    """An array (one-dimensional, contiguous) that is replaced in place by its sum over all workers."""

    array: NDArray[Any]


@dataclass(frozen=True)
class HostCollective:
    """A collective of the message library among the workers of this host; ``parts[i]`` belongs to the i-th of them."""

    goal: Literal["reduce_scatter", "all_gather"]
    parts: Sequence[NDArray[Any]]


Lengths = list[int]
Reducer = Generator[Round | Sum | HostCollective, Lengths, None]
"""Drive with ``send(lengths)``; after a Sum or HostCollective the value sent is ignored."""


@dataclass(frozen=True, eq=False)
class Held:
    """An owner's weights, like the known weights. ``keeps`` leaves encoding errors to later payloads."""

    weights: NDArray[Any]
    keeps: bool

    def cut(self, start: int, stop: int) -> Held:
        """Elements ``start`` to ``stop``."""
        return Held(self.weights[start:stop], self.keeps)


@dataclass(eq=False)
class Operand:
    """A part of a bucket: elements ``start`` to ``start + elements`` of a tensor, with codec and states.

    ``array`` has the gradient and is replaced by the sum over the workers; on a device it is a tensor, as in
    ``codecs._device``. ``state`` belongs to this worker's own encoding and ``again`` to the second encoding by an
    owner; with error feedback both have residuals. ``start`` is a multiple of the codec's block, or 0. An owner that
    distributes weights instead of gradients has ``held``.
    """

    name: str
    codec: Codec
    array: Floats
    state: State
    again: State
    start: int = 0
    held: Held | None = None

    @property
    def elements(self) -> int:
        """The number of elements."""
        return len(self.array)

    def cut(self, start: int, stop: int) -> Operand:
        """Elements ``start`` to ``stop``, counted from this part's first."""
        held = self.held and self.held.cut(start, stop)
        return Operand(self.name, self.codec, self.array[start:stop], self.state, self.again, self.start + start, held)


@dataclass(frozen=True)
class Participant:
    """This process and the processes that reduce with it. ``owners`` are the processes that own parts, in part order.

    ``report`` receives the name of every tensor whose gradient here is not finite. ``hosts`` lists the workers of each
    host if hosts sum before encoding (``levels``); with ``native`` the message library sums there. ``called`` gives the
    processes' ranks for error messages if they are a subset of all. With ``means`` owners divide sums by the number
    of workers before encoding, and workers do not divide. ``device`` has the
    gradients, if they are not in the host's memory; ``room`` is then the device's.
    """

    index: int
    workers: int
    owners: tuple[int, ...]
    room: Scratch
    report: Callable[[str], None] = lambda _: None
    hosts: tuple[tuple[int, ...], ...] = ()
    called: tuple[int, ...] = ()
    means: bool = False
    native: bool = False
    device: Device | None = None

    @property
    def encoding(self) -> Queue | None:
        """The queue that encodes gradients; None if the calling thread does."""
        return None if self.device is None else self.device.encoding

    @property
    def decoding(self) -> Queue | None:
        """The queue that decodes payloads and encodes decoded sums; None if the calling thread does."""
        return None if self.device is None else self.device.decoding

    def give(self, buffers: Iterable[Bytes]) -> None:
        """Return buffers to ``room`` once all decodings queued so far have read them."""
        for buffer in buffers:
            if self.device is None:
                self.room.give(buffer)
            else:
                self.device.after_decoding(partial(self.room.give, buffer))

    @property
    def works(self) -> bool:
        """False in a dedicated server."""
        return self.index < self.workers

    @property
    def owner(self) -> int:
        """This process's index among the owners, -1 if it owns nothing."""
        return self.owners.index(self.index) if self.index in self.owners else -1

    @property
    def encoders(self) -> int:
        """The number of encoders: hosts if these sum before encoding, else workers."""
        return len(self.hosts) or self.workers

    @property
    def encoder(self) -> int:
        """The index of the encoder that this process belongs to."""
        if not self.hosts:
            return self.index
        return next(number for number, ranks in enumerate(self.hosts) if self.index in ranks)

    def others(self) -> list[int]:
        """The other workers, starting after this one, so that not all workers address the same one first."""
        turned = ((self.index + k) % self.workers for k in range(1, self.workers + 1))
        return [worker for worker in turned if worker != self.index]


class ReduceError(SynclineError):
    """A payload that cannot be used; the message names its sender, its codec and the fault."""


@dataclass(frozen=True, eq=False)
class Flows:
    """Messages that travel concurrently, as columns: source, destination, expected bytes.

    ``most_bytes`` is the maximum size of each; it equals ``nbytes`` if the codec's payloads have a fixed size.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    most_bytes: NDArray[np.int64]

    @property
    def columns(self) -> tuple[NDArray[np.int64], ...]:
        """All four columns."""
        return self.src, self.dst, self.nbytes, self.most_bytes

    def busiest_bytes(self) -> int:
        """The bytes that the busiest port carries in one direction, if ports send and receive at the same time."""
        if not self.nbytes.size:
            return 0
        return int(max(np.bincount(ends, self.nbytes).max() for ends in (self.src, self.dst)))


@dataclass(frozen=True)
class Summed:
    """An array of ``nbytes`` that the strategy's plan sums over all workers."""

    nbytes: int


Traffic = list[Flows | Summed]
"""The communication of one reducer on all processes, step by step."""


class Computing(NamedTuple):
    """One rank's work in units of whole gradients: encodings, decodings (including adds), and additions of payloads."""

    encodes: float
    decodes: float
    adds: float


@dataclass(frozen=True, eq=False)
class Way:
    """One way of combining payloads.

    ``pieces`` makes the reducers of the parts that are combined this way, for one process. ``traffic`` describes the
    communication of each reducer from the number of workers and the owners. ``computing`` is the work of the busiest
    rank. ``words`` describe the way to the user, with placeholders ``{architecture}`` and ``{owners}``.

    ``carrier`` is the architecture whose messages are used, whatever the strategy asks for; None if the strategy's own
    plan sums. ``servable`` says that servers can be the owners, ``again`` that owners encode the sums again with their
    own residual.
    """

    pieces: Callable[[Sequence[Operand], Participant], list[Callable[[], Reducer]]]
    traffic: Callable[[Sequence[Operand], int, Sequence[int]], list[Traffic]]
    computing: Callable[[int], Computing]
    words: str
    carrier: str | None = None
    servable: bool = True
    again: bool = False
