"""Runs plans over a transport: by messages, in mapped memory, or by what the transport's library does by itself.

Chooses the way of each run (``messages``, ``memory``), and turns the transport for all of them.

Priority: sends carry it to the transport, and of what has completed there the most urgent is acted upon first. Before
what is less urgent it is looked whether something urgent has come meanwhile: so a run waits for no more than what has
come of one window of segments of a less urgent one, and what it has opened waits in the transport behind the urgent.
Nothing is held back while nothing more urgent is there to be done: so ranks may have different priorities, and each run
ends. With equal priorities everything is acted upon in the order in which it completed.

Pure apart from the transport it is given: no threads, no clocks, no knowledge of frameworks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from ..collectives import Collective
from ..errors import UsageError, labelled
from ..plans.plan import Plan
from ..transports import Handle, HasAllreduce, Transport
from ..wire.links import CONTROL
from ..wire.scratch import Scratch
from .memory import OneSided
from .messages import KEYS, MOST_ACTIONS, Array, Run, Sign, TwoSided
from .scripts import ScriptedRun
from .trace import Observer, Span, begin
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
        self._observer = observer
        self.scratch = Scratch()
        self._under_way: dict[int, Run] = {}
        self._messages = TwoSided(
            transport, self.scratch, segment_bytes, window, has_left, observer, finish=self._finish
        )
        mapped: Window | None = getattr(transport, "window", None)
        shared_bytes = min(segment_bytes, SHARED_SEGMENT_BYTES)
        self._onesided = (
            None if mapped is None else OneSided(mapped, self.scratch, shared_bytes, has_left, observer, handed_over)
        )
        self._handed: dict[int, str] = {}  # key -> label of what a library does by itself
        self.progress: Callable[..., int] = self._turn if self._onesided is None else self._advance
        """Do what can be done, waiting up to ``timeout`` seconds for it; returns how much that was.

        What is in shared memory is looked at ``spins`` times before this process sleeps.
        """
        self._ranked = False  # whether something had another priority than 0
        self._behind: list[Handle] = []  # what has completed and is less urgent than what was acted upon last

    def start(self, run: Run) -> None:
        """Begin a run; its ``on_done`` is called from a later ``progress``, or at once when there is nothing to do.

        Raises UsageError for a run that cannot be started, before anything of it is.
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
        if run.priority != 0.0:
            self.regard(run.priority)
        shared = self._onesided
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
            on_done = partial(self._finish, run)
            shared.start(
                run.program.plan, run.array, run.key, run.label, on_done, run.tolerant, run.priority, run.span, run.sign
            )
        elif run.left == 0:
            self._finish(run)
        else:
            self._messages.open(run)

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
        kept.label, kept.on_done = run.label, partial(self._finish, run)

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

    def _advance(self, timeout: float, spins: int = SPINS) -> int:
        """Carry out what lies in shared memory, and turn the transport."""
        shared = self._onesided
        assert shared is not None
        if not shared.active:
            return self._turn(timeout)
        moved = shared.advance(spins, PATIENCE_MS if timeout and len(self._under_way) == 1 and not self._behind else 0)
        if moved or self._behind:
            return moved + (self._turn(0.0) if shared.active else 0)
        shared.sleep_soon()
        try:
            return shared.advance(0) or self._turn(timeout)
        finally:
            shared.awake()

    def _turn(self, timeout: float, spins: int = SPINS) -> int:  # noqa: ARG002 - of shared memory
        """Turn the transport once and act on what has completed."""
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
        waits = {} if self._onesided is None else dict(self._onesided.waiting_for)
        for run in self._runs():
            waits |= self._messages.waiting_for(run)
        return waits

    @property
    def labels(self) -> list[str]:
        """What is under way, oldest first; may be asked from another thread."""
        return [run.label for run in self._runs() if not run.tolerant] + list(self._handed.values())

    def _runs(self) -> list[Run]:
        return list(self._under_way.values())

    def _finish(self, run: Run) -> None:
        del self._under_way[run.key]
        run.left = 0
        if run.span is not None:
            run.span.end()
        if run.on_done is not None:
            run.on_done()


def _urgency(handle: Handle) -> float:
    """The priority of what waits for a handle; single messages, for which much else waits, before everything."""
    owner = handle.owner
    if isinstance(owner, tuple):
        priority: float = owner[0].run.priority
        return priority
    return getattr(owner, "priority", CONTROL)
