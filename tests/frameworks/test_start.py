"""``prepare``: what all processes agree on before the first step, and what is refused there."""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import pytest
import torch
from toy import STRATEGIES, Here, alone, batch, close, fill, loss_of, mlp, on_group, same_as_alone, train, weights

from syncline.errors import MismatchError, SynclineError, UsageError
from syncline.frameworks.torch import Options, prepare
from syncline.frameworks.torch.partial_optimizer import probe, probe_parts
from syncline.strategy.strategy import Strategy


def normalised(seed: int) -> torch.nn.Module:
    """Parameters and buffers of several types that depend on the seed; one parameter is not contiguous."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten())
    fill(model, seed).to(memory_format=torch.channels_last)
    model.register_buffer("mask", torch.tensor([seed % 2 == 0, True]))
    model.register_buffer("low", torch.full((3,), seed, dtype=torch.bfloat16))
    model.register_buffer("scalar", torch.tensor(float(seed)))
    model.register_buffer("turned", torch.arange(6.0).add(seed).view(2, 3).t())
    with torch.no_grad():
        model[1].running_mean.fill_(seed)
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_start_from_rank_0s_parameters_and_buffers(group: Any, strategy: str) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = normalised(index + 4)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    wanted = weights(normalised(4))
    for found in on_group(group, strategy, 3, make, lambda here: weights(here.model)):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_servers_start_from_rank_0s_parameters_too(group: Any) -> None:
    """The first update would otherwise start from the server's own values."""

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = mlp(seed=index)
        return model, torch.optim.SGD(model.parameters(), lr=0.0)

    def body(here: Any) -> dict[str, torch.Tensor]:
        here.model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        here.optimizer.step()
        return weights(here.model)

    for found in on_group(group, "ps(servers=2)", 2, make, body):
        close(found, weights(mlp(seed=0)))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (lambda: torch.nn.Linear(4, 2), r"'weight' with shape \(2, 4\).*'weight' with shape \(3, 4\)"),
        (lambda: torch.nn.Linear(4, 3).double(), "torch.float64.*torch.float32"),
        (lambda: torch.nn.Linear(4, 3, bias=False), "nothing here, 'bias'.* there"),
        (lambda: torch.nn.Linear(4, 3).requires_grad_(False), "frozen"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 3)), "'0.weight'"),
    ],
)
def test_models_that_differ_are_refused_naming_rank_and_first_difference(
    group: Any, other: Callable[[], torch.nn.Module], named: str
) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = other() if index == 1 else torch.nn.Linear(4, 3)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(MismatchError, match=f"rank 1 has another model than rank 0: .*{named}"):
        on_group(group, "ring", 2, make, lambda here: weights(here.model))


def refused(group: Any, make: Callable[[], Any], strategy: str = "ring", **options: Any) -> str:
    """The text of the UsageError that ``prepare`` raises on one of two ranks."""

    def body(session: Any) -> None:
        prepare(session, *make(), Options(**options))

    with pytest.raises(UsageError) as caught:
        group(strategy, 2, body)
    return str(caught.value)


def test_an_optimizer_of_another_model_is_refused(group: Any) -> None:
    text = refused(group, lambda: (mlp(), torch.optim.SGD(torch.nn.Linear(2, 5).parameters(), lr=0.1)))
    assert "(5, 2)" in text
    assert "not a parameter of the model" in text


def test_an_unknown_word_for_unused_is_refused(group: Any) -> None:
    model = mlp()
    text = refused(group, lambda: (model, torch.optim.SGD(model.parameters(), lr=0.1)), unused="ignore")
    assert "choose 'error' or 'zeros'" in text


def test_a_model_without_trained_parameters_is_refused(group: Any) -> None:
    def make() -> Any:
        model = mlp().requires_grad_(False)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    assert "nothing to exchange" in refused(group, make)


