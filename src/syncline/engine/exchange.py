"""Runs plans over a transport: by messages, in mapped memory, or by collectives of the transport's library.

A ``Run`` executes one plan over one array. The ``Exchange`` selects how a run moves its data, polls the transport for
all runs and dispatches the completions. In mapped memory (``memory``) compiled code executes the segments.

By messages (``TwoSided``) a run is a dataflow over (rank, chunk). Large arrays are cut into segments. Each segment
executes the whole plan on its own elements, and a few segments are pipelined, so that sending, receiving and reducing
overlap. Within a segment an action starts as soon as its dependencies have finished: a slow peer delays only the
actions that depend on it. A segment posts its reducing receives when it opens and reduces directly from the transport's
memory (a peer's memory over shm, scratch over tcp). Copying receives go directly into the array. Reductions into one
chunk keep plan order, so the result does not depend on timing. Received parts take at most ``window`` segments of
scratch per run.

A plan may leave the transfers inside groups to the message library (``Plan.native``). Each segment then begins with the
library's reduce-scatter in the group, and ends with its all-gather. While one segment is on its way between groups, the
library works on others. The library runs its collectives in the order in which the ranks of the group have reached
them; between groups urgent messages go first.

Priority: the transport sends the most urgent message first, and of all completions the most urgent are handled first.
Before a less urgent one is handled, the transport is polled again. A run thus waits at most for the arrived parts of
one window of segments of a less urgent run; the other parts queue in the transport behind the urgent ones. Less urgent
work is never held back while no urgent work is ready, so ranks may use different priorities and every run ends. With
equal priorities, completions are handled in order.

This module has no threads and no clocks and knows no framework.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import ProtocolError, UsageError, labelled
from ..kernels.cpu import add_all_into
from ..plans.messages import Action, Cut, Native, Program
from ..plans.plan import Plan, ranks_text
from ..transports import Adds, Handle, HasAllreduce, HasCollectives, Transport
from ..wire.links import CONTROL
from ..wire.scratch import Scratch
from .memory import OneSided
from .order import KEYS, Array, Run, Sign
from .scripts import ScriptedRun, Window
from .trace import Kind, Observer, Span, begin

_INDEX_BITS = 17
_SEGMENT_BITS = 16
MOST_ACTIONS, MOST_SEGMENTS = 1 << _INDEX_BITS, 1 << _SEGMENT_BITS
"""The most actions per rank and segments per run that a tag can number."""


@dataclass(frozen=True)
class Copied:
    """A received part in scratch memory."""

    buffer: NDArray[np.uint8]
    nbytes: int

    @property
    def payload(self) -> NDArray[np.uint8]:
        """The received bytes: the part of the buffer that the message has filled."""
        return self.buffer[: self.nbytes]


class Segment:
    """The state of one segment: the remaining dependencies of its actions, and the parts that cannot be applied yet."""

    __slots__ = ("arrived", "left", "moves", "native", "number", "posted", "run", "span", "spans", "tag", "waits")

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number = run, number
        self.moves = run.cut.moves(number) if number else run.cut.first
        self.tag = (run.key << _INDEX_BITS + _SEGMENT_BITS) | (number << _INDEX_BITS)
        self.waits = list(run.program.waits)
        self.left = len(run.program.actions)
        self.posted: set[int] = set()  # actions in the transport
        self.native: tuple[int, ...] = ()  # the ranks of the library's collective in flight
        self.arrived: dict[int, Handle | Copied] = {}
        self.span: Span | None = None
        self.spans: dict[int, Span]  # spans of the posted actions; only with an observer

    def first_waiting(self, i: int) -> int:
        """The earliest arrived reduction that can share one pass with reduction ``i``; ``i`` itself if none can."""
        precedes = self.run.program.precedes
        while precedes[i] in self.arrived:
            i = precedes[i]
        return i


def has_begun(run: Run) -> bool:
    """Whether any message of a run has arrived or any action has finished."""
    # A run by messages keeps a segment open until it ends; a run in mapped memory has none.
    actions, segments = len(run.program.actions), tuple(run.open_segments)
    if not segments:
        return False
    return run.left < run.cut.segments or any(segment.arrived or segment.left < actions for segment in segments)


NATIVE_SEGMENT_BYTES = 4 * 1024 * 1024
NATIVE_WINDOW = 3
"""Segments and window of plans with a message library's part: the library works on one segment while others travel."""


