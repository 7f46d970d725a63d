"""Models under sync modes in which every worker's push is an update by itself, in PyTorch and NumPy."""

from __future__ import annotations

import itertools
import threading
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from toy import STAGED, Here, adam, alone, batch, close, fill, loss_of, making, on_group, same_as_alone, sgd, weights
from toy import train as steps

from syncline.errors import ClosedError, GradientError, UsageError
from syncline.frameworks.numpy import adapt
from syncline.frameworks.torch import Options, prepare
from syncline.session.session import Session

WORKERS, STEPS = 2, 4
OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
SINGLE = ["ps(servers=1)", "ps(servers=2) schedule=wait_free", "ps(servers=2, on=workers)"]
SINGLE += ["ps(servers=1)" + STAGED, "ps(servers=2, on=workers)" + STAGED]
LAYERED = ["ps(servers=2) schedule=priority(slice=64B)", "ps(servers=1, on=workers) schedule=priority(slice=64B)"]
LAYERED += ["ps(servers=2, on=workers) schedule=priority(slice=64B)" + STAGED]
SINGLE += LAYERED


def under(strategy: str, sync: str) -> str:
    """A strategy with a sync mode; what ``toy`` says behind it stays there."""
    text, staged, _ = strategy.partition(STAGED)
    return f"{text} sync={sync}{staged}"


def train(here: Here) -> dict[str, torch.Tensor]:
    steps(here, range(STEPS))
    return weights(here.model)


@pytest.mark.parametrize("strategy", SINGLE)
def test_with_no_staleness_plain_descent_is_that_of_all_together(group: Any, strategy: str) -> None:
    same_as_alone(group, under(strategy, "ssp(staleness=0)"), WORKERS, making("sgd"), train, weight=1)


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "ps(servers=2, on=workers)", "ps(servers=1)" + STAGED])
def test_a_codec_that_loses_nothing_changes_nothing(group: Any, strategy: str) -> None:
    """But that it is of float32."""
    wanted, text = alone(making("sgd"), train), under(strategy, "ssp(staleness=0) codec=topk(ratio=1)")
    for found in on_group(group, text, WORKERS, making("sgd"), train, weight=1):
        close(found, wanted, 2e-6)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=2) schedule=wait_free", "ps(servers=1)" + STAGED])
def test_one_worker_trains_as_without_owners(group: Any, strategy: str) -> None:
    """With an optimizer that learns, whose state anybody may ask for, clipped by the norm of its own gradients."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        norms = []
        for step in range(STEPS):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(step))).backward()
            if here.client is None:
                norms.append(float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.3)))
            else:
                norms.append(here.client.clip(0.3))
            here.optimizer.step()
        state = here.optimizer.state_dict()["state"]
        learnt = {f"state {index}": entry["exp_avg"] for index, entry in state.items()}
        return {**weights(here.model), **learnt, "norms": torch.tensor(norms, dtype=torch.float64)}

    same_as_alone(group, under(strategy, "asp"), 1, adam, body, weight=1)


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "ps(servers=2, on=workers)"])
def test_a_worker_is_clipped_by_the_norm_of_its_own_gradients(group: Any, strategy: str) -> None:
    """Whatever the others push, and of it all, though a share of it is what owners are sent."""

    def body(here: Here) -> tuple[float, float]:
        loss_of(here.model(batch(here.rank))).backward()
        assert here.client is not None
        return here.client.clip(1e6), here.client.clip(0.5)

    for rank, (norm, again) in enumerate(on_group(group, under(strategy, "asp"), 3, adam, body, weight=1)):
        model, _ = adam()
        loss_of(model(batch(rank))).backward()
        wanted = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6))
        assert norm == pytest.approx(wanted, rel=1e-9)
        assert again == pytest.approx(wanted, rel=1e-9)


def test_clipping_is_refused_where_nobody_knows_whose_gradients_are_averaged(group: Any) -> None:
    def body(here: Here) -> None:
        loss_of(here.model(batch(here.rank))).backward()
        assert here.client is not None
        here.client.clip(1.0)

    with pytest.raises(
        GradientError, match=r"with backup workers these are the first to arrive, .*: use sync=bsp without"
    ):
        on_group(group, "ps(servers=1) sync=bsp(backup=1)", WORKERS, sgd, body, weight=1)


def test_backup_workers_are_fewer_than_workers(group: Any) -> None:
    with pytest.raises(
        UsageError, match=r"sync=bsp\(backup=2\) does not wait for 2 of 2 workers, so it waits for none"
    ):
        on_group(group, "ps(servers=1) sync=bsp(backup=2)", WORKERS, sgd, train, weight=1)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", SINGLE)
def test_every_gradient_counts_once_with_backup_workers(group: Any, strategy: str) -> None:
    """Those of plain sums do not depend on the weights, so whenever they come the end is the same."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS + (2 * here.rank if here.client is not None else 0)):
            here.optimizer.zero_grad()
            (sum(p.sum() for p in here.model.parameters()) * (1 + step + 10 * here.rank)).backward()
            here.optimizer.step()
        if here.client is not None:
            here.client.consolidate()
        return weights(here.model)

    def one(here: Here) -> dict[str, torch.Tensor]:
        total = sum(1 + step + 10 * rank for rank in range(WORKERS) for step in range(STEPS + 2 * rank))
        (sum(p.sum() for p in here.model.parameters()) * total / WORKERS).backward()
        here.optimizer.step()
        return weights(here.model)

    wanted = alone(making("sgd"), one)
    for found in on_group(group, under(strategy, "bsp(backup=1)"), WORKERS, making("sgd"), body, weight=1):
        close(found, wanted)


