"""Workers that train by themselves and exchange weights: each mode against its formulas, by hand, in one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from periodic import STEPS, WORKERS, Weights, by_hand, consolidate, equal, mean, shares, under
from toy import STAGED, Here, adam, batch, close, loss_of, making, mlp, on_group, same_as_alone, sgd, weights

from syncline.errors import UsageError
from syncline.plans.check import mixing_matrix
from syncline.sync.gossip import Gossip

CARRIED = ["ring", "direct schedule=wait_free", "ps(servers=2, update=worker)", "ring" + STAGED, "tree schedule=fifo"]


def trained(here: Here) -> list[dict[str, torch.Tensor]]:
    """The weights after every step."""
    found = []
    for step in range(STEPS):
        shares(here, range(step, step + 1))
        found.append(weights(here.model))
    return found


def compare(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            close(one, other)


@pytest.mark.parametrize("strategy", CARRIED)
def test_local_is_the_mean_of_weights_after_every_period(group: Any, strategy: str) -> None:
    found = on_group(group, under(strategy, "local(steps=2)"), WORKERS, adam, trained, weight=1)
    compare(found, by_hand(adam, lambda step: step % 2 == 1, mean))
    for step in range(1, STEPS, 2):
        for mine in found[1:]:
            assert all(torch.equal(mine[step][name], tensor) for name, tensor in found[0][step].items())


@pytest.mark.parametrize("strategy", CARRIED)
def test_an_average_after_every_step_of_plain_descent_is_synchronous(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step, 13)))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, under(strategy, "local(steps=1)"), WORKERS, making("sgd"), body)


@pytest.mark.parametrize("strategy", ["ring", "ring" + STAGED])
def test_in_the_first_steps_of_post_local_ranks_count_by_their_samples(group: Any, strategy: str) -> None:
    """Which their tickets say, before any weights have been exchanged."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step, 13)))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, under(strategy, "post_local(after=2, steps=2)"), WORKERS, sgd, body)


@pytest.mark.parametrize("strategy", ["ring", "ring" + STAGED, "ps(servers=1, update=worker)"])
def test_post_local_is_synchronous_first(group: Any, strategy: str) -> None:
    """After two steps with everybody's gradients, which momentum remembers, two periods of two steps each."""

    def together(steps: range, made: list[Any]) -> None:
        for step in steps:
            for rank, (model, optimizer) in enumerate(made):
                optimizer.zero_grad()
                loss_of(model(batch(10 * step + rank))).backward()
            for parameters in zip(*(model.parameters() for model, _ in made), strict=True):
                average = sum(parameter.grad for parameter in parameters) / len(made)
                for parameter in parameters:
                    parameter.grad = average.clone()
            for _, optimizer in made:
                optimizer.step()

    made = [sgd() for _ in range(WORKERS)]
    together(range(2), made)
    found = on_group(group, under(strategy, "post_local(after=2, steps=2)"), WORKERS, sgd, trained, weight=1)
    for mine in found:
        close(mine[1], weights(made[0][0]))
    agreed = [parameter.detach().clone() for parameter in made[0][0].parameters()]
    for step in range(2, STEPS):
        for rank, (model, optimizer) in enumerate(made):
            shares(Here(model, optimizer), range(step, step + 1), rank)
        if step % 2 == 1:
            with torch.no_grad():
                mean(agreed, [list(model.parameters()) for model, _ in made])
        for mine, (model, _) in zip(found, made, strict=True):
            close(mine[step], weights(model))


@pytest.mark.parametrize(("nesterov", "lr", "momentum"), [("on", 0.7, 0.9), ("off", 0.5, 0.8), ("on", 1.0, 0.0)])
def test_diloco_is_an_outer_sgd_by_pseudo_gradients(group: Any, nesterov: str, lr: float, momentum: float) -> None:
    outer: list[torch.optim.Optimizer] = []

    def agree(agreed: Weights, workers: list[Weights]) -> None:
        if not outer:
            fast = nesterov == "on" and momentum > 0
            outer.append(torch.optim.SGD(agreed, lr=lr, momentum=momentum, nesterov=fast))
        for place, value in enumerate(agreed):
            value.grad = value - sum(mine[place] for mine in workers) / len(workers)
        outer[0].step()
        for mine in workers:
            for parameter, value in zip(mine, agreed, strict=True):
                parameter.copy_(value)

    sync = f"diloco(steps=2, lr={lr}, momentum={momentum}, nesterov={nesterov})"
    found = on_group(group, under("ring", sync), WORKERS, adam, trained, weight=1)
    compare(found, by_hand(adam, lambda step: step % 2 == 1, agree))
    assert all(torch.equal(found[1][-1][name], tensor) for name, tensor in found[0][-1].items())


