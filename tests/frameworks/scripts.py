"""What training scripts do, each a body that runs alone or on a group, and the schedules that overlap iterations."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR
from toy import STAGED, Here, batch, fill, loss_of, mlp, train, weights

from syncline.frameworks.torch.first_use import DeferredParameter

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


def zeroed_by_kept(here: Here) -> dict[str, torch.Tensor]:
    """Right behind each step, by gradients that were read once."""
    for step in range(STEPS):
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
        if step == 0:
            kept = [parameter.grad for parameter in here.model.parameters() if parameter.grad is not None]
        torch._foreach_zero_(kept)
    return weights(here.model)


def zeroed_by_their_memory(here: Here) -> dict[str, torch.Tensor]:
    """The same by what shares the memory of gradients."""
    for step in range(STEPS):
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
        if step == 0:
            kept = [parameter.grad.data for parameter in here.model.parameters() if parameter.grad is not None]
        torch._foreach_zero_(kept)
    return weights(here.model)


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
    adversarial, zeroed_by_kept,
]  # fmt: skip


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
    model = fill(Tied())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


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
    model = fill(Branches())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Global(torch.optim.SGD):
    """Scales the update by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        held = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        torch.nn.utils.clip_grad_norm_(held, 0.1)
        return super().step(closure)


def coupled(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, Global(model.parameters(), lr=0.1)


def weights_and_state(here: Here) -> dict[str, torch.Tensor]:
    """What training leaves, the optimizer's state too."""
    train(here, range(STEPS))
    state = here.optimizer.state_dict()["state"]
    kept = {f"{i} {key}": value for i, one in state.items() for key, value in one.items() if torch.is_tensor(value)}
    return weights(here.model) | kept
