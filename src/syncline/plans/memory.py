"""What one rank does of a plan when ranks can read and write each other's memory: passes over memory, and waits.

Owns the translation of a plan into one *script* per rank. Does not know bytes, addresses, or how waiting is done
(``engine.memory`` and ``kernels.onesided`` do).

Theory. With one-sided access nothing has to be sent: a rank that reduces reads its peers' chunks where they lie, and
what a message told ("here is my part", "I have read yours") becomes a condition on how far the other rank is. Every
rank carries out its operations in order, so that one number, its *progress*, says everything about it: all conditions
have the form "rank p has done its first k operations".

* A pass reads chunks of some ranks, adds them from left to right, and writes the sum to the same chunks of some ranks.
  It waits for those who wrote what it reads, and for those who still read what it writes.
* Consecutive reductions of one step into one chunk are one pass over all their inputs.
* A copy to a rank whose chunk the sum's pass has read last of all is written by that pass itself: nobody else can want
  the old value. So ``direct`` becomes one pass in which each owner reads all peers and writes all peers: n bytes are
  read N times and written N times in all, the least traffic possible when inputs and results are private to the ranks.
* A chunk that is overwritten in the step in which it is read by others is first collected in scratch memory.

No deadlock: passes of a step wait for passes of earlier steps only, and what waits for passes of its own step (writing
what was collected) stands behind all passes of its rank in that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from .plan import COPY, Plan

Wait = tuple[int, int]
"""(rank, k): that rank has done its first k operations."""

SCRATCH: Final = -1
"""As a source or target of a pass: this rank's scratch memory; SCRATCH - 1 is a second one, and so on."""


@dataclass(frozen=True)
class Operation:
    """One pass over the chunks ``lo`` to ``hi``, after ``waits``; without sources it only waits.

    ``sources`` and ``targets`` are ranks, or scratch. ``ring`` are the ranks that wait for it to be done.
    """

    waits: tuple[Wait, ...] = ()
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    lo: int = 0
    hi: int = 0
    ring: tuple[int, ...] = ()


@dataclass(frozen=True)
class Script:
    """One rank's operations in order; the first one opens its memory, the last one waits until nobody needs it.

    ``scratch`` is how many arrays of the size of the whole it collects into. ``touches`` are the ranks whose progress
    or memory it looks at; ``touched_by`` the ranks that look at its own.
    """

    rank: int
    operations: tuple[Operation, ...]
    scratch: int
    touches: tuple[int, ...]
    touched_by: tuple[int, ...]


@dataclass
class _Draft:
    """An operation that may still get more targets."""

    waits: set[Wait]
    sources: list[int]
    targets: list[int]
    lo: int
    hi: int


@dataclass
class _Place:
    """One chunk of one rank: who wrote it last, and who has read it since. An event is (rank, operation)."""

    writer: Wait | None = None
    readers: list[Wait] = field(default_factory=list)


@lru_cache(maxsize=512)
def compile_scripts(plan: Plan) -> tuple[Script, ...]:
    """The scripts of all ranks. Cost: linear in the chunks moved, for all ranks together."""
    return _Compiler(plan).scripts()


class _Compiler:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.ranks: list[list[_Draft]] = [[_opening()] for _ in range(plan.world)]
        self.places = [[_Place() for _ in range(plan.chunks)] for _ in range(plan.world)]
        self.empty = [_empty_chunks(plan, rank) for rank in range(plan.world)]
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
        """All passes of a step, then the writing of what had to be collected, then who has read and written what."""
        sent = {(int(self.plan.src[i]), chunk) for i in rows for chunk in self._chunks(i)}
        collected: dict[tuple[int, int, int, bool], list[int]] = {}
        shelf: Counter[tuple[int, int]] = Counter()  # (rank, chunk) -> scratch arrays in use there
        read: list[tuple[int, range, Wait]] = []
        written: list[tuple[int, range, Wait]] = []
        for group in self._groups(rows):
            dst, chunks = int(self.plan.dst[group[0]]), self._chunks(group[0])
            sources = [int(self.plan.src[i]) for i in group]
            adds = self._adds(group[0])
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
        self._note_reads(read)
        for (dst, lo, hi, adds), kept in collected.items():
            event = self._pass(dst, [dst, *kept] if adds else kept, [dst], range(lo, hi))
            written.append((dst, range(lo, hi), event))
        for dst, chunks, event in written:
            for chunk in chunks:
                self.places[dst][chunk] = _Place(event)

    def _groups(self, rows: range) -> list[list[int]]:
        """The rows of a step, those that reduce into the same chunks of the same rank together."""
        found: dict[tuple[int, int, int, int], list[int]] = {}
        for i in rows:
            dst, chunks, op = int(self.plan.dst[i]), self._chunks(i), int(self.plan.op[i])
            found.setdefault((dst, chunks.start, chunks.stop, op if op != COPY else -1 - i), []).append(i)
        return list(found.values())

    def _chunks(self, i: int) -> range:
        return range(int(self.plan.chunk[i]), int(self.plan.chunk[i] + self.plan.count[i]))

    def _adds(self, i: int) -> bool:
        """Whether what arrives is added; the first reduction into a chunk that holds nothing is a copy."""
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
        """What has to have happened before those chunks of a rank have their value."""
        for chunk in chunks:
            yield self.places[rank][chunk].writer or (rank, 1)

    def _written_by_its_sum(self, src: int, dst: int, chunks: range) -> bool:
        """Let the pass that made ``src``'s chunks write ``dst``'s too, where it was the last to read them."""
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

    def _note_reads(self, read: list[tuple[int, range, Wait]]) -> None:
        for src, chunks, event in read:
            for chunk in chunks:
                self.places[src][chunk].readers.append(event)

    def _outstanding(self, rank: int) -> set[Wait]:
        """What others still do with a rank's memory at the end."""
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


def _opening() -> _Draft:
    return _Draft(set(), [], [], 0, 0)


def _empty_chunks(plan: Plan, rank: int) -> set[int]:
    return set() if rank in plan.members or plan.goal == "all_gather" else set(range(plan.chunks))


def _nearest(rank: int, drafts: Sequence[_Draft]) -> list[tuple[Wait, ...]]:
    """The waits of each operation without those that an earlier one, or the order of the rank itself, has met."""
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
