"""What counts how much: gradient accumulation, batches of unequal size, several passes through the model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from toy import (
    REPLICAS,
    SERVED,
    STRATEGIES,
    Here,
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

from syncline.errors import GradientError, UsageError


@pytest.mark.parametrize(("strategy", "to_none"), [*zip(STRATEGIES, cycle([True, False]))])
def test_accumulation_under_no_sync_equals_one_big_batch(group: Any, strategy: str, to_none: bool) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad(set_to_none=to_none)
            mine = here.share(batch(step))
            if here.replica is None:
                loss_of(here.model(mine)).backward()
            else:
                first, second, third = mine.tensor_split([1, 3])  # unequal micro-batches
                with here.no_sync():
                    (loss_of(here.model(first)) * (len(first) / len(mine))).backward()
                    (loss_of(here.model(second)) * (len(second) / len(mine))).backward()
                (loss_of(here.model(third)) * (len(third) / len(mine))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_accumulate_unequal_totals_are_weighted_by_them(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            x = batch(step)
            mine = x if here.replica is None else (x[:9] if here.rank == 0 else x[9:])
            with here.no_sync():
                (loss_of(here.model(mine[:2])) * (2 / len(mine))).backward()
            (loss_of(here.model(mine[2:])) * (1 - 2 / len(mine))).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


def test_no_sync_nests_and_exchanges_nothing(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        mine = here.share(batch(0))
        with here.no_sync():
            with here.no_sync():
                loss_of(here.model(mine)).backward()
            loss_of(here.model(mine)).backward()
        assert here.replica.steps == 0
        return gradients(here.model)

    def local(here: Here, rank: int) -> dict[str, torch.Tensor]:
        mine = batch(0)[6 * rank : 6 * rank + 6]
        for _ in range(2):
            loss_of(here.model(mine)).backward()
        return gradients(here.model)

    for rank, found in enumerate(on_group(group, "ring", 2, sgd, body)):
        close(found, local(Here(*sgd()), rank))


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_of_unequal_size_are_weighted_by_their_size(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(4):
            here.optimizer.zero_grad()
            x = batch(step)
            cut = [0, step, 7, len(x)]  # in step 0 rank 0's batch is empty
            mine = x if here.replica is None else x[cut[here.rank] : cut[here.rank + 1]]
            loss_of(here.model(mine)).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 3, sgd, body)


def test_a_rank_without_weight_does_not_count_even_when_its_gradient_is_not_a_number(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0) if here.rank == 0 else batch(0)[:0] * float("nan")
        out = here.model(x)
        (loss_of(out) if here.rank == 0 else out.sum() * float("nan")).backward()
        return gradients(here.model)

    same_as_alone(group, "ring", 2, sgd, body)


@pytest.mark.parametrize(
    "weight", [lambda x: float(len(x)), lambda x: 3 * len(x), "batch"], ids=["function", "scaled function", "batch"]
)
def test_the_weight_may_be_a_function_of_the_models_arguments(group: Any, weight: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0)
        loss_of(here.model(x if here.replica is None else (x[:3] if here.rank == 0 else x[3:]))).backward()
        return gradients(here.model)

    same_as_alone(group, "ring", 2, sgd, body, weight=weight)


def test_a_fixed_weight_makes_the_mean_one_over_ranks(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0)
        if here.replica is None:
            ((loss_of(here.model(x[:3])) + loss_of(here.model(x[3:]))) / 2).backward()
        else:
            loss_of(here.model(x[:3] if here.rank == 0 else x[3:])).backward()
        return gradients(here.model)

    same_as_alone(group, "ring", 2, sgd, body, weight=5)


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(group: Any, weight: float) -> None:
    with pytest.raises(UsageError, match="weights are finite numbers from 0 up"):
        on_group(group, "ring", 2, sgd, lambda here: here.model(batch(0)), weight=weight)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_called_twice_per_backward_counts_both_batches(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            here.optimizer.zero_grad()
            a, b = batch(step), batch(step + 10)
            if here.replica is not None:
                cut = slice(0, 2) if here.rank == 0 else slice(2, None)
                a, b = a[cut], b[cut]
            ((here.model(a) - here.model(b)).square().sum(1)).mean().backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


class Branches(torch.nn.Module):
    """Two branches, of which a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(1), mlp(2)

    def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
        found: torch.Tensor = (self.left if left else self.right)(x)
        return found


