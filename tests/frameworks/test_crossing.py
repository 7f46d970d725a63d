"""Schedules whose steps end in the next iteration: whatever a script does, it gets one worker's weights."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from toy import OPTIMIZERS, STAGED, Here, adam, alone, batch, close, loss_of, making, mlp, on_group, sgd, train, weights

from syncline.errors import GradientError, UsageError
from syncline.frameworks.torch.deferred import DeferredParameter

LAYERED = [
    "ring schedule=priority",
    "ring schedule=priority(slice=40B)",
    "direct schedule=split(slice=40B)",
    "ps(servers=1, update=worker) schedule=priority(slice=40B)",
    "ring schedule=priority(slice=40B)" + STAGED,
    "ring schedule=split(slice=40B)" + STAGED,
]
ALL = [*LAYERED[1:3], "ring schedule=delayed"]
STEPS = 5


def under_way(here: Here) -> bool:
    """Whether something is, so that a test is about what it says."""
    return any(type(parameter) is DeferredParameter for parameter in here.model.parameters())


def plain(here: Here) -> dict[str, torch.Tensor]:
    train(here, range(STEPS))
    assert here.replica is None or under_way(here)
    return weights(here.model)


def clipped(here: Here) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        loss_of(here.model(here.share(batch(step)))).backward()
        norm = torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.1)
        assert norm > 0.1
        here.optimizer.step()
        here.optimizer.zero_grad()
    return weights(here.model)


def clipped_now_and_then(here: Here) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        loss_of(here.model(here.share(batch(step)))).backward()
        if step % 2:
            torch.nn.utils.clip_grad_value_(here.model.parameters(), 0.01)
        here.optimizer.step()
        here.optimizer.zero_grad()
    return weights(here.model)


def moving_average(here: Here) -> dict[str, torch.Tensor]:
    """Of a list of parameters that was kept, and by one that reads their ``data``."""
    kept = list(here.model.parameters())
    average = [parameter.detach().clone() for parameter in kept]
    other = copy.deepcopy(average)
    for step in range(STEPS):
        train(here, range(step, step + 1))
        with torch.no_grad():
            torch._foreach_lerp_(average, kept, 0.1)
        for mean, parameter in zip(other, kept, strict=True):
            mean.mul_(0.5).add_(parameter.data)
    return weights(here.model) | {str(i): t for i, t in enumerate([*average, *other])}


def evaluated_by_one_rank(here: Here) -> dict[str, torch.Tensor]:
    found = {}
    for step in range(STEPS):
        train(here, range(step, step + 1))
        if here.rank == 0:
            here.model.eval()
            with torch.no_grad():
                found[f"step {step}"] = here.model(batch(99)).clone()
            here.model.train()
        else:
            found[f"step {step}"] = torch.zeros(0)
    return found | weights(here.model)


def saved(here: Here) -> dict[str, torch.Tensor]:
    """Model and optimizer, in the middle, and taken up again."""
    train(here, range(2))
    file = io.BytesIO()
    torch.save({"model": here.model.state_dict(), "optimizer": here.optimizer.state_dict()}, file)
    train(here, range(2, 4))
    file.seek(0)
    state = torch.load(file)
    here.model.load_state_dict(state["model"])
    here.optimizer.load_state_dict(state["optimizer"])
    train(here, range(4, 6))
    return weights(here.model)


def scheduled(here: Here) -> dict[str, torch.Tensor]:
    """The learning rate changes between the call of the optimizer and the update of the weights."""
    scheduler = StepLR(here.optimizer, 1, 0.5)
    for step in range(STEPS):
        train(here, range(step, step + 1))
        scheduler.step()
    return weights(here.model)


def accumulated(here: Here) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        here.optimizer.zero_grad()
        with here.no_sync():
            loss_of(here.model(here.share(batch(step)))).backward()
        loss_of(here.model(here.share(batch(step + 50)))).backward()
        here.optimizer.step()
    return weights(here.model)


def added_up(here: Here) -> dict[str, torch.Tensor]:
    """Two passes that are exchanged, and one optimizer step; one graph is gone through twice."""
    for step in range(STEPS):
        here.model.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        loss = loss_of(here.model(here.share(batch(step + 50))))
        loss.backward(retain_graph=True)
        loss.backward()
        here.optimizer.step()
    return weights(here.model)


def never_zeroed(here: Here) -> dict[str, torch.Tensor]:
    for step in range(3):
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
    return weights(here.model)


def zeroed_otherwise(here: Here) -> dict[str, torch.Tensor]:
    ways: list[Callable[[], Any]] = [
        lambda: here.model.zero_grad(set_to_none=False),
        lambda: here.optimizer.zero_grad(set_to_none=False),
        here.model.zero_grad,
        here.model[0].zero_grad,  # type: ignore[index]
    ]
    for step, way in enumerate(ways):
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
        way()
    for parameter in here.model.parameters():
        parameter.grad = None
    return plain(here)


def skipped(here: Here) -> dict[str, torch.Tensor]:
    """A step is given up behind backward, as scripts do whose loss is not a number; another is made twice."""
    for step in range(STEPS):
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        if step == 2:
            continue
        here.optimizer.step()
        if step == 3:
            here.optimizer.step()
    return weights(here.model)


def own_gradients(here: Here) -> dict[str, torch.Tensor]:
    """A script puts gradients of its own in place, or takes some away."""
    for step in range(STEPS):
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        for number, parameter in enumerate(here.model.parameters()):
            if step == 1:
                parameter.grad = torch.full_like(parameter, 0.1)
            if step == 3 and number == 1:
                parameter.grad = None
        here.optimizer.step()
    return weights(here.model)


def changed_weights(here: Here) -> dict[str, torch.Tensor]:
    """Weights are clipped behind every step."""
    for step in range(STEPS):
        train(here, range(step, step + 1))
        with torch.no_grad():
            for parameter in here.model.parameters():
                parameter.clamp_(-0.2, 0.2)
    return weights(here.model)


def penalised(here: Here) -> dict[str, torch.Tensor]:
    """The loss reads weights by itself, before the forward pass."""
    for step in range(STEPS):
        here.optimizer.zero_grad()
        penalty = sum((parameter.square().sum() for parameter in here.model.parameters()), torch.zeros(()))
        (loss_of(here.model(here.share(batch(step)))) + 0.1 * penalty).backward()
        here.optimizer.step()
    return weights(here.model)


def copied(here: Here) -> dict[str, torch.Tensor]:
    """Copies and pickles of model and optimizer in the middle are plain ones, of the weights as they are."""
    train(here, range(3))
    twin = copy.deepcopy(here.model)
    pickled = pickle.loads(pickle.dumps([here.model, here.optimizer]))
    assert all(type(one) is torch.nn.Parameter for made in (twin, pickled[0]) for one in made.parameters())
    assert "zero_grad" not in vars(twin)
    made = pickled[1]
    assert type(made).__mro__[1] is not type(here.optimizer)
    for _, group in enumerate(made.param_groups):
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    made.step()
    train(here, range(3, 5))
    found = weights(here.model) | {f"twin {name}": tensor for name, tensor in weights(twin).items()}
    held = [one for group in made.param_groups for one in group["params"]]
    return found | {f"stepped {number}": one.detach() for number, one in enumerate(held)}


def with_closure(here: Here) -> dict[str, torch.Tensor]:
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            here.optimizer.zero_grad()
            loss = loss_of(here.model(here.share(batch(step))))
            loss.backward()
            return loss

        loss = here.optimizer.step(closure)
        assert loss is not None
    return weights(here.model)


def scaled(here: Here) -> dict[str, torch.Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(STEPS):
        here.optimizer.zero_grad()
        scaler.scale(loss_of(here.model(here.share(batch(step))))).backward()
        if step % 2:
            scaler.unscale_(here.optimizer)
            torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.1)
        scaler.step(here.optimizer)
        scaler.update()
    return weights(here.model)


def adversarial(here: Here) -> dict[str, torch.Tensor]:
    """Two halves with a backward pass each, of which one goes through both, as with generators."""
    for step in range(STEPS):
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
        loss_of(here.model(here.share(batch(step + 30)))).backward()
    here.optimizer.zero_grad()
    return plain(here)


def in_another_mode(here: Here) -> dict[str, torch.Tensor]:
    """Weights are looked at first, and so updated, where gradients are off, in inference mode and under autocast."""
    for step in range(STEPS):
        train(here, range(step, step + 1))
        if step % 2 == 0:
            with torch.inference_mode():
                here.model(batch(99))
        else:
            with torch.autocast("cpu", torch.bfloat16):
                here.model(batch(99))
    return weights(here.model)


SCRIPTS = [
    plain, clipped, clipped_now_and_then, moving_average, saved, scheduled, accumulated, added_up, never_zeroed,
    zeroed_otherwise, skipped, own_gradients, changed_weights, penalised, copied, with_closure, scaled, in_another_mode,
    adversarial,
]  # fmt: skip


@pytest.mark.parametrize("strategy", LAYERED)
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_get_one_workers_weights(group: Any, strategy: str, script: Callable[[Here], Any]) -> None:
    wanted = alone(sgd, script)
    for found in on_group(group, strategy, 2, sgd, script):
        close(found, wanted)


@pytest.mark.parametrize("strategy", [LAYERED[1], LAYERED[2]])
def test_one_rank_may_look_alone(group: Any, strategy: str) -> None:
    wanted = alone(sgd, evaluated_by_one_rank)
    found, other = on_group(group, strategy, 2, sgd, evaluated_by_one_rank)
    close(found, wanted)
    close({name: other[name] for name in weights(mlp())}, {name: wanted[name] for name in weights(mlp())})


@pytest.mark.parametrize("strategy", [LAYERED[1], LAYERED[2]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_in_parts_do_what_they_do_at_once(group: Any, strategy: str, optimizer: str) -> None:
    """Their state too."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(STEPS))
        state = here.optimizer.state_dict()["state"]
        kept = {f"{i} {key}": value for i, one in state.items() for key, value in one.items() if torch.is_tensor(value)}
        return weights(here.model) | kept

    wanted = alone(making(optimizer), body)
    for found in on_group(group, strategy, 2, making(optimizer), body):
        close(found, wanted)


