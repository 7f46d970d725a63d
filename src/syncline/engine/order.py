"""What is handed to the engine: an order says what is exchanged, and ``When`` says when that may begin.

The order of a bucket is made once and given in every step, so it holds nothing that a step decides. Both are tuples,
which cost least to make. Knows no thread and no transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ..collectives import Collective
from ..compression.reducers import Reducer
from ..plans.messages import Program
from .messages import Array, Sign
from .work import Lane, Work


class Order(NamedTuple):
    """A plan, or a library's collective, over ``array``.

    ``key`` is the same on all ranks and tells its messages from those of others in flight. A program that depends on
    the gate's result is given as a function. A ``tolerant`` order does not mind peers that leave, and nobody waits for
    it at the end. A ``sign`` is shown where ``Engine.shows`` says so. ``after`` is called, in the thread that drives,
    when all is exchanged, before the work is done.
    """

    program: Program | Collective | Callable[[], Program]
    array: Array
    key: int
    label: str
    tolerant: bool = False
    sign: Sign | None = None
    after: Callable[[], None] | None = None


class CodedOrder(NamedTuple):
    """The reducers of a bucket, which ``pieces`` makes when it begins; sums in it run ``program`` of their bytes."""

    pieces: Callable[[], Sequence[Callable[[], Reducer]]]
    program: Callable[[int], Program | Collective]
    key: int
    label: str
    tolerant: bool = False
    after: Callable[[], None] | None = None


class When(NamedTuple):
    """When an order begins: once ``gate`` is done and ``lane`` has room, right after ``before`` has been called.

    The smallest ``priority`` goes first, in whatever is under way (``work``); ranks need not agree on it. Whoever waits
    for the work at once need not ``announce`` it to the progress thread.
    """

    gate: Work | None = None
    before: Callable[[], None] | None = None
    lane: Lane | None = None
    priority: float = 0.0
    announce: bool = True


NOW, UNANNOUNCED = When(), When(announce=False)


class Exchanger(Protocol):
    """Whatever takes a model's buckets: plans, a codec, or those who hold the weights."""

    def start(self, bucket: int, when: When = NOW) -> Work:
        """Hand a bucket over."""
        ...