@pytest.mark.parametrize(("strategy", "sync"), [*zip(SINGLE, cycle(["asp", "ssp(staleness=1)", "bsp(backup=1)"]))])
def test_a_push_counts_by_its_batch(group: Any, strategy: str, sync: str) -> None:
    """Once every owner has heard of all: a sum of pushes is the mean over their samples."""
    sizes = [1, 5]

    def step(here: Here, factor: float) -> None:
        here.optimizer.zero_grad()
        rows = sizes[here.rank] if here.client is not None else 1
        (here.model(torch.ones(rows, 4, dtype=torch.float64)).mean() * factor).backward()
        here.optimizer.step()

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.client is not None
        step(here, 0.0)  # of this nobody can know what the others' counts
        here.client.consolidate()
        for number in range(STEPS):
            step(here, number + 10.0 * here.rank)
        here.client.consolidate()
        return weights(here.model)

    def one(here: Here) -> dict[str, torch.Tensor]:
        shares = [size / sum(sizes) for size in sizes]
        step(here, sum(share * (number + 10.0 * rank) for rank, share in enumerate(shares) for number in range(STEPS)))
        return weights(here.model)

    def linear(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(torch.nn.Linear(4, 3).double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    wanted = alone(linear, one)
    for found in on_group(group, under(strategy, sync), WORKERS, linear, body, weight="batch"):
        close(found, wanted)


@pytest.mark.parametrize("sync", ["ssp(staleness=0)", "ssp(staleness=0, rate=own)", "bsp(backup=1)"])
def test_what_an_optimizer_keeps_is_of_weighed_gradients(group: Any, sync: str) -> None:
    """With momentum: of constant gradients it comes to the mean over samples, whatever order pushes come in."""
    sizes = [2, 6]

    def body(here: Here) -> float:
        rows = sizes[here.rank]
        for _ in range(40):
            here.optimizer.zero_grad()
            (here.model(torch.ones(rows, 1, dtype=torch.float64)).mean() * (1 - here.rank)).backward()
            here.optimizer.step()
        assert here.client is not None
        here.client.consolidate()
        return float(here.model.weight.detach())

    def one(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)

    found, _ = on_group(group, f"ps(servers=1) sync={sync}", WORKERS, one, body, weight="batch")
    wanted = -0.01 * 40 * 0.25 / (1 - 0.5) * (2 if "own" in sync else 1)
    assert found == pytest.approx(wanted, rel=0.1)  # the start, and the last of what is kept, apart


class Normalised(torch.nn.Module):
    def __init__(self, kind: type[torch.nn.Module]) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 3), kind(3)


def normalised(kind: type[torch.nn.Module], index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = fill(Normalised(kind).double())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (partial(normalised, torch.nn.BatchNorm1d), {"weight": 1}, "give syncline.prepare.. broadcast_buffers=False"),
        (
            partial(normalised, torch.nn.SyncBatchNorm),
            {"weight": 1, "broadcast_buffers": False},
            "SyncBatchNorm sums over all ranks, which make no joint step under sync=asp",
        ),
    ],
)
def test_what_all_would_have_to_agree_on_is_refused(group: Any, make: Any, options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        on_group(group, "ps(servers=1) sync=asp", WORKERS, make, train, **options)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_weights_that_a_script_changes_are_refused(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        steps(here, range(1))
        with torch.no_grad():
            next(here.model.parameters()).add_(1)
        steps(here, range(1))

    with pytest.raises(
        UsageError, match="weights were changed on this worker, and under sync=asp owners keep their own"
    ):
        on_group(group, under(strategy, "asp"), WORKERS, sgd, body, weight=1)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_a_second_backward_before_the_step_is_refused(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        for _ in range(2):
            loss_of(here.model(batch(0))).backward()

    with pytest.raises(GradientError, match=r"a second backward\(\) before step\(\)"):
        on_group(group, under(strategy, "asp"), WORKERS, sgd, body, weight=1)


def test_a_second_model_is_refused(group: Any) -> None:
    def body(here: Here) -> None:
        prepare(here.session, *sgd(), Options())

    with pytest.raises(UsageError, match="owners of weights under sync=asp serve one model"):
        on_group(group, "ps(servers=1, on=workers) sync=asp", WORKERS, sgd, body, weight=1)


class Descent:
    def __init__(self) -> None:
        self.lr = 0.25

    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


@pytest.mark.parametrize("sync", ["asp", "ssp(staleness=0)"])
@pytest.mark.parametrize("strategy", ["ps(servers=2) schedule=wait_free", "ps(servers=2, on=workers)"])
def test_models_of_numpy(group: Any, strategy: str, sync: str) -> None:
    """All that was pushed is in the weights in the end."""

    def body(session: Session) -> Any:
        handed = adapt(session, {"w": np.ones(9), "b": np.zeros((2, 3))}, Descent(), OPTIONS)
        if handed is None:
            return None
        weights, optimizer = handed.result
        for step in range(STEPS):
            optimizer.step({"w": np.full(9, step + session.rank), "b": np.ones((2, 3))})
        session.barrier()
        optimizer.step({"w": np.zeros(9), "b": np.zeros((2, 3))})
        return {name: array.copy() for name, array in weights.items()}

    pushed = sum(step + rank for step in range(STEPS) for rank in range(WORKERS)) / WORKERS
    for found in group(f"{strategy} sync={sync}", WORKERS, body)[:WORKERS]:
        np.testing.assert_array_equal(found["w"], np.full(9, 1 - 0.25 * pushed))
        np.testing.assert_array_equal(found["b"], np.full((2, 3), -0.25 * STEPS))


class Slower:
    """Descent at a rate that a script sets before every step."""

    def __init__(self) -> None:
        self.lr = 1.0

    def update(self, weights: Any, gradient: Any, state: Any) -> None:  # noqa: ARG002
        weights -= self.lr * gradient


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=1, on=workers)", "ps(servers=2, on=workers)"])
def test_an_owner_leaves_the_scripts_optimizer_alone(group: Any, place: str) -> None:
    """Every push is applied with the newest values that a script has set: a slow worker's too."""
    done = threading.Event()

    def body(session: Session) -> Any:
        handed = adapt(session, {"w": np.zeros(4)}, Slower(), OPTIONS)
        if handed is None:
            return None
        arrays, optimizer = handed.result
        seen = []
        for step in range(4):
            optimizer.lr *= 0.5
            if session.rank == 0 and step == 0:
                done.wait(60)
            seen.append(optimizer.lr)
            optimizer.step({"w": np.ones(4)})
        if session.rank == 1:
            done.set()
        session.barrier()
        optimizer.step({"w": np.zeros(4)})
        return seen, arrays["w"].tolist()

    for seen, held in group(f"{place} sync=asp", 2, body)[:2]:
        assert seen == [0.5, 0.25, 0.125, 0.0625]
        assert held == [-(0.9375 + 4 * 0.0625) / 2] * 4


@pytest.mark.parametrize("sync", ["ssp(staleness=0)", "bsp"])
def test_a_step_that_is_left_in_the_middle_is_not_gone_on_from(group: Any, sync: str) -> None:
    """An interrupt between two buckets that a script catches: every later call says so."""

    def body(here: Here) -> None:
        assert here.replica is not None
        real, count = here.replica.exchange.start, itertools.count()

        def start(*arguments: Any) -> Any:
            if next(count) == 1:
                raise KeyboardInterrupt
            return real(*arguments)

        here.replica.exchange.start = start  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            loss_of(here.model(batch(0))).backward()
        loss_of(here.model(batch(1))).backward()

    with pytest.raises(ClosedError, match="an exchange was interrupted by KeyboardInterrupt"):
        on_group(group, f"ps(servers=1) sync={sync} schedule=wait_free", 1, making("sgd"), body, weight=1)