@pytest.mark.parametrize("strategy", LAYERED)
@pytest.mark.parametrize("workers", [2, 3])
def test_lossless_schedules_give_the_weights_of_fifo(group: Any, strategy: str, workers: int) -> None:
    """To the bit with two ranks, whose sums have one order; with more to what the order of sums makes of them."""
    architecture = strategy.split()[0] if not strategy.startswith("ps") else "ps(servers=1, update=worker)"
    wanted = on_group(group, f"{architecture} schedule=fifo", workers, adam, plain_of_fifo)
    for found, other in zip(on_group(group, strategy, workers, adam, plain), wanted, strict=True):
        close(found, other, 0.0 if workers == 2 else 1e-12)
    again = on_group(group, strategy, workers, adam, plain)
    for found, other in zip(again, on_group(group, strategy, workers, adam, plain), strict=True):
        close(found, other, 0.0)


def plain_of_fifo(here: Here) -> dict[str, torch.Tensor]:
    train(here, range(STEPS))
    return weights(here.model)


class Tied(torch.nn.Module):
    """Weights that two layers have, that are used outside their module, in another order, or now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.last = torch.nn.Linear(4, 3).double()
        self.first, self.middle = torch.nn.Linear(4, 4).double(), torch.nn.Linear(4, 4).double()
        self.middle.weight = self.first.weight
        self.outside = torch.nn.Linear(4, 4).double()
        self.gain = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.rare = torch.nn.Linear(4, 4).double()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        x = torch.nn.functional.linear(x, self.outside.weight * self.gain, self.outside.bias)
        if self.calls % 2:
            x = self.rare(x)
        return self.last(x)


def tied(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    from toy import fill

    model = fill(Tied())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("strategy", LAYERED)
def test_weights_that_are_tied_or_used_elsewhere_wait_where_they_are_read(group: Any, strategy: str) -> None:
    wanted = alone(tied, zero_filled)
    for found in on_group(group, strategy, 2, tied, zero_filled, unused="zeros"):
        close(found, wanted)


def zero_filled(here: Here) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        here.optimizer.zero_grad(set_to_none=here.replica is not None)
        loss_of(here.model(here.share(batch(step)))).backward()
        if here.replica is None:
            for parameter in here.model.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        here.optimizer.step()
    return weights(here.model)


class Branches(torch.nn.Module):
    """Of two layers one is used, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = torch.nn.Linear(4, 3).double(), torch.nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor, left: bool, right: bool) -> torch.Tensor:
        return sum((layer(x) for layer, used in ((self.left, left), (self.right, right)) if used), torch.zeros(3))


