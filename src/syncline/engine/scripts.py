"""Scripts made ready for compiled code: tables for one size and type of array, and the runs of them.

Both are kept for the next run of the same kind: what is made here once is not made in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..plans.memory import Script, compile_scripts
from ..plans.plan import Plan
from ..transports import Bytes, Words
from .slots import Table
from .trace import Span
from .window import Window

MOST = 1024
"""How many sizes of arrays are remembered."""


@dataclass(frozen=True)
class Scripted:
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
    idle: list[ScriptedRun]
    """Runs that have ended: their tables are used again."""


class ScriptedRun:
    """One run under way, or waiting to be; used again for the next one of its layout."""

    __slots__ = (
        "array", "before", "bound", "key", "label", "layout", "maps", "on_done", "peers", "priority", "room",
        "scratch", "slot", "span", "staging", "state", "table", "tolerant",
    )  # fmt: skip

    def __init__(self, layout: Scripted, world: int) -> None:
        self.layout = layout
        self.state = layout.state.copy()
        self.peers = np.zeros((world, 3), np.int64)
        self.room = np.empty((2, world + layout.script.scratch + 1), np.int64)
        self.maps: Words | None = None
        self.bound: Callable[[int, int, int], int] | None = None
        self.array: NDArray[Any] = self.state
        self.key = self.slot = self.before = -1
        self.table: Table | None = None
        self.label = ""
        self.priority = 0.0
        self.tolerant = False
        self.span: Span | None = None
        self.on_done: Callable[[], None] = nothing
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


def nothing() -> None:
    """What an idle run calls at its end."""


class Scripts:
    """The scripts of one process over one window, those used last."""

    def __init__(self, window: Window, segment_bytes: int) -> None:
        from ..kernels import onesided, passes  # compiled code: loaded where it is used

        self._kernel, self._codes = onesided, passes.CODES
        self._window, self._segment_bytes = window, segment_bytes
        self._numbers: dict[np.dtype[Any], int | None] = {}
        self._known: dict[tuple[int, int, np.dtype[Any]], Scripted] = {}
        self._buffer = np.zeros(onesided.BUFFER_WORDS, np.int64)
        self._buffer[onesided.ONE] = 1

    def code(self, dtype: np.dtype[Any]) -> int | None:
        """The kernels' number of an element type."""
        if dtype not in self._numbers:
            self._numbers[dtype] = self._codes.get(dtype.name) if dtype.isnative else None
        return self._numbers[dtype]

    def of(self, plan: Plan, array: NDArray[Any]) -> Scripted:
        """The tables of a plan for arrays like this one."""
        key = id(plan), array.size, array.dtype  # the layout keeps the plan: no other one gets its id
        found = self._known.pop(key, None) or self._lay_out(plan, array)
        self._known[key] = found  # the one used last stands last
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]
        return found

    def _lay_out(self, plan: Plan, array: NDArray[Any]) -> Scripted:
        scripts = compile_scripts(plan)
        script = scripts[self._window.rank]
        whole = plan.goal in ("reduce_scatter", "all_gather")
        longest = array.size if whole else max(1, self._segment_bytes // array.itemsize)
        per = max(1, min(longest, array.size))
        segments = -(-array.size // per)
        operations, operands = _tables(script)
        return Scripted(
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
        state[kernel.CODE], state[kernel.ITEM] = self.code(array.dtype) or 0, array.itemsize
        state[kernel.ELEMENTS], state[kernel.CHUNK_COUNT] = array.size, plan.chunks
        state[kernel.RANK], state[kernel.BUFFER] = script.rank, self._buffer.ctypes.data
        state[kernel.SCRATCH_STRIDE] = per * array.itemsize
        return state


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