def segment_bytes_of(plan: Plan, most: int, chunk_bytes: int | None) -> int:
    """The size of a plan's segments by messages, equal on all ranks and at most ``most``.

    Chunks that are added and sent on are limited to ``chunk_bytes``, if the transport gives that.
    """
    if plan.native:
        return min(most, NATIVE_SEGMENT_BYTES)
    return min(most, plan.chunks * chunk_bytes) if chunk_bytes and plan.additions.any() else most


class TwoSided:
    """The runs by messages of one process. Not thread-safe.

    An array is cut into segments of ``segment_bytes``; a run has at most ``window`` of them open, unless a message
    library has a part in its plan. ``finish(run)`` is called after its last segment.
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
        self._chunk_bytes: int | None = getattr(transport, "chunk_bytes", None)
        self._cut_of = lru_cache(maxsize=1024)(self._cut)  # every step repeats the same cuts

    def cut(self, run: Run) -> None:
        """Cut the array of a run into segments, possibly none. UsageError for more segments than tags can number."""
        run.cut = self._cut_of(run.program, run.array.size, run.array.dtype)
        segments = run.cut.segments
        if segments > MOST_SEGMENTS:
            text = f"{run.label}: an array of {run.array.nbytes} bytes has {segments} segments"
            raise UsageError(f"{text}, and tags can number {MOST_SEGMENTS}: use smaller buckets, or parts of the array")
        run.bytes_view = run.array.view(np.uint8)
        run.left, run.opened = segments, 0

    def _cut(self, program: Program, size: int, dtype: np.dtype[Any]) -> Cut:
        """The cut of arrays of ``size`` elements.

        The transport may add by itself only where a reduction has no dependency: otherwise it could violate plan order.
        """
        adds = tuple(
            self._adder is not None
            and waits == 0
            and action.kind == "reduce"
            and not action.swaps
            and self._adder.adds_from(action.peer, dtype)
            for action, waits in zip(program.actions, program.waits, strict=True)
        )
        nbytes = segment_bytes_of(program.plan, self._segment_bytes, self._chunk_bytes)
        return Cut(program, size, max(1, nbytes // dtype.itemsize), adds)

    def waiting_for(self, run: Run) -> dict[int, str]:
        """Peer -> label of a run that waits for it; a tolerant run waits once a peer has joined it. For any thread."""
        if run.tolerant and not has_begun(run):
            return {}
        found: dict[int, str] = {}
        for segment in tuple(run.open_segments):
            found |= {run.program.actions[i].peer: run.label for i in tuple(segment.posted)}
            found |= {rank: run.label for rank in segment.native if rank != run.program.rank}
        return found

    def open(self, run: Run) -> None:
        """Open the next segment of a run, and further ones until its window is full."""
        segment = Segment(run, run.opened)
        if self._observer is not None:
            segment.spans = {}
            segment.span = begin(self._observer, "segment", run.label, run.span, segment=segment.number)
        run.open_segments.append(segment)
        run.opened += 1
        native = run.program.native
        if native is not None and native.reduces:
            self._collect(segment, native, "reduce_scatter", partial(self._begin, segment))
        else:
            self._begin(segment)
        window = max(self._window, NATIVE_WINDOW) if run.program.plan.native else self._window
        if run.opened < window and run.opened < run.cut.segments:
            self.open(run)

    def _collect(
        self,
        segment: Segment,
        native: Native,
        goal: Literal["reduce_scatter", "all_gather"],
        then: Callable[[], None],
    ) -> None:
        """Let the transport's library run a collective on a segment, and call ``then`` after it."""
        run, library = segment.run, self._transport
        assert isinstance(library, HasCollectives)  # tested at the start of the run
        segment.native = native.ranks
        span = None
        if self._observer is not None:
            kind: Kind = "reduce" if goal == "reduce_scatter" else "copy"
            span = begin(self._observer, kind, run.label, segment.span, phase=goal, segment=segment.number)

        def collected(handle: Handle) -> None:
            segment.native = ()
            if handle.error is not None:
                what = f"{goal.replace('_', '-')} by transport={library.name} among {ranks_text(native.ranks)}"
                raise labelled(f"{run.label}: {what}", handle.error)
            if span is not None:
                span.end()
            then()

        parts = [run.array[start:stop] for start, stop in run.cut.parts(segment.number)]
        start = library.reduce_scatter if goal == "reduce_scatter" else library.all_gather
        start(segment.tag, parts, owner=collected)

    def _begin(self, segment: Segment) -> None:
        """Start the actions of a segment that have no dependency."""
        run = segment.run
        if not segment.left:
            self._acted(segment)
        # Post the reducing receives first: a peer's data can then arrive while this rank still waits to apply it.
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

    def _act(self, segment: Segment, i: int) -> None:
        """Start action ``i``, whose dependencies are done. Empty actions finish at once and start their successors."""
        # A stack instead of recursion: a plan may chain many empty actions.
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
        """Handle the completion of action ``i`` of a segment and start the actions that depended on it."""
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
            # In a swap both ends hold a loan that the other waits for. A copy breaks this circle.
            lent = self._transport.lends_from(action.peer)
            segment.arrived[i] = self._copied(handle) if action.swaps and lent else handle
            unlocked = self._reduce_what_came(segment, segment.first_waiting(i))
        else:
            unlocked = self._finished(segment, i)
        for other in unlocked:
            self._act(segment, other)

    def _copied(self, handle: Handle) -> Copied:
        """Copy a lent part to scratch, so that its lender can go on."""
        assert handle.payload is not None
        buffer = self._scratch.take(handle.nbytes)
        buffer[: handle.nbytes] = handle.payload
        self._transport.release(handle)
        return Copied(buffer, handle.nbytes)

    def _reduce_what_came(self, segment: Segment, i: int) -> list[int]:
        """Apply reduction ``i`` if it is ready, together with the reductions that can share its pass."""
        if segment.waits[i] or i not in segment.arrived:
            return []
        program = segment.run.program
        ready = [i]
        while (following := program.follows[ready[-1]]) >= 0:
            if following not in segment.arrived:
                if self._transport.lends_from(program.actions[following].peer):
                    return []  # holding lent memory is free, and a single pass over all parts is worth the wait
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
            for span in reversed(spans):  # the spans are nested
                span.end()
        for item in came:
            if isinstance(item, Copied):
                self._scratch.give(item.buffer)
            else:
                self._transport.release(item)
        unlocked = [other for index in ready for other in self._finished(segment, index)]
        # A reduction of this pass unlocks the next one of the pass, which is done already.
        return [other for other in unlocked if other not in ready]

    def _finished(self, segment: Segment, i: int) -> list[int]:
        """Record that action ``i`` is done. Returns the actions that are now ready."""
        run = segment.run
        segment.left -= 1
        unlocked = []
        for other in run.program.unlocks[i]:
            segment.waits[other] -= 1
            if segment.waits[other] == 0:
                unlocked.append(other)
        if segment.left == 0:
            self._acted(segment)
        return unlocked

    def _acted(self, segment: Segment) -> None:
        """Continue after all actions of a segment."""
        native = segment.run.program.native
        if native is not None and native.gathers:
            self._collect(segment, native, "all_gather", partial(self._close, segment))
        else:
            self._close(segment)

    def _close(self, segment: Segment) -> None:
        """End a segment, and open the next one or finish the run."""
        run = segment.run
        if segment.span is not None:
            segment.span.end()
        run.open_segments.remove(segment)
        run.left -= 1
        if run.opened < run.cut.segments:
            self.open(run)
        elif run.left == 0:
            self._finish(run)

    def _tell(self, kind: Kind, segment: Segment, i: int) -> Span:
        """Begin the observer's span of one action of a segment."""
        assert self._observer is not None
        run, (start, stop, *_) = segment.run, segment.moves[i]
        action = run.program.actions[i]
        nbytes, place = (stop - start) * run.array.itemsize, (segment.number, action.step, action.peer)
        span = Span(self._observer, kind, run.label, segment.span, -1, "", run.priority, *place, nbytes)
        self._observer.begin(span)  # inlined ``begin``: there is one call per message
        return span

    def _where(self, segment: Segment, action: Action) -> str:
        verb = {"send": "sending to", "copy": "receiving from", "reduce": "reducing from"}[action.kind]
        return (
            f"{segment.run.label}: {verb} rank {action.peer} ({segment.run.program.plan.name}, step {action.step},"
            f" segment {segment.number + 1} of {segment.run.cut.segments})"
        )

    def _explain(self, error: Exception, segment: Segment, action: Action) -> Exception:
        """The error of an action, with its context. A message of wrong length is the sender's fault."""
        explained = labelled(self._where(segment, action), error)
        if isinstance(error, UsageError) and action.kind != "send":
            advice = "do all ranks run the same version with the same model?"
            return ProtocolError(f"{explained}; {advice}", rank=action.peer)
        return explained