def branches(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    from toy import fill

    model = fill(Branches())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


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
def test_a_parameter_that_is_no_longer_used_is_named_where_that_is_not_said_to_be_meant(
    group: Any, strategy: str
) -> None:
    def body(here: Here) -> None:
        for step in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)), True, step != 1 or here.rank == 1)).backward()
            here.optimizer.step()

    with pytest.raises(GradientError, match=r"2 parameters got no gradient .*'right.weight', 'right.bias'.*unused"):
        on_group(group, strategy, 2, branches, body)


class Unseen(torch.nn.Module):
    """Reads a weight in a way that torch does not tell of, as extensions do: always, or from a step on."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.linear, self.begins, self.calls = torch.nn.Linear(4, 3).double(), begins, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls <= self.begins:
            return self.linear(x)
        with torch._C.DisableTorchFunctionSubclass():
            return torch.nn.functional.linear(x, self.linear.weight, self.linear.bias)


def unseen(begins: int) -> Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]]:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        from toy import fill

        model = fill(Unseen(begins))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    return make


def test_weights_that_are_read_unseen_wait_at_the_models_forward_pass(group: Any) -> None:
    wanted = alone(unseen(0), plain)
    for found in on_group(group, LAYERED[1], 2, unseen(0), plain):
        close(found, wanted)


def test_a_weight_that_was_read_too_early_is_refused(group: Any) -> None:
    with pytest.raises(GradientError, match=r"'linear\.(?:weight|bias)' were read .* before their update.*\.flush"):
        on_group(group, LAYERED[1], 2, unseen(2), plain)


def test_an_evaluation_before_training_shows_nothing_of_what_training_reads(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            here.model(batch(99))
        return plain(here)

    wanted = alone(unseen(1), body)
    for found in on_group(group, LAYERED[1], 2, unseen(1), body):
        close(found, wanted)


def test_a_flush_before_something_unseen_is_enough(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            if here.replica is not None:
                here.replica.flush()
                assert not under_way(here)
            train(here, range(step, step + 1))
        return weights(here.model)

    wanted = alone(unseen(2), body)
    for found in on_group(group, LAYERED[1], 2, unseen(2), body):
        close(found, wanted)


def test_gradients_changed_behind_the_exchange_are_refused(group: Any) -> None:
    def body(here: Here) -> None:
        kept: list[torch.Tensor] = []
        here.model.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
        loss_of(here.model(here.share(batch(0)))).backward()
        kept[0].mul_(2)
        here.optimizer.step()

    with pytest.raises(GradientError, match=r"the gradient of '0\.weight' was changed through a tensor that was kept"):
        on_group(group, LAYERED[1], 2, sgd, body)


class Global(torch.optim.SGD):
    """Scales the update by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        torch.nn.utils.clip_grad_norm_(held, 0.1)
        return super().step(closure)