@pytest.mark.parametrize("module", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_modules_with_sparse_gradients_are_refused_by_name(group: Any, module: Any) -> None:
    def make() -> Any:
        model = torch.nn.Sequential(module(5, 3, sparse=True), torch.nn.Linear(3, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    text = refused(group, make)
    assert "'0'" in text
    assert "sparse=False" in text


class Lars(torch.optim.Optimizer):
    """Layer-wise adaptive rates: the step depends on the norms of whole tensors."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for tensor in group["params"]:
                assert tensor.grad is not None
                rate = group["lr"] * tensor.norm() / tensor.grad.norm()
                tensor.sub_(rate * tensor.grad)


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam, warming up": lambda p: torch.optim.Adam(p, lr=0.0),
    "Adam, fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
}
COUPLED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Lars": lambda p: Lars(p, lr=0.1),
    "Lars, warming up": lambda p: Lars(p, lr=0.0),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1),
}
if hasattr(torch.optim, "Adafactor"):
    COUPLED["Adafactor"] = lambda p: torch.optim.Adafactor(p, lr=0.1)


@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_elementwise_optimizers_are_accepted_on_slices_and_left_alone(optimizer: str) -> None:
    model = mlp()
    made = ELEMENTWISE[optimizer](model.parameters())
    rates = [group["lr"] for group in made.param_groups]
    probe(made)
    close(weights(model), weights(mlp()))
    assert [group["lr"] for group in made.param_groups] == rates
    assert all(tensor.grad is None for tensor in model.parameters())


@pytest.mark.every(2)
@pytest.mark.parametrize("optimizer", ELEMENTWISE)
def test_accepted_optimizers_train_on_servers_as_alone(group: Any, optimizer: str) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, ELEMENTWISE[optimizer](model.parameters())

    def body(here: Any) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            here.model(here.share(x)).square().sum(1).mean().backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, "ps(servers=2)", 2, make, body)


@pytest.mark.parametrize("optimizer", COUPLED)
def test_optimizers_that_couple_elements_are_refused_by_name_with_the_remedy(group: Any, optimizer: str) -> None:
    def make() -> Any:
        model = mlp()
        return model, COUPLED[optimizer](model.parameters())

    text = refused(group, make, strategy="ps(servers=1)")
    assert optimizer.split(",")[0] in text
    assert "ps(update=worker)" in text


def test_a_coupled_group_behind_an_elementwise_one_is_found() -> None:
    class Mixed(Lars):
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                if group["adapt"]:
                    super().step(closure)
                    return
                with torch.no_grad():
                    for tensor in group["params"]:
                        tensor.sub_(group["lr"] * tensor.grad)

    model = mlp()
    groups = [
        {"params": list(model[0].parameters()), "adapt": False},
        {"params": list(model[2].parameters()), "adapt": True},
    ]
    with pytest.raises(UsageError, match="Mixed cannot run"):
        probe(Mixed(groups, lr=math.pi))  # type: ignore[arg-type]


def test_the_users_step_hooks_run_once_per_step_and_never_in_the_probe(group: Any) -> None:
    calls: list[int] = []

    def make(index: int) -> Any:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if index == 0:
            optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return model, optimizer

    def body(here: Any) -> None:
        for _ in range(2):
            here.model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            here.optimizer.step()

    on_group(group, "ps(servers=2, on=workers)", 2, make, body)
    assert calls == [1, 1]


class Counting(torch.optim.Optimizer):
    """Moves by the rate times a count of steps that it keeps in its groups, and lets the rate decay there."""

    def __init__(self, params: Any, lr: float = 0.1, decay: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "step": 0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            group["step"] += 1
            for tensor in group["params"]:
                tensor.sub_(group["lr"] * group["step"] * tensor.grad)
            group["lr"] *= group["decay"]


class Normalised(Counting):
    """By the norm of all gradients of all groups."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        tensors = [tensor for group in self.param_groups for tensor in group["params"]]
        norm = sum(tensor.grad.square().sum() for tensor in tensors) ** 0.5
        for tensor in tensors:
            tensor.sub_(self.param_groups[0]["lr"] * tensor.grad / norm)


class Estimating(Counting):
    """Keeps in its groups what it has learnt of all gradients, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0.0) + float(sum(one.grad.abs().sum() for one in group["params"]))
            for tensor in group["params"]:
                tensor.sub_(group["lr"] / (1 + group["seen"]) * tensor.grad)


def two_groups(model: torch.nn.Module, made: type[Counting]) -> torch.optim.Optimizer:
    return made([{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.05}])  # type: ignore[index]


@pytest.mark.parametrize(
    ("strategy", "made"),
    [
        *zip(
            [
                "ps(servers=1)",
                "ps(servers=2)",
                "ps(on=workers)",
                "ps(servers=2, on=workers)",
                "ps(servers=2) schedule=merged",
            ],
            cycle([Counting, Estimating]),
        )
    ],
)
def test_what_an_optimizer_counts_in_its_groups_advances_and_is_told(
    group: Any, strategy: str, made: type[Counting]
) -> None:
    """Between steps the script changes one of the values, and a scheduler the rate."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, made)

    def body(here: Any) -> dict[str, torch.Tensor]:
        told = []
        for step in range(9):
            here.optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            here.model(here.share(x)).square().sum(1).mean().backward()
            here.optimizer.step()
            if step == 2:
                here.optimizer.param_groups[1]["lr"] = 0.04
            if step == 3:
                here.optimizer.load_state_dict(here.optimizer.state_dict())
            told += [value for one in here.optimizer.param_groups for key, value in one.items() if key != "params"]
        said = [float(value) for value in told]
        return weights(here.model) | {"told": torch.tensor(said, dtype=torch.float64)}

    owners = Strategy.parse(strategy).roles
    assert owners is not None
    if made is Estimating and owners.owners > 1:
        text = refused(group, lambda: make(0), strategy=strategy)
        assert "Estimating" in text
        assert "servers=1" in text
    else:
        same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "ps(servers=2, on=workers)"])
def test_an_optimizer_that_couples_tensors_is_refused_where_owners_are_several(group: Any, strategy: str) -> None:
    def make() -> Any:
        model = mlp()
        return model, two_groups(model, Normalised)

    assert "Normalised cannot run" in refused(group, make, strategy=strategy)


@pytest.mark.parametrize("word", ["sync=asp", "sync=ssp(staleness=1)", "schedule=priority"])
def test_where_workers_cannot_all_be_told_a_value_that_advances_is_refused(group: Any, word: str) -> None:
    def make() -> Any:
        model = mlp()
        return model, two_groups(model, Counting)

    text = refused(group, make, strategy=f"ps(servers=1) {word}")
    assert "Counting changes values of its parameter groups itself" in text


def test_a_value_that_first_changes_later_is_an_error(group: Any) -> None:
    class Late(Counting):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # noqa: ARG002
            for one in self.param_groups:
                for tensor in one["params"]:
                    tensor.sub_(one["lr"] * tensor.grad)
                    state = self.state[tensor]
                    state["count"] = state.get("count", 0) + 1
                    if state["count"] == 5:
                        one["lr"] = 0.01

    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, Late)

    def body(here: Any) -> None:
        for _ in range(7):
            here.optimizer.zero_grad()
            here.model(torch.ones(3, 4, dtype=torch.float64)).sum().backward()
            here.optimizer.step()

    with pytest.raises(SynclineError, match=r"changed 'lr' of parameter group 0 itself, from 0\.1 to 0\.01"):
        on_group(group, "ps(servers=1)", 2, make, body)


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_a_value_changed_before_a_step_that_overflows_counts_in_the_next(group: Any, strategy: str) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, Counting)

    def body(here: Any) -> dict[str, torch.Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            here.optimizer.zero_grad()
            if step == 1:
                here.optimizer.param_groups[0]["lr"] = 0.01
            loss = loss_of(here.model(here.share(batch(step)))) * (math.inf if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(here.optimizer)
            scaler.update()
        rate = torch.tensor(here.optimizer.param_groups[0]["lr"], dtype=torch.float64)
        return weights(here.model) | {"rate": rate}

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "ps(servers=2, on=workers)", "ps(servers=2) schedule=merged"])
def test_an_owner_without_a_slice_of_a_group_need_not_count_in_it(group: Any, strategy: str) -> None:
    class Skipping(Counting):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # noqa: ARG002
            for one in self.param_groups:
                one["step"] += bool(one["params"])
                for tensor in one["params"]:
                    tensor.sub_(one["lr"] / one["step"] * tensor.grad)

    def make(index: int) -> Any:  # noqa: ARG001
        model = fill(torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 1)).double())
        return model, Skipping([{"params": [model[0].weight, model[1].weight]}, {"params": [model[1].bias]}])

    def body(here: Any) -> dict[str, torch.Tensor]:
        train(here, range(9))
        return weights(here.model) | {"steps": torch.tensor([one["step"] for one in here.optimizer.param_groups])}

    same_as_alone(group, strategy, 2, make, body)


