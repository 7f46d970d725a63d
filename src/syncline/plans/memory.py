"""Compiles a plan into passes over shared memory, for ranks that can read and write each other's arrays.

Every rank gets one *script*: a list of operations, each of which waits, reads, adds and writes. This module knows no
bytes, no addresses and no way of waiting (``engine.memory`` and ``kernels.onesided`` do).

Theory. With one-sided access nothing has to be sent. A rank that reduces reads its peers' chunks in place, and the
information that a message would carry ("my part is ready", "I have read yours") becomes a condition on the progress of
another rank. A rank runs its operations in order, so one number, its *progress*, describes its state, and every
condition reads "rank p has finished its first k operations".

* A pass reads the same chunks of several ranks, adds them from left to right, and writes the sum to the same chunks of
  one or more ranks. It waits for the ranks that wrote its inputs and for the ranks that still read its outputs.
* Consecutive reductions of one step into one chunk become one pass over all their inputs.
* If the pass that computes a sum was the last to read a rank's chunk, it also writes the sum to that rank, because no
  other rank still needs the old value. ``direct`` thus becomes one pass in which each owner reads from all peers and
  writes to all peers: n bytes are read N times and written N times in total, the least possible traffic for private
  arrays.
* If a step both overwrites a chunk and sends it, the incoming values are first collected in scratch memory.

No deadlock: a pass waits only for passes of earlier steps. The exception, writing the collected values, waits for
passes of its own step and comes after all other passes of its rank in that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from .plan import COPY, Plan

Wait = tuple[int, int]
"""(rank, k): wait until that rank has finished its first k operations."""

SCRATCH: Final = -1
"""A source or target in this rank's scratch memory; SCRATCH - 1 is a second scratch array, and so on."""


@dataclass(frozen=True)
class Operation:
    """One pass over the chunks ``lo`` to ``hi`` that starts after ``waits``; without sources it only waits.

    ``sources`` and ``targets`` are ranks or scratch arrays. ``ring`` lists the ranks that wait for this operation.
    """

    waits: tuple[Wait, ...] = ()
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    lo: int = 0
    hi: int = 0
    ring: tuple[int, ...] = ()


@dataclass(frozen=True)
class Script:
    """One rank's operations in order. The first one opens its memory; the last one waits until no rank needs it.

    ``scratch`` counts the scratch arrays, each as large as the whole array. ``touches`` are the ranks whose progress or
    memory this rank accesses; ``touched_by`` are the ranks that access its own.
    """

    rank: int
    operations: tuple[Operation, ...]
    scratch: int
    touches: tuple[int, ...]
    touched_by: tuple[int, ...]


@dataclass
class _Draft:
    """An operation to which further targets may be added."""

    waits: set[Wait]
    sources: list[int]
    targets: list[int]
    lo: int
    hi: int


@dataclass
class _Place:
    """The last writer of one chunk of one rank, and its readers since. Both are (rank, operation)."""

    writer: Wait | None = None
    readers: list[Wait] = field(default_factory=list)


@lru_cache(maxsize=512)
def compile_scripts(plan: Plan) -> tuple[Script, ...]:
    """The scripts of all ranks. Cost for all together: linear in the number of chunks moved."""
    return _Compiler(plan).scripts()


