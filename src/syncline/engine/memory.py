"""Runs plans by one-sided access: scripts carried out over memory that all ranks of the group have mapped.

Owns the runs under way: where their arrays lie, their slots on this rank's board, and what they wait for. Does not know
how memory is shared (the transport's ``window``) nor how waiting is done (``messages`` and the transport's poll).

An array that lies in the transport's memory is read and written where it is. Any other is *staged*: copied segment by
segment to shared memory and back. Ranks need not agree on that: a slot says where a rank's segments lie.

Large arrays are cut into segments, which flow one after the other; chunks that belong to ranks (reduce-scatter,
all-gather) are not cut, so that a rank's chunk of the whole array stays in one piece.

Priority: what is done next is the next operation of the most urgent run that can go on. One that is less urgent than
another does a single operation before that one is looked at again; where nothing is more urgent a run goes on for a
segment at a time, and then sees whether something has been handed over. Runs of equal priority go on in the order in
which they were started, each as far as it can. Whatever can be done is done, so ranks may have different priorities.

Memory: scratch of a segment for algorithms that swap chunks (recursive doubling), and a segment for staged arrays.

No deadlock between runs. What a run needs to begin (a slot, scratch, staging) is its own rank's, and is made when none
is free: a run that has been started never waits for the end of another one of its rank, and what it waits for
in others is that they have started the same run, or have got so far in it (``plans.memory``). So in whatever order
ranks start runs, and however many of them, each ends once all who take part have started it; only what the callers
themselves put one behind the other (a lane, a gate, a thread that waits) is an order, and that is the same on all
ranks. A limit on slots would break this: a rank whose slots are all held by runs that its peers come to later
could not start the one that they wait for now. Messages keep the same rule: a receive, once posted, waits for
nothing but its sender, a large send for nothing but its receive, and scratch is made when none is free.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import PeerLost, ProtocolError, SynclineError
from ..kernels import board
from ..plans.memory import Operation, Script, compile_scripts
from ..plans.plan import REDUCE, Plan
from ..transports import Bytes, Words
from ..wire.link import broken
from ..wire.scratch import Scratch
from .trace import Kind, Observer, Span, begin


class Window(Protocol):
    """Memory that all processes of a group have mapped, with a board for each (``kernels.onesided``)."""

    rank: int
    world: int
    members: Words
    """Per process: the address of its board, 0 while unknown, and the descriptor of its bell, -1 while unknown."""
    board: Words
    """This process's own board."""
    maps: Words
    """Per process two words for each segment number: where the segment is mapped here, 0 while it is not; its size."""
    gone: set[int]
    """Processes whose connections have closed."""

    def words_of(self, peer: int, segment: int) -> Words:
        """A segment of a process, empty while unknown and after the end; may be asked from any thread."""
        ...

    def allocate(self, nbytes: int) -> Bytes:
        """Zeroed shared memory, for good."""
        ...

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Segment number and offset of memory of this process, or None when it is not shared."""
        ...

    def staging(self, nbytes: int) -> Bytes:
        """Shared memory of at least that size, until ``free``."""
        ...

    def free(self, staging: Bytes) -> None:
        """Give back what ``staging`` gave."""
        ...

    def count(self, sent: Words, received: Words) -> None:
        """Add to the traffic: bytes per process."""
        ...


def address_of(array: NDArray[Any]) -> int:
    """Where an array begins in memory."""
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(frozen=True)
class _Layout:
    """A script as tables for one size and type of array; shared by all runs of it."""

    plan: Plan
    script: Script
    count: int
    """Operations of a segment."""
    state: Words
    operations: Words
    operands: Words
    lengths: Words
    touched: Words
    per_segment: int
    segments: int
    item: int
    sent: Words
    received: Words
    idle: list[_Run]
    """Runs that have ended: their tables are used again."""


@dataclass(frozen=True)
class _Table:
    """A table of this rank's slots; per slot who uses it, or how many had to look at what was there."""

    address: int
    words: Words
    users: list[_Run | int]


