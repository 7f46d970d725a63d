"""Measures what a gradient costs the training thread in a real step, beside its messages: ``tensor``.

A model of small tensors trains with and without Syncline, each tensor in a bucket of its own (``schedule=wait_free``).
The difference of the training thread's processor time is the constant. A plan that runs alone does not show it: hooks,
the state machine of a step, tickets and the hand-over to the engine belong to steps.
"""

from __future__ import annotations

import time
from importlib.util import find_spec

from syncline import api
from syncline.session.session import Session

from .fits import Estimate, Samples
from .links import Told, without_collector

_TENSORS, _ELEMENTS = 64, 256
_ROUNDS, _STEPS = 15, 4
_FIRST = 2
"""The first rounds make buckets and load code; they do not count."""


def measure(session: Session, told: Told) -> Estimate | None:
    """The processor seconds per tensor on this rank. All ranks call it together; None without torch or wait_free."""
    able = [int(found) for found in session.gather(b"1" if find_spec("torch") else b"0")]
    if session.world_size < 2 or session.strategy.schedule.name != "wait_free" or not all(able):
        return None
    from ..codecs.compositions import one_thread  # needs torch

    told(0.0, "steps of small tensors")
    with without_collector(), one_thread():
        plain_s, prepared_s = min(_times(prepare=False)), _times(prepare=True)
    return Samples(tuple(max(0.0, one_s - plain_s) / _TENSORS for one_s in prepared_s)).estimate


def _times(*, prepare: bool) -> list[float]:
    """This thread's processor seconds of a step, for every round."""
    import torch

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
    if prepare:
        model, optimizer = api.prepare(model, optimizer)
    found = []
    for _ in range(_ROUNDS):
        begun_s = time.thread_time()
        for _ in range(_STEPS):
            model(torch.ones(_ELEMENTS)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((time.thread_time() - begun_s) / _STEPS)
    if prepare:
        api.release(model)
    return found[_FIRST:]
