"""What scripts that were written for DistributedDataParallel do, and what must not be done beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from toy import (
    REPLICAS,
    STRATEGIES,
    Here,
    batch,
    fill,
    gradients,
    loss_of,
    mlp,
    on_group,
    same_as_alone,
    sgd,
    weights,
)

from syncline.errors import GradientError, UsageError


@pytest.fixture
def gloo() -> Iterator[None]:
    """A process group of this process alone, which DistributedDataParallel asks for."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("inside", [False, True])
def test_a_model_that_ddp_wraps_already_is_refused(group: Any, inside: bool) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model: torch.nn.Module = DistributedDataParallel(mlp())
        model = torch.nn.Sequential(model) if inside else model
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(UsageError, match=r"wrapped in DistributedDataParallel.*only Syncline or only.*ddp\.module"):
        on_group(group, "ring", 2, make, lambda here: None)  # noqa: ARG005


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("wrap", ["model", "around", "inside"])
def test_ddp_around_a_prepared_model_is_refused_in_the_first_forward(group: Any, wrap: str, trained: bool) -> None:
    """Both would divide: gradients would silently be halved."""

    def body(here: Here) -> None:
        model = here.model
        assert isinstance(model, torch.nn.Sequential)
        if wrap == "inside":
            model[0] = DistributedDataParallel(model[0])
        else:
            model = DistributedDataParallel(model if wrap == "model" else torch.nn.Sequential(model))  # type: ignore[assignment]
        with torch.set_grad_enabled(trained):
            model(batch(0))

    with pytest.raises(GradientError, match=r"rank \d.*DistributedDataParallel.*(leave|let only)"):
        on_group(group, "ring", 2, sgd, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_attribute_that_ddp_wrappers_have_stops_the_exchange_too(group: Any, strategy: str) -> None:
    """As in loops that set it before each micro-batch instead of using no_sync."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            for micro in range(3):
                here.model.require_backward_grad_sync = micro == 2  # type: ignore[assignment]
                (loss_of(here.model(here.share(batch(3 * step + micro)))) / 3).backward()
            here.optimizer.step()
            assert here.replica is None or here.replica.steps == step + 1
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body, weight=1)


class _Nothing(torch.autograd.Function):
    """Multiplies, and says nothing of the factor's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # noqa: ARG004
        return gradient, None


class Silent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.factor = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Nothing.apply(self.inner(x), self.factor)  # type: ignore[no-untyped-call]
        return out


def silent(index: int) -> Any:  # noqa: ARG001
    model = Silent()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_function_that_gives_no_gradient_is_named(group: Any) -> None:
    with pytest.raises(GradientError, match=r"1 parameters got no gradient.*'factor'.*unused="):
        on_group(group, "ring", 2, silent, lambda here: loss_of(here.model(batch(0))).backward())


def test_a_function_that_gives_no_gradient_may_count_as_zero(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, "ring", 2, silent, body, unused="zeros")


def _take(parameter: torch.Tensor) -> None:
    parameter.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]
    parameter.grad = None


def _replace(parameter: torch.Tensor) -> None:
    parameter.grad = parameter.grad * 10  # type: ignore[operator]