def coupled(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, Global(model.parameters(), lr=0.1)


class Sure(Global):
    """Says of itself what is not so."""

    updates_parameters_alone = True


class Alone(torch.optim.SGD):
    """Says of itself what is so."""

    updates_parameters_alone = True


def of_class(kind: type[torch.optim.SGD]) -> Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]]:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, kind(model.parameters(), lr=0.1)

    return make


@pytest.mark.parametrize("strategy", ALL[:2])
def test_an_optimizer_that_nobody_knows_updates_all_at_once(
    group: Any, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = alone(coupled, plain)
    for found in on_group(group, strategy, 2, coupled, settled):
        close(found, wanted)
    assert "Global is none of torch's own optimizers" in caplog.text


def test_delayed_steps_need_an_optimizer_that_is_known(group: Any) -> None:
    with pytest.raises(UsageError, match=r"Global, which is none of torch's own, .*schedule=fixed"):
        on_group(group, "ring schedule=delayed", 2, coupled, settled)


def settled(here: Here) -> dict[str, torch.Tensor]:
    train(here, range(STEPS))
    assert not under_way(here)
    return weights(here.model)


@pytest.mark.parametrize("strategy", ALL)
def test_an_optimizer_that_says_it_updates_parameters_alone_is_tried(group: Any, strategy: str) -> None:
    with pytest.raises(UsageError, match=r"Sure cannot update parameters one after the other.*depends on others"):
        on_group(group, strategy, 2, of_class(Sure), plain)
    wanted = alone(of_class(Alone), plain)
    found, other = on_group(group, strategy, 2, of_class(Alone), plain)
    close(found, other, 0.0)
    if strategy != ALL[-1]:
        close(found, wanted)


def test_an_optimizer_that_calls_its_closure_often_gets_averages_each_time(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, torch.optim.LBFGS(model.parameters(), max_iter=4)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):

            def closure(step: int = step) -> torch.Tensor:
                here.optimizer.zero_grad()
                loss = loss_of(here.model(here.share(batch(step))))
                loss.backward()
                return loss.detach() * 0  # what ranks have of it differs

            here.optimizer.step(closure)
        return weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, LAYERED[1], 2, make, body):
        close(found, wanted)


