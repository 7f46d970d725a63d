"""Parameters of every kind: without a gradient, frozen, of several types, shared, strided; where gradients lie."""

from __future__ import annotations

import sys
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from toy import (
    REPLICAS,
    STRATEGIES,
    Here,
    alone,
    batch,
    close,
    fill,
    gradients,
    loss_of,
    mlp,
    on_group,
    same_as_alone,
    sgd,
    weights,
)

from syncline.errors import GradientError


class Optional(torch.nn.Module):
    """Has a layer that a call may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = mlp(1), mlp(2)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        out: torch.Tensor = self.always(x)
        return out + self.sometimes(x) if both else out


def optional(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = Optional()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_without_a_gradient_are_an_error_that_names_them(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        loss_of(here.model(here.share(batch(0)))).backward()

    with pytest.raises(GradientError, match=r"'sometimes.0.weight', 'sometimes.0.bias'.*unused=\"zeros\""):
        on_group(group, strategy, 2, optional, body)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "ring schedule=fifo"])
def test_parameters_without_a_gradient_count_as_zero_when_asked(group: Any, strategy: str) -> None:
    """A rank that leaves a layer out takes part in its mean with zeros; kept gradients still count."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            x, third = batch(step), 4
            if here.replica is None:
                (loss_of(here.model(x[:third])) / 3 + loss_of(here.model(x[third:], both=True)) * 2 / 3).backward()
            else:
                mine = x[:third] if here.rank == 0 else x[third:]
                loss_of(here.model(mine, both=here.rank == 1)).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, optional, body, unused="zeros")


@pytest.mark.parametrize("strategy", REPLICAS)
def test_gradients_kept_from_before_count_even_when_this_pass_makes_none(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        x = here.share(batch(0))
        with here.no_sync():
            loss_of(here.model(x, both=True)).backward()
        loss_of(here.model(x)).backward()
        return gradients(here.model)

    same_as_alone(group, strategy, 2, optional, body, unused="zeros")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_parameters_stay_and_do_not_travel(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, _ = sgd(index)
        model[0].requires_grad_(False)  # type: ignore[index]
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
        assert here.model[0].weight.grad is None  # type: ignore[index]
        assert here.replica is None or [name for name, _ in here.replica.named] == ["2.weight", "2.bias"]
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("unused", ["error", "zeros"])
@pytest.mark.parametrize("swap", [True, False])
def test_a_parameter_unfrozen_after_prepare_is_an_error_that_names_it(group: Any, unused: str, swap: bool) -> None:
    """Also when another one is frozen at the same time, so that their number stays."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        model[2].bias.requires_grad_(False)  # type: ignore[index]
        return model, optimizer

    def body(here: Here) -> None:
        here.model[2].bias.requires_grad_(True)  # type: ignore[index]
        if swap:
            here.model[2].weight.requires_grad_(False)  # type: ignore[index]
        loss_of(here.model(here.share(batch(0)))).backward()

    named = "'2.weight'" if swap else "'2.bias'"
    with pytest.raises(GradientError, match=rf"{named} was frozen, unfrozen or added after syncline.prepare\(\)"):
        on_group(group, "ring", 2, make, body, unused=unused)


class Mixed(torch.nn.Module):
    """Parameters of three types, one without elements and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(4, 5).double()
        self.single = torch.nn.Linear(5, 4)
        self.low = torch.nn.Linear(4, 3).bfloat16()
        self.empty = torch.nn.Parameter(torch.zeros(0, 3))
        self.factor = torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.single((self.wide(x) * self.factor).float())
        out: torch.Tensor = self.low(x.bfloat16()).double() + self.empty.sum()
        return out


@pytest.mark.parametrize("strategy", [*STRATEGIES, "ring schedule=fifo", "ps(servers=2) schedule=fixed(bucket=64B)"])
def test_several_element_types_in_one_model(group: Any, strategy: str) -> None:
    """Each rank has the same batch, so that even bfloat16 agrees: a mean of equal numbers is exact for 2 ranks."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(Mixed())
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(step))).backward()
            here.optimizer.step()
        for parameter in here.model.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


class Tied(torch.nn.Module):
    """An embedding that is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4)
        self.inner = torch.nn.Linear(4, 4)
        self.output = torch.nn.Linear(4, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.output(self.inner(self.embedding(words)))
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shared_weights_stay_shared_and_travel_once(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(Tied().double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            words = torch.randint(0, 7, (8,), generator=torch.Generator().manual_seed(step))
            mine = here.share(words)
            torch.nn.functional.cross_entropy(here.model(mine), (mine + 1) % 7).backward()
            here.optimizer.step()
        assert here.model.output.weight is here.model.embedding.weight
        assert here.replica is None or len(here.replica.named) == 3
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameters_in_channels_last_keep_their_strides(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Tanh(), torch.nn.Conv2d(5, 4, 2)).double()
        fill(model).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        before = [parameter.stride() for parameter in here.model.parameters()]
        for step in range(3):
            here.optimizer.zero_grad()
            x = here.share(batch(step, 6, 27).view(6, 3, 3, 3)).contiguous(memory_format=torch.channels_last)
            here.model(x).square().sum((1, 2, 3)).mean().backward()
            here.optimizer.step()
        for parameter, stride in zip(here.model.parameters(), before, strict=True):
            assert parameter.stride() == stride
            assert here.replica is None or (parameter.grad is not None and parameter.grad.stride() == stride)
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2)"])
def test_parameters_that_are_views_with_gaps(group: Any, strategy: str) -> None:
    """Not dense in memory, so their gradients are laid out plainly."""

    class Gaps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 8, dtype=torch.float64)[:, ::2])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(Gaps())
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize(
    ("strategy", "to_none"),
    [*zip([*STRATEGIES, "ring schedule=fifo", "ring schedule=fixed(bucket=100B)"], cycle([True, False]))],
)
def test_gradients_are_views_of_contiguous_buckets_that_never_move(group: Any, strategy: str, to_none: bool) -> None:
    def body(here: Here) -> None:
        assert here.replica is not None
        places: list[list[int]] = []
        for step in range(4):
            here.optimizer.zero_grad(set_to_none=to_none)
            loss_of(here.model(here.share(batch(step)))).backward()
            grads = [parameter.grad for parameter in here.model.parameters()]
            places.append([grad.data_ptr() for grad in grads if grad is not None])
            here.optimizer.step()
        assert places == places[:1] * 4
        storage = here.replica.storage
        for number, bucket in enumerate(storage.buckets):
            here_lies = storage.pair(number).device
            at = here_lies.data_ptr()
            for part in bucket.slices:
                assert places[0][part.tensor] == at - part.start * here_lies.itemsize
                at += part.elements * here_lies.itemsize
            assert at == here_lies.data_ptr() + here_lies.nbytes

    on_group(group, strategy, 2, sgd, body)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES, "tree", "recursive_doubling", "double_tree"])
