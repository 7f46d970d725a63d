"""Changes past autograd: weights and gradients that are not what, or where, an exchange has left them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from toy import (
    SERVED,
    STAGED,
    STRATEGIES,
    Here,
    batch,
    fill,
    loss_of,
    making,
    mlp,
    on_group,
    same_as_alone,
    sgd,
    train,
    weights,
)

from syncline.errors import GradientError, MismatchError
from syncline.frameworks.torch.replica import Forms
from syncline.frameworks.torch.storage import SAMPLES, Contents, Storage, layers_of
from syncline.strategy.strategy import Strategy

Change = Callable[[Here], object]


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mul_(0.5)


CHANGES: dict[str, Change] = {
    "in place": lambda here: [halved(p) for p in with_no_grad(here)],
    "past autograd": lambda here: [halved(p.data) for p in here.model.parameters()],
    "clamped": lambda here: [p.data.clamp_(-0.2, 0.2) for p in here.model.parameters()],
    "other memory": lambda here: [setattr(p, "data", p.data * 0.5) for p in here.model.parameters()],
    "one of them": lambda here: halved(here.model[2].bias.data),  # type: ignore[index]
    "from a vector": lambda here: torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(here.model.parameters()).detach() * 0.5, here.model.parameters()
    ),
    "a part of the state": lambda here: here.model[0].load_state_dict(  # type: ignore[index]
        {name: tensor * 0.5 for name, tensor in here.model[0].state_dict().items()}  # type: ignore[index]
    ),
    "initialised": lambda here: [torch.nn.init.constant_(p, 0.25) for p in here.model.parameters()],
}


def with_no_grad(here: Here) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in here.model.parameters()]


EVERYWHERE = ("in place", "other memory")
"""Changes that are tried with every strategy; the others where weights are replicas, staged, and owned by workers."""
OF_EACH_KIND = ("ring schedule=wait_free" + STAGED, "ps(servers=1)" + STAGED, "ps(servers=2, on=workers)")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "change"),
    [(text, change) for text in STRATEGIES for change in CHANGES if change in EVERYWHERE or text in OF_EACH_KIND],
)
def test_weights_may_be_changed_between_steps(group: Any, strategy: str, change: str) -> None:
    """Under servers they take them over: before the first step, after one, and between backward and step."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        CHANGES[change](here)
        train(here, range(2))
        CHANGES[change](here)
        train(here, range(2, 3))
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(3)))).backward()
        CHANGES[change](here)
        here.optimizer.step()
        train(here, range(4, 5))
        return weights(here.model)

    same_as_alone(group, strategy, 2, making("adam"), body)


GRADIENTS: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda p: p.grad.clamp_(-1e-3, 1e-3),  # type: ignore[union-attr]
    "past autograd": lambda p: p.grad.data.clamp_(-1e-3, 1e-3),  # type: ignore[union-attr]
    "other tensor": lambda p: setattr(p, "grad", p.grad * 0.5),  # type: ignore[operator]
    "other memory": lambda p: setattr(p.grad, "data", p.grad.data * 0.5),  # type: ignore[union-attr]
    "as numpy": lambda p: np.multiply(p.grad.numpy(), 0.5, out=p.grad.numpy()),  # type: ignore[union-attr]
    "none": lambda p: setattr(p, "grad", None),
}


@pytest.mark.parametrize(("change", "strategy"), [*zip(GRADIENTS, cycle(SERVED))])
def test_gradients_changed_after_the_owners_have_them_are_an_error_with_a_name(
    group: Any, strategy: str, change: str
) -> None:
    def body(here: Here) -> None:
        train(here, range(1))
        loss_of(here.model(here.share(batch(1)))).backward()
        GRADIENTS[change](here.model[2].weight)  # type: ignore[index]
        here.optimizer.step()

    with pytest.raises(GradientError, match=r"the gradient of '2.weight' was changed between.*clip_grad_norm_"):
        on_group(group, strategy, 2, making("sgd"), body)


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "unused"), [*zip(STRATEGIES, cycle(["error", "zeros"]))])
def test_gradients_that_a_script_keeps_are_not_overwritten(group: Any, strategy: str, unused: Any) -> None:
    """Whoever holds ``p.grad`` over ``zero_grad()`` has the old one, as in one process; it may also be written to."""

    def body(here: Here) -> dict[str, torch.Tensor]:
        kept, average = [], [torch.zeros_like(parameter) for parameter in here.model.parameters()]
        for step in range(4):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            if kept and step > 1:
                average = [tensor.mul_(0.5) for tensor in kept[0]]
            kept.append([parameter.grad for parameter in here.model.parameters()])
            here.optimizer.step()
        if here.replica is None or here.client is None:
            assert all(torch.equal(p.grad, kept[3][i]) for i, p in enumerate(here.model.parameters()))  # type: ignore[arg-type]
        found = [tensor for gradients in (average, *kept) for tensor in gradients]
        return {**weights(here.model), **{str(i): tensor.clone() for i, tensor in enumerate(found)}}  # type: ignore[union-attr]

    if strategy in SERVED:  # where ``.grad`` is the rank's own contribution
        wanted = None
        for found in on_group(group, strategy, 2, making("momentum"), body, unused=unused):
            kept = [tensor for name, tensor in found.items() if name.isdigit()]
            assert not any(torch.equal(one, other) for one, other in zip(kept[4:8], kept[8:12], strict=True))
            wanted = found if wanted is None else wanted
            assert all(torch.equal(found[name], wanted[name]) for name in found if not name.isdigit())
    else:
        same_as_alone(group, strategy, 2, making("momentum"), body, unused=unused)


