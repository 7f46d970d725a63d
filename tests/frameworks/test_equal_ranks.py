"""By default every rank counts alike in an exchange, whatever its batch, its loss and its passes are.

That is DistributedDataParallel's rule: the wanted gradients are the mean of what the ranks get by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from toy import REPLICAS, STRATEGIES, Here, batch, close, fill, gradients, loss_of, mlp, on_group, sgd, weights

from syncline.frameworks.torch.prepare import shadow_until_all_joined

Loss = Callable[[torch.nn.Module, int], torch.Tensor]


class Recurrent(torch.nn.Module):
    """Takes (sequence, batch, features)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fill(torch.nn.LSTM(4, 3).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)[0]
        return out


def recurrent(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = Recurrent()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def summed(model: torch.nn.Module, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(batch(0, 3 + 4 * rank)).square().sum()
    return out


def unbatched(model: torch.nn.Module, rank: int) -> torch.Tensor:
    out: torch.Tensor = model(batch(0)[rank]).square().sum()
    return out


def unequal(model: torch.nn.Module, rank: int) -> torch.Tensor:
    return loss_of(model(batch(0, 3 + 4 * rank)))


def sequences(model: torch.nn.Module, rank: int) -> torch.Tensor:
    """The first dimension is time, and differs; the batches are of one size."""
    x = torch.stack([batch(step, 5) for step in range(2 + 3 * rank)])
    out: torch.Tensor = model(x).square().mean()
    return out


CASES: dict[str, tuple[Any, Loss]] = {
    "summed": (sgd, summed),
    "unbatched": (sgd, unbatched),
    "unequal": (sgd, unequal),
    "sequences": (recurrent, sequences),
}


def mean_of_ranks(make: Any, loss: Loss, workers: int, passes: int = 1) -> dict[str, torch.Tensor]:
    """What every rank should get: the mean over ranks of what each computes alone."""
    found: dict[str, torch.Tensor] = {}
    for rank in range(workers):
        model, _ = make(rank)
        for _ in range(passes):
            loss(model, rank).backward()
        for name, gradient in gradients(model).items():
            found[name] = found.get(name, 0) + gradient / workers
    return found


@pytest.mark.parametrize(("case", "strategy"), [*zip(CASES, cycle(REPLICAS))])
def test_the_mean_is_over_ranks(group: Any, strategy: str, case: str) -> None:
    make, loss = CASES[case]

    def body(here: Here) -> dict[str, torch.Tensor]:
        for _ in range(2):
            here.optimizer.zero_grad()
            loss(here.model, here.rank).backward()
        return gradients(here.model)

    for found in on_group(group, strategy, 3, make, body, weight=1):
        close(found, mean_of_ranks(make, loss, 3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_passes_are_not_counted(group: Any, strategy: str) -> None:
    """Rank 1 makes three backward passes before the exchange, the others one."""

    def passes(rank: int) -> int:
        return 3 if rank == 1 else 1

    def body(here: Here) -> dict[str, torch.Tensor]:
        with here.no_sync():
            for _ in range(passes(here.rank) - 1):
                unequal(here.model, here.rank).backward()
        unequal(here.model, here.rank).backward()
        here.optimizer.step()
        return weights(here.model)

    model, optimizer = sgd()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for rank in range(2):
        one = mean_of_ranks(sgd, lambda model, _, rank=rank: unequal(model, rank), 1, passes(rank))  # type: ignore[misc]
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            parameter.grad += one[name] / 2
    optimizer.step()
    for found in on_group(group, strategy, 2, sgd, body, weight=1):
        close(found, weights(model))


def test_a_number_of_its_own_is_what_a_rank_counts(group: Any) -> None:
    """As shares of the data that are known beforehand."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        unequal(here.model, here.rank).backward()
        return gradients(here.model)

    def run(session: Any) -> Any:
        from syncline.frameworks.torch import Options, prepare

        made = prepare(session, *sgd(), Options(weight=1 + 2 * session.rank))
        assert made is not None
        try:
            return body(Here(made.model, made.optimizer, session.rank))
        finally:
            made.replica.detach()

    apart = [mean_of_ranks(sgd, lambda model, _, rank=rank: unequal(model, rank), 1) for rank in range(2)]  # type: ignore[misc]
    wanted = {name: (apart[0][name] + 3 * apart[1][name]) / 4 for name in apart[0]}
    for found in group("ring", 2, run):
        close(found, wanted)


def test_join_divides_by_the_ranks_that_are_left(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        seen = {}
        for _ in range(1 if here.rank == 0 else 2):
            here.optimizer.zero_grad()
            unequal(here.model, here.rank).backward()
            seen = gradients(here.model)
        shadow_until_all_joined(here.replica, here.client)
        return seen

    found = on_group(group, "ring", 3, sgd, body, weight=1)
    close(found[0], mean_of_ranks(sgd, unequal, 3))
    left = mean_of_ranks(sgd, lambda model, rank: unequal(model, rank + 1), 2)
    close(found[1], left)
    close(found[2], left)


class Returning(torch.nn.Module):
    """Gives one of its own parameters beside what it computes, as for a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.scale = torch.nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x) * self.scale, self.scale


@pytest.mark.parametrize("weight", [1, "batch"])
def test_a_model_that_returns_its_own_parameter(group: Any, weight: Any) -> None:
    """A parameter outlives the pass: hooks on it would count old passes again."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = Returning()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: torch.nn.Module, rank: int, number: int) -> None:
        # The proportion of the batches changes from step to step, and old ones would show.
        x = batch(number, 12)
        out, scale = model(x[: 2 + 3 * number] if rank == 0 else x[2 + 3 * number :])
        (loss_of(out) + scale.square().sum()).backward()

    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        found = []
        for number in range(3):
            here.optimizer.zero_grad()
            step(here.model, here.rank, number)
            found.append(gradients(here.model))
        return found

    wanted = []
    for number in range(3):
        share = (2 + 3 * number) / 12 if weight == "batch" else 0.5
        apart = []
        for rank in range(2):
            model, _ = make(0)
            step(model, rank, number)
            apart.append(gradients(model))
        wanted.append({name: share * apart[0][name] + (1 - share) * apart[1][name] for name in apart[0]})
    for found in on_group(group, "ring schedule=wait_free", 2, make, body, weight=weight):
        for one, other in zip(found, wanted, strict=True):
            close(one, other)


@pytest.mark.parametrize("weight", [1, "batch"])
@pytest.mark.parametrize("strategy", ["ring", "ring schedule=wait_free"])
def test_truncated_backpropagation_with_a_carried_state(group: Any, strategy: str, weight: Any) -> None:
    """The second backward comes through the first pass again; it counts by the second one's batch alone."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = fill(torch.nn.Linear(4, 4).double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        cut = slice(None) if here.replica is None else (slice(0, 4) if here.rank == 0 else slice(4, None))
        here.optimizer.zero_grad()
        state = here.model(batch(0)[cut])
        loss_of(state).backward(retain_graph=True)
        here.optimizer.zero_grad()
        loss_of(here.model(batch(1)[cut] + state.tanh())).backward()
        return gradients(here.model)

    wanted = []
    for rank in range(2):
        model, optimizer = make(0)
        wanted.append(body(Here(model, optimizer, rank, replica=object())))  # type: ignore[arg-type]
    share = 4 / 12 if weight == "batch" else 0.5
    mean = {name: share * wanted[0][name] + (1 - share) * wanted[1][name] for name in wanted[0]}
    for found in on_group(group, strategy, 2, make, body, weight=weight):
        close(found, mean)


def test_an_unequal_kind_of_weight_is_refused(group: Any) -> None:
    from syncline.errors import MismatchError
    from syncline.frameworks.torch import Options, prepare

    def run(session: Any) -> None:
        prepare(session, *sgd(), Options(weight="batch" if session.rank == 0 else 1))

    with pytest.raises(MismatchError, match=r"rank 1.* a number as weight=, and rank 0 .* 'batch' as weight="):
        group("ring", 2, run)
