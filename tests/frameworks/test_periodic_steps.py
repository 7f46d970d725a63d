"""What a script does between two averages of weights: clipping, scaling, accumulating, statistics; and who counts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from periodic import STEPS, WORKERS, Normalised, consolidate, equal, shares, under
from toy import STAGED, Here, batch, close, loss_of, making, mlp, on_group, same_as_alone, sgd, weights

from syncline.errors import UsageError
from syncline.frameworks.torch import Options, prepare
from syncline.session.session import Session

CARRIED = ["ring", "ps(servers=2, update=worker)", "ring" + STAGED]


def clipped(here: Here) -> list[float]:
    """With gradients clipped by their own norm, and a scheduler; weights and rates at the end."""
    schedule = torch.optim.lr_scheduler.StepLR(here.optimizer, 2, 0.5)
    norms = []
    for step in range(4):
        here.optimizer.zero_grad()
        loss_of(here.model(batch(10 * step + here.rank))).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.3)))
        here.optimizer.step()
        schedule.step()
    return [*norms, here.optimizer.param_groups[0]["lr"]]


def test_steps_of_a_worker_are_clipped_and_scheduled_as_without_others(group: Any) -> None:
    found = on_group(group, "ring sync=local(steps=9)", 2, sgd, clipped, weight=1)
    for rank, norms in enumerate(found):
        assert norms == clipped(Here(*sgd(), rank=rank))


def test_a_step_that_the_scaler_skips_on_one_rank_is_counted_on_all(group: Any) -> None:
    """The average is made before that rank's next forward pass, or when it consolidates."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales = []
        for step in range(6):
            here.optimizer.zero_grad()
            factor = float("inf") if (here.rank, step) in ((1, 1), (0, 5)) else 1.0
            scaler.scale(loss_of(here.model(batch(10 * step + here.rank).float())) * factor).backward()
            scaler.step(here.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        before = weights(here.model)
        with torch.no_grad():
            here.model(batch(0).float())
        here.model.eval()
        here.model(batch(0).float())
        if here.rank == 0:  # evaluation exchanges nothing by itself
            equal([before, weights(here.model)])
        consolidate(here)
        return scales, before, weights(here.model)

    (first, _, a), (second, _, b) = on_group(group, "ring sync=local(steps=2)", 2, make, body, weight=1)
    assert (first[-1], second[-1]) == (512.0, 512.0)
    assert (first[1], second[1]) == (1024.0, 512.0)
    equal([a, b])


@pytest.mark.parametrize("call", ["barrier", "gather", "allreduce"])
def test_a_rank_whose_last_step_the_scaler_has_skipped_exchanges_before_another_call(group: Any, call: str) -> None:
    """And calls between backward pass and optimizer come before the exchange on all ranks."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.session is not None
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        seen = np.ones(3, np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "barrier": here.session.barrier,
            "gather": lambda: here.session.gather(b"me") if here.session else None,
            "allreduce": lambda: here.session.allreduce(seen) if here.session else None,
        }
        for step in range(4):
            here.optimizer.zero_grad()
            factor = float("inf") if (here.rank, step) in ((1, 1), (0, 3)) else 1.0
            scaler.scale(loss_of(here.model(batch(10 * step + here.rank).float())) * factor).backward()
            before = weights(here.model)
            calls[call]()
            scaler.unscale_(here.optimizer)
            calls[call]()
            equal([before, weights(here.model)])
            scaler.step(here.optimizer)
            calls[call]()
            scaler.update()
        return weights(here.model)

    equal(on_group(group, "ring sync=local(steps=2)", 2, make, body, weight=1))


def test_a_grad_scaler_finds_an_optimizer_as_it_was_when_the_run_is_over(group: Any) -> None:
    kept: list[torch.optim.Optimizer] = []

    def body(here: Here) -> None:
        shares(here, range(1))
        kept.append(here.optimizer)
        copy.deepcopy(here.optimizer).step()

    on_group(group, "ring sync=local(steps=2)", 2, sgd, body, weight=1)
    assert not any("_step_supports_amp_scaling" in vars(optimizer) for optimizer in kept)


def test_accumulated_passes_and_those_of_one_closure_are_one_step(group: Any) -> None:
    def accumulated(here: Here) -> int:
        for step in range(4):
            here.optimizer.zero_grad()
            with here.no_sync():
                loss_of(here.model(batch(step))).backward()
            loss_of(here.model(batch(step + 10))).backward()
            here.optimizer.step()
        return here.replica.steps if here.replica is not None else 0

    def several(here: Here) -> int:
        def closure() -> torch.Tensor:
            here.optimizer.zero_grad()
            loss = loss_of(here.model(batch(here.rank)))
            loss.backward()
            return loss.detach()

        for _ in range(4):
            here.optimizer.step(closure)
        return here.replica.steps if here.replica is not None else 0

    def counted(here: Here) -> float:
        several(here)
        here.optimizer.step(lambda: several_batches(here))
        averaging = None if here.replica is None else here.replica.averaging
        return 0.0 if averaging is None else averaging.weight

    def several_batches(here: Here) -> torch.Tensor:
        here.optimizer.zero_grad()
        with here.no_sync():
            loss_of(here.model(batch(1, 3))).backward()
        loss = loss_of(here.model(batch(2, 5)))
        loss.backward()
        return loss.detach()

    def raising(here: Here) -> int:
        def closure() -> torch.Tensor:
            several_batches(here)
            raise ValueError

        with contextlib.suppress(ValueError):
            here.optimizer.step(closure)
        loss_of(here.model(batch(3))).backward()
        return here.replica.steps if here.replica is not None else 0

    def lbfgs(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, tolerance_change=0)

    assert on_group(group, "ring sync=local(steps=2)", 2, sgd, accumulated, weight=1) == [4, 4]
    assert on_group(group, "ring sync=local(steps=2)", 2, lbfgs, several, weight=1) == [4, 4]
    assert on_group(group, "ring sync=local(steps=2)", 2, lbfgs, counted, weight="batch") == [8.0, 8.0]
    assert on_group(group, "ring sync=local(steps=3)", 2, sgd, raising, weight=1) == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("compiling")
@pytest.mark.filterwarnings("ignore")  # the compiler filters its own warnings, which threads disturb
def test_compiled_models_train_as_others(group: Any) -> None:
    def body(here: Here, compiled: bool) -> dict[str, torch.Tensor]:
        plain = here.model
        if compiled:
            here.model = torch.compile(plain, backend="aot_eager", dynamic=True)  # type: ignore[assignment]
        shares(here, range(4))
        return weights(plain)

    one, other = (
        on_group(group, "ring sync=local(steps=2)", 2, sgd, partial(body, compiled=compiled), weight=1)
        for compiled in (False, True)
    )
    for found, wanted in zip(other, one, strict=True):
        close(found, wanted)


def test_gradients_stay_where_autograd_puts_them(group: Any) -> None:
    """So does what a script holds on to: an average writes to none of it."""

    def body(here: Here) -> None:
        loss_of(here.model(batch(here.rank))).backward()
        kept = [parameter.grad for parameter in here.model.parameters()]
        values = [gradient.clone() for gradient in kept if gradient is not None]
        here.optimizer.step()
        for parameter, gradient, value in zip(here.model.parameters(), kept, values, strict=True):
            assert parameter.grad is gradient
            assert torch.equal(value, gradient)

    on_group(group, "ring sync=local(steps=1)", 2, sgd, body, weight=1)
    on_group(group, "ring sync=post_local(after=0, steps=1)", 2, sgd, body, weight=1)


@pytest.mark.parametrize("weight", ["batch", "number"])
def test_ranks_count_by_what_they_have_seen_since_the_last_average(group: Any, weight: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(10 * step + here.rank, 3 if here.rank == 0 else 6))).backward()
            here.optimizer.step()
        return weights(here.model)

    def run(session: Session) -> dict[str, torch.Tensor]:
        made = prepare(session, *sgd(), Options(weight="batch" if weight == "batch" else 1.0 + session.rank))
        assert made is not None
        return body(Here(made.model, made.optimizer, session.rank, 2, session, made.replica))  # type: ignore[arg-type]

    found = group("ring sync=local(steps=2)", 2, run)
    own = [body(Here(*sgd(), rank=rank)) for rank in range(2)]
    wanted = {name: (own[0][name] + 2 * own[1][name]) / 3 for name in own[0]}
    for mine in found:
        close(mine, wanted)


@pytest.mark.parametrize(
    "strategy",
    [
        "ring sync=local(steps=2)",
        "ps(servers=1, update=worker) sync=local(steps=2)",
        "ring sync=local(steps=2)" + STAGED,
        "ring sync=gossip(steps=2)",
    ],
)
@pytest.mark.parametrize("shared", [True, False])
def test_statistics_of_batches_are_averaged_with_the_weights(group: Any, strategy: str, shared: bool) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        torch.manual_seed(5)
        model = Normalised().double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            for tensor in here.model.parameters():
                tensor.fill_(0.25)
        shares(here, range(2))
        return weights(here.model)

    own = [body(Here(*make(0), rank=rank)) for rank in range(2)]
    found = on_group(group, strategy, 2, make, body, weight=1, broadcast_buffers=shared)
    for mine, alone in zip(found, own, strict=True):
        for name in ("norm.running_mean", "norm.running_var"):
            average = (own[0][name] + own[1][name]) / 2
            assert torch.allclose(mine[name], average if shared else alone[name], rtol=1e-12)
        assert int(mine["norm.num_batches_tracked"]) == 2


# Ranks count by their samples.


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
