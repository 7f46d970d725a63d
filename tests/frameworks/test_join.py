"""Ranks with unequal numbers of batches: an error that names the rank, or a join."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from toy import REPLICAS, SERVED, Here, adam, alone, batch, close, fill, loss_of, on_group, weights

from syncline.errors import GradientError, MismatchError, PeerError
from syncline.frameworks.torch.prepare import shadow_until_all_joined

COUNTS = [2, 5, 3]


def train(here: Here, steps: range) -> None:
    for step in steps:
        here.optimizer.zero_grad()
        loss_of(here.model(batch(10 * step + here.rank, 4))).backward()
        here.optimizer.step()


def clip(here: Here, max_norm: float) -> float:
    if here.client is not None:
        return here.client.clip(max_norm)
    return float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), max_norm))


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


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", REPLICAS + SERVED)
def test_joined_ranks_count_all_batches_and_end_equal(group: Any, strategy: str) -> None:
    """Two epochs: the optimizer's state is equal too, so that training goes on from one point."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for start, counts in ((0, COUNTS), (20, COUNTS[::-1])):
            train(here, range(start, start + counts[here.rank]))
            shadow_until_all_joined(here.replica, here.client)
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


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", [*SERVED, "ps(servers=2) codec=fp16", "ps(servers=3, on=workers) codec=fp16"])
def test_who_has_no_batches_takes_part_in_clipping_by_owners(group: Any, strategy: str) -> None:
    """It does not know who clips when, nor with which learning rate: the others' count."""
    counts = [1, 5, 3]

    def clipped(here: Here, step: int, loss: torch.Tensor) -> float:
        here.optimizer.zero_grad()
        loss.backward()
        norm = 0.0
        if step % 2:
            norm = clip(here, 0.2)
        here.optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
        here.optimizer.step()
        return norm

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        norms = [
            clipped(here, step, loss_of(here.model(batch(10 * step + here.rank, 4))))
            for step in range(counts[here.rank])
        ]
        shadow_until_all_joined(here.replica, here.client)
        found = weights(here.model)
        return {**found, "norms": torch.tensor(norms, dtype=torch.float64)} if here.rank == 1 else found

    def one(here: Here) -> dict[str, torch.Tensor]:
        norms = []
        for step in range(max(counts)):
            parts = [batch(10 * step + rank, 4) for rank, count in enumerate(counts) if step < count]
            norms.append(clipped(here, step, loss_of(here.model(torch.cat(parts)))))
        return {**weights(here.model), "norms": torch.tensor(norms, dtype=torch.float64)}

    wanted = alone(adam, one)
    results = on_group(group, strategy, 3, adam, body)
    if "codec" not in strategy:
        close(results[1], wanted)
    for found in results:
        assert all(torch.equal(found[name], results[1][name]) for name in found if name != "norms")


@pytest.mark.parametrize("strategy", SERVED)
def test_training_goes_on_after_a_join_with_owners(group: Any, strategy: str) -> None:
    """Batch statistics are those of the rank that trained longest, and no weights look changed by the script."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)).double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for start, counts in ((0, [1, 3]), (20, [4, 2])):
            train(here, range(start, start + counts[here.rank]))
            shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    first, second = on_group(group, strategy, 2, make, body)
    assert int(first["0.num_batches_tracked"]) == 7
    assert all(torch.equal(first[name], tensor) for name, tensor in second.items())


@pytest.mark.parametrize("batches", [[0, 2], [2, 2]])
def test_a_rank_without_any_batch_joins_at_once_and_equal_numbers_change_nothing(
    group: Any, batches: list[int]
) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        train(here, range(batches[here.rank]))
        shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    def one(here: Here) -> dict[str, torch.Tensor]:
        union(here, batches)
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
        shadow_until_all_joined(here.replica, here.client)
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
            shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    first, second = on_group(group, "ring", 2, adam, body)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_gradients_that_are_added_to_are_refused_where_a_rank_has_joined(group: Any, strategy: str) -> None:
    """What the rank without batches had left of its own would be missing."""

    def body(here: Here) -> None:
        assert here.replica is not None
        for step in range(2 if here.rank else 3):
            loss_of(here.model(batch(step, 4))).backward()
            here.optimizer.step()
        # Rank 0 leaves by its error, so the servers may be gone before it has reached the others.
        with suppress(PeerError) if here.rank else nullcontext():
            shadow_until_all_joined(here.replica, here.client)

    with pytest.raises(GradientError, match="do not count as much"):
        on_group(group, strategy, 2, adam, body)
