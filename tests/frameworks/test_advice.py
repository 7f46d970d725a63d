"""A codec that sends few elements is told of at the start where the optimizer learns little from them at first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from toy import mlp

from syncline.frameworks.torch import prepare
from syncline.session.session import Session

OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "Adagrad": torch.optim.Adagrad,
    "SGD": torch.optim.SGD,
}


def said(group: Any, strategy: str, optimizer: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of all ranks of a run."""

    def start(session: Session) -> None:
        model = mlp().float()
        made = prepare(session, model, OPTIMIZERS[optimizer](model.parameters(), lr=0.1))
        if made is not None:
            made.replica.detach()

    with caplog.at_level(logging.WARNING, "syncline"):
        group(strategy, 2, start)
    return [record.getMessage() for record in caplog.records]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "text", ["topk(ratio=0.01)", "gtopk(ratio=0.01)", "randomk(ratio=0.01)", "threshold(ratio=0.01)"]
)
def test_few_elements_under_an_adaptive_optimizer_are_told_once(
    group: Any, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (one,) = said(group, f"codec={text}", "AdamW", caplog)
    assert one.startswith("rank 0")
    assert "in 100 steps or so, and AdamW learns little" in one
    assert "codec=threshold(ratio=0.01, warmup=100)" in one


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_every_optimizer_that_divides_by_the_size_of_gradients_is_meant_and_no_other(
    group: Any, name: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = said(group, f"{strategy} codec=topk(ratio=0.01)", name, caplog)
    assert len(found) == (name != "SGD")


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "int8",
        "topk(ratio=0.1)",
        "feedback(topk(ratio=0.01), warmup=5)",
        "threshold(ratio=0.01, warmup=5)",
        "adaptive(topk(ratio=0.01))",  # whose tensors here are too small for it
    ],
)
def test_nothing_is_said_where_more_is_sent(group: Any, text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert said(group, f"codec={text}", "AdamW", caplog) == []


def test_what_is_chosen_for_large_tensors_counts(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert len(said(group, "codec=adaptive(topk(ratio=0.01), small=8B)", "AdamW", caplog)) == 1