class InAttribute(Counting):
    """Moves by the rate over a count of steps that it keeps in an attribute, and saves it with its state."""

    count: Any = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        steps = self.advance()
        for one in self.param_groups:
            for tensor in one["params"]:
                tensor.sub_(one["lr"] / steps * tensor.grad)

    def advance(self) -> float:
        self.count += 1
        return self.count

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": copy.deepcopy(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        super().load_state_dict({key: value for key, value in state.items() if key != "count"})


class InDictionary(InAttribute):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = {"step": 0, 3: (1.5, None)}

    def advance(self) -> float:
        self.count["step"] += 1
        return self.count["step"]


class InList(InAttribute):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = []

    def advance(self) -> float:
        self.count.append(2.0)
        return sum(self.count)


class InTensor(InAttribute):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = torch.tensor(0.0, dtype=torch.float64)

    def advance(self) -> float:
        self.count += 1
        return self.count.item()


class Alone(InDictionary):
    updates_parameters_alone = True


IN_ATTRIBUTES = [InAttribute, InDictionary, InList, InTensor, Alone]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("made", "strategy"),
    [
        *zip(
            IN_ATTRIBUTES,
            cycle(["ps(servers=1)", "ps(servers=2)", "ps(servers=2, on=workers)", "ps(servers=2) schedule=merged"]),
        )
    ],
)
def test_what_an_optimizer_counts_in_an_attribute_advances_and_is_told(
    group: Any, strategy: str, made: type[InAttribute]
) -> None:
    """Between steps the script loads an earlier state, whose count is another."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, made)

    def body(here: Here) -> dict[str, Any]:
        told = []
        train(here, range(2))
        saved = copy.deepcopy(here.optimizer.state_dict())
        for step in range(2, 9):
            train(here, range(step, step + 1))
            if step == 4:
                here.optimizer.load_state_dict(copy.deepcopy(saved))
            told.append(copy.deepcopy(here.optimizer.count))
        return {**weights(here.model), "told": told}

    wanted = alone(make, body)
    for found in on_group(group, strategy, 2, make, body):
        assert found.pop("told") == wanted["told"]
        close(found, {name: value for name, value in wanted.items() if name != "told"})


def test_the_attributes_of_an_optimizer_that_is_tried_stay_as_they_are() -> None:
    for made in IN_ATTRIBUTES:
        optimizer = two_groups(mlp(), made)
        before = copy.deepcopy(optimizer.count)
        probe(optimizer, owners=2)
        assert optimizer.count == before


class Scaled(Counting):
    """The script says by how much; subclasses read that in other ways."""

    factor = 1.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for one in self.param_groups:
            for tensor in one["params"]:
                tensor.sub_(self.scale() * one["lr"] * tensor.grad)

    def scale(self) -> float:
        return self.factor


class ScaledByName(Scaled):
    def scale(self) -> float:
        return getattr(self, "factor", 1.0)


class ScaledByComputedName(Scaled):
    def scale(self) -> float:
        return getattr(self, f"{'fac'}tor", 1.0)


class ScaledByVars(Scaled):
    def scale(self) -> float:
        return vars(self).get("factor", 1.0)


class ScaledByFunction(Scaled):
    def scale(self) -> float:
        return factor_of(self)


class ScaledByObject(Scaled):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.reader = Reader()

    def scale(self) -> float:
        return self.reader.read(self)


class Reader:
    def read(self, one: Any) -> float:
        return max(one.factor for _ in "x")


def factor_of(one: Any) -> float:
    return one.factor


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "made", [Scaled, ScaledByName, ScaledByComputedName, ScaledByVars, ScaledByFunction, ScaledByObject]
)
def test_an_attribute_that_the_script_sets_between_steps_reaches_the_owners(group: Any, made: type[Scaled]) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, made)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(4):
            here.optimizer.factor = 1.0 / (1 + step // 2)
            train(here, range(step, step + 1))
        return weights(here.model)

    for strategy in ("ps(servers=2)", "ps(servers=2, on=workers)"):
        same_as_alone(group, strategy, 2, make, body)


class Measures(InAttribute):
    """Notes for logs how long a step was, and never reads it."""

    def advance(self) -> float:
        self.last_step_s = time.perf_counter()
        return super().advance()


@pytest.mark.parametrize("made", [Counting, InAttribute, Measures])
def test_what_is_noted_on_an_optimizer_that_does_not_read_it_may_differ_between_ranks(
    group: Any, made: type[Counting]
) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, made)

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(4):
            here.optimizer.zero_grad()
            loss = loss_of(here.model(here.share(batch(step))))
            loss.backward()
            here.optimizer.last_loss = loss.item()
            here.optimizer.step()
            assert here.optimizer.last_loss == loss.item()
        return weights(here.model)

    for strategy in ("ps(servers=1)", "ps(servers=1, on=workers)"):
        same_as_alone(group, strategy, 2, make, body)


class CountsOnOneRank(Scaled):
    def step(self, closure: None = None) -> None:
        if self.rank == 0:
            self.logged += 1
        super().step(closure)


class CountsInGroupOnOneRank(Scaled):
    def step(self, closure: None = None) -> None:
        if self.rank == 0:
            self.param_groups[0]["logged"] = self.param_groups[0].get("logged", 0) + 1
        super().step(closure)


@pytest.mark.parametrize(
    ("made", "named"),
    [(CountsOnOneRank, "the attribute 'logged'"), (CountsInGroupOnOneRank, "'logged' of parameter group 0")],
)
@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_what_only_one_ranks_optimizer_changes_is_named(
    group: Any, strategy: str, made: type[Scaled], named: str
) -> None:
    def make(index: int) -> Any:
        model = mlp()
        optimizer = two_groups(model, made)
        optimizer.rank, optimizer.logged = index, 0
        return model, optimizer

    with pytest.raises(MismatchError) as caught:
        on_group(group, strategy, 2, make, lambda here: train(here, range(1)))
    assert f"has an optimizer whose step() changes {named}" in str(caught.value)
    assert "whose step() changes no value" in str(caught.value)


class GrowsQuickly(InList):
    def advance(self) -> float:
        self.count.extend([1.0] * 4000)
        return 1.0


def test_a_list_that_has_grown_too_long_to_be_told_is_refused_by_name(group: Any) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, GrowsQuickly)

    for strategy in ("ps(servers=1)", "ps(servers=1, on=workers)"):
        with pytest.raises(SynclineError, match=r"the attribute 'count' has grown to .* keep only its last items"):
            on_group(group, strategy, 2, make, lambda here: train(here, range(9)))


def test_what_never_changes_may_be_long(group: Any) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        optimizer = two_groups(model, InDictionary)
        optimizer.param_groups[0]["names"] = optimizer.names = ["weight"] * 20000
        return model, optimizer

    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(3))
        return weights(here.model)

    same_as_alone(group, "ps(servers=1)", 2, make, body)


@pytest.mark.parametrize("word", ["sync=asp", "sync=ssp(staleness=1)", "schedule=priority"])
def test_where_workers_cannot_all_be_told_an_attribute_that_advances_is_refused(group: Any, word: str) -> None:
    def make() -> Any:
        model = mlp()
        return model, two_groups(model, InDictionary)

    assert "InDictionary changes its attribute 'count' itself" in refused(group, make, strategy=f"ps(servers=1) {word}")


def test_an_optimizer_that_says_it_updates_parameters_alone_is_tried_on_attributes_of_its_own() -> None:
    optimizer = two_groups(mlp(), Alone)
    with pytest.raises(UsageError, match="its update of a parameter depends on others"):
        probe_parts(optimizer)
    assert optimizer.count == {"step": 0, 3: (1.5, None)}


class Sums(InAttribute):
    """Learns of all gradients in an attribute."""

    def advance(self) -> float:
        self.count += float(sum(one.grad.abs().sum() for group in self.param_groups for one in group["params"]))
        return 1.0


def test_an_attribute_that_depends_on_all_tensors_needs_one_owner(group: Any) -> None:
    def make() -> Any:
        model = mlp()
        return model, two_groups(model, Sums)

    probe(make()[1], owners=1)
    text = refused(group, make, strategy="ps(servers=2)")
    assert "computes the attribute 'count' from all tensors" in text
    assert "servers=1" in text


TAKEN = [0]


class InGlobal(InAttribute):
    def advance(self) -> float:
        TAKEN[0] += 1
        return TAKEN[0]


class InClass(InAttribute):
    def advance(self) -> float:
        InClass.count += 1
        return self.count


class InDictionaryOfClass(InAttribute):
    count = {"step": 0}  # noqa: RUF012 - that is the mistake that scripts make

    def advance(self) -> float:
        self.count["step"] += 1
        return self.count["step"]


class InObject(InAttribute):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.clock = Clock()

    def advance(self) -> float:
        self.clock.time += 1
        return self.clock.time


class Clock:
    time = 0


def in_closure() -> type[InAttribute]:
    taken = 0

    class InClosure(InAttribute):
        def advance(self) -> float:
            nonlocal taken
            taken += 1
            return taken

    return InClosure


class Momentum(InAttribute):
    """Would lose its momentum where other slices take the place of these."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for one in self.param_groups:
            for tensor in one["params"]:
                buffer = self.count.setdefault(tensor, torch.zeros_like(tensor))
                tensor.sub_(one["lr"] * buffer.mul_(0.9).add_(tensor.grad))


