"""A plan under way over one array, and the segments that ``messages`` cuts it into.

A ``Run`` is what the exchange is given, whether it then goes by ``messages`` or in mapped memory (``memory``,
``kept``), where compiled code counts the segments by itself. By messages a large array is cut into segments, each of
which executes the whole plan on its own elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..plans.messages import Program
from ..transports import Handle
from .trace import Span

Array = NDArray[Any]

_INDEX_BITS = 17
_SEGMENT_BITS = 16
KEY_BITS = 30
KEYS = 1 << KEY_BITS
"""Keys a run may have; tags with the highest bit set are left to single messages and to reducers."""

MOST_ACTIONS, MOST_SEGMENTS = 1 << _INDEX_BITS, 1 << _SEGMENT_BITS
"""What tags can number, of a rank's part in a plan and of a run."""


@dataclass(frozen=True)
class Sign:
    """What a run is for, which ranks show each other where they share memory (``kernels.board``): SIGN_WORDS numbers.

    ``differs`` makes the error for a process whose first two are others, from its number and its words.
    """

    words: tuple[int, ...]
    differs: Callable[[int, tuple[int, ...]], Exception]


@dataclass(eq=False)
class Run:
    """One plan under way over one array.

    ``key`` is the same on all ranks and tells this run's messages from those of others in flight. A ``tolerant`` run
    does not mind peers that have left: it then never finishes (a server waiting for a next step that does not come).
    ``span`` is what it is to be observed within, and itself once it has begun.
    """

    program: Program
    array: Array
    key: int
    label: str
    priority: float = 0.0
    on_done: Callable[[], None] | None = None
    tolerant: bool = False
    span: Span | None = None
    sign: Sign | None = None
    cut: Cut = field(init=False, repr=False)
    opened: int = 0
    left: int = 0
    open_segments: list[Any] = field(default_factory=list)
    bytes_view: NDArray[np.uint8] = field(init=False, repr=False)

    @property
    def done(self) -> bool:
        """True when every segment has finished."""
        return self.left == 0


@dataclass(frozen=True)
class Copied:
    """A received part in scratch memory of the exchange."""

    buffer: NDArray[np.uint8]
    nbytes: int

    @property
    def payload(self) -> NDArray[np.uint8]:
        """Its bytes."""
        return self.buffer[: self.nbytes]


class Segment:
    """The state of one segment: which actions still wait, and what has arrived too early to be applied."""

    __slots__ = ("arrived", "left", "moves", "number", "posted", "run", "span", "spans", "tag", "waits")

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.moves = run.cut.moves(number)
        self.tag = first_tag(run.key, number)
        self.waits = list(run.program.waits)
        self.left = len(run.program.actions)
        self.posted: set[int] = set()  # actions handed to the transport and not done
        self.arrived: dict[int, Handle | Copied] = {}
        self.span: Span | None = None
        self.spans: dict[int, Span]  # of what is posted; where somebody observes it

    def first_waiting(self, i: int) -> int:
        """The first reduction that waits to be applied in one pass with reduction ``i``, or ``i`` itself."""
        precedes = self.run.program.precedes
        while precedes[i] in self.arrived:
            i = precedes[i]
        return i


class Move(NamedTuple):
    """What an action moves of a segment: the elements from ``start`` to ``stop``, under a tag that ends in ``tag``.

    What arrives for one that ``borrows`` cannot go straight to its place. One that ``adds`` is left to the transport,
    which adds while a message comes in.
    """

    start: int
    stop: int
    tag: int
    borrows: bool
    adds: bool


class Cut:
    """The ``segments`` of arrays of one size under a program, and what each action moves of them.

    ``adds`` says of each action whether the transport adds what it receives.

    A plan whose chunks belong to ranks (reduce-scatter, all-gather) is cut inside each chunk, so that a rank's chunk of
    the whole array stays in one piece; others are cut into contiguous segments, which are kinder to the cache.
    """

    def __init__(self, program: Program, size: int, per_segment: int, adds: Sequence[bool]) -> None:
        self._program, self._size, self._per, self._adds = program, size, per_segment, adds
        plan = program.plan
        self._owned = plan.goal in ("reduce_scatter", "all_gather")
        if not (size and program.actions):
            self.segments = 0
        elif not self._owned:
            self.segments = -(-size // per_segment)
        else:
            widest = -(-size // plan.chunks)
            together = any(action.hi - action.lo > 1 for action in program.actions)  # have to lie side by side
            self._per = widest if together else max(1, per_segment // plan.chunks)
            self.segments = -(-widest // self._per)
        self._first = self._moves(0) if self.segments else ()

    def moves(self, number: int) -> Sequence[Move]:
        """What each action moves of a segment; known already of the first one, which most arrays have alone."""
        return self._moves(number) if number else self._first

    def _moves(self, number: int) -> tuple[Move, ...]:
        size, per, chunks = self._size, self._per, self._program.plan.chunks
        if self._owned:
            edges = chunk_edges(size, chunks)
            starts = [min(edges[chunk] + number * per, edges[chunk + 1]) for chunk in range(chunks)]
            stops = [min(edges[chunk] + (number + 1) * per, edges[chunk + 1]) for chunk in range(chunks)]
        else:
            first = number * per
            edges = [first + edge for edge in chunk_edges(min(size - first, per), chunks)]
            starts, stops = edges[:-1], edges[1:]
        return tuple(
            Move(
                starts[one.lo],
                stops[one.hi - 1],
                one.index,
                one.kind == "reduce" or (one.kind == "copy" and one.swaps),
                adds,
            )
            for one, adds in zip(self._program.actions, self._adds, strict=True)
        )


def chunk_edges(size: int, chunks: int) -> list[int]:
    """Where the chunks of an array of ``size`` elements begin and end: ``chunks + 1`` indices."""
    return [size * chunk // chunks for chunk in range(chunks + 1)]


def has_begun(run: Run) -> bool:
    """Whether something of a run has come or has been done by messages, which have a segment open until the end."""
    actions, segments = len(run.program.actions), tuple(run.open_segments)
    if not segments:
        return False
    return run.left < run.cut.segments or any(segment.arrived or segment.left < actions for segment in segments)


def first_tag(key: int, segment: int) -> int:
    """What tells a segment's messages from all others in flight between two ranks, below which ``Move`` has a tag."""
    return (key << _INDEX_BITS + _SEGMENT_BITS) | (segment << _INDEX_BITS)
