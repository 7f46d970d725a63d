"""Runs plans by one-sided access: executes scripts over memory that all ranks of the group have mapped.

This module owns the runs in flight: the place of their arrays, their order, and the peers that they wait for.
``scripts`` lays out their tables and slots. Memory is shared by ``scripts.Window``; waiting is up to ``exchange`` and
the transport's poll.

An array in the transport's memory is read and written in place. Any other array is *staged*: copied to shared memory
and back, segment by segment. Ranks need not agree on this, because a slot tells where its rank's segments are.

Large arrays are cut into segments that run one after the other. Plans whose chunks belong to ranks (reduce-scatter,
all-gather) are not cut, so that a rank's chunk of the whole array stays contiguous.

Priority: the next operation is always one of the most urgent run that can go on. A run that is less urgent than another
does a single operation before the other is checked again. Without a more urgent run, a run proceeds one segment at a
time and checks for new submissions after each. Runs of equal priority proceed in the order in which they started, each
as far as it can. No run is held back without need, so ranks may use different priorities.

Memory: one segment of scratch for algorithms that swap chunks (recursive doubling), one segment for staged arrays.

No deadlock between runs. The resources of a run (slot, scratch, staging) belong to its own rank and are created if none
is free. A started run therefore never waits for the end of another run of its rank. It waits for other ranks only to
start the same run or to advance in it (``plans.memory``). Whatever the order in which ranks start runs, and however
many, each run ends once all participants have started it. Orders imposed by callers (a lane, a gate, a waiting thread)
are the same on all ranks. A limit on slots would break this argument: if runs that peers join later hold all slots of a
rank, it could not start the run that they wait for now. Messages obey the same rule: a posted receive waits only for
its sender, a large send only for its receive, and scratch is created if none is free.
"""

from __future__ import annotations

import struct
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PeerLost, ProtocolError
from ..kernels import board
from ..plans.memory import Operation
from ..plans.messages import Program
from ..plans.plan import REDUCE, Plan
from ..wire.links import broken
from ..wire.scratch import Scratch, address_of
from .cores import OFTEN, Cores
from .order import KEY_BITS, Run, Sign
from .scripts import Scripted, ScriptedRun, Scripts, Slots, Window, nothing
from .trace import Kind, Observer, begin

_SIGN = struct.Struct(f"={board.SIGN_WORDS}Q")


def _priority(run: ScriptedRun) -> float:
    return run.of.priority


