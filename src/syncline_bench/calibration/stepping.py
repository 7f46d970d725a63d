"""Measures what a gradient costs the training thread in a real step, beside its messages: ``tensor``.

A model of small tensors trains with and without Syncline, each tensor in a bucket of its own (``schedule=wait_free``).
The difference of the training thread's processor time is the constant. A plan that runs alone does not show it: hooks,
the state machine of a step, tickets and the hand-over to the engine belong to steps. A thread that waits may drive the
engine itself. That time does not count, because ``message``, ``byte_cpu``, ``bucket`` and ``gamma`` contain it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from syncline.engine.order import Work
from syncline.session.session import Session

from .fits import Estimate, Samples
from .links import Told, rounds_within, without_collector, without_torch

_TENSORS, _ELEMENTS = 64, 256
_ROUNDS, _STEPS = 13, 4
_FIRST = 2
"""The first rounds make buckets and load code; they do not count."""


def measure(session: Session, budget_s: float, told: Told) -> Estimate | str:
    """The processor seconds per tensor on this rank, or the reason why there are none. All ranks call it together."""
    if missing := without_torch(session):
        return missing
    strategy = session.strategy
    if strategy.schedule.name != "wait_free":
        return f"the ranks use {strategy}, and it needs schedule=wait_free (--transport tcp)"
    from ..codecs.compositions import one_thread  # needs torch

    told(0.0, "steps of small tensors")
    rounds = rounds_within(session, budget_s, _ROUNDS)
    with without_collector(), one_thread():
        plain_s, prepared_s = float(np.median(_times(None, rounds))), _times(session, rounds)
    return Samples(tuple(max(0.0, one_s - plain_s) / _TENSORS for one_s in prepared_s)).estimate


@contextmanager
def _driving(session: Session) -> Iterator[Callable[[], float]]:
    """This thread's processor seconds in ``drive`` of the engine. Only this measurement pays for the clock."""
    engine, thread, spent_s = session.engine, threading.get_ident(), 0.0
    drive = engine.drive

    def timed(works: Collection[Work] | None, *more: Any) -> None:
        nonlocal spent_s
        begun_s = time.thread_time()
        try:
            drive(works, *more)
        finally:
            if threading.get_ident() == thread:
                spent_s += time.thread_time() - begun_s

    engine.drive = timed  # type: ignore[method-assign, assignment]
    try:
        yield lambda: spent_s
    finally:
        engine.drive = drive  # type: ignore[method-assign]


def _times(session: Session | None, rounds: int) -> list[float]:
    """This thread's processor seconds of a step outside the engine, for every round; with a session, as its rank."""
    import torch

    from syncline.frameworks.torch import prepare, release

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factors = torch.nn.ParameterList(torch.ones(_ELEMENTS) for _ in range(_TENSORS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for factor in self.factors:
                x = x * factor
            return x.sum()

    model: torch.nn.Module = Chain()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    if session is not None:
        prepare(session, model, optimizer)
    found = []
    driving: AbstractContextManager[Callable[[], float]] = nullcontext(float) if session is None else _driving(session)
    with driving as driven_s:
        for _ in range(_FIRST + rounds):
            begun_s = time.thread_time() - driven_s()
            for _ in range(_STEPS):
                model(torch.ones(_ELEMENTS)).backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append((time.thread_time() - driven_s() - begun_s) / _STEPS)
    if session is not None:
        release(session, model)
    return found[_FIRST:]