@pytest.mark.parametrize("optimizer", ["LBFGS", "SGD"])
def test_while_the_optimizer_runs_another_thread_may_look(group: Any, optimizer: str) -> None:
    """As a device's thread of autograd does in a closure's backward pass; SGD with hooks updates at once too."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)

    def body(here: Here) -> list[bool]:
        assert here.replica is not None
        looked: list[bool] = []

        def look() -> None:
            looking = threading.Thread(target=here.replica.flush, daemon=True)  # type: ignore[union-attr]
            looking.start()
            looking.join(5)
            looked.append(not looking.is_alive())

        def closure() -> torch.Tensor:
            here.optimizer.zero_grad()
            loss = loss_of(here.model(here.share(batch(0))))
            loss.backward()
            if optimizer == "LBFGS":
                look()
            return loss.detach() * 0

        if optimizer == "SGD":
            here.optimizer.register_step_pre_hook(lambda *_: look())
        here.optimizer.step(closure)
        return looked

    for looked in on_group(group, LAYERED[1], 2, make, body):
        assert looked
        assert all(looked)


class Counts(torch.optim.SGD):
    """Keeps a count of its steps in its groups, and slows down by it."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            group["lr"] = 0.1 / group["steps"]
        return super().step(closure)


class Counted(Counts):
    """Is known to keep nothing elsewhere."""

    updates_parameters_alone = True


