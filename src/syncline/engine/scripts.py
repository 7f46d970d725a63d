"""Prepares runs in mapped memory: shared memory, the slots where peers find a run, and scripts for compiled code.

A script is laid out as tables for one size and type of array. Tables and runs are cached, so that steps after the first
create nothing.

A rank's slots are on its board and in further tables. There is always a free slot: new tables, each twice as large as
the last, are added on demand and announced on the board (``kernels.board``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import SynclineError
from ..kernels import board
from ..plans.memory import Script, compile_scripts
from ..plans.plan import Plan
from ..transports import Bytes, Words
from ..wire.scratch import address_of
from .order import Run


class Window(Protocol):
    """Memory that all processes of a group have mapped, with a board for each process (``kernels.onesided``)."""

    rank: int
    world: int
    members: Words
    """Per process: the address of its board (0 if unknown) and the descriptor of its bell (-1 if unknown)."""
    board: Words
    """This process's own board."""
    maps: Words
    """Per process, two words for each segment number: its local address (0 if not mapped) and its size."""
    gone: set[int]
    """The processes whose connections have closed."""

    def words_of(self, peer: int, segment: int) -> Words:
        """A segment of a process; empty if unknown and after the end. Callable from any thread."""
        ...

    def allocate(self, nbytes: int) -> Bytes:
        """Zeroed shared memory that is never freed."""
        ...

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """The segment number and offset of this process's memory; None if it is not shared."""
        ...

    def staging(self, nbytes: int) -> Bytes:
        """Shared memory of at least ``nbytes``, until ``free``."""
        ...

    def free(self, staging: Bytes) -> None:
        """Return memory of ``staging``."""
        ...

    def count(self, sent: Words, received: Words) -> None:
        """Add bytes per process to the traffic counters."""
        ...


@dataclass(frozen=True)
class Table:
    """This rank's slots. ``users`` counts, per slot, the ranks that read its last content; None while it is in use."""

    address: int
    words: Words
    users: list[int | None]


