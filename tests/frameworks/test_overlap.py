"""Schedules whose steps end in the next iteration: whatever a script does, it gets one worker's weights."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from scripts import (
    ALL,
    LAYERED,
    SCRIPTS,
    STEPS,
    branches,
    evaluated_by_one_rank,
    plain,
    plain_of_fifo,
    tied,
    zero_filled,
    zeroed_by_their_memory,
)
from toy import Here, adam, alone, batch, close, loss_of, mlp, on_group, same_as_alone, sgd, train, weights

from syncline.frameworks.torch.prepare import shadow_until_all_joined

# Every script under two of the strategies, which take turns.
TURNS = [(script, LAYERED[(number + turn) % len(LAYERED)]) for number, script in enumerate(SCRIPTS) for turn in (0, 3)]


@pytest.mark.every(2)
@pytest.mark.parametrize(("script", "strategy"), TURNS)
def test_scripts_get_one_workers_weights(group: Any, strategy: str, script: Callable[[Here], Any]) -> None:
    same_as_alone(group, strategy, 2, sgd, script)


@pytest.mark.parametrize("strategy", LAYERED[1:4])
def test_gradients_may_be_changed_by_what_shares_their_memory(group: Any, strategy: str) -> None:
    """On a device nobody knows of it."""
    same_as_alone(group, strategy, 2, sgd, zeroed_by_their_memory)


@pytest.mark.parametrize("strategy", [LAYERED[1], LAYERED[2]])
def test_one_rank_may_look_alone(group: Any, strategy: str) -> None:
    wanted = alone(sgd, evaluated_by_one_rank)
    found, other = on_group(group, strategy, 2, sgd, evaluated_by_one_rank)
    close(found, wanted)
    close({name: other[name] for name in weights(mlp())}, {name: wanted[name] for name in weights(mlp())})


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "workers"), [*zip(LAYERED, cycle([2, 3]))])
def test_lossless_schedules_give_the_weights_of_fifo(group: Any, strategy: str, workers: int) -> None:
    """To the bit with two ranks, whose sums have one order; with more to what the order of sums makes of them."""
    architecture = strategy.split()[0] if not strategy.startswith("ps") else "ps(servers=1, update=worker)"
    wanted = on_group(group, f"{architecture} schedule=fifo", workers, adam, plain_of_fifo)
    for found, other in zip(on_group(group, strategy, workers, adam, plain), wanted, strict=True):
        close(found, other, 0.0 if workers == 2 else 1e-12)
    again = on_group(group, strategy, workers, adam, plain)
    for found, other in zip(again, on_group(group, strategy, workers, adam, plain), strict=True):
        close(found, other, 0.0)


@pytest.mark.parametrize("strategy", LAYERED)
def test_weights_that_are_tied_or_used_elsewhere_wait_where_they_are_read(group: Any, strategy: str) -> None:
    same_as_alone(group, strategy, 2, tied, zero_filled, unused="zeros")


def branching(here: Here) -> dict[str, torch.Tensor]:
    """Which layers are used differs from rank to rank and from step to step."""
    for step in range(STEPS):
        here.optimizer.zero_grad()
        ranks = [0, 1] if here.replica is None else [here.rank]
        for rank in ranks:
            output = here.model(batch(step)[6 * rank : 6 * rank + 6], (step + rank) % 3 != 0, (step + rank) % 3 != 1)
            (loss_of(output) / len(ranks)).backward()
        for parameter in here.model.parameters():
            if here.replica is None and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        here.optimizer.step()
    return weights(here.model)


@pytest.mark.parametrize("strategy", ALL)
def test_which_parameters_are_used_may_change_and_differ_from_rank_to_rank(group: Any, strategy: str) -> None:
    found, other = on_group(group, strategy, 2, branches, branching, unused="zeros")
    close(found, other, 0.0)
    if strategy != ALL[-1]:
        close(found, alone(branches, branching))


@pytest.mark.parametrize("strategy", ALL)
def test_ranks_with_fewer_batches_take_part(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(6 if here.rank == 0 else 3))
        assert here.replica is not None
        here.replica.listeners.joined = lambda _: None
        shadow_until_all_joined(here.replica, here.client)
        return weights(here.model)

    found, other = on_group(group, strategy, 2, sgd, body)
    close(found, other, 0.0)
