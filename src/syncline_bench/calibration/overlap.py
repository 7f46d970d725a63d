"""Measures how much longer a backward pass takes while the engine moves messages: ``slowdown.cpu``.

Every rank computes with torch on one thread, as ``compare`` does, first alone, then while its engine runs ring
allreduces of ``_SIZES`` among all ranks that take part. The lost time is set against the processor time of the same
allreduces without computation, which is the time that a simulation gives to the thread that moves messages. So the
constant contains everything that both share: caches, memory, the interpreter's lock, and cores, if there are fewer than
busy threads. It is measured for layers that mostly multiply matrices and for layers that mostly pass over memory; its
range covers all of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from syncline.algorithms.ring import all_gather_rows, reduce_scatter_rows
from syncline.engine.order import Order, Work
from syncline.plans.messages import compile_program
from syncline.plans.plan import Plan
from syncline.session.session import Session

from ..report import units
from .fits import Estimate
from .links import Told, rounds_within, without_collector, without_torch

_SIZES = {64 << 10: 128, 4 << 20: 12}
"""Bytes of an allreduce, and the most of them that are in flight together."""

_TOGETHER_S = 0.2
"""The time of the allreduces of a round. Sizes of which one takes longer are left out, as on slow links."""

_ALONE_S = 0.06
"""The time of the passes without communication."""

_ROUNDS = 7
_MOST_SPREAD = 2.0
"""The distance of the quartiles of all rounds above which other work on the machine hides what is measured."""

_LABEL = "calibration"

Pass = Callable[[], None]


def measure(session: Session, members: Sequence[int], budget_s: float, told: Told) -> Estimate | str:
    """The seconds lost per processor second of the engine, or the reason why they are not known.

    All ranks call it together; ``members`` take part. With less time there are fewer rounds, passes and allreduces.
    """
    if missing := without_torch(session):
        return missing
    from ..codecs.compositions import one_thread  # needs torch

    rounds = rounds_within(session, budget_s, _ROUNDS)
    with without_collector(), one_thread():
        found = _Measuring(session, tuple(members), rounds, told).run()
    return _estimate(found)


def _estimate(found: NDArray[np.float64]) -> Estimate | str:
    """The median of the rows' medians, whose range is the interval; a reason instead if the rounds tell nothing."""
    if not found.size:
        return f"an allreduce of {units.size(min(_SIZES))} takes longer than {_TOGETHER_S:g} s on these links"
    spread = float(np.subtract(*np.percentile(found, (75, 25))))
    if spread > _MOST_SPREAD:
        return (
            f"other work on the machine hides it: the quartiles of the rounds are {spread:.1f} apart, more than"
            f" {_MOST_SPREAD:g} (measure again on a machine that does nothing else)"
        )
    medians = np.maximum(np.median(found, axis=1), 0.0)
    return Estimate(float(np.median(medians)), float(medians.min()), float(medians.max()), samples=found.size)


class _Measuring:
    """The rounds of one measurement; every rank executes them."""

    def __init__(self, session: Session, members: tuple[int, ...], rounds: int, told: Told) -> None:
        self._session, self._rounds, self._told = session, rounds, told
        count = len(members)
        parts = [(place, 1) for place in range(count)]
        rows = [reduce_scatter_rows(members, parts, 0), all_gather_rows(members, parts, count - 1)]
        plan = Plan.of(_LABEL, session.world_size, count, np.concatenate(rows))
        self._program = compile_program(plan, session.rank)
        self._takes_part = session.rank in members

    def run(self) -> NDArray[np.float64]:
        """The lost seconds per processor second: a row for each kind of layers and size, a column for each round."""
        found: list[list[float]] = []
        for kind, step in _passes():
            for nbytes, most in _SIZES.items():
                arrays = self._arrays(nbytes, most)
                if not arrays:
                    continue
                self._finish(self._start(arrays))
                step()
                self._told(len(found) / 4, f"computing beside messages: {kind}")
                found.append([self._round(arrays, step) for _ in range(self._rounds)])
        return np.array(found)

    def _arrays(self, nbytes: int, most: int) -> list[NDArray[np.float32]]:
        """The arrays of a round, as many as rank 0 finds time for."""
        found = [self._session.engine.allocate(nbytes, np.dtype(np.float32)) for _ in range(most)]
        for array in found:
            array[:] = 0  # sums of zeros cannot overflow
        self._finish(self._start(found[:1]))
        begun_s = time.perf_counter()
        self._finish(self._start(found[:1]))
        count = min(most, int(_TOGETHER_S / (time.perf_counter() - begun_s)))
        count = -(-count * self._rounds // _ROUNDS)
        return found[: int(json.loads(self._session.tell_all(json.dumps(count).encode())))]

    def _round(self, arrays: Sequence[NDArray[np.float32]], step: Pass) -> float:
        """One round; the mean over the ranks that take part."""
        self._session.barrier()
        pass_s = self._alone_s(step) if self._takes_part else 0.0
        self._session.barrier()
        used_s = time.process_time()
        self._finish(self._start(arrays))
        used_s = time.process_time() - used_s
        self._session.barrier()
        works, begun_s, passes = self._start(arrays), time.perf_counter(), 0
        engine = self._session.engine  # after a fault nothing is done any more, and ``_finish`` raises
        while self._takes_part and engine.error is None and not all(work.done for work in works):
            step()
            passes += 1
        lost_s = time.perf_counter() - begun_s - passes * pass_s
        self._finish(works)
        mine = np.array([lost_s, used_s] if self._takes_part else [0.0, 0.0])
        every = np.array([np.frombuffer(told) for told in self._session.gather(mine.tobytes())])
        lost, used = every.sum(axis=0)
        return float(lost / used)

    def _alone_s(self, step: Pass) -> float:
        """The mean time of a pass."""
        begun_s, passes = time.perf_counter(), 0
        while time.perf_counter() - begun_s < _ALONE_S * self._rounds / _ROUNDS:
            step()
            passes += 1
        return (time.perf_counter() - begun_s) / passes

    def _start(self, arrays: Sequence[NDArray[np.float32]]) -> list[Work]:
        engine, keys = self._session.engine, self._session.keys
        orders = [Order(self._program, array, keys.take(), _LABEL) for array in arrays]
        return [engine.start(order) for order in orders]

    def _finish(self, works: Sequence[Work]) -> None:
        for work in works:
            self._session.engine.wait(work)


def _passes() -> Iterator[tuple[str, Pass]]:
    """Forward and backward passes of some milliseconds: of a transformer, and of layers as large as their input."""
    import torch
    from torch.nn.functional import cross_entropy

    from ..workloads.models.transformer import Transformer

    model, symbols = Transformer(96, 64, 128, 4, 6), torch.zeros(8, 64, dtype=torch.int64)
    yield "a transformer", lambda: cross_entropy(model(symbols), symbols).backward()  # type: ignore[no-untyped-call]
    sparse = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024))
    rows = torch.ones(8, 1024)
    yield "wide layers", lambda: sparse(rows).square().mean().backward()
