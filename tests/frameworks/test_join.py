"""Ranks with unequal numbers of batches: an error that names the rank, or a join."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import REPLICAS, Here, adam, alone, batch, close, fill, loss_of, on_group, weights

from syncline.errors import MismatchError, PeerError

COUNTS = [2, 5, 3]


def train(here: Here, steps: range) -> None:
    for step in steps:
        here.optimizer.zero_grad()
        loss_of(here.model(batch(10 * step + here.rank, 4))).backward()
        here.optimizer.step()


def union(here: Here, counts: list[int], start: int = 0) -> None:
    """What one worker does with the batches of all ranks that still have one."""
    for step in range(start, start + max(counts)):
        here.optimizer.zero_grad()
        parts = [batch(10 * step + rank, 4) for rank, count in enumerate(counts) if step - start < count]
        loss_of(here.model(torch.cat(parts))).backward()
        here.optimizer.step()


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)", "ps(servers=1, update=worker)"])
def test_a_rank_that_ends_early_is_named(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        train(here, range(2 if here.rank == 1 else 3))

    with pytest.raises(PeerError, match="rank 1"):
        on_group(group, strategy, 3, adam, body)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_a_rank_that_goes_on_to_another_call_is_named_with_the_remedy(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        assert here.session is not None
        train(here, range(2 if here.rank == 1 else 3))
        here.session.barrier()

    with pytest.raises(MismatchError, match=r"rank 1 is at barrier.*join\(\)"):
        on_group(group, strategy, 3, adam, body)


@pytest.mark.parametrize("strategy", REPLICAS)
def test_joined_ranks_count_all_batches_and_end_equal(group: Any, strategy: str) -> None:
    """Two epochs: the optimizer's state is equal too, so that training goes on from one point."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for start, counts in ((0, COUNTS), (20, COUNTS[::-1])):
            train(here, range(start, start + counts[here.rank]))
            here.replica.shadow_until_all_joined()
        return weights(here.model)

    def both(here: Here) -> dict[str, torch.Tensor]:
        union(here, COUNTS)
        union(here, COUNTS[::-1], 20)
        return weights(here.model)

    wanted = alone(adam, both)
    results = on_group(group, strategy, 3, adam, body)
    for found in results:
        close(found, wanted)
        assert all(torch.equal(found[name], tensor) for name, tensor in results[0].items())


def test_a_rank_without_any_batch_joins_at_once(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        train(here, range([0, 2][here.rank]))
        here.replica.shadow_until_all_joined()
        return weights(here.model)

    def one(here: Here) -> dict[str, torch.Tensor]:
        union(here, [0, 2])
        return weights(here.model)

    wanted = alone(adam, one)
    for found in on_group(group, "ring", 2, adam, body):
        close(found, wanted)


def test_joining_with_equal_numbers_of_batches_changes_nothing(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        train(here, range(2))
        here.replica.shadow_until_all_joined()
        return weights(here.model)

    def one(here: Here) -> dict[str, torch.Tensor]:
        union(here, [2, 2])
        return weights(here.model)

    wanted = alone(adam, one)
    for found in on_group(group, "ring", 2, adam, body):
        close(found, wanted)


def test_a_joined_rank_gets_the_buffers_of_those_that_train_on(group: Any) -> None:
    """Rank 0, whose batch statistics count otherwise, has run out first."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        train(here, range([1, 3][here.rank]))
        here.replica.shadow_until_all_joined()
        return weights(here.model)

    first, second = on_group(group, "ring", 2, make, body)
    assert int(first["0.num_batches_tracked"]) == 3
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


def test_ranks_that_take_turns_in_having_more_batches_end_equal(group: Any) -> None:
    """Equal totals: who trained longest is asked anew at every join."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for start, counts in ((0, (3, 5)), (20, (5, 3))):
            train(here, range(start, start + counts[here.rank]))
            here.replica.shadow_until_all_joined()
        return weights(here.model)

    first, second = on_group(group, "ring", 2, adam, body)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())
