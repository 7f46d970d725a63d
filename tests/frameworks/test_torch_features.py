"""torch.compile, autocast and activation checkpointing work with the hooks."""

from __future__ import annotations

import threading
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from toy import Here, alone, batch, close, fill, loss_of, on_group, same_as_alone, sgd, weights

from syncline.errors import GradientError
from syncline.frameworks.torch.compiled import is_compiled

_COMPILING = threading.Lock()  # dynamo is made for one thread at a time; the ranks of a test are threads


def train(here: Here, steps: int = 3) -> dict[str, torch.Tensor]:
    for step in range(steps):
        here.optimizer.zero_grad()
        x = batch(step)
        loss_of(here.model(x if here.replica is None else (x[:5] if here.rank == 0 else x[5:]))).backward()
        here.optimizer.step()
    return {name.removeprefix("_orig_mod."): tensor for name, tensor in weights(here.model).items()}


@pytest.mark.usefixtures("compiling")
@pytest.mark.filterwarnings("ignore")  # the compiler filters its own warnings, which threads disturb
@pytest.mark.parametrize(
    ("strategy", "before"),
    [
        ("ring", True),
        pytest.param("ring schedule=priority(slice=40B)", False, marks=pytest.mark.slow),
        pytest.param("ps(servers=1)", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_models(group: Any, strategy: str, before: bool) -> None:
    """Compiled before prepare, the hooks are on the wrapper; after it, dynamo meets them in the model."""
    wanted = alone(sgd, train)

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = sgd(index)
        if before:
            model = torch.compile(model, backend="aot_eager", dynamic=True)  # type: ignore[assignment]
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        if not before:
            here.model = torch.compile(here.model, backend="aot_eager", dynamic=True)  # type: ignore[assignment]
        for size in (7, 5):
            with _COMPILING, here.no_sync():
                loss_of(here.model(batch(0, size))).backward()
        assert here.replica is not None
        here.replica.counting.reset()
        return train(here)

    for found in on_group(group, strategy, 2, make, body):
        close(found, wanted)


@pytest.mark.filterwarnings("ignore")  # torch.jit.script is deprecated, and used
@pytest.mark.parametrize("way", ["in place", "wrapped", "scripted"])
def test_a_model_is_compiled_when_any_part_of_it_is(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._dynamo.utils, "counters", {"frames": {"total": 0}})  # other tests may have compiled
    shared, inner = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(shared, torch.nn.Sequential(inner, shared))
    model.register_module("nothing", None)
    assert not is_compiled(model)
    if way == "in place":
        inner[0].compile(backend="eager")
    else:
        made: Any = torch.compile(inner[0], backend="eager") if way == "wrapped" else torch.jit.script(inner[0])
        inner[0] = made
    assert is_compiled(model)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_autocast_to_bfloat16_keeps_gradients_in_the_parameters_type(group: Any, strategy: str) -> None:
    """Both ranks have the same batch, so that rounding is the same as alone."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, _ = sgd(index)
        model = model.float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = here.model(batch(step).float())
                assert out.dtype == torch.bfloat16
                loss = loss_of(out.float())
            loss.backward()
            assert all(parameter.grad.dtype == torch.float32 for parameter in here.model.parameters())  # type: ignore[union-attr]
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, make, body)


class Checkpointed(torch.nn.Module):
    """Two blocks whose activations are computed again in backward; the second one may be used twice."""

    def __init__(self, reentrant: bool, twice: bool = False) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.second = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh())
        self.last = torch.nn.Linear(6, 3)
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(1 + self.twice):
            x = checkpoint(self.second, x, use_reentrant=self.reentrant)
        out: torch.Tensor = checkpoint(self.last, x, use_reentrant=self.reentrant)
        return out


def checkpointed(reentrant: bool, twice: bool = False) -> Any:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(Checkpointed(reentrant, twice).double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    return make


@pytest.mark.parametrize("strategy", ["ring", "ring schedule=wait_free", "ps(servers=1)", "ps(servers=1, on=workers)"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(group: Any, strategy: str, reentrant: bool) -> None:
    """A re-entrant checkpoint runs a backward inside backward; the exchange ends with the outer one."""
    same_as_alone(group, strategy, 2, checkpointed(reentrant), train)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_a_whole_model_may_be_checkpointed(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            x = batch(step)
            x = x if here.replica is None else (x[:5] if here.rank == 0 else x[5:])
            loss_of(checkpoint(here.model, x, use_reentrant=False)).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


def test_a_block_used_twice_works_with_plain_checkpoints(group: Any) -> None:
    same_as_alone(group, "ring", 2, checkpointed(reentrant=False, twice=True), train)


@pytest.mark.parametrize("strategy", ["ring schedule=wait_free", "ps(servers=1)", "ring codec=fp16"])
def test_a_block_used_twice_works_with_reentrant_checkpoints(group: Any, strategy: str) -> None:
    """Its gradient is produced once for each use, in passes of their own inside the backward pass."""
    make = checkpointed(reentrant=True, twice=True)
    wanted = alone(make, train)
    for found in on_group(group, strategy, 2, make, train):
        close(found, wanted, 1e-3 if "codec" in strategy else 1e-9)


def test_reentrant_checkpoints_that_begin_later_are_refused_where_a_gradient_comes_twice(group: Any) -> None:
    """The first backward pass had none, so buckets are sent as soon as they are complete."""

    def body(here: Here) -> None:
        assert isinstance(here.model, Checkpointed)
        here.model.reentrant = False
        train(here, 1)
        here.model.reentrant = True
        train(here, 1)

    with pytest.raises(GradientError, match=r"'second\.1\.\w+' .*use_reentrant=False.* from the first step on"):
        on_group(group, "ring schedule=wait_free", 2, checkpointed(reentrant=False, twice=True), body)


def test_a_whole_model_under_a_reentrant_checkpoint(group: Any) -> None:
    """No output of the model is in the graph that the script differentiates: the inner pass comes first."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            x = here.share(batch(step)).requires_grad_()
            loss_of(checkpoint(here.model, x, use_reentrant=True)).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, "ring", 2, sgd, body)


CALLED = ["ring", "ps(servers=1)", "ps(servers=2, on=workers)", "ring sync=local(steps=2)"]
CALLED += [f"ring schedule={word}" for word in ("auto", "merged", "split", "priority", "delayed")]


def of_parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.nn.Parameter(one.detach().clone()) for name, one in model.named_parameters()}


def of_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone().requires_grad_() for name, one in model.named_parameters()}


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "made"), [*zip(CALLED, cycle([of_parameters, of_tensors]))])
def test_calls_with_other_weights_are_the_scripts_own(group: Any, strategy: str, made: Any) -> None:
    """Their gradients too, by backward(), by torch.func.grad and for each sample; some may be the model's own."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        call = torch.func.functional_call
        for step in range(4):
            here.optimizer.zero_grad()
            x = here.share(batch(step))
            other = made(here.model)
            before = {name: one.grad for name, one in here.model.named_parameters()}
            loss_of(call(here.model, other, (x,))).backward()
            assert all(one.grad is not None for one in other.values())
            assert all(one.grad is before[name] for name, one in here.model.named_parameters())
            plain = {name: one.detach() for name, one in other.items()}
            each = torch.func.vmap(
                torch.func.grad(lambda weights, one: loss_of(call(here.model, weights, (one[None],)))),
                in_dims=(None, 0),
            )(plain, x)
            assert each["0.weight"].shape[0] == len(x)
            torch.testing.assert_close(each["0.weight"].mean(0), other["0.weight"].grad)
            loss_of(here.model(x)).backward()
            here.optimizer.step()
        return weights(here.model)

    if strategy.endswith(("delayed", "local(steps=2)")):
        on_group(group, strategy, 2, sgd, body)
    else:
        same_as_alone(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)", "ring schedule=priority"])
def test_an_outer_loss_reaches_the_weights_through_an_inner_step(group: Any, strategy: str) -> None:
    """As in MAML: the model runs with weights made of its own, and their gradients are exchanged."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        call = torch.func.functional_call
        for step in range(4):
            here.optimizer.zero_grad()
            x = here.share(batch(step))
            own = dict(here.model.named_parameters())
            inner = torch.autograd.grad(loss_of(here.model(batch(9, 3))), list(own.values()), create_graph=True)
            fast = {name: one - 0.1 * grad for (name, one), grad in zip(own.items(), inner, strict=True)}
            loss_of(call(here.model, fast, (x,))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and used
@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)", "ps(servers=1) schedule=priority", *CALLED[4:]])
def test_a_model_may_be_traced_in_every_step(group: Any, strategy: str) -> None:
    """torch traces twice and compares; what an update computes is no part of the model."""

    def body(here: Here) -> None:
        for step in range(6):
            with _COMPILING:
                traced = torch.jit.trace(here.model, batch(step))  # type: ignore[no-untyped-call]
            assert "sub" not in str(traced.graph)
            torch.testing.assert_close(traced(batch(7)), here.model(batch(7)))
            train(here, 1)

    on_group(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("schedule", ["fixed", "auto", "merged", "priority", "split", "delayed"])
def test_freezing_after_prepare_is_told_with_the_remedy(group: Any, schedule: str) -> None:
    def body(here: Here) -> None:
        train(here, 1)
        here.model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        train(here, 12)

    with pytest.raises(GradientError, match=r"'0.weight' was frozen, unfrozen or added after"):
        on_group(group, f"ring schedule={schedule}", 2, sgd, body)