def counting(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, Counted(model.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ALL[:2])
def test_what_an_optimizer_keeps_in_its_groups_counts_once_a_step(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(STEPS))
        state = here.optimizer.state_dict()
        return weights(here.model) | {"steps": torch.tensor(state["param_groups"][0]["steps"])}

    wanted = alone(counting, body)
    assert wanted["steps"] == STEPS
    for found in on_group(group, strategy, 2, counting, body):
        close(found, wanted)


def test_delayed_steps_count_once_too(group: Any) -> None:
    def body(here: Here) -> int:
        train(here, range(STEPS))
        return int(here.optimizer.state_dict()["param_groups"][0]["steps"])

    assert on_group(group, "ring schedule=delayed(local=off)", 2, counting, body) == [STEPS] * 2


class Old(torch.optim.SGD):
    """Zeroes in place unless told otherwise, as optimizers once did."""

    updates_parameters_alone = True

    def zero_grad(self, set_to_none: bool = False) -> None:
        super().zero_grad(set_to_none)


class Zeroes(torch.nn.Sequential):
    """Zeroes its gradients by itself."""

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


@pytest.mark.parametrize("strategy", [LAYERED[1], LAYERED[2]])
def test_a_zero_grad_of_somebodys_own_waits(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = Zeroes(*mlp().children())
        return model, Old(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(STEPS):
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
            (here.optimizer if step % 2 else here.model).zero_grad()
        return weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, strategy, 2, make, body):
        close(found, wanted)


def half(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, torch.optim.SGD(model.get_submodule("2").parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("strategy", ALL)
def test_parameters_that_are_added_to_the_optimizer_later_are_updated_too(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(6):
            if step == 3:
                added = list(here.model.get_submodule("0").parameters())
                here.optimizer.add_param_group({"params": added, "lr": 0.05})
            here.model.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
        return weights(here.model)

    wanted = alone(half, body)
    found, other = on_group(group, strategy, 2, half, body)
    close(found, other, 0.0)
    if strategy != ALL[-1]:
        close(found, wanted)
    with pytest.raises(UsageError, match="not a parameter of the model"):
        on_group(group, strategy, 2, half, lambda here: here.optimizer.add_param_group({"params": [torch.zeros(2)]}))


def test_a_step_that_was_replaced_on_the_optimizer_is_refused(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
        return model, optimizer

    with pytest.raises(UsageError, match=r"step\(\) of this SGD was replaced on the object itself.*after syncline"):
        on_group(group, LAYERED[0], 2, make, plain)


def test_parameters_that_share_memory_are_refused(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        model.get_submodule("2").bias.data = model.get_submodule("0").bias.data[:3]  # type: ignore[union-attr, assignment]
        return model, optimizer

    with pytest.raises(UsageError, match=r"parameters '..bias' and '..bias' share memory.*schedule=fixed"):
        on_group(group, LAYERED[0], 2, make, plain)


def test_a_gradient_that_is_still_under_way_is_not_added_to(group: Any) -> None:
    with pytest.raises(GradientError, match=r"adds to the gradient of .* still under way.*call zero_grad"):
        on_group(group, "ring schedule=delayed", 2, sgd, never_zeroed)


@pytest.mark.parametrize("strategy", ALL)
def test_ranks_with_fewer_batches_take_part(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(6 if here.rank == 0 else 3))
        assert here.replica is not None
        here.replica.on_joined = lambda _: None
        here.replica.shadow_until_all_joined()
        return weights(here.model)

    found, other = on_group(group, strategy, 2, sgd, body)
    close(found, other, 0.0)


def test_a_transform_that_looks_inside_is_refused(group: Any) -> None:
    def body(here: Here) -> None:
        train(here, range(2))
        torch.func.vmap(lambda one: here.model(one[None]))(batch(3))

    with pytest.raises(UsageError, match=r"a transform of torch\.func looks at weights .*syncline\.flush\(\)"):
        on_group(group, LAYERED[1], 2, sgd, body)


def test_gradients_of_one_half_before_the_forward_pass_of_the_other_accuse_nobody(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        first, last = here.model.get_submodule("0"), here.model.get_submodule("2")
        for step in range(STEPS):
            here.optimizer.zero_grad()
            x = here.share(batch(step))
            torch.autograd.grad(first(x).sum(), list(first.parameters()))
            loss_of(last(torch.tanh(first(x)))).backward()
            here.optimizer.step()
        return weights(here.model)

    wanted = alone(sgd, body)
    for found in on_group(group, LAYERED[1], 2, sgd, body, weight=1):
        close(found, wanted)


def test_the_class_of_a_deferred_parameter_makes_plain_ones(group: Any) -> None:
    def body(here: Here) -> None:
        train(here, range(1))
        parameter = next(here.model.parameters())
        assert type(parameter) is DeferredParameter
        made = type(parameter)(torch.ones(2))
        assert type(made) is torch.nn.Parameter
        assert (made + 1).sum() == 4

    on_group(group, LAYERED[1], 2, sgd, body)


@pytest.mark.filterwarnings("ignore")  # torch.jit.script is deprecated, and used
def test_scripted_parts_wait_at_the_models_forward_pass(group: Any) -> None:
    """In an evaluation, with a penalty behind the pass, and where a weight is looked at elsewhere."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        whole = mlp()
        model = torch.nn.Sequential(whole[0], torch.jit.script(whole[2]))  # type: ignore[index, no-untyped-call]
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        found = {}
        for step in range(STEPS):
            here.optimizer.zero_grad()
            penalty = loss_of(here.model(here.share(batch(step))))
            for parameter in here.model.parameters():
                penalty = penalty + 0.1 * parameter.square().sum()
            penalty.backward()
            here.optimizer.step()
            with torch.no_grad():
                found[str(step)] = here.model(batch(99)).clone()
        return found | weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, LAYERED[1], 2, make, body):
        close(found, wanted)


def test_what_could_not_be_waited_for_is_never_read_as_if_it_had(group: Any) -> None:
    """A wait that fails is told at every later look: the weights are not those of the step."""
    stepped = threading.Event()
    told: list[Exception] = []
    values: list[Any] = []

    def body(here: Here) -> None:
        if here.rank == 1:
            stepped.wait(20)
            raise RuntimeError("gone")
        train(here, range(1))
        stepped.set()
        for _ in range(6):
            try:
                values.append(here.model.state_dict())
            except Exception as error:
                told.append(error)

    with pytest.raises(RuntimeError, match="gone"):
        on_group(group, LAYERED[1], 2, sgd, body)
    assert values == []
    assert len(told) == 6


def test_hooks_of_the_optimizer_are_called_once_a_step(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        calls: list[str] = []
        here.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        here.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        train(here, range(STEPS))
        assert calls == ["before", "after"] * STEPS
        return weights(here.model)

    wanted = alone(sgd, body)
    for found in on_group(group, LAYERED[1], 2, sgd, body):
        close(found, wanted)


@pytest.mark.parametrize("before", [True, False])
def test_learning_rate_schedulers_may_be_made_before_or_after(group: Any, before: bool) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        if before:
            optimizer.scheduler = StepLR(optimizer, 1, 0.5)  # type: ignore[attr-defined]
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        scheduler = here.optimizer.scheduler if before else StepLR(here.optimizer, 1, 0.5)  # type: ignore[attr-defined]
        for step in range(STEPS):
            train(here, range(step, step + 1))
            scheduler.step()
        return weights(here.model)

    wanted = alone(make, body)
    for found in on_group(group, LAYERED[1], 2, make, body):
        close(found, wanted)


def delayed_by_hand(local: bool) -> list[dict[str, torch.Tensor]]:
    """The recursion, for two workers: W(t+1) = W(t) - lr mean g(t); w(t+1) = W(t) - lr g(t)."""
    shared = [mlp()]
    optimizer = torch.optim.SGD(shared[0].parameters(), lr=0.1, momentum=0.9)
    workers = [mlp(), mlp()]
    waiting: list[torch.Tensor] | None = None
    for step in range(STEPS):
        mine = []
        for rank, model in enumerate(workers):
            model.zero_grad()
            x = batch(step)
            loss_of(model(x[6 * rank : 6 * rank + 6])).backward()
            mine.append([parameter.grad for parameter in model.parameters()])
        if waiting is not None:
            update(shared[0], optimizer, waiting)
        waiting = [(a + b) / 2 for a, b in zip(*mine, strict=True) if a is not None and b is not None]
        with torch.no_grad():
            for model, own in zip(workers, mine, strict=True):
                for parameter, whole, gradient in zip(model.parameters(), shared[0].parameters(), own, strict=True):
                    assert gradient is not None
                    parameter.copy_(whole - 0.1 * gradient if local else whole)
    assert waiting is not None
    update(shared[0], optimizer, waiting)
    return [weights(shared[0])] * 2


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


@pytest.mark.parametrize("place", ["ring", "ps(servers=1, on=workers, update=worker)", "ring" + STAGED])
@pytest.mark.parametrize("local", [True, False])
def test_delayed_steps_are_their_recursion(group: Any, place: str, local: bool) -> None:
    """To the bit, with buckets of a tensor each; whoever looks sees the weights that all have."""
    architecture, staged = place.removesuffix(STAGED), STAGED if place.endswith(STAGED) else ""
    text = f"{architecture} schedule=delayed(bucket=1B, local={'on' if local else 'off'}){staged}"
    for found, wanted in zip(on_group(group, text, 2, sgd, plain), delayed_by_hand(local), strict=True):
        close(found, wanted, 1e-15)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_local_step_is_of_the_last_backward_pass_alone(group: Any, given_up: bool) -> None:
    """Not of one whose gradients were read, or that was given up: a layer that it does not use stays where it is."""

    def body(here: Here) -> tuple[torch.Tensor, torch.Tensor]:
        first, last = here.model.get_submodule("0"), here.model.get_submodule("2")
        x = here.share(batch(0))

        def fail(_: torch.Tensor) -> None:
            raise ValueError("given up")

        if given_up:
            handle = first.weight.register_hook(fail)
            with pytest.raises(ValueError, match="given up"):
                loss_of(here.model(x)).backward()
            handle.remove()
        else:
            loss_of(here.model(x)).backward()
            torch.nn.utils.clip_grad_norm_(here.model.parameters(), 1e9)
            here.optimizer.step()
        here.optimizer.zero_grad()
        before = last.weight.detach().clone()
        here.model(x)
        first(x).sum().backward()
        here.optimizer.step()
        own: list[torch.Tensor] = []
        last.register_forward_pre_hook(lambda module, _: own.append(module.weight.detach().clone()))
        here.model(x)
        return own[0], before

    for own, before in on_group(group, "ring schedule=delayed(local=on)", 2, sgd, body, weight=1, unused="zeros"):
        assert torch.equal(own, before)


@pytest.mark.parametrize("script", [clipped, scaled])
def test_who_reads_every_gradient_makes_delayed_steps_synchronous(group: Any, script: Callable[[Here], Any]) -> None:
    wanted = alone(sgd, script)
    for found in on_group(group, "ring schedule=delayed", 2, sgd, script):
        close(found, wanted)


@pytest.mark.parametrize(
    "script",
    [moving_average, saved, scheduled, added_up, zeroed_otherwise, skipped, own_gradients, copied, with_closure],
)
def test_delayed_scripts_leave_the_same_weights_on_all_ranks(group: Any, script: Callable[[Here], Any]) -> None:
    found, other = on_group(group, "ring schedule=delayed", 2, sgd, script)
    close(found, other, 0.0)


def test_what_crosses_iterations_needs_an_optimizer_of_one_model(group: Any) -> None:
    from syncline.frameworks.torch import Options, prepare

    def without(session: Any) -> None:
        prepare(session, mlp(), None, Options())

    with pytest.raises(
        UsageError, match=r"schedule=priority has weights updated when they are needed: give .* optimizer"
    ):
        group(LAYERED[0], 2, without)

    def foreign(session: Any) -> None:
        model, other = mlp(), torch.nn.Linear(2, 2)
        prepare(session, model, torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1), Options())

    with pytest.raises(UsageError, match=r"not a parameter of the model, and schedule=priority .*ModuleList"):
        group(LAYERED[0], 2, foreign)


class Special(torch.nn.Parameter):
    """A parameter of somebody's own class."""


def test_parameters_of_another_class_are_refused(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, _ = sgd(index)
        model.get_submodule("0").bias = Special(torch.zeros(6, dtype=torch.float64))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(UsageError, match=r"parameter '0\.bias' is a Special.*schedule=fixed"):
        on_group(group, LAYERED[0], 2, make, plain)
