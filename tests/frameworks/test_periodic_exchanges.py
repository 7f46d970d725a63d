"""What travels where weights are exchanged: bytes, codecs' payloads, weights that were loaded, ranks that have left."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from periodic import equal, shares
from toy import Here, adam, batch, close, loss_of, making, mlp, on_group, sgd, weights

from syncline.errors import GradientError, UsageError
from syncline.frameworks.torch import prepare
from syncline.frameworks.torch.prepare import shadow_until_all_joined
from syncline.session.session import Session


@pytest.mark.parametrize(("sync", "period"), [("local(steps=16)", 16), ("diloco(steps=50)", 50)])
def test_bytes_are_fewer_by_the_period(group: Any, sync: str, period: int) -> None:
    """Counted at the transport, with headers and tickets."""

    def sent(session: Session) -> int:
        made = prepare(session, *sgd())
        assert made is not None
        here = Here(made.model, made.optimizer, session.rank, 2, session, made.replica)  # type: ignore[arg-type]
        shares(here, range(1))
        before = session.stats().bytes_sent
        shares(here, range(1, 1 + period))
        return sum(session.stats().bytes_sent.values()) - sum(before.values())

    often, seldom = group("ring", 2, sent)[0], group(f"ring sync={sync}", 2, sent)[0]
    assert often == period * seldom


def test_what_a_codec_has_lost_comes_with_the_next_differences(group: Any) -> None:
    """Error feedback: when workers stand still, the agreed weights become the mean at last."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        shares_float(here, range(1))
        first = weights(here.model)
        here.optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(40):
            shares_float(here, range(1))
        return first, weights(here.model)

    def shares_float(here: Here, steps: range) -> None:
        for step in steps:
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * step + here.rank).float())).backward()
            here.optimizer.step()

    own = []
    for rank in range(2):
        here = Here(*make(0), rank=rank)
        shares_float(here, range(1))
        own.append(weights(here.model))
    wanted = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    for first, last in on_group(group, "ring sync=local(steps=1) codec=topk(ratio=0.1)", 2, make, body, weight=1):
        assert (first["0.weight"] - wanted["0.weight"]).norm() > 1e-3
        close(last, wanted, 1e-5)


def test_weights_are_exchanged_by_an_optimizer_that_is_known(group: Any) -> None:
    def run(session: Session) -> None:
        prepare(session, mlp())

    with pytest.raises(UsageError, match=r"sync=local exchanges weights when the optimizer .* give syncline.prepare"):
        group("ring sync=local(steps=2)", 2, run)


def test_different_weights_that_ranks_load_are_found(group: Any) -> None:
    def body(here: Here) -> None:
        here.model.load_state_dict(mlp(here.rank).state_dict())
        shares(here)

    with pytest.raises(GradientError, match=r"loaded different weights .* load the same weights on all ranks"):
        on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1)


def test_the_same_weights_that_ranks_load_are_agreed_on(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        shares(here, range(1))
        here.model.load_state_dict(mlp(7).state_dict())
        shares(here, range(1, 2))
        return weights(here.model)

    own = []
    for rank in range(2):
        here = Here(mlp(7), None, rank=rank)  # type: ignore[arg-type]
        here.optimizer = torch.optim.SGD(here.model.parameters(), lr=0.1)
        shares(here, range(1, 2))
        own.append(weights(here.model))
    wanted = {name: (own[0][name] + own[1][name]) / 2 for name in own[0]}
    for mine in on_group(group, "ring sync=local(steps=2)", 2, making("sgd"), body, weight=1):
        close(mine, wanted)


@pytest.mark.parametrize("counts", [[2, 5], [3, 0], [4, 4]])
@pytest.mark.parametrize("sync", ["local(steps=2)", "diloco(steps=2)", "easgd(steps=2)", "gossip", "gossip(steps=2)"])
def test_joined_ranks_end_equal_and_go_on(group: Any, sync: str, counts: list[int]) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for start, mine in ((0, counts), (20, counts[::-1])):
            shares(here, range(start, start + mine[here.rank]))
            shadow_until_all_joined(here.replica)
        assert here.replica.steps == 2 * max(counts)
        return weights(here.model)

    equal(on_group(group, f"ring sync={sync}", 2, adam, body, weight=1))


@pytest.mark.parametrize(
    ("mode", "steps", "says"),
    [
        ("diloco(steps=2)", 7, r"3 outer steps in 7 steps, .* first 20: .*diloco\(steps=2, momentum=0.33\)"),
        ("diloco(steps=50)", 3, r"0 outer steps in 3 steps, .* first 20: .*diloco\(steps=50, momentum=0\)"),
        ("diloco(steps=2, momentum=0.5)", 8, ""),
        ("diloco(steps=50, momentum=0.0)", 3, ""),
        ("local(steps=2)", 2, ""),
    ],
)
def test_who_ends_after_few_outer_steps_is_told(
    group: Any, mode: str, steps: int, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "syncline"):
        on_group(group, f"ring sync={mode}", 2, sgd, lambda here: shares(here, range(steps)), weight=1)
    said = [text for record in caplog.records if "outer steps" in (text := record.getMessage())]
    assert len(said) == bool(says)
    assert all(re.search(says, one) for one in said), said


def test_a_joined_rank_counts_with_the_steps_that_it_has_made(group: Any) -> None:
    """Of three steps, and of one: the mean after two is of both, and that at the end of the first alone."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        shares(here, range([3, 1][here.rank]))
        shadow_until_all_joined(here.replica)
        return weights(here.model)

    made = [making("sgd")(0) for _ in range(2)]
    shares(Here(*made[0], rank=0), range(2))
    shares(Here(*made[1], rank=1), range(1))
    with torch.no_grad():
        for mine, other in zip(made[0][0].parameters(), made[1][0].parameters(), strict=True):
            mine.copy_((mine + other) / 2)
    shares(Here(*made[0], rank=0), range(2, 3))
    for found in on_group(group, "ring sync=local(steps=2)", 2, making("sgd"), body, weight=1):
        close(found, weights(made[0][0]))