@pytest.mark.parametrize("strategy", REPLICAS)
def test_the_weight_is_told_when_every_pass_has_been_counted(group: Any, strategy: str) -> None:
    """The gradients of one branch are complete before backward comes to the other one's output."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = Branches()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        x, y = batch(0), batch(1)
        if here.replica is not None:
            # The sizes of the two passes have another proportion on each rank.
            x, y = (x[:9], y[:1]) if here.rank == 0 else (x[9:], y[1:])
        out = torch.cat([here.model(x, left=True), here.model(y, left=False)])
        loss_of(out).backward()
        return gradients(here.model)

    same_as_alone(group, strategy, 2, make, body)


@pytest.mark.parametrize("strategy", REPLICAS)
def test_a_second_backward_before_the_step_adds_both_means(group: Any, strategy: str) -> None:
    """As with DistributedDataParallel; unequal batches too."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(2):
            x = batch(step)
            cut = 4 + step
            loss_of(here.model(x if here.replica is None else (x[:cut] if here.rank == 0 else x[cut:]))).backward()
        return gradients(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", SERVED)
def test_a_second_backward_before_the_step_is_refused_by_servers(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        for step in range(2):
            loss_of(here.model(here.share(batch(step)))).backward()

    with pytest.raises(GradientError, match=r"second backward\(\) before step\(\).*syncline.no_sync"):
        on_group(group, strategy, 2, sgd, body)


@pytest.mark.parametrize("strategy", REPLICAS)
def test_a_graph_may_be_kept_for_a_second_backward(group: Any, strategy: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0)
        loss = loss_of(here.model(x if here.replica is None else (x[:5] if here.rank == 0 else x[5:])))
        here.model(batch(9)[:1] if here.rank == 0 else batch(9))  # another pass, with no backward
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(here.model)

    same_as_alone(group, strategy, 2, sgd, body)


def test_derivatives_by_autograd_grad_are_no_backward_pass(group: Any) -> None:
    """A gradient penalty: the inner derivative goes through the model's output and leaves no gradients."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0) if here.replica is None else (batch(0)[:5] if here.rank == 0 else batch(0)[5:])
        x = x.requires_grad_()
        out = here.model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (loss_of(out) + slope.square().sum(1).mean()).backward()
        assert here.replica is None or here.replica.steps == 1
        return gradients(here.model)

    same_as_alone(group, "ring", 2, sgd, body, unused="zeros")


def test_gradients_that_can_be_differentiated_are_refused(group: Any) -> None:
    def body(here: Here) -> None:
        loss_of(here.model(batch(0))).backward(create_graph=True)

    with (
        pytest.raises(GradientError, match=r"create_graph=True.*torch.autograd.grad"),
        pytest.warns(UserWarning, match="create_graph=True"),
    ):
        on_group(group, "ring", 2, sgd, body)


@dataclass
class Result:
    name: str
    logits: torch.Tensor


class Forms(torch.nn.Module):
    """One model whose inputs and outputs come in several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inner = mlp()
        self.form = form

    def forward(self, flag: int, inputs: dict[str, torch.Tensor], *, other: torch.Tensor | None = None) -> Any:  # noqa: ARG002
        out = self.inner(inputs["x"] if other is None else inputs["x"] + other)
        return {
            "tensor": out,
            "tuple": (3, out.detach(), out),
            "list": [[out], "text"],
            "dict": {"first": None, "logits": out},
            "dataclass": Result("text", out),
        }[self.form]


FORMS = {
    "tensor": lambda found: found,
    "tuple": lambda found: found[2],
    "list": lambda found: found[0][0],
    "dict": lambda found: found["logits"],
    "dataclass": lambda found: found.logits,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_inputs_and_outputs_may_have_any_form(group: Any, form: str, accumulate: bool) -> None:
    """The weight is the first dimension of the first tensor, wherever it is."""

    def make(index: int) -> Any:  # noqa: ARG001
        model = Forms(form)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0) if here.replica is None else (batch(0)[:3] if here.rank == 0 else batch(0)[3:])
        parts = x.tensor_split([1]) if accumulate else [x]
        for part in parts[:-1]:
            with here.no_sync():
                (loss_of(FORMS[form](here.model(1, {"x": part}))) * (len(part) / len(x))).backward()
        last = parts[-1]
        out = here.model(1, {"x": last}, other=torch.zeros(1, 4, dtype=torch.float64))
        (loss_of(FORMS[form](out)) * (len(last) / len(x))).backward()
        return gradients(here.model)

    same_as_alone(group, "ring", 2, make, body)


def test_several_outputs_count_a_batch_once(group: Any) -> None:
    class Heads(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.left, self.right = (fill(torch.nn.Linear(4, 4).double(), seed) for seed in range(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = self.body(x)
            return self.left(x), self.right(x)

    def make(index: int) -> Any:  # noqa: ARG001
        model = Heads()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0) if here.replica is None else (batch(0)[:3] if here.rank == 0 else batch(0)[3:])
        left, right = here.model(x)
        with here.no_sync():
            (loss_of(right)).backward(retain_graph=True)
        (loss_of(left) + loss_of(right)).backward()
        return gradients(here.model)

    same_as_alone(group, "ring", 2, make, body)


def test_a_backward_that_came_through_no_output_has_no_weight(group: Any) -> None:
    """Parts of the model are called by themselves: nothing was counted, and ranks would silently weigh alike."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert isinstance(here.model, torch.nn.Sequential)
        x = here.share(batch(0))
        for module in here.model:
            x = module(x)
        loss_of(x).backward()
        return gradients(here.model)

    with pytest.raises(GradientError, match=r"this rank's weight in the mean is unknown.* a number as weight="):
        on_group(group, "ring", 3, sgd, body)
    same_as_alone(group, "ring", 3, sgd, body, weight=1)


def test_outputs_that_hide_their_tensors_have_no_weight(group: Any) -> None:
    class Hiding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> Any:
            out = self.inner(x)
            return lambda: out

    def make(index: int) -> Any:  # noqa: ARG001
        model = Hiding()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        loss_of(here.model(here.share(batch(0)))()).backward()
        return gradients(here.model)

    with pytest.raises(GradientError, match=r"the model returned a function without any tensor.* a number as weight="):
        on_group(group, "ring", 2, make, body)
    same_as_alone(group, "ring", 2, make, body, weight=1)


def test_forward_passes_that_no_backward_follows_do_not_count(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        x = batch(0) if here.replica is None else (batch(0)[:3] if here.rank == 0 else batch(0)[3:])
        if here.rank == 0:
            here.model(batch(1, 100))
            with torch.no_grad():
                here.model(batch(1, 100))
            kept = here.model(batch(1, 100))  # noqa: F841 - its graph stays
        loss_of(here.model(x)).backward()
        return gradients(here.model)

    same_as_alone(group, "ring", 2, sgd, body)


def test_a_pass_that_began_before_the_end_of_the_run_goes_on_alone(group: Any) -> None:
    """Outputs are watched for what they count; after the end nobody asks."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        out = here.model(batch(0))
        here.replica.detach()
        loss_of(out).backward()
        return gradients(here.model)

    model, _ = sgd()
    loss_of(model(batch(0))).backward()
    for found in on_group(group, "ring", 2, sgd, body):
        close(found, gradients(model))


@pytest.mark.parametrize(("strategy", "workers"), [*zip(STRATEGIES, cycle([2, 3]))])
def test_gradients_that_are_not_zeroed_are_added_to_as_on_one_worker(group: Any, strategy: str, workers: int) -> None:
    """Also under ``no_sync``, after a halving by the script, and where a later step begins with zeros."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(6):
            if step in (3, 5):
                here.optimizer.zero_grad(set_to_none=step == 3)
            mine = here.share(batch(step, 12))
            if step == 1:
                with torch.no_grad():
                    for parameter in here.model.parameters():
                        parameter.grad *= 0.5
            if step == 2:
                with here.no_sync():
                    loss_of(here.model(mine)).backward()
            loss_of(here.model(mine)).backward()
            here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, strategy, workers, sgd, body)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("ps(servers=1) codec=int8", "have other values of it"),
        ("ps(servers=1) schedule=priority", "have other values of it"),
        ("ps(servers=1)", "do not count as much"),
        ("ps(servers=2, on=workers)", "do not count as much"),
        ("ps(servers=1, local=on)", "the push has added gradients of other workers of this host to it"),
    ],
)
def test_gradients_that_are_not_zeroed_are_refused_where_the_share_of_them_is_not_known(
    group: Any, strategy: str, why: str
) -> None:
    def body(here: Here) -> None:
        for step in range(2):
            loss_of(here.model(batch(step, 5 + here.rank * step))).backward()
            here.optimizer.step()

    with pytest.raises(GradientError, match=f"was not zeroed after the last step, .*{why}"):
        on_group(group, strategy, 2, sgd, body)


def test_without_a_forward_pass_gradients_have_to_be_zeroed_under_servers(group: Any) -> None:
    def body(here: Here) -> None:
        for step in range(2):
            loss_of(torch.nn.Sequential.forward(here.model, here.share(batch(step)))).backward()
            here.optimizer.step()

    with pytest.raises(GradientError, match="no forward pass of the model came before"):
        on_group(group, "ps(servers=1)", 2, sgd, body, weight=1.0)


def clear_all_but(here: Here, kept: int, how: str) -> None:
    for number, parameter in enumerate(here.model.parameters()):
        if number != kept and parameter.grad is not None:
            if how == "none":
                parameter.grad = None
            else:
                parameter.grad.zero_()


ONE_LEFT = [
    "ps(servers=1) codec=int8",
    "ps(servers=1) schedule=priority",
    "ps(servers=2, on=workers) schedule=priority",
]


WAYS = [("none", True), ("zero", False), ("zero", True), ("none", False)]
"""How gradients are zeroed, and whether that is before the forward pass or behind it."""


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", ONE_LEFT)
@pytest.mark.parametrize(("kept", "how", "early"), [(kept, *way) for kept, way in enumerate(WAYS)])
def test_one_gradient_that_is_not_zeroed_is_refused_whichever_it_is(
    group: Any, strategy: str, kept: int, how: str, early: bool
) -> None:
    """The last layer's gradients come first, when others have not been added to; before or behind the forward pass."""

    def body(here: Here) -> None:
        for step in range(3):
            if early:
                clear_all_but(here, kept if step else -1, how)
            loss = loss_of(here.model(here.share(batch(step))))
            if not early:
                clear_all_but(here, kept if step else -1, how)
            loss.backward()
            here.optimizer.step()

    name = ["0.weight", "0.bias", "2.weight", "2.bias"][kept]
    with pytest.raises(GradientError, match=f"{name}' was not zeroed after the last step.*have other values of it"):
        on_group(group, strategy, 2, sgd, body)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "how", "early"),
    [(text, *way) for number, text in enumerate([*ONE_LEFT, *SERVED]) for way in WAYS[number % 2 * 2 :][:2]],
)
def test_gradients_may_be_zeroed_before_or_behind_the_forward_pass(
    group: Any, strategy: str, how: str, early: bool
) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(4):
            if early:
                clear_all_but(here, -1, how)
            for _ in range(2):  # one pass that has no backward
                loss = loss_of(here.model(here.share(batch(step))))
            if not early:
                clear_all_but(here, -1, how)
            loss.backward()
            here.optimizer.step()
        return weights(here.model)

    if "codec" in strategy:
        on_group(group, strategy, 2, sgd, body)
    else:
        same_as_alone(group, strategy, 2, sgd, body)


@pytest.mark.parametrize(("kept", "strategy"), [*zip(range(4), cycle(SERVED))])
def test_one_gradient_that_is_not_zeroed_is_added_to_as_on_one_worker(group: Any, strategy: str, kept: int) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(4):
            loss = loss_of(here.model(here.share(batch(step))))
            loss.backward()
            here.optimizer.step()
            clear_all_but(here, kept, "none" if step else "zero")
        return weights(here.model)

    same_as_alone(group, strategy, 2, sgd, body)
