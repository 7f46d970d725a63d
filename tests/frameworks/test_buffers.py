"""Buffers: after every step all ranks have rank 0's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toy import STAGED, STRATEGIES, Here, batch, fill, gradients, loss_of, on_group

from syncline.errors import GradientError


class Averaging(torch.nn.Module):
    """Batch normalisation, and a buffer that is replaced by a new tensor in every forward pass."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(4)
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("hidden", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.hidden += 1
        out: torch.Tensor = self.linear(self.norm(x))
        return out


def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = fill(Averaging().double())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_have_rank_0s_buffers_after_every_step(group: Any, strategy: str) -> None:
    def body(here: Here) -> list[dict[str, torch.Tensor]]:
        seen = []
        for step in range(3):
            here.optimizer.zero_grad()
            out = here.model(here.share(batch(step)))
            own = {name: buffer.clone() for name, buffer in here.model.named_buffers()}
            loss_of(out).backward()
            here.optimizer.step()
            seen.append({"own": own, "after": {name: buffer.clone() for name, buffer in here.model.named_buffers()}})
        return seen  # type: ignore[return-value]

    results = on_group(group, strategy, 3, make, body)
    for ranks in zip(*results, strict=True):
        assert not torch.equal(ranks[0]["own"]["norm.running_mean"], ranks[1]["own"]["norm.running_mean"])
        for rank in ranks:
            assert rank["after"].keys() == {
                *("mean", "hidden", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
            }
            assert all(torch.equal(rank["after"][name], value) for name, value in ranks[0]["own"].items())


def test_two_forward_passes_before_two_backward_passes(group: Any) -> None:
    """Statistics that arrive at the end of one backward do not disturb a graph that waits for its own."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        first, second = (loss_of(here.model(here.share(batch(step)))) for step in range(2))
        first.backward()
        second.backward()
        return gradients(here.model)

    results = on_group(group, "ring", 2, make, body)
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())


def test_buffers_do_not_travel_under_no_sync(group: Any) -> None:
    def body(here: Here) -> torch.Tensor:
        with here.no_sync():
            loss_of(here.model(here.share(batch(0)))).backward()
        return here.model.norm.running_mean.clone()  # type: ignore[no-any-return, union-attr, operator]

    first, second = on_group(group, "ring", 2, make, body)
    assert not torch.equal(first, second)


def test_a_buffer_that_changes_its_size_is_an_error(group: Any) -> None:
    def body(here: Here) -> None:
        out = here.model(here.share(batch(0)))
        here.model.mean = torch.zeros(9, dtype=torch.float64)
        loss_of(out).backward()

    with pytest.raises(GradientError, match="a buffer of the model has another size"):
        on_group(group, "ring", 2, make, body)


class Expanded(torch.nn.Module):
    """Buffers of all kinds of strides, one element of memory for several of the tensor's among them."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("one", torch.full((1,), float(index)).expand(3))
        self.register_buffer("rows", (torch.arange(4.0) + index).expand(3, 2, 4))
        self.register_buffer("columns", (torch.arange(6.0).view(2, 1, 3).transpose(0, 2) + index).expand(3, 5, 2))
        self.register_buffer("single", torch.full((4, 2), float(index))[:1, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for buffer in (self.one[0], self.rows[0, 0], self.columns[:, 0], self.single):  # type: ignore[index]
                buffer.add_(x.sum())  # type: ignore[operator]
        out: torch.Tensor = self.linear(x)
        return out


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2)", "ring" + STAGED])
def test_expanded_buffers_travel_too_and_stay_expanded(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = fill(Expanded(index).double())
        # What ``double`` makes of an expanded buffer is expanded no more.
        model.one, model.rows = torch.full((1,), float(index)).expand(3), torch.arange(4.0).add(index).expand(3, 2, 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        before = {name: buffer.clone() for name, buffer in here.model.named_buffers()}
        assert before["one"].tolist() == [0.0] * 3
        early, late = (here.model(here.share(batch(step))) for step in range(2))
        for out in (early, late):
            here.optimizer.zero_grad()
            loss_of(out).backward()
            here.optimizer.step()
        assert here.model.one.stride() == (0,)  # type: ignore[union-attr, operator]
        return {name: buffer.clone() for name, buffer in here.model.named_buffers()}

    first, second = on_group(group, strategy, 2, make, body)
    assert first["one"].tolist() != [0.0] * 3
    assert all(torch.equal(second[name], value) for name, value in first.items())


class Counted(torch.nn.Module):
    """Counts its forward passes, and has no buffer that could be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 3).double()
        self.register_buffer("counted", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counted += 1
        return self.layer(x)


def test_counts_are_those_of_rank_0_also_where_weights_are_averaged_and_no_buffer_is(group: Any) -> None:
    def make_counted(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(Counted())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> int:
        for step in range(2 + 3 * here.rank):
            with torch.set_grad_enabled(step >= 3 * here.rank):
                output = here.model(batch(step))
            if output.requires_grad:
                here.optimizer.zero_grad()
                loss_of(output).backward()
                here.optimizer.step()
        return int(here.model.get_buffer("counted"))

    assert on_group(group, "ring sync=local(steps=2)", 2, make_counted, body) == [2, 2]