SEGMENT_BYTES = 32 * 1024 * 1024
WINDOW = 2
SHARED_SEGMENT_BYTES = 8 * 1024 * 1024
"""Segments in shared memory are small enough for the cache, since several passes read them."""
SPINS = 20
"""How often a condition in shared memory is polled before this process sleeps."""

PATIENCE_MS = 2
"""How long it then sleeps in shared memory without polling its connections."""


class Exchange:
    """Runs plans over one transport. Not thread-safe.

    ``handed_over`` tells whether new runs are queued, which might be more urgent than those in flight.
    """

    def __init__(
        self,
        transport: Transport,
        segment_bytes: int = SEGMENT_BYTES,
        window: int = WINDOW,
        has_left: Callable[[int], bool] = lambda _: False,
        observer: Observer | None = None,
        handed_over: Callable[[], bool] = lambda: False,
    ) -> None:
        if segment_bytes < 1 or window < 1:
            raise UsageError(f"segments of {segment_bytes} bytes and a window of {window} make no sense")
        self.transport = transport
        self._observer = observer
        self.scratch = Scratch()
        self._under_way: dict[int, Run] = {}
        self._messages = TwoSided(
            transport, self.scratch, segment_bytes, window, has_left, observer, finish=self._finish
        )
        mapped: Window | None = getattr(transport, "window", None)
        shared_bytes = min(segment_bytes, SHARED_SEGMENT_BYTES)
        self.shared: OneSided | None = (
            None if mapped is None else OneSided(mapped, self.scratch, shared_bytes, has_left, observer, handed_over)
        )
        self._handed: dict[int, str] = {}  # key -> label of the library's collectives in flight
        self.progress: Callable[..., int] = self._turn if self.shared is None else self._advance
        """Make progress, waiting up to ``timeout`` seconds. Returns the number of events handled.

        Conditions in shared memory are polled ``spins`` times before this process sleeps.
        """
        self._ranked = False  # whether any run had a priority other than 0
        self._behind: list[Handle] = []  # completions that are less urgent than those handled last

    def start(self, run: Run) -> None:
        """Start a run. ``on_done`` is called from a later ``progress``, or at once if there is nothing to do.

        Raises UsageError, without side effects, for a run that cannot be started.
        """
        if run.key in self._under_way:
            raise UsageError(f"{run.label}: key {run.key} is in use by {self._under_way[run.key].label}")
        if not 0 <= run.key < KEYS:
            raise UsageError(f"{run.label}: key {run.key} is out of range")
        if run.array.ndim != 1 or not run.array.flags.c_contiguous:
            raise UsageError(f"{run.label}: an exchange needs a one-dimensional contiguous array")
        if len(run.program.actions) > MOST_ACTIONS:
            text = f"{run.label}: a rank has {len(run.program.actions)} transfers in {run.program.plan.name}"
            raise UsageError(f"{text}, and tags can number {MOST_ACTIONS}: use another algorithm, or fewer ranks")
        self._check_library(run)
        if run.priority != 0.0:
            self.regard(run.priority)
        shared = self.shared
        if shared is not None and not shared.takes(run.program.plan, run.array):
            shared = None
        if shared is None:
            self._messages.cut(run)
        self._under_way[run.key] = run
        if self._observer is not None:
            what = {"key": run.key, "phase": run.program.plan.goal, "nbytes": run.array.nbytes}
            run.span = begin(self._observer, "run", run.label, run.span, priority=run.priority, **what)
        if shared is not None:
            run.left = 1
            shared.start(run, partial(self._finish, run))
        elif run.left == 0:
            self._finish(run)
        else:
            self._messages.open(run)

    def _check_library(self, run: Run) -> None:
        """Raise UsageError unless the transport's library can carry out its part of a run."""
        native, library = run.program.native, self.transport
        if native is None:
            return
        if not isinstance(library, HasCollectives):
            raise UsageError(f"{run.label}: transport={library.name} has no collectives of its own for inside=native")
        if library.together != native.ranks:
            made, asked = (ranks_text(ranks) for ranks in (library.together, native.ranks))
            raise UsageError(f"{run.label}: the library's group is {made}, and the plan's {asked}: use inside=ring")

    def prompt(self, kept: ScriptedRun, address: int, key: int, sign: Sign | None, spins: int) -> int | None:
        """Execute a prepared run at once (``OneSided.prompt``): 0 when it is done, None if it cannot start."""
        if self._under_way or self._behind or self.shared is None:
            return None
        return self.shared.prompt(kept, address, key, sign, spins)

    def take_up(self, kept: ScriptedRun, run: Run) -> None:
        """Continue a prepared run that has started but is not done, as ``run``."""
        self._under_way[run.key] = run
        run.left = 1
        kept.of, kept.on_done = run, partial(self._finish, run)

    def shows(self, plan: Plan, array: Array) -> bool:
        """Whether a run of ``plan`` shows its sign; the same on all ranks."""
        return self.shared is not None and self.shared.takes(plan, array)

    def regard(self, priority: float) -> None:
        """Note the priority of new work. Completions are sorted by urgency from the first priority other than 0 on."""
        self._ranked = self._ranked or priority != 0.0

    def hand_over(
        self,
        collective: Collective,
        array: Array,
        key: int,
        label: str,
        on_done: Callable[[], None],
        within: Span | None = None,
    ) -> None:
        """Let the transport's library run a collective; UsageError if it has none."""
        if not isinstance(self.transport, HasAllreduce) or collective.goal != "allreduce":
            raise UsageError(f"{label}: transport={self.transport.name} has no {collective.goal} of its own")
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise UsageError(f"{label}: an exchange needs a one-dimensional contiguous array")
        if array.size == 0:
            on_done()
            return
        span: Span | None = None
        if self._observer is not None:
            span = begin(self._observer, "run", label, within, key=key, phase=collective.goal, nbytes=array.nbytes)

        def handed_back(handle: Handle) -> None:
            del self._handed[key]
            if handle.error is not None:
                raise labelled(label, handle.error)
            if span is not None:
                span.end()
            on_done()

        self._handed[key] = label
        self.transport.allreduce(key, array, owner=handed_back)

    def _advance(self, timeout: float, spins: int = SPINS) -> int:
        """Make progress in shared memory and poll the transport."""
        shared = self.shared
        assert shared is not None
        if not shared.active:
            return self._turn(timeout)
        moved = shared.advance(spins, PATIENCE_MS if timeout and len(self._under_way) == 1 and not self._behind else 0)
        if moved or self._behind:
            return moved + (self._turn(0.0) if shared.active else 0)
        # Announce the sleep before the last check: a peer that changes memory after the check then rings the bell.
        shared.sleep_soon()
        try:
            return shared.advance(0) or self._turn(timeout)
        finally:
            shared.awake()

    def _turn(self, timeout: float, spins: int = SPINS) -> int:  # noqa: ARG002 - of shared memory
        """Poll the transport once and handle the completions."""
        handles = self.transport.poll(0.0 if self._behind else timeout)
        if self._ranked:
            handles = self._most_urgent(handles)
        for handle in handles:
            owner = handle.owner
            if isinstance(owner, tuple):
                self._messages.completed(handle, *owner)
            elif callable(owner):
                owner(handle)
        return len(handles)

    def _most_urgent(self, handles: list[Handle]) -> list[Handle]:
        """The most urgent completions, in order. The others are kept for the next turn."""
        there = [(_urgency(handle), handle) for handle in (*self._behind, *handles)]
        first = min((priority for priority, _ in there), default=0.0)
        self._behind = [handle for priority, handle in there if priority != first]
        return [handle for priority, handle in there if priority == first]

    @property
    def waiting_for(self) -> dict[int, str]:
        """Peer -> label of a run that waits for it. A tolerant run waits only once a peer has joined it.

        For error messages; callable from any thread.
        """
        waits = {} if self.shared is None else dict(self.shared.waiting_for)
        for run in self._runs():
            waits |= self._messages.waiting_for(run)
        return waits

    @property
    def labels(self) -> list[str]:
        """The labels of the exchanges in flight, oldest first. Callable from any thread."""
        return [run.label for run in self._runs() if not run.tolerant] + list(self._handed.values())

    def _runs(self) -> list[Run]:
        return list(self._under_way.values())

    def _finish(self, run: Run) -> None:
        del self._under_way[run.key]
        run.left = 0
        if run.span is not None:
            run.span.end()
        on_done, run.on_done = run.on_done, None  # a prepared run keeps this object, which must keep no memory alive
        if on_done is not None:
            on_done()


def _urgency(handle: Handle) -> float:
    """The priority of the run that waits for a handle. Single messages come first, because much else waits for them."""
    owner = handle.owner
    if isinstance(owner, tuple):
        priority: float = owner[0].run.priority
        return priority
    return getattr(owner, "priority", CONTROL)
