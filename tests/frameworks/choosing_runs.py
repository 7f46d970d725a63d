"""What tests of chosen schedules have in common: what is chosen, and by whom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from toy import Here, batch, loss_of, train

from syncline.costs.plans import LinearCost
from syncline.frameworks.torch import choosing
from syncline.nouns import Layer
from syncline.session.layout import Lay, Layout
from syncline.strategy.grammar import read_part
from syncline.strategy.strategy import Strategy

STEPS = choosing._UNCOUNTED + choosing._MEASURED
"""After so many the schedule is chosen, at the next one's first gradient."""


Asked = list[bool]


Script = Callable[[Here, int], None]


def step(here: Here, number: int) -> None:
    train(here, range(number, number + 1))


def schedule_of(here: Here) -> str:
    assert here.session is not None
    return here.session.stats().strategy.split("schedule=")[1].split()[0]


def overlaps(here: Here) -> bool:
    return schedule_of(here).startswith("priority")


def clips(here: Here, number: int) -> None:
    loss_of(here.model(here.share(batch(number)))).backward()
    torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.5)
    here.optimizer.step()
    here.optimizer.zero_grad()


def answered(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Whether iterations may overlap at each choice of rank 0; if so they overlap, and the rest is decided too."""
    monkeypatch.setenv("SYNCLINE_TUNING", "on")
    given: Asked = []

    def choose(
        strategy: Strategy, layers: Sequence[Layer], cost: LinearCost | None, lay: Lay, overlap: bool, *, crowded: bool
    ) -> Layout:
        assert not crowded  # ranks are threads of one process here
        assert cost is not None
        assert any(layer.backward_s > 0 for layer in layers)
        given.append(overlap)
        text = "priority(slice=40B)" if overlap else "wait_free"
        laid = lay(replace(strategy, schedule=read_part(text)))
        return replace(laid, schedule=text, reason="as a test would have it", cost=cost)

    monkeypatch.setattr(choosing, "choose_schedule", choose)
    return given