class OfItsOwn(InAttribute):
    """Owners would go on without an update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.tensors = [tensor for one in self.param_groups for tensor in one["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for tensor in self.tensors:
            if tensor.grad is not None:
                tensor.sub_(0.1 * tensor.grad)


class Drawing(InAttribute):
    def advance(self) -> float:
        return float(torch.rand(()))


@pytest.mark.parametrize(
    ("made", "named"),
    [
        (InGlobal, "it changes 'TAKEN', a global variable of "),
        (InClass, "it changes 'count' of the class InClass"),
        (InDictionaryOfClass, "it changes 'count' of the class InDictionaryOfClass"),
        (Momentum, "it keeps tensors in its attribute 'count'"),
        (OfItsOwn, "it keeps its parameters in its attribute 'tensors'"),
        (InObject, "it changes 'time' of the object in its attribute 'clock'"),
        (in_closure(), "it changes 'taken', a variable around InClosure.advance()"),
        (Drawing, "it draws random numbers, or keeps something outside of itself"),
    ],
)
def test_what_an_optimizer_keeps_where_owners_cannot_tell_is_refused_by_name(
    group: Any, made: type[InAttribute], named: str
) -> None:
    def make() -> Any:
        model = mlp()
        return model, two_groups(model, made)

    text = refused(group, make, strategy="ps(servers=1)")
    assert named in text
    assert "param_groups" in text
    assert "ps(update=worker)" in text


WARNED = False


class WarnsOnce(Counting):
    """Says something once, and remembers that for all of its kind."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        global WARNED
        WARNED = True
        for one in self.param_groups:
            for tensor in one["params"]:
                tensor.sub_(one["lr"] * tensor.grad)


