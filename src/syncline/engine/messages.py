"""Runs plans by messages: a dataflow over (rank, chunk), several runs in flight, large arrays cut into segments.

A ``Run`` is a plan under way over one array: what the exchange is given, whether it then goes by messages or in mapped
memory (``memory``, ``kept``), where compiled code counts the segments by itself. By messages each segment of an array
executes the whole plan on its own elements; a few segments flow one behind the other, so that sending, receiving and
reducing overlap. Within a segment an action starts as soon as what it waits for has finished: a slow peer holds up
only what needs it.

Receives that reduce are posted when their segment opens, straight from the transport's memory (a peer's own memory
over shm, scratch over tcp); receives that copy go straight into the array. Reductions into one chunk keep plan order,
so the result does not depend on timing.

Memory: the scratch for received parts is at most ``window`` segments per run.

Owns the segments under way. Does not know what else the transport carries, nor what of it is acted upon first: that is
the ``exchange``'s, which hands on what has completed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError, UsageError, labelled
from ..kernels.cpu import add_all_into
from ..plans.messages import Action, Program
from ..transports import Adds, Handle, Transport
from ..wire.scratch import Scratch
from .trace import Kind, Observer, Span, begin

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
        self.moves = run.cut.moves(number) if number else run.cut.first
        self.tag = (run.key << _INDEX_BITS + _SEGMENT_BITS) | (number << _INDEX_BITS)
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
        self.first: Sequence[Move] = self.moves(0) if self.segments else ()
        """What each action moves of the first segment, which most arrays have alone."""

    def moves(self, number: int) -> Sequence[Move]:
        """What each action moves of a segment."""
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


class TwoSided:
    """The runs of one process that send and receive; used from one thread.

    An array is cut into segments of ``segment_bytes``, and each run has at most ``window`` of them open at a time.
    ``finish`` is called with a run when all of its segments have finished.
    """

    def __init__(
        self,
        transport: Transport,
        scratch: Scratch,
        segment_bytes: int,
        window: int,
        has_left: Callable[[int], bool],
        observer: Observer | None,
        finish: Callable[[Run], None],
    ) -> None:
        self._transport, self._scratch = transport, scratch
        self._segment_bytes, self._window = segment_bytes, window
        self._has_left, self._observer, self._finish = has_left, observer, finish
        self._adder = transport if isinstance(transport, Adds) else None
        self._cut_of = lru_cache(maxsize=1024)(self._cut)  # steps repeat it

    def cut(self, run: Run) -> None:
        """Cut the array of a run into segments, which may be none; raises UsageError for more than tags can number."""
        run.cut = self._cut_of(run.program, run.array.size, run.array.dtype)
        segments = run.cut.segments
        if segments > MOST_SEGMENTS:
            text = f"{run.label}: an array of {run.array.nbytes} bytes has {segments} segments"
            raise UsageError(f"{text}, and tags can number {MOST_SEGMENTS}: use smaller buckets, or parts of the array")
        run.bytes_view = run.array.view(np.uint8)
        run.left, run.opened = segments, 0

    def _cut(self, program: Program, size: int, dtype: np.dtype[Any]) -> Cut:
        """How arrays of ``size`` elements of that type are cut.

        The transport may do a reduction that waits for nothing, so that plan order is kept.
        """
        adds = tuple(
            self._adder is not None
            and waits == 0
            and action.kind == "reduce"
            and not action.swaps
            and self._adder.adds_from(action.peer, dtype)
            for action, waits in zip(program.actions, program.waits, strict=True)
        )
        return Cut(program, size, max(1, self._segment_bytes // dtype.itemsize), adds)

    def waiting_for(self, run: Run) -> dict[int, str]:
        """Peer -> label of a run that waits for it, a tolerant one once somebody has come to it.

        May be asked from another thread.
        """
        if run.tolerant and not has_begun(run):
            return {}
        return {
            run.program.actions[i].peer: run.label
            for segment in tuple(run.open_segments)
            for i in tuple(segment.posted)
        }

    def open(self, run: Run) -> None:
        """Open the next segment of a run, and more of them until its window is full."""
        segment = Segment(run, run.opened)
        if self._observer is not None:
            segment.spans = {}
            segment.span = begin(self._observer, "segment", run.label, run.span, segment=segment.number)
        run.open_segments.append(segment)
        run.opened += 1
        ready = []
        for i, (start, stop, tag, borrows, adds) in enumerate(segment.moves):
            if borrows and start < stop:
                peer, tag = run.program.actions[i].peer, segment.tag | tag
                segment.posted.add(i)
                if self._observer is not None:
                    segment.spans[i] = self._tell("receive", segment, i)
                if adds and self._adder is not None:
                    self._adder.add(peer, tag, run.array[start:stop], owner=(segment, i))
                else:
                    self._transport.borrow(peer, tag, (stop - start) * run.array.itemsize, owner=(segment, i))
            elif segment.waits[i] == 0:
                ready.append(i)
        for i in ready:
            self._act(segment, i)
        if run.opened < self._window and run.opened < run.cut.segments:
            self.open(run)

    def _act(self, segment: Segment, i: int) -> None:
        """Action ``i`` has nothing to wait for any more; do it, and what it unlocks when there is nothing to move."""
        todo = [i]
        while todo:
            i = todo.pop()
            run, action = segment.run, segment.run.program.actions[i]
            start, stop, tag, borrows, _ = segment.moves[i]
            if start == stop:
                todo.extend(self._finished(segment, i))
            elif borrows:
                todo.extend(self._reduce_what_came(segment, i))
            else:
                item = run.array.itemsize
                part = run.bytes_view[start * item : stop * item]
                tag |= segment.tag
                segment.posted.add(i)
                if self._observer is not None:
                    kind: Kind = "send" if action.kind == "send" else "receive"
                    segment.spans[i] = self._tell(kind, segment, i)
                if action.kind == "send":
                    self._transport.send(action.peer, tag, part, run.priority, owner=(segment, i))
                else:
                    self._transport.recv(action.peer, tag, part, owner=(segment, i))

    def completed(self, handle: Handle, segment: Segment, i: int) -> None:
        """What action ``i`` of a segment had posted is there, or has failed: do what that unlocks."""
        action = segment.run.program.actions[i]
        segment.posted.discard(i)
        if handle.error is not None:
            if segment.run.tolerant and self._has_left(handle.peer):
                return
            raise self._explain(handle.error, segment, action)
        start, stop, _, borrows, _ = segment.moves[i]
        expected = (stop - start) * segment.run.array.itemsize
        if handle.nbytes != expected:
            came = f"{handle.nbytes} bytes came where {expected} were expected"
            raise self._explain(UsageError(came), segment, action)
        if self._observer is not None:
            segment.spans.pop(i).end()
        if handle.kind == "add":
            unlocked = self._finished(segment, i)
        elif borrows:
            lent = self._transport.lends_from(action.peer)
            segment.arrived[i] = self._copied(handle) if action.swaps and lent else handle
            unlocked = self._reduce_what_came(segment, segment.first_waiting(i))
        else:
            unlocked = self._finished(segment, i)
        for other in unlocked:
            self._act(segment, other)

    def _copied(self, handle: Handle) -> Copied:
        """Copy what was lent, so that its owner can go on."""
        assert handle.payload is not None
        buffer = self._scratch.take(handle.nbytes)
        buffer[: handle.nbytes] = handle.payload
        self._transport.release(handle)
        return Copied(buffer, handle.nbytes)

    def _reduce_what_came(self, segment: Segment, i: int) -> list[int]:
        """Apply reduction ``i`` if it may and has come, and those that follow it in the same pass."""
        if segment.waits[i] or i not in segment.arrived:
            return []
        program = segment.run.program
        ready = [i]
        while (following := program.follows[ready[-1]]) >= 0:
            if following not in segment.arrived:
                if self._transport.lends_from(program.actions[following].peer):
                    return []  # lent memory costs nothing to hold: one pass over all of them is worth the wait
                break
            ready.append(following)
        start, stop, *_ = segment.moves[i]
        came = [segment.arrived.pop(index) for index in ready]
        payloads = [item.payload for item in came]
        into = segment.run.array[start:stop]
        parts = [payload.view(into.dtype) for payload in payloads if payload is not None]
        kind: Kind = "copy" if program.actions[i].kind == "copy" else "reduce"
        if self._observer is not None:
            spans = [self._tell(kind, segment, index) for index in ready]
        if kind == "copy":
            np.copyto(into, parts[0])
        else:
            add_all_into(into, parts)
        if self._observer is not None:
            for span in reversed(spans):  # each within the one before
                span.end()
        for item in came:
            if isinstance(item, Copied):
                self._scratch.give(item.buffer)
            else:
                self._transport.release(item)
        unlocked = [other for index in ready for other in self._finished(segment, index)]
        return [other for other in unlocked if other not in ready]

    def _finished(self, segment: Segment, i: int) -> list[int]:
        """Note that action ``i`` is done; the actions that may act now."""
        run = segment.run
        segment.left -= 1
        unlocked = []
        for other in run.program.unlocks[i]:
            segment.waits[other] -= 1
            if segment.waits[other] == 0:
                unlocked.append(other)
        if segment.left == 0:
            if segment.span is not None:
                segment.span.end()
            run.open_segments.remove(segment)
            run.left -= 1
            if run.opened < run.cut.segments:
                self.open(run)
            elif run.left == 0:
                self._finish(run)
        return unlocked

    def _tell(self, kind: Kind, segment: Segment, i: int) -> Span:
        """Tell the observer, which there is, that something of a segment begins."""
        assert self._observer is not None
        run, (start, stop, *_) = segment.run, segment.moves[i]
        action = run.program.actions[i]
        nbytes, place = (stop - start) * run.array.itemsize, (segment.number, action.step, action.peer)
        span = Span(self._observer, kind, run.label, segment.span, -1, "", run.priority, *place, nbytes)
        self._observer.begin(span)  # as ``begin`` does, of which there are as many as messages
        return span

    def _where(self, segment: Segment, action: Action) -> str:
        verb = {"send": "sending to", "copy": "receiving from", "reduce": "reducing from"}[action.kind]
        return (
            f"{segment.run.label}: {verb} rank {action.peer} ({segment.run.program.plan.name}, step {action.step},"
            f" segment {segment.number + 1} of {segment.run.cut.segments})"
        )

    def _explain(self, error: Exception, segment: Segment, action: Action) -> Exception:
        """What befell an action; a message of another length is the fault of whoever sent it."""
        explained = labelled(self._where(segment, action), error)
        if isinstance(error, UsageError) and action.kind != "send":
            advice = "do all ranks run the same version with the same model?"
            return ProtocolError(f"{explained}; {advice}", rank=action.peer)
        return explained