class _Run:
    """One run under way, or waiting to be; used again for the next one of its layout."""

    __slots__ = (
        "array", "before", "bound", "key", "label", "layout", "maps", "on_done", "peers", "priority", "room",
        "scratch", "slot", "span", "staging", "state", "table", "tolerant",
    )  # fmt: skip

    def __init__(self, layout: _Layout, world: int) -> None:
        self.layout = layout
        self.state = layout.state.copy()
        self.peers = np.zeros((world, 3), np.int64)
        self.room = np.empty((2, world + layout.script.scratch + 1), np.int64)
        self.maps: Words | None = None
        self.bound: Callable[[int, int, int], int] | None = None
        self.array: NDArray[Any] = self.state
        self.key = self.slot = self.before = -1
        self.table: _Table | None = None
        self.label = ""
        self.priority = 0.0
        self.tolerant = False
        self.span: Span | None = None
        self.on_done: Callable[[], None] = _nothing
        self.staging: Bytes | None = None
        self.scratch: Bytes | None = None

    def advance(self, kernel: Any, window: Window) -> Callable[[int, int, int], int]:
        """The compiled ``advance`` with this run's tables; laid out anew when the window's table of maps is another."""
        if self.bound is None or self.maps is not window.maps:
            layout, self.maps = self.layout, window.maps
            self.bound = kernel.advance.bind(
                self.state, self.peers, window.members, window.maps, layout.operations, layout.operands,
                layout.lengths, layout.touched, self.room,
            )  # fmt: skip
        return self.bound


def _priority(run: _Run) -> float:
    return run.priority


def _nothing() -> None:
    """What an idle run calls at its end."""