CHANGES: dict[str, Any] = {
    "steps": lambda parameter: parameter.add_(parameter.grad, alpha=-0.1),
    "takes the gradient": _take,
    "scales the gradient": lambda parameter: parameter.grad.mul_(10),
    "replaces the gradient": _replace,
}


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", ["ring schedule=wait_free", "ps(servers=1)"])
@pytest.mark.parametrize("early", [True, False], ids=["before prepare", "after"])
@pytest.mark.parametrize("does", CHANGES)
@pytest.mark.parametrize("since", [0, 2], ids=["from the first pass on", "from the third pass on"])
def test_a_hook_that_steps_or_changes_gradients_is_refused(
    group: Any, strategy: str, early: bool, does: str, since: int
) -> None:
    """It would use, or change, this rank's gradient while that travels."""
    passes: dict[int, int] = {}

    def change(parameter: torch.Tensor) -> None:
        passes[id(parameter)] = passes.get(id(parameter), 0) + 1
        if passes[id(parameter)] > since:
            with torch.no_grad():
                CHANGES[does](parameter)

    def attach(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(change)

    def make(index: int) -> Any:
        model, optimizer = sgd(index)
        if early:
            attach(model)
        return model, optimizer

    def body(here: Here) -> None:
        if not early:
            attach(here.model)
        for _ in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(0))).backward()
            here.optimizer.step()

    with pytest.raises(GradientError, match=r"'\d\.\w+' or its gradient was changed during backward"):
        on_group(group, strategy, 2, make, body)


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", ["fixed", "wait_free", "auto"])
@pytest.mark.parametrize("by", ["its own", "another's"])
@pytest.mark.parametrize("does", CHANGES)
def test_a_small_gradient_that_a_hook_changes_is_refused(group: Any, schedule: str, by: str, does: str) -> None:
    """As a backward pass goes on, whoever changes it."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp().float()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> None:
        passes = 0
        first, *_, last = here.model.parameters()

        def change(_: torch.Tensor) -> None:
            nonlocal passes
            passes += 1
            if passes > 2:
                with torch.no_grad():
                    CHANGES[does](last)

        (last if by == "its own" else first).register_post_accumulate_grad_hook(change)
        for _ in range(3):
            here.optimizer.zero_grad()
            here.model(batch(0).float()).square().mean().backward()
            here.optimizer.step()

    with pytest.raises(GradientError, match=r"'2\.bias' or its gradient was changed during backward"):
        on_group(group, f"ring schedule={schedule}", 2, make, body)


@pytest.mark.parametrize("given", ["sparse", "differentiable"])
def test_small_gradients_that_cannot_be_exchanged_are_refused(group: Any, given: str) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = torch.nn.Embedding(4, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> None:
        for step in range(3):
            here.optimizer.zero_grad()
            here.model.sparse = given == "sparse"  # type: ignore[assignment]
            output = here.model(torch.tensor([step, 1])).square().mean()
            if step == 2 or given == "sparse":
                output.backward(create_graph=given == "differentiable")
            else:
                output.backward()

    with pytest.raises(GradientError, match=r"is sparse|can itself be differentiated"):
        on_group(group, "ring", 2, make, body)


def test_a_hook_that_only_looks_is_left_alone(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        seen = []
        for parameter in here.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda found: seen.append(found.grad.norm()))  # type: ignore[union-attr]
        for step in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
        assert len(seen) == 12
        return gradients(here.model)

    same_as_alone(group, "ring", 2, sgd, body)


class Own(torch.nn.Module):
    """A shared part, and an embedding and counters that are each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = mlp()
        self.own = fill(torch.nn.Linear(3, 3).double(), seed=10 + rank)
        self.norm = torch.nn.BatchNorm1d(3).double()
        self.register_buffer("counter", torch.full((2,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        out: torch.Tensor = self.norm(self.own(self.shared(x)))
        return out


def own(index: int) -> Any:
    model = Own(index)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(here: Here) -> dict[str, torch.Tensor]:
    for step in range(2):
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()
    return weights(here.model)


OWN = ["own.weight", "own.bias", "counter"]


@pytest.mark.parametrize("strategy", REPLICAS)
@pytest.mark.parametrize("by", ["ignore", "model"])
def test_ignored_parameters_and_buffers_stay_each_ranks_own(group: Any, strategy: str, by: str) -> None:
    """Named in prepare, or on the model, as DistributedDataParallel reads them."""

    def make(index: int) -> Any:
        model, optimizer = own(index)
        if by == "model":
            model._ddp_params_and_buffers_to_ignore = OWN
        return model, optimizer

    ignore = frozenset(OWN) if by == "ignore" else frozenset()
    one, other = on_group(group, strategy, 2, make, train, ignore=ignore, weight=1)
    assert one["counter"].tolist() == [2, 2]
    assert other["counter"].tolist() == [3, 3]
    for name in one:
        assert torch.equal(one[name], other[name]) == (name not in OWN), name
    # Own parameters are trained by the rank's own gradients, at the weights that are shared.
    model = Own(0)
    assert not torch.equal(one["own.weight"], model.own.weight)


def test_ignored_names_that_nothing_has_are_refused(group: Any) -> None:
    with pytest.raises(UsageError, match=r"'own.weigth'.*did you mean 'own.weight'"):
        on_group(group, "ring", 2, own, train, ignore=frozenset(["own.weigth"]))


@pytest.mark.parametrize("strategy", SERVED := ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_servers_that_hold_weights_refuse_to_ignore_what_their_optimizer_updates(group: Any, strategy: str) -> None:
    """They would never update it."""
    with pytest.raises(UsageError, match=r"'own.weight'.*ps\(update=worker\)"):
        on_group(group, strategy, 2, own, train, ignore=frozenset(OWN))


@pytest.mark.parametrize("strategy", [*REPLICAS, "ps(servers=1)"])
def test_buffers_may_be_each_ranks_own(group: Any, strategy: str) -> None:
    def make(index: int) -> Any:
        model = Own(index)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    one, other = on_group(group, strategy, 2, make, train, broadcast_buffers=False, weight=1)
    for name in one:
        shared = name.startswith(("shared", "own", "norm.weight", "norm.bias", "norm.num"))
        assert torch.equal(one[name], other[name]) == shared, name
    assert other["counter"].tolist() == [3, 3]


def test_ranks_that_disagree_on_buffers_are_told(group: Any) -> None:
    """One would wait for ever for what the other does not send."""
    from syncline.errors import MismatchError
    from syncline.frameworks.torch import Options, prepare

    def run(session: Any) -> None:
        prepare(session, *own(0), Options(broadcast_buffers=session.rank == 0))

    with pytest.raises(
        MismatchError, match=r"rank 1.*broadcast_buffers=False, and rank 0 .*with broadcast_buffers=True"
    ):
        group("ring", 2, run)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=2, on=workers)"])
def test_a_parameter_of_two_prepared_models_is_refused(group: Any, strategy: str) -> None:
    """Both would divide its gradient, and move it."""
    from syncline.frameworks.torch import prepare

    def run(session: Any) -> None:
        shared = mlp()
        for _ in range(2):
            model = torch.nn.Sequential(shared, fill(torch.nn.Linear(3, 3).double()))
            prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(UsageError, match=r"'0\.0\.weight' is in a model that was prepared before.*ModuleList"):
        group(strategy, 2, run)


def test_a_module_that_takes_the_place_of_all_is_noticed(group: Any) -> None:
    """Its parameters have no hooks: every rank would train alone."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = torch.nn.Sequential(fill(torch.nn.Linear(4, 3).double()))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> None:
        here.model[0] = torch.nn.Linear(4, 3).double()  # type: ignore[operator]
        here.model(batch(0))

    with pytest.raises(GradientError, match=r"'0\.weight' was replaced after syncline\.prepare\(\)"):
        on_group(group, "ring", 2, make, body)


def test_a_context_that_is_made_and_not_entered_stops_no_exchange(group: Any, monkeypatch: Any) -> None:
    """no_sync() is a context manager: it works from ``with`` on."""
    from types import SimpleNamespace

    from syncline import api
    from syncline.process import process

    def body(here: Here) -> int:
        assert here.replica is not None
        here.replica.no_sync()  # as syncline.no_sync() does for all prepared models
        loss_of(here.model(here.share(batch(0)))).backward()
        return here.replica.steps

    assert on_group(group, "ring", 2, sgd, body) == [1, 1]
    entered = []
    replica = SimpleNamespace(no_sync=lambda: _Noting(entered))
    monkeypatch.setattr(api, "session", lambda: SimpleNamespace(models=[]))
    monkeypatch.setattr(process, "prepared", [SimpleNamespace(replica=replica)])
    context = api.no_sync()
    assert entered == []
    with context:
        assert entered == ["in"]
    assert entered == ["in", "out"]


class _Noting:
    """Says when it is entered and left."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._log.append("in")

    def __exit__(self, *_: object) -> None:
        self._log.append("out")