@pytest.mark.parametrize("strategy", ["ring", "ring" + STAGED])
def test_easgd_is_two_springs(group: Any, strategy: str) -> None:
    beta = 0.6

    def agree(centre: Weights, workers: list[Weights]) -> None:
        for place, value in enumerate(centre):
            apart = [mine[place] - value for mine in workers]
            for mine, difference in zip(workers, apart, strict=True):
                mine[place].sub_(beta / WORKERS * difference)
            value.add_(beta / WORKERS * sum(apart))

    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        found = trained(here)
        assert here.replica is not None
        assert here.replica.averaging is not None
        here.replica.trained.consolidate()
        return [*found, weights(here.model)]

    centre: list[Weights] = []

    def kept(agreed: Weights, workers: list[Weights]) -> None:
        centre[:] = [agreed]
        agree(agreed, workers)

    found = on_group(group, under(strategy, "easgd(steps=2, beta=0.6)"), WORKERS, sgd, body, weight=1)
    compare([mine[:-1] for mine in found], by_hand(sgd, lambda step: step % 2 == 1, kept))
    for mine in found:
        assert all(torch.equal(mine[-1][name], tensor) for name, tensor in found[0][-1].items())
        for tensor, value in zip(mine[-1].values(), centre[0], strict=True):
            assert torch.allclose(tensor, value, rtol=1e-12)


@pytest.mark.parametrize("strategy", ["ring", "direct schedule=wait_free", "ring" + STAGED])
@pytest.mark.parametrize(("graph", "workers"), [("ring", 4), ("exponential", 5), ("ring", 2)])
def test_gossip_is_a_product_with_the_mixing_matrix(group: Any, strategy: str, graph: Any, workers: int) -> None:
    turns = itertools.count()

    def mixed(_: Weights, of_workers: list[Weights]) -> None:
        matrix = mixing_matrix(Gossip(graph).mix(workers, next(turns)))
        for place in range(len(of_workers[0])):
            rows = torch.stack([mine[place].detach().clone() for mine in of_workers])
            found = torch.einsum("ij,j...->i...", torch.from_numpy(matrix), rows)
            assert torch.allclose(found.mean(0), rows.mean(0), rtol=1e-12)
            for mine, value in zip(of_workers, found, strict=True):
                mine[place].copy_(value)

    text = under(strategy, f"gossip(graph={graph})")
    found = on_group(group, text, workers, adam, trained, weight=1)
    compare(found, by_hand(adam, lambda _: True, mixed, workers))


def test_gossip_ends_with_the_mean_of_all(group: Any) -> None:
    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        shares(here, range(3))
        before = weights(here.model)
        consolidate(here)
        return [before, weights(here.model)]

    found = on_group(group, "ring sync=gossip", 4, sgd, body, weight=1)
    for mine in found:
        close(mine[1], {name: sum(other[0][name] for other in found) / 4 for name in mine[0]})
    equal([mine[1] for mine in found])
    assert not torch.equal(found[0][0]["0.weight"], found[2][0]["0.weight"])


class Watching(torch.nn.Module):
    """Keeps the mean of what it has seen last, which is no number where that was nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("seen", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(x.detach().mean(0))
        return self.inner(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("strategy", ["ring sync=local(steps=2)", "ring sync=local(steps=2)" + STAGED])
def test_who_has_seen_no_samples_counts_nothing(group: Any, strategy: str, steps: int) -> None:
    """Whose weights and statistics are no numbers: after a period, and in the final mean in the middle of one."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = Watching()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(steps):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(step, 0 if here.rank == 1 else 8))).backward()
            here.optimizer.step()
        if here.replica is not None:
            consolidate(here)
        return weights(here.model)

    wanted = body(Here(*make(0)))
    for found in on_group(group, strategy, 2, make, body, weight="batch"):
        close(found, wanted)


def test_gossip_counts_all_alike(group: Any) -> None:
    with pytest.raises(UsageError, match=r"weight='batch': under sync=gossip .* leave weight= out"):
        on_group(group, "ring sync=gossip", 2, sgd, shares)