FORMS: dict[str, tuple[Change, str]] = {
    "float": (lambda here: here.model.float(), r"torch.float64 .*torch.float32"),
    "channels_last": (lambda here: here.model.to(memory_format=torch.channels_last), "with strides"),
    "shape": (lambda here: setattr(here.model[0].weight, "data", torch.zeros(5, 3, 3, 3).double()), r"\(5, 3, 3, 3\)"),  # type: ignore[index]
}


@pytest.mark.parametrize(
    ("strategy", "form", "moment"),
    [
        (strategy, form, moment)
        for strategy in ("ring", "ps(servers=1)", "ps(servers=1, on=workers)")
        for form in FORMS
        for moment in ("before", "between")
        if (strategy, form, moment) != ("ring", "shape", "between")  # torch's own step() refuses such a gradient
    ],
)
def test_a_model_that_gets_another_form_is_refused_naming_the_parameter(
    group: Any, strategy: str, form: str, moment: str
) -> None:
    change, named = FORMS[form]

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = fill(torch.nn.Sequential(torch.nn.Conv2d(3, 5, 2), torch.nn.Flatten()).double())
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> None:
        x = torch.ones(2, 3, 4, 4, dtype=torch.float64)
        if moment == "between":
            here.model(x).square().mean().backward()
            change(here)
            here.optimizer.step()
            here.optimizer.zero_grad()
        else:
            change(here)
        dtype, device = here.model[0].weight.dtype, here.model[0].weight.device  # type: ignore[index]
        here.model(x.to(dtype).to(device)).square().mean().backward()

    with pytest.raises(GradientError, match=rf"parameter '0.weight' was .*{named}.*before prepare\(\)"):
        on_group(group, strategy, 2, make, body)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to("meta"),
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
        lambda model: setattr(model[0], "weight", torch.nn.Parameter(model[0].weight.detach().clone())),
    ],
    ids=["meta", "assign", "setattr"],
)
@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)"])
def test_parameters_that_others_have_taken_the_place_of_are_named(
    group: Any, strategy: str, change: Callable[[Any], object]
) -> None:
    """No hook would notice their gradients: the ranks would train apart from one another."""

    def body(here: Here) -> None:
        train(here, range(1))
        change(here.model)
        loss_of(here.model(batch(1).to(here.model[0].weight.device))).backward()  # type: ignore[index, arg-type]

    with pytest.raises(GradientError, match=r"'0.weight' was replaced after .*before prepare\(\)"):
        on_group(group, strategy, 2, making("sgd"), body)


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1)", "ps(servers=1, on=workers)"])
def test_weights_and_gradients_that_are_moved_into_shared_memory_are_refused(group: Any, strategy: str) -> None:
    """Torch moves the memory under all views of it, so that they still agree with one another."""

    def body(here: Here) -> None:
        train(here, range(1))
        with _SHARING:
            here.model.share_memory()
        train(here, range(1, 2))

    with pytest.raises(GradientError, match=r"share_memory\(\).*before syncline.prepare\(\)"):
        on_group(group, strategy, 2, making("sgd"), body)