def test_nothing_is_allocated_per_step_once_warm(group: Any, strategy: str, monkeypatch: Any) -> None:
    """Neither transport memory nor scratch, nor an array anywhere near the size of a bucket."""
    large = 32 * 1024
    model_bytes = 128 * 128 * 8
    made: list[int] = []

    def watched(name: str) -> None:
        plain = getattr(np, name)

        def allocate(shape: Any, *arguments: Any, **options: Any) -> Any:
            found = plain(shape, *arguments, **options)
            caller = sys._getframe(1).f_globals["__name__"]
            if large < found.nbytes <= 2 * model_bytes and caller != "syncline.wire.scratch":
                made.append(found.nbytes)
            return found

        monkeypatch.setattr(np, name, allocate)

    for name in ("empty", "zeros"):
        watched(name)

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def body(here: Here) -> None:
        assert here.session is not None
        engine = here.session.engine
        kept: list[tuple[int, int]] = []
        for step in range(6):
            here.optimizer.zero_grad()
            here.model(here.share(batch(step, 6, 128))).square().mean().backward()
            here.optimizer.step()
            here.session.barrier()
            kept.append((engine._exchange.scratch.allocated_bytes, len(made)))
            here.session.barrier()
        # Whose part waits for whose is a matter of timing: scratch may grow after the first step, within bounds.
        assert kept[-1][1] == kept[0][1], made
        assert kept[-1][0] <= 2 * model_bytes

    on_group(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sparse_gradients_are_refused_by_name_in_backward(group: Any, strategy: str) -> None:
    class Functional(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(5, 3))

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.embedding(words, self.table, sparse=True)

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = Functional()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(GradientError, match=r"rank \d: the gradient of 'table' is sparse.*use sparse=False"):
        on_group(group, strategy, 2, make, lambda here: here.model(torch.tensor([1, 2])).sum().backward())


def test_gradients_keep_their_values_after_the_end(group: Any) -> None:
    """Detaching removes the hooks: the model trains on alone."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        loss_of(here.model(batch(0))).backward()
        late = loss_of(here.model(batch(1)))
        here.replica.detach()
        here.optimizer.step()
        here.optimizer.zero_grad()
        late.backward()
        here.optimizer.step()
        return weights(here.model)

    def plain(here: Here) -> dict[str, torch.Tensor]:
        first, late = loss_of(here.model(batch(0))), loss_of(here.model(batch(1)))
        first.backward()
        rates = here.optimizer
        rates.step()
        rates.zero_grad()
        late.backward()
        rates.step()
        return weights(here.model)

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        # One linear layer: its derivative does not read the weights that the first step changes in place.
        model = fill(torch.nn.Linear(4, 3).double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    wanted = alone(make, plain)
    for found in on_group(group, "ring", 2, make, body):
        close(found, wanted)
