"""Between ``backward`` and ``step``: clipping, GradScaler, schedulers, closures, parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from toy import (
    SERVED,
    STRATEGIES,
    Here,
    adam,
    batch,
    loss_of,
    mlp,
    on_group,
    same_as_alone,
    sgd,
    weights,
)

from syncline.errors import GradientError, MismatchError

STEPS = 4


def clip(here: Here, max_norm: float) -> float:
    if here.client is not None:
        return here.client.clip(max_norm)
    return float(torch.nn.utils.clip_grad_norm_(here.model.parameters(), max_norm))


@pytest.mark.parametrize(
    ("strategy", "max_norm", "make"),
    [(row, *other) for row, other in zip(STRATEGIES, cycle([(0.3, sgd), (1e6, adam)]))],
)
def test_clipping_equals_that_of_one_worker(group: Any, strategy: str, max_norm: float, make: Any) -> None:
    """Clipped hard, and not at all; the norms are those of the averaged gradients."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        norms = []
        for step in range(STEPS):
            here.optimizer.zero_grad()
            x = batch(step)
            loss_of(here.model(x if here.replica is None else (x[:5] if here.rank == 0 else x[5:]))).backward()
            norms.append(clip(here, max_norm))
            here.optimizer.step()
        return {**weights(here.model), "norms": torch.tensor(norms, dtype=torch.float64)}

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2)"])
def test_clipping_twice_and_only_sometimes(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        norms = []
        for step in range(STEPS):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            if step % 2:
                norms += [clip(here, 0.5), clip(here, 0.2)]
            here.optimizer.step()
        return {**weights(here.model), "norms": torch.tensor(norms, dtype=torch.float64)}

    same_as_alone(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", SERVED)
def test_clipping_by_torch_is_refused_where_servers_hold_the_gradients(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        loss_of(here.model(here.share(batch(0)))).backward()
        torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.1)
        here.optimizer.step()

    with pytest.raises(GradientError, match=r"changed between backward\(\) and step\(\).*syncline.clip_grad_norm_"):
        on_group(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", SERVED)
def test_a_rank_that_clips_alone_is_an_error(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        loss_of(here.model(here.share(batch(0)))).backward()
        if here.rank == 1:
            clip(here, 0.1)
        here.optimizer.step()

    with pytest.raises(MismatchError, match="clip_grad_norm_"):
        on_group(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", SERVED)
def test_clip_before_backward_is_refused(group: Any, strategy: str) -> None:
    with pytest.raises(GradientError, match=r"no gradients of this step"):
        on_group(group, strategy, 2, sgd, lambda here: clip(here, 0.1))


@pytest.mark.parametrize("strategy", SERVED)
def test_step_before_backward_is_refused_by_servers(group: Any, strategy: str) -> None:
    with pytest.raises(GradientError, match=r"step\(\) before backward\(\)"):
        on_group(group, strategy, 2, sgd, lambda here: here.optimizer.step())


def small(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp().float()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "clips"), [*zip(STRATEGIES, cycle([False, True]))])
def test_one_ranks_overflow_makes_all_ranks_skip_the_step(group: Any, strategy: str, clips: bool) -> None:
    """Every rank sees the same gradients, or its scaler hears what owners have seen: scales stay equal."""

    def body(here: Here) -> tuple[list[float], list[bool]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scales, moved = [], []
        for step in range(STEPS):
            here.optimizer.zero_grad()
            before = weights(here.model)
            x = here.share(batch(step)).float()
            factor = float("inf") if (here.rank, step) == (1, 2) else 1.0
            scaler.scale(loss_of(here.model(x)) * factor).backward()
            if clips and here.client is not None:
                here.client.clip(1.0, scaler.get_scale())
            elif clips:
                scaler.unscale_(here.optimizer)
                clip(here, 1.0)
            scaler.step(here.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            moved.append(any(not torch.equal(before[name], tensor) for name, tensor in weights(here.model).items()))
        return scales, moved

    results = on_group(group, strategy, 3, small, body)
    assert results[0] == ([1024.0, 1024.0, 512.0, 512.0], [True, True, False, True])
    assert results[1:] == results[:1] * 2


@pytest.mark.parametrize("strategy", SERVED)
def test_a_change_behind_a_scalers_look_is_seen(group: Any, strategy: str) -> None:
    """What asks, as a GradScaler does, whether the optimizer scales by itself opens no door to other changes."""

    def body(here: Here) -> None:
        loss_of(here.model(here.share(batch(0)))).backward()
        assert here.optimizer._step_supports_amp_scaling  # type: ignore[attr-defined]
        for parameter in here.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5).mul_(0.5)
        here.optimizer.step()

    with pytest.raises(GradientError, match=r"changed between backward\(\) and step\(\)"):
        on_group(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1, update=worker)", *SERVED])
def test_grad_scaler_trains_as_on_one_worker(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            here.optimizer.zero_grad()
            scaler.scale(loss_of(here.model(here.share(batch(step))))).backward()
            scaler.step(here.optimizer)
            scaler.update()
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


@pytest.mark.every(2)
@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("strategy", SERVED)
def test_grad_scaler_and_clipping_by_owners_train_as_on_one_worker(group: Any, strategy: str, make: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        scaler, norms = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2), []
        for step in range(STEPS):
            here.optimizer.zero_grad()
            scaler.scale(loss_of(here.model(here.share(batch(step))))).backward()
            if here.client is None:
                scaler.unscale_(here.optimizer)
                norms.append(clip(here, 0.3))
            else:
                norms.append(here.client.clip(0.3, scaler.get_scale()))
            scaler.step(here.optimizer)
            scaler.update()
        return {**weights(here.model), "norms": torch.tensor(norms, dtype=torch.float64)}

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", SERVED)
def test_unscaling_what_owners_have_is_refused_with_the_remedy(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(loss_of(here.model(here.share(batch(0))))).backward()
        scaler.unscale_(here.optimizer)
        scaler.step(here.optimizer)

    with pytest.raises(GradientError, match=r"syncline.clip_grad_norm_.*scaler= in place of a GradScaler's unscale_"):
        on_group(group, strategy, 2, sgd, body)


def test_a_grad_scaler_cannot_hold_back_what_owners_update_at_once(group: Any) -> None:
    def body(here: Here) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaler.scale(loss_of(here.model(here.share(batch(0))))).backward()
        scaler.step(here.optimizer)

    with pytest.raises(GradientError, match=r"GradScaler needs all gradients.*schedule=fixed"):
        on_group(group, "ps(servers=1) schedule=priority", 2, sgd, body)


def test_a_disabled_grad_scaler_is_fine_with_servers(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        scaler.scale(loss_of(here.model(here.share(batch(0))))).backward()
        scaler.step(here.optimizer)
        scaler.update()
        return weights(here.model)

    same_as_alone(group, "ps(servers=1)", 2, sgd, body)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 3)),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1),
}


@pytest.mark.parametrize(
    ("scheduler", "strategy"), [*zip(SCHEDULERS, cycle(["ring", "ps(servers=2)", "ps(servers=2, on=workers)"]))]
)
@pytest.mark.parametrize("before", [True, False])
def test_learning_rate_schedulers_made_before_or_after_prepare(
    group: Any, strategy: str, scheduler: str, before: bool
) -> None:
    """OneCycleLR changes the momentum too; a warm-up begins with a rate of 0."""
    made: dict[int, Any] = {}

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        if before:
            made[id(optimizer)] = SCHEDULERS[scheduler](optimizer)
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        schedule = made[id(here.optimizer)] if before else SCHEDULERS[scheduler](here.optimizer)
        rates = []
        for step in range(STEPS):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
            schedule.step()
            rates.append(here.optimizer.param_groups[0]["lr"])
        return {**weights(here.model), "rates": torch.tensor(rates, dtype=torch.float64)}

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", SERVED)
def test_learning_rates_that_differ_between_ranks_are_refused(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        here.optimizer.param_groups[0]["lr"] = 0.1 + here.rank
        loss_of(here.model(here.share(batch(0)))).backward()
        here.optimizer.step()

    with pytest.raises(MismatchError):
        on_group(group, strategy, 2, sgd, body)


def test_the_learning_rate_may_be_a_tensor(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.02, dtype=torch.float64))

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, "ps(servers=2)", 2, make, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closures_are_called_once_and_their_loss_comes_back(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        losses = []
        for step in range(STEPS):

            def closure(step: int = step) -> torch.Tensor:
                here.optimizer.zero_grad()
                loss = loss_of(here.model(here.share(batch(step))))
                loss.backward()
                losses.append(float(loss.detach()))
                return loss.detach()

            assert float(here.optimizer.step(closure)) == losses[-1]
        assert len(losses) == STEPS
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


def test_lbfgs_evaluates_its_closure_several_times_per_step(group: Any) -> None:
    """It may stop early by the rank's own loss, which is switched off here."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, tolerance_change=0)

    def body(here: Here) -> dict[str, torch.Tensor]:
        def closure() -> torch.Tensor:
            here.optimizer.zero_grad()
            loss = loss_of(here.model(here.share(batch(0))))
            loss.backward()
            return loss.detach()

        here.optimizer.step(closure)
        return weights(here.model)

    same_as_alone(group, "ring", 2, make, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parameter_groups_keep_their_own_values(group: Any, strategy: str) -> None:
    """Groups cut across the order of the model, and one is changed on the way."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        named = dict(model.named_parameters())
        groups = [
            {"params": [named["2.bias"], named["0.weight"]], "lr": 0.01},
            {"params": [named["0.bias"]], "momentum": 0.5, "weight_decay": 0.1},
            {"params": [named["2.weight"]]},
        ]
        return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
            here.optimizer.param_groups[1]["lr"] /= 2
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.slow
def test_many_parameter_groups_fit_into_a_request(group: Any) -> None:
    """A group per parameter, as layer-wise decay makes them: more than 64 KiB of values."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = torch.nn.ParameterList([torch.full((1,), float(i), dtype=torch.float64) for i in range(300)])
        groups = [{"params": [parameter], "lr": 0.1 / (i + 1)} for i, parameter in enumerate(model)]
        return model, torch.optim.Adam(groups)

    def body(here: Here) -> dict[str, torch.Tensor]:
        torch.stack([parameter.square() for parameter in here.model.parameters()]).sum().backward()
        here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, "ps(servers=1)", 2, make, body, weight=1)


@pytest.mark.parametrize("strategy", SERVED)
def test_parameter_groups_cannot_be_added_to_a_served_optimizer(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        here.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})

    with pytest.raises(ValueError, match=r"before syncline.prepare\(\)"):
        on_group(group, strategy, 2, sgd, body)


@pytest.mark.parametrize(("strategy", "to_none"), [*zip(STRATEGIES, cycle([True, False]))])
def test_gradients_may_be_cleared_in_either_way_and_before_or_after_forward(
    group: Any, strategy: str, to_none: bool
) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            loss = loss_of(here.model(here.share(batch(step))))
            here.optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)