_SHARING = threading.Lock()


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=2, on=workers)"])
@pytest.mark.parametrize("change", ["another rank", "another value"])
def test_ranks_that_change_weights_differently_are_named(group: Any, strategy: str, change: str) -> None:
    def body(here: Here) -> None:
        train(here, range(1))
        if change == "another value":
            here.model[0].weight.data.fill_(here.rank)  # type: ignore[index]
        elif here.rank == 1:
            halved(here.model[0].weight.data)  # type: ignore[index]
        train(here, range(1, 2))

    with pytest.raises(MismatchError, match=r"changed weights|at the optimizer's step"):
        on_group(group, strategy, 2, making("sgd"), body)


@pytest.mark.parametrize("strategy", ["ps(servers=1) codec=topk(ratio=0.1)", "ps(servers=1, on=workers) codec=int8"])
def test_under_a_codec_weights_of_which_the_owners_know_more_are_only_loaded_whole(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        assert here.client is not None
        assert here.client.owned.keeps
        halved(here.model[0].weight.data)  # type: ignore[index]
        train(here, range(1))
        here.model.load_state_dict(here.model.state_dict())
        train(here, range(1, 2))
        halved(here.model[0].weight.data)  # type: ignore[index]
        train(here, range(2, 3))

    with pytest.raises(GradientError, match=r"'0.weight' were changed.*load a state_dict into the whole model"):
        on_group(group, strategy, 2, making("sgd"), body)


def storage(*sizes: int) -> tuple[Storage, list[tuple[str, torch.nn.Parameter]]]:
    kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    named = [
        (f"p{i}", torch.nn.Parameter(torch.zeros(size, dtype=kinds[i % len(kinds)]))) for i, size in enumerate(sizes)
    ]
    buckets = Strategy.parse("ring schedule=fixed").schedule_object().buckets(layers_of(named))
    return Storage(named, buckets, lambda nbytes, dtype: np.zeros(nbytes // dtype.itemsize, dtype)), named


SIZES = (0, 1, 2, SAMPLES - 1, SAMPLES, SAMPLES + 1, 2 * SAMPLES - 1, 2 * SAMPLES, 1000, 100_003, 0, 5)


def test_every_element_is_looked_at_in_its_turn() -> None:
    """A single changed bit is found within as many turns as there are elements from one sample to the next."""
    made, _ = storage(*SIZES)
    contents = Contents(made)
    for index, size in enumerate(SIZES):
        for at in {0, size // 3, size - 1} if size else ():
            found = False
            for _ in range(size // SAMPLES + 1):
                contents.remember()
                assert contents.changed() == []
                made.flat_of(index)[at] = -made.flat_of(index)[at]  # between zeros of either sign
                changed = contents.changed()
                assert changed in ([], [index])
                found = found or bool(changed)
            assert found, (index, at)


def test_all_of_a_small_tensor_and_a_share_of_a_large_one_are_seen_at_once() -> None:
    made, _ = storage(*SIZES)
    contents = Contents(made)
    for index, size in enumerate(SIZES):
        contents.remember()
        made.flat_of(index)[: max(1, 2 * size // SAMPLES)] += 1
        assert contents.changed() == ([index] if size else [])


def test_values_that_are_not_numbers_are_compared_as_bits() -> None:
    made, _ = storage(8)
    made.flat_of(0)[:] = float("nan")
    contents = Contents(made)
    contents.remember()
    assert contents.changed() == []


def test_forms_name_the_first_that_differs() -> None:
    _, named = storage(3, 4)
    forms = Forms(named)
    assert forms.changed() is None
    named[1][1].data = torch.zeros(4)
    text = forms.changed()
    assert text is not None
    assert "'p1' was torch.bfloat16 (4,)" in text


def test_a_type_of_which_all_parameters_are_empty_is_looked_at_too(group: Any) -> None:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, dtype=torch.float32)))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def body(here: Here) -> dict[str, torch.Tensor]:
        here.optimizer.zero_grad()
        (loss_of(here.model(here.share(batch(0)))) + here.model.empty.sum()).backward()  # type: ignore[operator, union-attr]
        here.optimizer.step()
        return weights(here.model)

    same_as_alone(group, "ps(servers=2, on=workers)", 2, make, body)


def test_ranks_that_change_weights_differently_are_named_though_a_checkpoint_came_between(group: Any) -> None:
    """The owners take the weights for the checkpoint; the workers have not compared theirs by then."""

    def body(here: Here) -> None:
        assert here.client is not None
        here.model.load_state_dict({name: value * (1 + here.rank) for name, value in weights(here.model).items()})
        here.client.owners_weights()
        loss_of(here.model(here.share(batch(0)))).backward()
        here.optimizer.step()

    with pytest.raises(MismatchError, match="rank"):
        on_group(group, "ps(servers=2, on=workers)", 2, sgd, body)