class OneSided:
    """The runs of one process over one window; used from one thread at a time.

    ``handed_over`` says whether something waits to be started, which might be more urgent.
    """

    def __init__(
        self,
        window: Window,
        scratch: Scratch,
        segment_bytes: int,
        has_left: Callable[[int], bool] = lambda _: False,
        observer: Observer | None = None,
        handed_over: Callable[[], bool] = lambda: False,
    ) -> None:
        from ..kernels import onesided, passes  # compiled code: loaded where it is used

        self._kernel, self._codes = onesided, passes.CODES
        self._window = window
        self._scratch = scratch
        self._segment_bytes = segment_bytes
        self._has_left = has_left
        self._observer, self._handed_over = observer, handed_over
        self._known: dict[np.dtype[Any], int | None] = {}
        self._layouts: dict[tuple[int, int, np.dtype[Any]], _Layout] = {}
        self._generations: dict[int, int] = {}
        self._runs: list[_Run] = []  # the most urgent first, equal ones as they were started
        self._waiting: deque[_Run] = deque()
        self._introduced = False
        self._buffer = np.zeros(onesided.BUFFER_WORDS, np.int64)
        self._buffer[onesided.ONE] = 1
        self._board = int(window.members[window.rank, onesided.BOARD])
        slots = window.board[board.BOARD_HEAD // 8 :]
        self._tables = [_Table(self._board + board.BOARD_HEAD, slots, [0] * board.SLOTS)]

    def takes(self, plan: Plan, array: NDArray[Any]) -> bool:
        """Whether such a plan can be run here; the same on all ranks. Copies have no type."""
        return self._code(array.dtype) is not None or not np.any(plan.op == REDUCE)

    def _code(self, dtype: np.dtype[Any]) -> int | None:
        """The kernels' number of an element type."""
        if dtype not in self._known:
            self._known[dtype] = self._codes.get(dtype.name) if dtype.isnative else None
        return self._known[dtype]

    @property
    def active(self) -> bool:
        """True when runs are under way."""
        return bool(self._runs or self._waiting)

    def start(
        self,
        plan: Plan,
        array: NDArray[Any],
        key: int,
        label: str,
        on_done: Callable[[], None],
        tolerant: bool = False,
        priority: float = 0.0,
        span: Span | None = None,
    ) -> None:
        """Begin a run over a one-dimensional contiguous array; ``on_done`` is called from a later ``advance``."""
        layout = self._layout(plan, array)
        if not layout.segments or (len(layout.script.operations) <= 2 and not layout.script.touched_by):
            self._next_generation(key)  # nothing to do, but those who do something count it too
            on_done()
            return
        run = layout.idle.pop() if layout.idle else _Run(layout, self._window.world)
        run.array, run.key, run.label, run.tolerant, run.on_done = array, key, label, tolerant, on_done
        run.priority, run.span = priority, span
        run.before = -1
        self._waiting.append(run)
        self._admit()

    def advance(self, spins: int, patience_ms: int = 0) -> int:
        """Do what can be done; how many runs have moved. Raises PeerLost when one waits for a process that is gone.

        A single run may sleep up to ``patience_ms`` for each of its conditions; among several none may hold up the
        others. It ends early where something more urgent has to be looked at again.
        """
        kernel, window = self._kernel, self._window
        gone = set(window.gone) if window.gone else window.gone
        if self._waiting:
            self._admit()
            self._check_waiting(gone)
        moved = 0
        if len(self._runs) > 1:
            patience_ms = 0
        runs, overtaken, looks = tuple(self._runs), False, spins
        ranked = len(runs) > 1 and runs[0].priority != runs[-1].priority
        for run in runs:
            state = run.state
            if ranked:  # an urgent run does not look again and again while a less urgent one could go on
                looks = 0 if run.priority != runs[-1].priority else spins
                overtaken = self._runs[0].priority < run.priority
            code = self._go_on(run, run.advance(kernel, window), looks, patience_ms, overtaken)
            if code == kernel.DONE:
                moved += 1
                self._finish(run)
                if overtaken:
                    break
                continue
            now = int(state[kernel.AT]) + int(state[kernel.SEGMENT]) * run.layout.count
            went_on = now != run.before
            moved += went_on
            run.before = now
            if code in (kernel.UNLIKE, kernel.BROKEN):
                raise self._fault(run, code)
            if gone:
                self._check_peer(run, int(state[kernel.WAITS_FOR]), gone)
            if code == kernel.PAUSED or (overtaken and went_on):
                break
        return moved

    def _go_on(
        self, run: _Run, call: Callable[[int, int, int], int], spins: int, patience_ms: int, overtaken: bool
    ) -> int:
        """Carry out a run: one operation where it is ``overtaken``, else as long as nothing is handed over."""
        most, code = 1 if overtaken else run.layout.count, self._kernel.PAUSED
        while code == self._kernel.PAUSED:
            if self._observer is None:
                code = call(spins, patience_ms, most)
            else:
                code = self._observed(self._observer, run, partial(call, spins, patience_ms, most))
            if overtaken or (code == self._kernel.PAUSED and self._handed_over()):
                break
        return code

    def _observed(self, observer: Observer, run: _Run, call: Callable[[], int]) -> int:
        """Carry out a run as far as it goes, and tell what has been done of it meanwhile."""
        first, script = self._done(run), run.layout.script
        at = {"segment": first // len(script.operations), "step": first % len(script.operations)}
        span = begin(observer, "advance", run.label, run.span, priority=run.priority, **at)
        code = call()
        for done in range(first, self._done(run)):
            segment, step = divmod(done, len(script.operations))
            for kind, peer, nbytes in self._moved(run, script.operations[step], segment):
                what = {"segment": segment, "step": step, "peer": peer, "nbytes": nbytes}
                begin(observer, kind, run.label, span, priority=run.priority, **what).end()
        span.end()
        return code

    def _done(self, run: _Run) -> int:
        """How many operations of all segments a run has done."""
        return int(run.state[self._kernel.AT]) + int(run.state[self._kernel.SEGMENT]) * len(
            run.layout.script.operations
        )

    def _moved(self, run: _Run, operation: Operation, segment: int) -> list[tuple[Kind, int, int]]:
        """What one operation has done: kind, peer and bytes."""
        layout, rank = run.layout, run.layout.script.rank
        length = min(layout.per_segment, run.array.size - segment * layout.per_segment)
        start, stop = (length * chunk // layout.plan.chunks for chunk in (operation.lo, operation.hi))
        nbytes, found = (stop - start) * layout.item, list[tuple[Kind, int, int]]()
        if start == stop or not operation.sources:
            return found
        found += [("receive", source, nbytes) for source in operation.sources if source >= 0 and source != rank]
        found.append(("copy" if len(operation.sources) == 1 else "reduce", -1, nbytes))
        return found + [("send", target, nbytes) for target in operation.targets if target >= 0 and target != rank]

    def sleep_soon(self) -> None:
        """Say that this process is about to sleep: whoever it waits for then rings its bell. ``advance`` once more."""
        self._kernel.sleep_soon(self._board)

    def awake(self) -> None:
        """Say that it is awake."""
        self._kernel.awake(self._board)

    @property
    def labels(self) -> list[str]:
        """What is under way."""
        return [run.label for run in (*self._runs, *self._waiting) if not run.tolerant]

    @property
    def waiting_for(self) -> dict[int, str]:
        """Peer -> label of a run that waits for it: those that have not come to it, else the one that blocks it."""
        opened = {peer: run.label for run in tuple(self._runs) for peer in self._awaited(run)}
        if opened or self._introduced:
            return opened
        waiting, strangers = tuple(self._waiting), self._strangers()
        return {peer: run.label for run in waiting if not run.tolerant for peer in strangers.intersection(_peers(run))}

    def _awaited(self, run: _Run) -> list[int]:
        wanted = int(run.state[self._kernel.ID])
        touches = run.layout.script.touches
        absent = [peer for peer in touches if not self._has_come(peer, wanted)]
        if run.tolerant and len(absent) == len(touches):
            return []  # nobody has come to it
        return absent or [int(run.state[self._kernel.WAITS_FOR])]

    def _has_come(self, peer: int, wanted: int) -> bool:
        """Whether a process has a slot for a run, as far as is known: not while a table of it is yet to be mapped."""
        shown = self._window.words_of(peer, 0)
        tables = [
            shown[_HEAD_WORDS:],
            *(self._window.words_of(peer, int(number)) for number in shown[_TABLES] if number),
        ]
        return any(wanted in table[_IDS] for table in tables) or not all(table.size for table in tables[1:])

    def _strangers(self) -> set[int]:
        """The processes that have not shown their board or bell yet."""
        members = self._window.members
        known = (members[:, self._kernel.BOARD] != 0) & (members[:, self._kernel.BELL] >= 0)
        return {int(peer) for peer in np.flatnonzero(~known)}

    def _layout(self, plan: Plan, array: NDArray[Any]) -> _Layout:
        key = id(plan), array.size, array.dtype  # the layout keeps the plan: no other one gets its id
        found = self._layouts.pop(key, None) or self._lay_out(plan, array)
        self._layouts[key] = found  # the one used last stands last
        if len(self._layouts) > _LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return found

    def _lay_out(self, plan: Plan, array: NDArray[Any]) -> _Layout:
        scripts = compile_scripts(plan)
        script = scripts[self._window.rank]
        whole = plan.goal in ("reduce_scatter", "all_gather")
        longest = array.size if whole else max(1, self._segment_bytes // array.itemsize)
        per = max(1, min(longest, array.size))
        segments = -(-array.size // per)
        operations, operands = _tables(script)
        return _Layout(
            plan,
            script,
            len(script.operations),
            self._first_state(script, plan, array, per, segments),
            operations,
            operands,
            np.array([len(other.operations) for other in scripts], np.int64),
            np.array(script.touches, np.int64),
            per,
            segments,
            array.itemsize,
            *_traffic(plan, script.rank, array.nbytes, self._window.world),
            [],
        )

    def _first_state(self, script: Script, plan: Plan, array: NDArray[Any], per: int, segments: int) -> Words:
        kernel = self._kernel
        state = np.zeros(kernel.STATE, np.int64)
        state[kernel.SEGMENTS], state[kernel.PER_SEGMENT] = segments, per
        state[kernel.CODE], state[kernel.ITEM] = self._code(array.dtype) or 0, array.itemsize
        state[kernel.ELEMENTS], state[kernel.CHUNK_COUNT] = array.size, plan.chunks
        state[kernel.RANK], state[kernel.BUFFER] = script.rank, self._buffer.ctypes.data
        state[kernel.SCRATCH_STRIDE] = per * array.itemsize
        return state

    def _admit(self) -> None:
        """Open waiting runs once those they deal with can be rung: a matter of the start alone."""
        strangers = set[int]() if self._introduced else self._strangers()
        self._introduced = not strangers
        for run in tuple(self._waiting):
            if strangers and not strangers.isdisjoint(_peers(run)):
                continue
            self._waiting.remove(run)
            self._open(run)

    def _free_slot(self, wanted: int) -> tuple[_Table, int]:
        """A slot where peers look for a run of that identity, in the first table that has a free one."""
        sets, level = board.SLOTS // board.WAYS, 0
        while True:
            if level == len(self._tables):
                self._add_table()
            table, first = self._tables[level], self._kernel.first_slot(wanted, sets)
            for slot in range(first, first + board.WAYS):
                user = table.users[slot]
                if isinstance(user, _Run):
                    continue
                if user == 0 or table.words[(slot * board.SLOT_BYTES + board.SLOT_DONE_WITH) // 8] >= user:
                    return table, slot
            sets, level = 2 * sets, level + 1

    def _add_table(self) -> None:
        """Make twice as many slots as the last table has, and say on the board where."""
        further, slots = len(self._tables) - 1, 2 * len(self._tables[-1].users)
        if further == board.MORE_TABLES:
            raise SynclineError(f"{len(self._runs)} exchanges are under way at once, more than shared memory can show")
        memory = self._window.allocate(slots * board.SLOT_BYTES)
        place = self._window.find(address_of(memory), memory.nbytes)
        assert place is not None
        self._tables.append(_Table(address_of(memory), memory.view(np.int64), [0] * slots))
        self._window.board[board.TABLES // 8 + further] = place[0]

    def _open(self, run: _Run) -> None:
        """Fill in a run's state; the first ``advance`` fills in the slot and shows it to the others."""
        kernel, window, layout, state = self._kernel, self._window, run.layout, run.state
        identity = (self._next_generation(run.key) << _KEY_BITS | run.key) + 1
        table, slot = self._free_slot(identity)
        run.table, run.slot, table.users[slot] = table, slot, run
        state[:] = layout.state
        address = address_of(run.array)
        place = window.find(address, run.array.nbytes)
        stride = layout.per_segment * layout.item
        if place is None:
            run.staging = window.staging(min(stride, run.array.nbytes))
            state[kernel.STAGED], state[kernel.USER], stride = 1, address, 0
            address = address_of(run.staging)
            place = window.find(address, run.staging.nbytes)
            assert place is not None
        if layout.script.scratch:
            run.scratch = self._scratch.take(layout.script.scratch * layout.per_segment * layout.item)
            state[kernel.SCRATCH] = address_of(run.scratch)
        state[kernel.ID], state[kernel.OWN_SLOT] = identity, table.address + slot * board.SLOT_BYTES
        state[kernel.OWN_SEGMENT : kernel.STATE] = *place, address, stride
        if self._runs and run.priority < self._runs[-1].priority:
            insort(self._runs, run, key=_priority)
        else:
            self._runs.append(run)

    def _next_generation(self, key: int) -> int:
        """How often that key has been used: all ranks count alike, and so find the slots of the same run."""
        generation = self._generations.get(key, 0)
        self._generations[key] = (generation + 1) & _GENERATIONS
        return generation

    def _finish(self, run: _Run) -> None:
        self._runs.remove(run)
        assert run.table is not None
        run.table.users[run.slot] = len(run.layout.script.touched_by)
        if run.staging is not None:
            self._window.free(run.staging)
            run.staging = None
        if run.scratch is not None:
            self._scratch.give(run.scratch)
            run.scratch = None
        self._window.count(run.layout.sent, run.layout.received)
        on_done, run.on_done, run.array = run.on_done, _nothing, run.state
        run.layout.idle.append(run)
        on_done()

    def _fault(self, run: _Run, code: int) -> SynclineError:
        """The error for a peer whose slot is not as that of a run like this has to be."""
        if code == self._kernel.BROKEN:
            peer = int(run.state[self._kernel.WAITS_FOR])
            return broken(peer, f"its slot for {run.label} names memory that it has not shared")
        return ProtocolError(
            f"{self._where(run)}: that rank exchanges another number of bytes than the {run.array.nbytes} here;"
            " do all ranks run the same version with the same model?",
            rank=int(run.state[self._kernel.WAITS_FOR]),
        )

    def _check_peer(self, run: _Run, peer: int, gone: set[int]) -> None:
        """The process that a run waits for has gone: that ends the run, or, where it may leave, just its hopes."""
        if peer not in gone:
            return
        if not (run.tolerant and self._has_left(peer)):
            raise PeerLost(f"{self._where(run)}: the connection to rank {peer} closed", rank=peer)

    def _check_waiting(self, gone: set[int]) -> None:
        """What has not begun and deals with a process that has gone can never end."""
        for run in self._waiting if gone else ():
            for peer in sorted(gone.intersection(_peers(run))):
                if not (run.tolerant and self._has_left(peer)):
                    raise PeerLost(f"{run.label}: the connection to rank {peer} closed", rank=peer)

    def _where(self, run: _Run) -> str:
        kernel, state, plan = self._kernel, run.state, run.layout.plan
        return (
            f"{run.label}: waiting for rank {state[kernel.WAITS_FOR]} in shared memory ({plan.name}, operation"
            f" {state[kernel.AT]} of {len(run.layout.script.operations) - 1}, segment {state[kernel.SEGMENT] + 1} of"
            f" {run.layout.segments})"
        )


def _peers(run: _Run) -> tuple[int, ...]:
    """The processes that a run deals with: those it looks at and those that look at it."""
    return run.layout.script.touches + run.layout.script.touched_by


_KEY_BITS = 24
_GENERATIONS = 0xFFFFFFFF

_LAYOUTS = 1024
"""How many sizes of arrays are remembered."""

_HEAD_WORDS = board.BOARD_HEAD // 8
_TABLES = slice(board.TABLES // 8, _HEAD_WORDS)
_IDS = slice(board.SLOT_ID // 8, None, board.SLOT_BYTES // 8)
"""The segments of further tables among the words of a board, and the identities of runs among those of a table."""


def _tables(script: Script) -> tuple[Words, Words]:
    """A script as the table of its operations and the lists that its columns point into."""
    from ..kernels import onesided as kernel

    rows, lists = np.zeros((len(script.operations), kernel.COLUMNS), np.int64), list[int]()
    for row, operation in zip(rows, script.operations, strict=True):
        waits = [number for wait in operation.waits for number in wait]
        # Sources and targets lie side by side: together they are whom the operation deals with.
        parts = (
            (kernel.WAITS, waits),
            (kernel.SOURCES, operation.sources),
            (kernel.TARGETS, operation.targets),
            (kernel.RING, operation.ring),
        )
        for column, part in parts:
            row[column] = len(lists)
            lists.extend(part)
            row[column + 1] = len(lists)
        row[kernel.CHUNKS : kernel.CHUNKS + 2] = operation.lo, operation.hi
    return rows, np.array(lists or [0], np.int64)


def _traffic(plan: Plan, rank: int, nbytes: int, world: int) -> tuple[Words, Words]:
    """The bytes that the plan moves from this rank to each process of the ``world``, and to it."""
    moved = plan.count.astype(np.int64) * nbytes // plan.chunks
    sent, received = np.zeros((2, world), np.int64)
    np.add.at(sent, plan.dst[plan.src == rank], moved[plan.src == rank])
    np.add.at(received, plan.src[plan.dst == rank], moved[plan.dst == rank])
    return sent, received
