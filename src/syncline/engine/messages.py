"""Runs plans over a transport: a dataflow over (rank, chunk), several runs in flight, large arrays cut into segments.

Each segment of an array executes the whole plan on its own elements (``runs``); a few segments flow one behind the
other, so that sending, receiving and reducing overlap. Within a segment an action starts as soon as what it waits for
has finished: a slow peer holds up only what needs it.

Receives that reduce are posted when their segment opens, straight from the transport's memory (a peer's own memory
over shm, scratch over tcp); receives that copy go straight into the array. Reductions into one chunk keep plan order,
so the result does not depend on timing.

Priority: sends carry it to the transport, and of what has completed there the most urgent is acted upon first. Before
what is less urgent it is looked whether something urgent has come meanwhile: so a run waits for no more than what has
come of one window of segments of a less urgent one, and what it has opened waits in the transport behind the urgent.
Nothing is held back while nothing more urgent is there to be done: so ranks may have different priorities, and each run
ends. With equal priorities everything is acted upon in the order in which it completed.

Memory: the scratch for received parts is at most ``window`` segments per run.

Pure apart from the transport it is given: no threads, no clocks, no knowledge of frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from ..collectives import Collective
from ..errors import PeerError, ProtocolError, SynclineError, UsageError
from ..kernels.cpu import add_all_into
from ..plans.messages import Action
from ..plans.plan import Plan
from ..transports import Adds, Handle, HasAllreduce, Transport
from ..wire.link import CONTROL
from ..wire.scratch import Scratch
from .memory import OneSided
from .runs import (
    KEYS,
    MOST_ACTIONS,
    MOST_SEGMENTS,
    Array,
    Kept,
    Run,
    Segment,
    Sign,
    borrows,
    has_begun,
    segments_of,
    tag_of,
)
from .scripts import ScriptedRun
from .trace import Kind, Observer, Span, begin
from .window import Window

SEGMENT_BYTES = 32 * 1024 * 1024
WINDOW = 2
SHARED_SEGMENT_BYTES = 8 * 1024 * 1024
"""Segments in shared memory: what several passes go over shall stay in the cache."""
SPINS = 20
"""How often what a run waits for in shared memory is looked at before this process sleeps."""

PATIENCE_MS = 2
"""How long it then sleeps without an ear for its connections."""


class Exchange:
    """Executes runs over one transport; used from one thread.

    ``handed_over`` says whether runs wait to be started, which might be more urgent than those under way.
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
        self._segment_bytes = segment_bytes
        self._window = window
        self._has_left = has_left
        self._observer = observer
        self.scratch = Scratch()
        self._adder = transport if isinstance(transport, Adds) else None
        self._under_way: dict[int, Run] = {}
        mapped: Window | None = getattr(transport, "window", None)
        shared_bytes = min(segment_bytes, SHARED_SEGMENT_BYTES)
        self._onesided = (
            None if mapped is None else OneSided(mapped, self.scratch, shared_bytes, has_left, observer, handed_over)
        )
        self._handed: dict[int, str] = {}  # key -> label of what a library does by itself
        self._ranked = False  # whether something had another priority than 0
        self._behind: list[Handle] = []  # what has completed and is less urgent than what was acted upon last

    def start(self, run: Run) -> None:
        """Begin a run; its ``on_done`` is called from a later ``progress``, or at once when there is nothing to do."""
        if run.key in self._under_way:
            raise UsageError(f"{run.label}: key {run.key} is in use by {self._under_way[run.key].label}")
        if not 0 <= run.key < KEYS:
            raise UsageError(f"{run.label}: key {run.key} is out of range")
        if run.priority != 0.0:
            self.regard(run.priority)
        array = run.array
        if array.ndim != 1 or not array.flags.c_contiguous:
            raise UsageError(f"{run.label}: an exchange needs a one-dimensional contiguous array")
        if len(run.program.actions) > MOST_ACTIONS:
            text = f"{run.label}: a rank has {len(run.program.actions)} transfers in {run.program.plan.name}"
            raise UsageError(f"{text}, and tags can number {MOST_ACTIONS}: use another algorithm, or fewer ranks")
        if self._onesided is not None and self._onesided.takes(run.program.plan, array):
            on_done = partial(self._left_shared, run)
            self._under_way[run.key] = run
            run.left = 1
            if self._observer is not None:
                self._tell_begun(self._observer, run)
            self._onesided.start(
                run.program.plan, array, run.key, run.label, on_done, run.tolerant, run.priority, run.span, run.sign
            )
            return
        run.bytes_view = array.view(np.uint8)
        run.per_segment, run.segments = segments_of(run, self._segment_bytes)
        if run.segments > MOST_SEGMENTS:
            text = f"{run.label}: an array of {array.nbytes} bytes has {run.segments} segments"
            raise UsageError(f"{text}, and tags can number {MOST_SEGMENTS}: use smaller buckets, or parts of the array")
        run.left = run.segments
        run.opened = 0
        if self._observer is not None:
            self._tell_begun(self._observer, run)
        if run.left == 0:
            self._finish(run)
            return
        self._under_way[run.key] = run
        while run.opened < min(self._window, run.segments):
            self._open(run)

    def keep(self, plan: Plan, dtype: np.dtype[Any], size: int) -> ScriptedRun:
        """A run that is kept for arrays of one size and type (``OneSided.keep``), where it shows its sign."""
        assert self._onesided is not None
        return self._onesided.keep(plan, dtype, size)

    def drop(self, kept: ScriptedRun) -> None:
        """It is not needed any more."""
        assert self._onesided is not None
        self._onesided.drop(kept)

    def prompt(self, kept: ScriptedRun, address: int, key: int, sign: Sign, spins: int) -> int | None:
        """Carry it out at once (``OneSided.prompt``): 0 when it is done, None where it cannot be begun."""
        if self._under_way or self._behind or self._onesided is None:
            return None
        return self._onesided.prompt(kept, address, key, sign, spins)

    def take_up(self, kept: ScriptedRun, run: Run) -> None:
        """Go on with a kept run that was begun and is not done, as any other: as ``run``."""
        self._under_way[run.key] = run
        run.left = 1
        kept.label, kept.on_done = run.label, partial(self._left_shared, run)

    def shows(self, plan: Plan, array: Array) -> bool:
        """Whether a run of that plan shows its sign; the same on all ranks."""
        return self._onesided is not None and self._onesided.takes(plan, array)

    def absent(self, key: int, processes: Iterable[int]) -> set[int]:
        """Those who have not come to a run that shows signs and is under way here."""
        return set() if self._onesided is None else self._onesided.absent(key, processes)

    def regard(self, priority: float) -> None:
        """Something of that priority begins: from the first on that is not 0, the most urgent is acted upon first."""
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
        """Let the transport's library do a collective by itself; UsageError where it has none."""
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

    def progress(self, timeout: float, spins: int = SPINS) -> int:
        """Do what can be done, waiting up to ``timeout`` seconds for it; returns how much that was."""
        shared = self._onesided
        if shared is None or not shared.active:
            return self._turn(timeout)
        moved = shared.advance(spins, PATIENCE_MS if timeout and len(self._under_way) == 1 and not self._behind else 0)
        if moved or self._behind:
            return moved + (self._turn(0.0) if shared.active else 0)
        shared.sleep_soon()
        try:
            return shared.advance(0) or self._turn(timeout)
        finally:
            shared.awake()

    def _turn(self, timeout: float) -> int:
        """Turn the transport once and act on what has completed."""
        handles = self.transport.poll(0.0 if self._behind else timeout)
        if self._ranked:
            handles = self._most_urgent(handles)
        for handle in handles:
            owner = handle.owner
            if isinstance(owner, tuple):
                self._completed(handle, *owner)
            elif callable(owner):
                owner(handle)
        return len(handles)

    def _most_urgent(self, handles: list[Handle]) -> list[Handle]:
        """Of what has completed the most urgent, in order; the rest waits for the next turn."""
        there = [(_urgency(handle), handle) for handle in (*self._behind, *handles)]
        first = min((priority for priority, _ in there), default=0.0)
        self._behind = [handle for priority, handle in there if priority != first]
        return [handle for priority, handle in there if priority == first]

    @property
    def waiting_for(self) -> dict[int, str]:
        """Peer -> label of a run that waits for it, a tolerant one once somebody has come to it.

        For messages about what takes so long; may be asked from another thread.
        """
        shared = {} if self._onesided is None else self._onesided.waiting_for
        return shared | {
            segment.run.program.actions[i].peer: run.label
            for run in self._runs()
            if not run.tolerant or has_begun(run)
            for segment in tuple(run.open_segments)
            for i in tuple(segment.posted)
        }

    @property
    def labels(self) -> list[str]:
        """What is under way, oldest first; may be asked from another thread."""
        return [run.label for run in self._runs() if not run.tolerant] + list(self._handed.values())

    def _runs(self) -> list[Run]:
        return list(self._under_way.values())

    def _open(self, run: Run) -> None:
        segment = Segment(run, run.opened)
        if self._observer is not None:
            segment.spans = {}
            segment.span = begin(self._observer, "segment", run.label, run.span, segment=segment.number)
        run.open_segments.append(segment)
        run.opened += 1
        ready = []
        for i, action in enumerate(run.program.actions):
            if borrows(action):
                start, stop = segment.bounds(action)
                if start < stop:
                    nbytes = (stop - start) * run.array.itemsize
                    segment.posted.add(i)
                    tag = tag_of(segment, action)
                    if self._observer is not None:
                        segment.spans[i] = self._tell("receive", segment, action)
                    if self._adder is not None and self._adds(segment, i):
                        self._adder.add(action.peer, tag, run.array[start:stop], owner=(segment, i))
                    else:
                        self.transport.borrow(action.peer, tag, nbytes, owner=(segment, i))
                    continue
            if segment.waits[i] == 0:
                ready.append(i)
        for i in ready:
            self._act(segment, i)

    def _adds(self, segment: Segment, i: int) -> bool:
        """Whether the transport may do a reduction: one that waits for nothing, so that plan order is kept."""
        action = segment.run.program.actions[i]
        alone = segment.waits[i] == 0 and action.kind == "reduce" and not action.swaps
        return alone and self._adder is not None and self._adder.adds_from(action.peer, segment.run.array.dtype)

    def _act(self, segment: Segment, i: int) -> None:
        """Action ``i`` has nothing to wait for any more; do it, and what it unlocks when there is nothing to move."""
        todo = [i]
        while todo:
            i = todo.pop()
            run, action = segment.run, segment.run.program.actions[i]
            start, stop = segment.bounds(action)
            if start == stop:
                todo.extend(self._finished(segment, i))
            elif borrows(action):
                todo.extend(self._reduce_what_came(segment, i))
            else:
                item = run.array.itemsize
                part = run.bytes_view[start * item : stop * item]
                tag = tag_of(segment, action)
                segment.posted.add(i)
                if self._observer is not None:
                    kind: Kind = "send" if action.kind == "send" else "receive"
                    segment.spans[i] = self._tell(kind, segment, action)
                if action.kind == "send":
                    self.transport.send(action.peer, tag, part, run.priority, owner=(segment, i))
                else:
                    self.transport.recv(action.peer, tag, part, owner=(segment, i))

    def _completed(self, handle: Handle, segment: Segment, i: int) -> None:
        action = segment.run.program.actions[i]
        segment.posted.discard(i)
        if handle.error is not None:
            if segment.run.tolerant and self._has_left(handle.peer):
                return
            raise self._explain(handle.error, segment, action)
        start, stop = segment.bounds(action)
        expected = (stop - start) * segment.run.array.itemsize
        if handle.nbytes != expected:
            came = f"{handle.nbytes} bytes came where {expected} were expected"
            raise self._explain(UsageError(came), segment, action)
        if self._observer is not None:
            segment.spans.pop(i).end()
        if handle.kind == "add":
            unlocked = self._finished(segment, i)
        elif borrows(action):
            lent = self.transport.lends_from(action.peer)
            segment.arrived[i] = self._keep(handle) if action.swaps and lent else handle
            unlocked = self._reduce_what_came(segment, segment.first_waiting(i))
        else:
            unlocked = self._finished(segment, i)
        for other in unlocked:
            self._act(segment, other)

    def _keep(self, handle: Handle) -> Kept:
        """Copy what was lent, so that its owner can go on."""
        assert handle.payload is not None
        buffer = self.scratch.take(handle.nbytes)
        buffer[: handle.nbytes] = handle.payload
        self.transport.release(handle)
        return Kept(buffer, handle.nbytes)

    def _reduce_what_came(self, segment: Segment, i: int) -> list[int]:
        """Apply reduction ``i`` if it may and has come, and those that follow it in the same pass."""
        if segment.waits[i] or i not in segment.arrived:
            return []
        program = segment.run.program
        ready = [i]
        while (following := program.follows[ready[-1]]) >= 0:
            if following not in segment.arrived:
                if self.transport.lends_from(program.actions[following].peer):
                    return []  # lent memory costs nothing to hold: one pass over all of them is worth the wait
                break
            ready.append(following)
        start, stop = segment.bounds(program.actions[i])
        came = [segment.arrived.pop(index) for index in ready]
        payloads = [item.payload for item in came]
        into = segment.run.array[start:stop]
        parts = [payload.view(into.dtype) for payload in payloads if payload is not None]
        kind: Kind = "copy" if program.actions[i].kind == "copy" else "reduce"
        if self._observer is not None:
            spans = [self._tell(kind, segment, program.actions[index]) for index in ready]
        if kind == "copy":
            np.copyto(into, parts[0])
        else:
            add_all_into(into, parts)
        if self._observer is not None:
            for span in reversed(spans):  # each within the one before
                span.end()
        for item in came:
            if isinstance(item, Kept):
                self.scratch.give(item.buffer)
            else:
                self.transport.release(item)
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
            if run.opened < run.segments:
                self._open(run)
            elif run.left == 0:
                del self._under_way[run.key]
                self._finish(run)
        return unlocked

    def _left_shared(self, run: Run) -> None:
        del self._under_way[run.key]
        run.left = 0
        self._finish(run)

    def _finish(self, run: Run) -> None:
        if run.span is not None:
            run.span.end()
        if run.on_done is not None:
            run.on_done()

    def _tell_begun(self, observer: Observer, run: Run) -> None:
        what = {"key": run.key, "phase": run.program.plan.goal, "nbytes": run.array.nbytes}
        run.span = begin(observer, "run", run.label, run.span, priority=run.priority, **what)

    def _tell(self, kind: Kind, segment: Segment, action: Action) -> Span:
        """Tell the observer, which there is, that something of a segment begins."""
        assert self._observer is not None
        run, (start, stop) = segment.run, segment.bounds(action)
        nbytes, place = (stop - start) * run.array.itemsize, (segment.number, action.step, action.peer)
        span = Span(self._observer, kind, run.label, segment.span, -1, "", run.priority, *place, nbytes)
        self._observer.begin(span)  # as ``begin`` does, of which there are as many as messages
        return span

    def _where(self, segment: Segment, action: Action) -> str:
        verb = {"send": "sending to", "copy": "receiving from", "reduce": "reducing from"}[action.kind]
        return (
            f"{segment.run.label}: {verb} rank {action.peer} ({segment.run.program.plan.name}, step {action.step},"
            f" segment {segment.number + 1} of {segment.run.segments})"
        )

    def _explain(self, error: Exception, segment: Segment, action: Action) -> Exception:
        """What befell an action; a message of another length is the fault of whoever sent it."""
        explained = labelled(self._where(segment, action), error)
        if isinstance(error, UsageError) and action.kind != "send":
            advice = "do all ranks run the same version with the same model?"
            return ProtocolError(f"{explained}; {advice}", rank=action.peer)
        return explained


def labelled(label: str, error: Exception) -> Exception:
    """An error with what it befell."""
    text = f"{label}: {error}"
    return type(error)(text, rank=error.rank, host=error.host) if isinstance(error, PeerError) else SynclineError(text)


def _urgency(handle: Handle) -> float:
    """The priority of what waits for a handle; single messages, for which much else waits, before everything."""
    owner = handle.owner
    if isinstance(owner, tuple):
        priority: float = owner[0].run.priority
        return priority
    return getattr(owner, "priority", CONTROL)