class Slots:
    """The slots of one process in one window."""

    def __init__(self, window: Window) -> None:
        from ..kernels import onesided  # compiled code: loaded where it is used

        self._window = window
        address, words = int(window.members[window.rank, onesided.BOARD]), window.board[board.BOARD_HEAD // 8 :]
        self.tables = [Table(address + board.BOARD_HEAD, words, [0] * board.SLOTS)]

    def take(self, wanted: int) -> tuple[Table, int]:
        """A free slot where peers look for a run with this identity, in the first table that has one."""
        sets, level = board.SLOTS // board.WAYS, 0
        while True:
            if level == len(self.tables):
                self._add_table()
            table, first = self.tables[level], _first_slot(wanted, sets)
            for slot in range(first, first + board.WAYS):
                user = table.users[slot]
                if user is None:
                    continue
                # A slot is free once every rank that reads it has counted itself there.
                if user == 0 or table.words[(slot * board.SLOT_BYTES + board.SLOT_DONE_WITH) // 8] >= user:
                    table.users[slot] = None
                    return table, slot
            sets, level = 2 * sets, level + 1

    def _add_table(self) -> None:
        """Add a table with twice as many slots as the last one, and announce it on the board."""
        further, slots = len(self.tables) - 1, 2 * len(self.tables[-1].users)
        if further == board.MORE_TABLES:
            used = sum(table.users.count(None) for table in self.tables)
            raise SynclineError(f"{used} exchanges are under way at once, more than shared memory can show")
        memory = self._window.allocate(slots * board.SLOT_BYTES)
        place = self._window.find(address_of(memory), memory.nbytes)
        assert place is not None
        self.tables.append(Table(address_of(memory), memory.view(np.int64), [0] * slots))
        self._window.board[board.TABLES // 8 + further] = place[0]


def _first_slot(wanted: int, sets: int) -> int:
    """An inlined ``kernels.onesided.first_slot``: the call would cost more than the computation."""
    return ((wanted * board.SPREAD & 0xFFFFFFFFFFFFFFFF) >> 32 & sets - 1) * board.WAYS


MOST = 1024
"""The number of cached sizes of arrays."""


@dataclass(frozen=True)
class Scripted:
    """A script as tables for one size and type of array, shared by all its runs."""

    plan: Plan
    script: Script
    count: int
    """The number of operations per segment."""
    state: Words
    operations: Words
    operands: Words
    lengths: Words
    touched: Words
    staged: Words
    """The ranges of a private array that are copied to shared memory and back."""
    per_segment: int
    segments: int
    item: int
    sent: Words
    received: Words
    idle: list[ScriptedRun]
    """Finished runs whose tables are reused."""


class ScriptedRun:
    """The tables for a run (``of``) that is in flight or waits to start. The next run of their layout reuses them."""

    __slots__ = (
        "base", "before", "bound", "layout", "maps", "of", "on_done", "peers", "room", "scratch", "slot", "staging",
        "state", "table", "words",
    )  # fmt: skip

    def __init__(self, layout: Scripted, run: Run, world: int) -> None:
        self.layout, self.of = layout, run
        self.state = layout.state.copy()
        self.words = memoryview(self.state)
        self.base: Words | None = None
        """For a prepared run: its state before each call."""
        self.peers = np.zeros((world, 3), np.int64)
        self.room = np.empty((2, world + layout.script.scratch + 1), np.int64)
        self.maps: Words | None = None
        self.bound: Callable[[int, int, int], int] | None = None
        self.slot = self.before = -1
        self.table: Table | None = None
        self.on_done: Callable[[], None] = nothing
        self.staging: Bytes | None = None
        self.scratch: Bytes | None = None

    def advance(self, kernel: Any, window: Window) -> Callable[[int, int, int], int]:
        """The compiled ``advance``, bound to this run's tables; bound again if the table of maps was replaced."""
        if self.bound is None or self.maps is not window.maps:
            layout, self.maps = self.layout, window.maps
            self.bound = kernel.advance.bind(
                self.state, self.peers, window.members, window.maps, layout.operations, layout.operands,
                layout.lengths, layout.touched, layout.staged, self.room,
            )  # fmt: skip
        return self.bound


def nothing() -> None:
    """The ``on_done`` of an idle run."""


class Scripts:
    """The scripts of one process in one window, in an LRU cache."""

    def __init__(self, window: Window, segment_bytes: int) -> None:
        from ..kernels import onesided, passes  # compiled code: loaded where it is used

        self._kernel, self._codes = onesided, passes.CODES
        self._window, self._segment_bytes = window, segment_bytes
        self._numbers: dict[np.dtype[Any], int | None] = {}
        self._known: dict[tuple[int, int, np.dtype[Any]], Scripted] = {}
        self._buffer = np.zeros(onesided.BUFFER_WORDS, np.int64)
        self._buffer[onesided.ONE] = 1

    def crowded(self, often: int) -> bool:
        """Whether the last ``often`` waits were all for a rank on this rank's core. Resets the counter if so."""
        if self._buffer[self._kernel.CROWDED] < often:
            return False
        self._buffer[self._kernel.CROWDED] = 0
        return True

    def code(self, dtype: np.dtype[Any]) -> int | None:
        """The kernels' number of an element type; None if they do not support it."""
        if dtype not in self._numbers:
            self._numbers[dtype] = self._codes.get(dtype.name) if dtype.isnative else None
        return self._numbers[dtype]

    def of(self, plan: Plan, dtype: np.dtype[Any], size: int) -> Scripted:
        """The tables of a plan for arrays of ``size`` elements."""
        key = id(plan), size, dtype  # the id stays unique: the cached layout keeps the plan alive
        found = self._known.pop(key, None) or self._lay_out(plan, dtype, size)
        self._known[key] = found  # move to the end: most recently used
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        return found

    def _lay_out(self, plan: Plan, dtype: np.dtype[Any], size: int) -> Scripted:
        scripts = compile_scripts(plan)
        script = scripts[self._window.rank]
        whole = plan.goal in ("reduce_scatter", "all_gather")
        longest = size if whole else max(1, self._segment_bytes // dtype.itemsize)
        per = max(1, min(longest, size))
        segments = -(-size // per)
        operations, operands = _tables(script, _shared(scripts, script.rank, plan.chunks))
        return Scripted(
            plan,
            script,
            len(script.operations),
            self._first_state(script, plan, dtype, size, per, segments),
            operations,
            operands,
            np.array([len(other.operations) for other in scripts], np.int64),
            np.array(script.touches, np.int64),
            _stages(scripts, script.rank, plan.chunks),
            per,
            segments,
            dtype.itemsize,
            *_traffic(plan, script.rank, size * dtype.itemsize, self._window.world),
            [],
        )

    def _first_state(
        self, script: Script, plan: Plan, dtype: np.dtype[Any], size: int, per: int, segments: int
    ) -> Words:
        kernel = self._kernel
        state = np.zeros(kernel.STATE, np.int64)
        state[kernel.SEGMENTS], state[kernel.PER_SEGMENT] = segments, per
        state[kernel.CODE], state[kernel.ITEM] = self.code(dtype) or 0, dtype.itemsize
        state[kernel.ELEMENTS], state[kernel.CHUNK_COUNT] = size, plan.chunks
        state[kernel.RANK], state[kernel.BUFFER] = script.rank, self._buffer.ctypes.data
        state[kernel.SCRATCH_STRIDE] = per * dtype.itemsize
        return state


def _tables(script: Script, shared: NDArray[np.bool_]) -> tuple[Words, Words]:
    """A script as a table of operations and the lists that its columns point into."""
    from ..kernels import onesided as kernel

    rows, lists = np.zeros((len(script.operations), kernel.COLUMNS), np.int64), list[int]()
    for row, operation in zip(rows, script.operations, strict=True):
        waits = [number for wait in operation.waits for number in wait]
        # Sources and targets must be adjacent: the kernel iterates over both as the operation's partners.
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
        row[kernel.PRIVATE] = not shared[operation.lo : operation.hi].any()
    return rows, np.array(lists or [0], np.int64)


def _shared(scripts: Sequence[Script], rank: int, chunks: int) -> NDArray[np.bool_]:
    """The chunks of a rank's array that other ranks access, and those that share an operation with such a chunk."""
    shared = np.zeros(chunks, np.bool_)
    for script in scripts:
        for operation in script.operations:
            if script.rank != rank and rank in (*operation.sources, *operation.targets):
                shared[operation.lo : operation.hi] = True
    # Grow to a fixed point: an operation over several chunks cannot be partly private.
    before = -1
    while before != (before := int(shared.sum())):
        for operation in scripts[rank].operations:
            if shared[operation.lo : operation.hi].any():
                shared[operation.lo : operation.hi] = True
    return shared


def _stages(scripts: Sequence[Script], rank: int, chunks: int) -> Words:
    """The shared chunks of a rank that are copied to shared memory (others read them) or back (others write them)."""
    from ..kernels import onesided as kernel

    shared = _shared(scripts, rank, chunks)
    copied = np.zeros((2, chunks), np.int64)
    for operation in (operation for script in scripts for operation in script.operations):
        copied[0, operation.lo : operation.hi] |= rank in operation.sources
        copied[1, operation.lo : operation.hi] |= rank in operation.targets
    copied *= shared
    edges = [0, *(np.flatnonzero(np.diff(copied, axis=1).any(axis=0)) + 1).tolist(), chunks]
    rows = np.zeros((len(edges) - 1, kernel.STAGES), np.int64)
    for row, first, last in zip(rows, edges[:-1], edges[1:], strict=True):
        row[kernel.FIRST], row[kernel.LAST] = first, last
        row[kernel.IN : kernel.OUT + 1] = copied[:, first]
    return rows


def _traffic(plan: Plan, rank: int, nbytes: int, world: int) -> tuple[Words, Words]:
    """The bytes that the plan moves from this rank to each process of ``world``, and from each process to it."""
    moved = plan.count.astype(np.int64) * nbytes // plan.chunks
    sent, received = np.zeros((2, world), np.int64)
    np.add.at(sent, plan.dst[plan.src == rank], moved[plan.src == rank])
    np.add.at(received, plan.src[plan.dst == rank], moved[plan.dst == rank])
    return sent, received