def test_what_an_optimizer_does_once_for_all_of_its_kind_is_no_count() -> None:
    assert not any(probe(two_groups(mlp(), WarnsOnce), owners=2).own)
    assert WARNED


class Logs(Counting):
    """Says something of large gradients, which fills a cache of the logger."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.log = logging.Logger("of a test", logging.ERROR)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for one in self.param_groups:
            for tensor in one["params"]:
                tensor.sub_(one["lr"] * tensor.grad)
                if tensor.grad.abs().max() > 1000:
                    self.log.debug("large")


class Caches(Logs):
    """Fills a cache of its own once gradients are large."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.log = Cache()


class Cache:
    filled = False

    def debug(self, text: str) -> None:  # noqa: ARG002
        self.filled = True


@pytest.mark.parametrize("made", [Logs, Caches])
def test_a_cache_that_is_filled_once_is_no_count(made: type[Logs]) -> None:
    assert not any(probe(two_groups(mlp(), made), owners=2).own)


class SlowToStart(OfItsOwn):
    """Changes nothing in its first steps, and keeps its parameters for something else."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for one in self.param_groups:
            one["step"] += 1
            for tensor in one["params"]:
                if one["step"] > 5:
                    tensor.sub_(one["lr"] * tensor.grad)


def test_an_optimizer_that_changes_nothing_at_first_is_not_refused_for_that() -> None:
    optimizer = two_groups(mlp(), SlowToStart)
    with pytest.raises(UsageError, match="'tensors'"):
        probe(optimizer)
    optimizer.tensors.clear()
    assert probe(optimizer, owners=2).own[0]


class StateBeside(Counting):
    """Counts under a word in its state, as MADGRAD does."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        self.state["k"] = self.state.get("k", 0) + 1


class ListInGroup(Counting):
    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # noqa: ARG002
        for one in self.param_groups:
            one.setdefault("seen", []).append(1.0)
            for tensor in one["params"]:
                tensor.sub_(one["lr"] / len(one["seen"]) * tensor.grad)


def test_a_list_in_a_group_grows_and_is_told(group: Any) -> None:
    def make(index: int) -> Any:  # noqa: ARG001
        model = mlp()
        return model, two_groups(model, ListInGroup)

    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(5))
        seen = [float(sum(one["seen"])) for one in here.optimizer.param_groups]
        return weights(here.model) | {"seen": torch.tensor(seen, dtype=torch.float64)}

    for strategy in ("ps(servers=2)", "ps(servers=1, on=workers)"):
        same_as_alone(group, strategy, 2, make, body)


def test_what_belongs_to_no_parameter_is_refused(group: Any) -> None:
    def make() -> Any:
        model = mlp()
        return model, two_groups(model, StateBeside)

    text = refused(group, make, strategy="ps(servers=1)")
    assert "'k' in its state" in text
    assert "which owners cannot send" in text