class _Compiler:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks: list[list[_Draft]] = [[_Draft(set(), [], [], 0, 0)] for _ in range(plan.world)]
        self.places = [[_Place() for _ in range(plan.chunks)] for _ in range(plan.world)]
        self.empty = [plan.empty_chunks(rank) for rank in range(plan.world)]
        self.scratch = [0] * plan.world

    def scripts(self) -> tuple[Script, ...]:
        step, start = self.plan.step, 0
        while start < len(self.plan):
            stop = start
            while stop < len(self.plan) and step[stop] == step[start]:
                stop += 1
            self._step(range(start, stop))
            start = stop
        for rank, drafts in enumerate(self.ranks):
            drafts.append(_Draft(self._outstanding(rank), [], [], 0, 0))
        return self._finish()

    def _step(self, rows: range) -> None:
        """Add all passes of a step, then the writes of collected values, then record readers and writers.

        The records come last because every transfer of a step reads the values from before it.
        """
        sent = {(int(self.plan.src[i]), chunk) for i in rows for chunk in self._chunks(i)}
        collected: dict[tuple[int, int, int, bool], list[int]] = {}
        shelf: Counter[tuple[int, int]] = Counter()  # (rank, chunk) -> scratch arrays in use there
        read: list[tuple[int, range, Wait]] = []
        written: list[tuple[int, range, Wait]] = []
        for group in self._groups(rows):
            dst, chunks = int(self.plan.dst[group[0]]), self._chunks(group[0])
            sources = [int(self.plan.src[i]) for i in group]
            adds = self._adds(group[0])
            # Another transfer of this step sends these chunks, so they must keep their old values: collect.
            if any((dst, chunk) in sent for chunk in chunks):
                kept = collected.setdefault((dst, chunks.start, chunks.stop, adds), [])
                for src in sources:
                    used = max(shelf[dst, chunk] for chunk in chunks)
                    shelf.update({(dst, chunk): used + 1 - shelf[dst, chunk] for chunk in chunks})
                    event = self._pass(dst, [src], [SCRATCH - used], chunks)
                    kept.append(SCRATCH - used)
                    read.append((src, chunks, event))
                    self.scratch[dst] = max(self.scratch[dst], used + 1)
            elif adds or not self._written_by_its_sum(sources[0], dst, chunks):
                event = self._pass(dst, [dst, *sources] if adds else sources, [dst], chunks)
                read += [(src, chunks, event) for src in sources]
                written.append((dst, chunks, event))
        for src, chunks, event in read:
            for chunk in chunks:
                self.places[src][chunk].readers.append(event)
        for (dst, lo, hi, adds), kept in collected.items():
            event = self._pass(dst, [dst, *kept] if adds else kept, [dst], range(lo, hi))
            written.append((dst, range(lo, hi), event))
        for dst, chunks, event in written:
            for chunk in chunks:
                self.places[dst][chunk] = _Place(event)

    def _groups(self, rows: range) -> list[list[int]]:
        """The rows of a step, grouped where they reduce into the same chunks of the same rank."""
        found: dict[tuple[int, int, int, int], list[int]] = {}
        for i in rows:
            dst, chunks, op = int(self.plan.dst[i]), self._chunks(i), int(self.plan.op[i])
            # A copy never joins a group: its key is unique.
            found.setdefault((dst, chunks.start, chunks.stop, op if op != COPY else -1 - i), []).append(i)
        return list(found.values())

    def _chunks(self, i: int) -> range:
        return range(int(self.plan.chunk[i]), int(self.plan.chunk[i] + self.plan.count[i]))

    def _adds(self, i: int) -> bool:
        """Whether the incoming chunks are added; the first reduction into an empty chunk is a copy."""
        if self.plan.op[i] == COPY:
            return False
        empty, chunks = self.empty[int(self.plan.dst[i])], self._chunks(i)
        fresh = empty.intersection(chunks)
        empty.difference_update(fresh)
        return not fresh

    def _pass(self, rank: int, sources: list[int], targets: list[int], chunks: range) -> Wait:
        waits: set[Wait] = set()
        for source in sources:
            if source > SCRATCH:
                waits.update(self._made(source, chunks))
        for target in targets:
            if target > SCRATCH:
                waits.update(self._made(target, chunks))
                for chunk in chunks:
                    waits.update(self.places[target][chunk].readers)
        self.ranks[rank].append(_Draft(waits, sources, targets, chunks.start, chunks.stop))
        return rank, len(self.ranks[rank])

    def _made(self, rank: int, chunks: range) -> Iterable[Wait]:
        """The operations after which those chunks of a rank have their values."""
        for chunk in chunks:
            # A chunk that no operation has written is valid once its rank has opened its memory: operation 1.
            yield self.places[rank][chunk].writer or (rank, 1)

    def _written_by_its_sum(self, src: int, dst: int, chunks: range) -> bool:
        """Let the pass that wrote ``src``'s chunks also write ``dst``'s, if it was the last to read them."""
        writers = {self.places[src][chunk].writer for chunk in chunks}
        writer = writers.pop()
        if writers or writer is None or writer[0] != src:
            return False
        draft = self.ranks[src][writer[1] - 1]
        if (draft.lo, draft.hi) != (chunks.start, chunks.stop) or dst not in draft.sources:
            return False
        if any(self.places[dst][chunk].readers != [writer] for chunk in chunks):
            return False
        draft.targets.append(dst)
        for chunk in chunks:
            self.places[dst][chunk] = _Place(writer)
        return True

    def _outstanding(self, rank: int) -> set[Wait]:
        """The operations that still use a rank's memory at the end."""
        waits: set[Wait] = set()
        for place in self.places[rank]:
            waits.update(place.readers)
            if place.writer is not None:
                waits.add(place.writer)
        return waits

    def _finish(self) -> tuple[Script, ...]:
        waits = [_nearest(rank, drafts) for rank, drafts in enumerate(self.ranks)]
        rings: dict[Wait, list[int]] = {}
        for rank, mine in enumerate(waits):
            for needed in mine:
                for wait in needed:
                    rings.setdefault(wait, []).append(rank)
        touches = [
            {wait[0] for needed in waits[rank] for wait in needed}
            | {other for draft in drafts for other in (*draft.sources, *draft.targets) if other >= 0 and other != rank}
            for rank, drafts in enumerate(self.ranks)
        ]
        return tuple(
            Script(
                rank,
                tuple(
                    Operation(
                        waits[rank][i],
                        tuple(draft.sources),
                        tuple(draft.targets),
                        draft.lo,
                        draft.hi,
                        tuple(rings.get((rank, i + 1), ())),
                    )
                    for i, draft in enumerate(drafts)
                ),
                self.scratch[rank],
                tuple(sorted(touches[rank])),
                tuple(other for other in range(self.plan.world) if rank in touches[other]),
            )
            for rank, drafts in enumerate(self.ranks)
        )


def _nearest(rank: int, drafts: Sequence[_Draft]) -> list[tuple[Wait, ...]]:
    """The waits of each operation, without those that the rank's own order or an earlier wait implies."""
    # Progress only grows: a wait for operation k of a rank also covers every operation before k.
    met: dict[int, int] = {rank: len(drafts)}
    found = []
    for draft in drafts:
        needed: dict[int, int] = {}
        for other, position in draft.waits:
            if position > max(met.get(other, 0), needed.get(other, 0)):
                needed[other] = position
        met.update(needed)
        found.append(tuple(sorted(needed.items())))
    return found
