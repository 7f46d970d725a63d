"""Checkpoints where workers train by themselves: in the middle of a period, on another number of workers."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from periodic import Normalised, equal, shares
from toy import Here, batch, close, fill, on_group, sgd, weights

from syncline import checkpoint
from syncline.errors import UsageError
from syncline.frameworks.torch import Prepared


def saved_state(here: Here) -> Any:
    """What each rank saves, as ``torch.save`` and ``torch.load`` leave it."""
    assert here.session is not None
    file = io.BytesIO()
    state = checkpoint.save(here.session, prepared(here))
    torch.save([here.model.state_dict(), here.optimizer.state_dict(), state], file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def prepared(here: Here) -> list[Any]:
    assert here.replica is not None
    return [Prepared(here.model, here.optimizer, here.replica, None)]


def small_with_statistics(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = fill(Normalised().float())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def float_shares(here: Here, steps: range) -> None:
    for step in steps:
        here.optimizer.zero_grad()
        x = batch(10 * step + here.rank, 4 + 2 * here.rank).float()
        here.model(x).square().sum().backward()
        here.optimizer.step()


@pytest.mark.parametrize("at", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "sync",
    [
        "local(steps=3)",
        "diloco(steps=3)",
        "easgd(steps=3)",
        "gossip(graph=exponential, steps=2)",
        "post_local(after=4, steps=2)",
        "local(steps=2) codec=topk(ratio=0.3)",
        "post_local(after=3, steps=2) codec=int8",
    ],
)
def test_a_resumed_run_goes_on_with_the_same_bits(group: Any, sync: str, at: int) -> None:
    """From the middle of a period too: each rank with its own weights, statistics and optimizer."""
    kept: dict[int, Any] = {}

    def whole(here: Here) -> dict[str, torch.Tensor]:
        float_shares(here, range(at))
        kept[here.rank] = saved_state(here)
        float_shares(here, range(at, 9))
        return weights(here.model)

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        assert here.session is not None
        model, optimizer, state = kept[here.rank]
        here.model.load_state_dict(kept[0][0])  # rank 0's, as most scripts have it
        here.optimizer.load_state_dict(optimizer)
        checkpoint.load(here.session, prepared(here), state)
        assert here.replica is not None
        assert here.replica.steps == at
        for name, tensor in weights(here.model).items():
            assert torch.equal(tensor, model[name])
        float_shares(here, range(at, 9))
        return weights(here.model)

    weight = 1 if sync.startswith("gossip") else "batch"
    wanted = on_group(group, f"ring sync={sync}", 2, small_with_statistics, whole, weight=weight)
    found = on_group(group, f"ring sync={sync}", 2, small_with_statistics, resumed, weight=weight)
    for mine, theirs in zip(found, wanted, strict=True):
        equal([theirs, mine])


def test_a_state_after_a_period_that_ended_in_a_skipped_step_is_of_one_moment(group: Any) -> None:
    """As when a GradScaler skips on all ranks: what the codec keeps is of the exchange that is made to save."""
    kept: dict[int, Any] = {}

    def whole(here: Here) -> dict[str, torch.Tensor]:
        float_shares(here, range(3))
        here.model(batch(30 + here.rank).float()).square().sum().backward()
        kept[here.rank] = saved_state(here)
        float_shares(here, range(4, 8))
        return weights(here.model)

    def resumed(here: Here) -> dict[str, torch.Tensor]:
        assert here.session is not None
        _, optimizer, state = kept[here.rank]
        here.model.load_state_dict(kept[0][0])
        here.optimizer.load_state_dict(optimizer)
        checkpoint.load(here.session, prepared(here), state)
        float_shares(here, range(4, 8))
        return weights(here.model)

    strategy = "ring sync=local(steps=2) codec=topk(ratio=0.3)"
    wanted = on_group(group, strategy, 2, small_with_statistics, whole, weight=1)
    found = on_group(group, strategy, 2, small_with_statistics, resumed, weight=1)
    for mine, theirs in zip(found, wanted, strict=True):
        equal([theirs, mine])


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3)])
def test_another_number_of_workers_goes_on_from_the_mean(group: Any, before: int, after: int) -> None:
    kept: list[Any] = []

    def first(here: Here) -> dict[str, torch.Tensor]:
        shares(here, range(3))
        state = saved_state(here)
        if here.rank == 0:
            kept.append(state)
        return weights(here.model)

    def second(here: Here) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        assert here.session is not None
        checkpoint.load(here.session, prepared(here), kept[0][2])
        found = weights(here.model)
        shares(here, range(3, 6))
        return found, weights(here.model)

    own = on_group(group, "ring sync=diloco(steps=2)", before, sgd, first, weight=1)
    found = on_group(group, "ring sync=diloco(steps=2)", after, sgd, second, weight=1)
    for mine, _ in found:
        close(mine, {name: sum(one[name] for one in own) / before for name in mine})
    equal([last for _, last in found])


def test_a_state_of_another_model_is_refused(group: Any) -> None:
    kept: list[Any] = []

    def first(here: Here) -> None:
        assert here.session is not None
        kept.append(checkpoint.save(here.session, prepared(here)))

    def second(here: Here) -> None:
        assert here.session is not None
        checkpoint.load(here.session, prepared(here), kept[0])

    on_group(group, "ring sync=local(steps=2)", 2, sgd, first, weight=1)
    with pytest.raises(UsageError, match="the agreed weights in this state belong to another model"):
        on_group(group, "ring sync=local(steps=2)", 2, small_with_statistics, second, weight=1)
