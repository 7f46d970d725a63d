"""A plan under way over one array, and the segments that ``messages`` cuts it into.

A ``Run`` is what the exchange is given, whether it then goes by ``messages`` or in mapped memory (``memory``,
``kept``), where compiled code counts the segments by itself. By messages a large array is cut into segments, each of
which executes the whole plan on its own elements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plans.messages import Action, Program
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
    per_segment: int = 0
    segments: int = 0
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
    """The state of one segment: which actions still wait, and what has arrived too early to be applied.

    A plan whose chunks belong to ranks (reduce-scatter, all-gather) is cut inside each chunk, so that a rank's chunk of
    the whole array stays in one piece; others are cut into contiguous segments, which are kinder to the cache.
    """

    __slots__ = ("arrived", "left", "number", "posted", "run", "span", "spans", "starts", "stops", "waits")

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        size, per, chunks = run.array.size, run.per_segment, run.program.plan.chunks
        if _owned(run.program):
            edges = chunk_edges(size, chunks)
            self.starts = [min(edges[chunk] + number * per, edges[chunk + 1]) for chunk in range(chunks)]
            self.stops = [min(edges[chunk] + (number + 1) * per, edges[chunk + 1]) for chunk in range(chunks)]
        else:
            first = number * per
            length = min(size - first, per)
            edges = [first + edge for edge in chunk_edges(length, chunks)]
            self.starts, self.stops = edges[:-1], edges[1:]
        self.waits = list(run.program.waits)
        self.left = len(run.program.actions)
        self.posted: set[int] = set()  # actions handed to the transport and not done
        self.arrived: dict[int, Handle | Copied] = {}
        self.span: Span | None = None
        self.spans: dict[int, Span]  # of what is posted; where somebody observes it

    def bounds(self, action: Action) -> tuple[int, int]:
        """The elements of an action; those of several chunks are contiguous (see ``segments_of``)."""
        return self.starts[action.lo], self.stops[action.hi - 1]

    def first_waiting(self, i: int) -> int:
        """The first reduction that waits to be applied in one pass with reduction ``i``, or ``i`` itself."""
        precedes = self.run.program.precedes
        while precedes[i] in self.arrived:
            i = precedes[i]
        return i


def chunk_edges(size: int, chunks: int) -> list[int]:
    """Where the chunks of an array of ``size`` elements begin and end: ``chunks + 1`` indices."""
    return [size * chunk // chunks for chunk in range(chunks + 1)]


def segments_of(run: Run, segment_bytes: int) -> tuple[int, int]:
    """Elements per segment (per chunk, where chunks belong to ranks), and the number of segments."""
    size, program = run.array.size, run.program
    if size == 0 or not program.actions:
        return 1, 0
    per = max(1, segment_bytes // run.array.itemsize)
    if not _owned(program):
        return per, -(-size // per)
    widest = -(-size // program.plan.chunks)
    if any(action.hi - action.lo > 1 for action in program.actions):
        return widest, 1  # several chunks in one message have to lie side by side
    per = max(1, per // program.plan.chunks)
    return per, -(-widest // per)


def has_begun(run: Run) -> bool:
    """Whether something of a run has come or has been done."""
    actions = len(run.program.actions)
    segments = tuple(run.open_segments)
    return run.left < run.segments or any(segment.arrived or segment.left < actions for segment in segments)


def borrows(action: Action) -> bool:
    """Whether what arrives cannot go straight to its place."""
    return action.kind == "reduce" or (action.kind == "copy" and action.swaps)


def _owned(program: Program) -> bool:
    return program.plan.goal in ("reduce_scatter", "all_gather")


def tag_of(segment: Segment, action: Action) -> int:
    """What tells an action's message from all others in flight between two ranks."""
    return (segment.run.key << _INDEX_BITS + _SEGMENT_BITS) | (segment.number << _INDEX_BITS) | action.index