class OneSided:
    """The runs of one process in one window. One thread at a time.

    ``handed_over`` tells whether work is queued that might be more urgent.
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
        from ..kernels import onesided  # loads compiled code, so import it on first use

        self._kernel = onesided
        self._window = window
        self._scratch = scratch
        self._scripts, self._slots = Scripts(window, segment_bytes), Slots(window)
        self._has_left = has_left
        self._observer, self._handed_over = observer, handed_over
        self._generations: dict[int, int] = {}
        self._runs: list[ScriptedRun] = []  # the most urgent first, equal ones in the order of their start
        self._waiting: deque[ScriptedRun] = deque()
        self._introduced = False
        self._board = int(window.members[window.rank, onesided.BOARD])
        self._cores = Cores(self._shown_cores)

    def takes(self, plan: Plan, array: NDArray[Any]) -> bool:
        """Whether ``plan`` can run here; the same on all ranks. Plans that only copy support every type."""
        return self._scripts.code(array.dtype) is not None or not np.any(plan.op == REDUCE)

    @property
    def active(self) -> bool:
        """Whether runs are in flight."""
        return bool(self._runs or self._waiting)

    def start(self, run: Run, on_done: Callable[[], None]) -> None:
        """Start a run over a one-dimensional contiguous array. ``on_done`` is called from a later ``advance``."""
        layout = self._scripts.of(run.program.plan, run.array.dtype, run.array.size)
        if self._is_idle(layout):
            # nothing to do here, but ranks with work count a generation, so this rank must too
            self._next_generation(run.key)
            on_done()
            return
        if layout.idle:
            scripted = layout.idle.pop()
            scripted.of = run
        else:
            scripted = ScriptedRun(layout, run, self._window.world)
        scripted.on_done, scripted.before = on_done, -1
        self._waiting.append(scripted)
        self._admit()

    def keep(self, program: Program, dtype: np.dtype[Any], size: int) -> ScriptedRun:
        """Prepare a run over private arrays of one size and type, for ``prompt``."""
        kernel, window = self._kernel, self._window
        layout = self._scripts.of(program.plan, dtype, size)
        stand_in = np.broadcast_to(np.empty((), dtype), size)  # with the right size, for error messages
        run = ScriptedRun(layout, Run(program, stand_in, -1, ""), window.world)
        run.staging = window.staging(min(layout.per_segment, size) * layout.item)
        address = address_of(run.staging)
        place = window.find(address, run.staging.nbytes)
        assert place is not None
        if layout.script.scratch:
            run.scratch = self._scratch.take(layout.script.scratch * layout.per_segment * layout.item)
            run.state[kernel.SCRATCH] = address_of(run.scratch)
        run.state[kernel.STAGED], run.state[kernel.OWN_SEGMENT : kernel.SIGN] = 1, (*place, address, 0)
        run.base = run.state.copy()
        return run

    def keep_in_place(self, program: Program, array: NDArray[Any]) -> ScriptedRun | None:
        """Prepare runs over this array, for ``prompt``. None if they need more memory than the array."""
        if not self.takes(program.plan, array):
            return None
        kernel, address = self._kernel, address_of(array)
        place = self._window.find(address, array.nbytes)
        layout = self._scripts.of(program.plan, array.dtype, array.size)
        if place is None or layout.script.scratch or self._is_idle(layout):
            return None
        stand_in = np.broadcast_to(np.empty((), array.dtype), array.size)
        run = ScriptedRun(layout, Run(program, stand_in, -1, ""), self._window.world)
        run.state[kernel.OWN_SEGMENT : kernel.SIGN] = (*place, address, layout.per_segment * layout.item)
        run.base = run.state.copy()
        return run

    def _is_idle(self, layout: Scripted) -> bool:
        """Whether this rank has nothing to do in a script."""
        return not layout.segments or (len(layout.script.operations) <= 2 and not layout.script.touched_by)

    def drop(self, run: ScriptedRun) -> None:
        """Release a prepared run."""
        assert run.staging is not None
        self._window.free(run.staging)
        if run.scratch is not None:
            self._scratch.give(run.scratch)

    def prompt(self, run: ScriptedRun, address: int, key: int, sign: Sign | None, spins: int) -> int | None:
        """Start and advance a prepared run over the array at ``address``, if no other run is in flight.

        Returns the code of the compiled ``advance``; the run is in flight unless the code is DONE. None if the run has
        not started.
        """
        if self._runs or self._waiting or not (self._introduced or not self._strangers()):
            return None
        kernel, window, state, layout = self._kernel, self._window, run.state, run.layout
        identity = (self._next_generation(key) << KEY_BITS | key) + 1
        run.table, run.slot = table, slot = self._slots.take(identity)
        assert run.base is not None
        state[:] = run.base
        words = run.words  # faster than the array for single numbers
        words[kernel.ID], words[kernel.OWN_SLOT] = identity, table.address + slot * board.SLOT_BYTES
        words[kernel.USER] = address
        if sign is not None:
            _SIGN.pack_into(words, 8 * kernel.SIGN, *sign.words)
        run.of.key, run.of.sign, run.before = key, sign, -1
        code = run.advance(kernel, window)(spins, 0, layout.count * layout.segments + 1)
        if code == kernel.DONE:
            table.users[slot] = len(layout.script.touched_by)
            window.count(layout.sent, layout.received)
        else:
            self._runs.append(run)
        if self._scripts.crowded(OFTEN):
            self._cores.part()
        return code

    def advance(self, spins: int, patience_ms: int = 0) -> int:
        """Advance all runs. Returns how many have moved. Raises PeerLost if one waits for a process that is gone.

        A single run may sleep up to ``patience_ms`` per condition; several runs must not delay each other, so none
        sleeps. The loop ends early if a more urgent run must be checked again.
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
        ranked = len(runs) > 1 and runs[0].of.priority != runs[-1].of.priority
        for run in runs:
            state = run.state
            if ranked:  # do not spin on an urgent run while a less urgent one could go on
                looks = 0 if run.of.priority != runs[-1].of.priority else spins
                overtaken = self._runs[0].of.priority < run.of.priority
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
            if code in (kernel.UNLIKE, kernel.BROKEN, kernel.OTHER):
                raise self._fault(run, code)
            if gone:
                self._check_peer(run, int(state[kernel.WAITS_FOR]), gone)
            if code == kernel.PAUSED or (overtaken and went_on):
                break
        if self._scripts.crowded(OFTEN):
            self._cores.part()
        return moved

    def _shown_cores(self) -> list[int]:
        """The cores on which this machine's processes waited last, this one's first, counted from 1."""
        window = self._window
        peers = (peer for peer in range(window.world) if peer != window.rank)
        boards = [window.board, *(window.words_of(peer, 0) for peer in peers)]
        return [int(words[board.CORE // 8]) for words in boards if words.size]

    def _go_on(
        self, run: ScriptedRun, call: Callable[[int, int, int], int], spins: int, patience_ms: int, overtaken: bool
    ) -> int:
        """Advance a run: by one operation if it is ``overtaken``, else until it waits or new work is submitted."""
        most, code = 1 if overtaken else run.layout.count, self._kernel.PAUSED
        while code == self._kernel.PAUSED:
            if self._observer is None:
                code = call(spins, patience_ms, most)
            else:
                code = self._observed(self._observer, run, partial(call, spins, patience_ms, most))
            if overtaken or (code == self._kernel.PAUSED and self._handed_over()):
                break
        return code

    def _observed(self, observer: Observer, run: ScriptedRun, call: Callable[[], int]) -> int:
        """Advance a run and report the finished operations to the observer."""
        first, script = self._done(run), run.layout.script
        at = {"segment": first // len(script.operations), "step": first % len(script.operations)}
        span = begin(observer, "advance", run.of.label, run.of.span, priority=run.of.priority, **at)
        code = call()
        for done in range(first, self._done(run)):
            segment, step = divmod(done, len(script.operations))
            for kind, peer, nbytes in self._moved(run, script.operations[step], segment):
                what = {"segment": segment, "step": step, "peer": peer, "nbytes": nbytes}
                begin(observer, kind, run.of.label, span, priority=run.of.priority, **what).end()
        span.end()
        return code

    def _done(self, run: ScriptedRun) -> int:
        """The number of finished operations in all segments."""
        return int(run.state[self._kernel.AT]) + int(run.state[self._kernel.SEGMENT]) * len(
            run.layout.script.operations
        )

    def _moved(self, run: ScriptedRun, operation: Operation, segment: int) -> list[tuple[Kind, int, int]]:
        """The transfers of one operation: kind, peer and bytes."""
        layout, rank = run.layout, run.layout.script.rank
        length = min(layout.per_segment, run.of.array.size - segment * layout.per_segment)
        start, stop = (length * chunk // layout.plan.chunks for chunk in (operation.lo, operation.hi))
        nbytes, found = (stop - start) * layout.item, list[tuple[Kind, int, int]]()
        if start == stop or not operation.sources:
            return found
        found += [("receive", source, nbytes) for source in operation.sources if source >= 0 and source != rank]
        found.append(("copy" if len(operation.sources) == 1 else "reduce", -1, nbytes))
        return found + [("send", target, nbytes) for target in operation.targets if target >= 0 and target != rank]

    def sleep_soon(self) -> None:
        """Announce that this process will sleep, so that peers ring its bell. Call ``advance`` once more after this."""
        self._kernel.sleep_soon(self._board)

    def awake(self) -> None:
        """Announce that this process is awake."""
        self._kernel.awake(self._board)

    @property
    def labels(self) -> list[str]:
        """The labels of the runs in flight."""
        return [run.of.label for run in (*self._runs, *self._waiting) if not run.of.tolerant]

    @property
    def waiting_for(self) -> dict[int, str]:
        """Peer -> label of a run that waits for it: peers that have not joined, else the peer that blocks it."""
        opened = {peer: run.of.label for run in tuple(self._runs) for peer in self._awaited(run)}
        if opened or self._introduced:
            return opened
        waiting, strangers = tuple(self._waiting), self._strangers()
        return {
            peer: run.of.label for run in waiting if not run.of.tolerant for peer in strangers.intersection(_peers(run))
        }

    def _awaited(self, run: ScriptedRun) -> list[int]:
        wanted = int(run.state[self._kernel.ID])
        touches = run.layout.script.touches
        absent = [peer for peer in touches if not self._has_come(peer, wanted)]
        if run.of.tolerant and len(absent) == len(touches):
            return []  # no peer has joined it
        return absent or [int(run.state[self._kernel.WAITS_FOR])]

    def absent(self, key: int, processes: Iterable[int]) -> set[int]:
        """The members of ``processes`` that have not joined a run in flight here. Callable from any thread."""
        wanted = next((int(run.state[self._kernel.ID]) for run in tuple(self._runs) if run.of.key == key), None)
        if wanted is None:
            return set()
        return {peer for peer in processes if peer != self._window.rank and not self._has_come(peer, wanted)}

    def _has_come(self, peer: int, wanted: int) -> bool:
        """Whether a process has a slot for a run; assumed true while one of its tables is not mapped yet."""
        shown = self._window.words_of(peer, 0)
        tables = [
            shown[_HEAD_WORDS:],
            *(self._window.words_of(peer, int(number)) for number in shown[_TABLES] if number),
        ]
        return any(wanted in table[_IDS] for table in tables) or not all(table.size for table in tables[1:])

    def _strangers(self) -> set[int]:
        """The processes whose board or bell is still unknown."""
        members = self._window.members
        known = (members[:, self._kernel.BOARD] != 0) & (members[:, self._kernel.BELL] >= 0)
        return {int(peer) for peer in np.flatnonzero(~known)}

    def _admit(self) -> None:
        """Open waiting runs once their peers can be woken. Only the first runs of a session wait for this."""
        strangers = set[int]() if self._introduced else self._strangers()
        self._introduced = not strangers
        for run in tuple(self._waiting):
            if strangers and not strangers.isdisjoint(_peers(run)):
                continue
            self._waiting.remove(run)
            self._open(run)

    def _open(self, run: ScriptedRun) -> None:
        """Initialize a run's state. Its first ``advance`` fills in the slot and publishes it."""
        kernel, window, layout, state = self._kernel, self._window, run.layout, run.state
        identity = (self._next_generation(run.of.key) << KEY_BITS | run.of.key) + 1
        run.table, run.slot = table, slot = self._slots.take(identity)
        state[:] = layout.state
        address = address_of(run.of.array)
        place = window.find(address, run.of.array.nbytes)
        stride = layout.per_segment * layout.item
        if place is None:
            run.staging = window.staging(min(stride, run.of.array.nbytes))
            state[kernel.STAGED], state[kernel.USER], stride = 1, address, 0
            address = address_of(run.staging)
            place = window.find(address, run.staging.nbytes)
            assert place is not None
        if layout.script.scratch:
            run.scratch = self._scratch.take(layout.script.scratch * layout.per_segment * layout.item)
            state[kernel.SCRATCH] = address_of(run.scratch)
        state[kernel.ID], state[kernel.OWN_SLOT] = identity, table.address + slot * board.SLOT_BYTES
        state[kernel.OWN_SEGMENT : kernel.SIGN] = *place, address, stride
        if run.of.sign is not None:
            state[kernel.SIGN : kernel.THEIRS] = run.of.sign.words
        if self._runs and run.of.priority < self._runs[-1].of.priority:
            insort(self._runs, run, key=_priority)
        else:
            self._runs.append(run)

    def _next_generation(self, key: int) -> int:
        """The number of earlier uses of a key. All ranks count alike and so find the slots of the same run."""
        generation = self._generations.get(key, 0)
        self._generations[key] = (generation + 1) & _GENERATIONS
        return generation

    def _finish(self, run: ScriptedRun) -> None:
        self._runs.remove(run)
        assert run.table is not None
        run.table.users[run.slot] = len(run.layout.script.touched_by)
        self._window.count(run.layout.sent, run.layout.received)
        on_done, run.on_done = run.on_done, nothing
        if run.base is None:
            run.of.array = _NO_ARRAY  # the array may be freed; other threads may still read the label and the key
            if run.staging is not None:
                self._window.free(run.staging)
                run.staging = None
            if run.scratch is not None:
                self._scratch.give(run.scratch)
                run.scratch = None
            run.layout.idle.append(run)
        on_done()

    def _fault(self, run: ScriptedRun, code: int) -> Exception:
        """The error for a peer whose slot contradicts this run."""
        if code == self._kernel.OTHER:
            assert run.of.sign is not None
            theirs = run.state[self._kernel.THEIRS : self._kernel.STATE].tolist()
            return run.of.sign.differs(int(run.state[self._kernel.WAITS_FOR]), tuple(theirs))
        if code == self._kernel.BROKEN:
            peer = int(run.state[self._kernel.WAITS_FOR])
            return broken(peer, f"its slot for {run.of.label} names memory that it has not shared")
        return ProtocolError(
            f"{self._where(run)}: that rank exchanges another number of bytes than the {run.of.array.nbytes} here;"
            " do all ranks run the same version with the same model?",
            rank=int(run.state[self._kernel.WAITS_FOR]),
        )

    def _check_peer(self, run: ScriptedRun, peer: int, gone: set[int]) -> None:
        """Raise PeerLost if the awaited process has gone, unless the run is tolerant and it has left in order."""
        if peer not in gone:
            return
        if not (run.of.tolerant and self._has_left(peer)):
            raise PeerLost(f"{self._where(run)}: the connection to rank {peer} closed", rank=peer)

    def _check_waiting(self, gone: set[int]) -> None:
        """Raise PeerLost for a run that has not begun and needs a process that has gone."""
        for run in self._waiting if gone else ():
            for peer in sorted(gone.intersection(_peers(run))):
                if not (run.of.tolerant and self._has_left(peer)):
                    raise PeerLost(f"{run.of.label}: the connection to rank {peer} closed", rank=peer)

    def _where(self, run: ScriptedRun) -> str:
        kernel, state, plan = self._kernel, run.state, run.layout.plan
        return (
            f"{run.of.label}: waiting for rank {state[kernel.WAITS_FOR]} in shared memory ({plan.name}, operation"
            f" {state[kernel.AT]} of {len(run.layout.script.operations) - 1}, segment {state[kernel.SEGMENT] + 1} of"
            f" {run.layout.segments})"
        )


def _peers(run: ScriptedRun) -> tuple[int, ...]:
    """The processes that a run accesses and those that access it."""
    return run.layout.script.touches + run.layout.script.touched_by


_NO_ARRAY = np.empty(0, np.uint8)
_GENERATIONS = 0xFFFFFFFF

_HEAD_WORDS = board.BOARD_HEAD // 8
_TABLES = slice(board.TABLES // 8, _HEAD_WORDS)
_IDS = slice(board.SLOT_ID // 8, None, board.SLOT_BYTES // 8)
"""The table segments among a board's words, and the run identities among a table's words."""
