"""Runs plans by messages: a dataflow over (rank, chunk), several runs in flight, large arrays cut into segments.

Each segment of an array executes the whole plan on its own elements (``runs``); a few segments flow one behind the
other, so that sending, receiving and reducing overlap. Within a segment an action starts as soon as what it waits for
has finished: a slow peer holds up only what needs it.

Receives that reduce are posted when their segment opens, straight from the transport's memory (a peer's own memory
over shm, scratch over tcp); receives that copy go straight into the array. Reductions into one chunk keep plan order,
so the result does not depend on timing.

Memory: the scratch for received parts is at most ``window`` segments per run.

Owns the segments under way. Does not know what else the transport carries, nor what of it is acted upon first: that is
the ``exchange``'s, which hands on what has completed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import ProtocolError, UsageError, labelled
from ..kernels.cpu import add_all_into
from ..plans.messages import Action, Program
from ..transports import Adds, Handle, Transport
from ..wire.scratch import Scratch
from .runs import MOST_SEGMENTS, Copied, Cut, Run, Segment, has_begun
from .trace import Kind, Observer, Span, begin


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

    def start(self, run: Run) -> None:
        """Open the first segments of a run."""
        while run.opened < min(self._window, run.cut.segments):
            self._open(run)

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

    def _open(self, run: Run) -> None:
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
                self._open(run)
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
