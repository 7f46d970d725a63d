"""Larger batches: the papers' formulas, one worker against several, and refusal where slices of tensors are held."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.optim.lr_scheduler import LinearLR
from toy import Here, batch, loss_of, mlp, on_group, same_as_alone, train, weights

from syncline.errors import UsageError
from syncline.optim import LAMB, LARS

Array = NDArray[np.float64]
STEPS = 5

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "LARS": lambda parameters: LARS(parameters, 2.0, weight_decay=0.01, trust=0.02),
    "LAMB": lambda parameters: LAMB(parameters, 0.02, weight_decay=0.1),
}


def making(name: str) -> Any:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, OPTIMIZERS[name](model.parameters())

    return make


def drawn(seed: int) -> tuple[list[Array], list[list[Array]]]:
    """Two tensors, and their gradients in every step."""
    random = np.random.default_rng(seed)
    shapes = ((3, 4), (5,))
    return [random.normal(size=s) for s in shapes], [[random.normal(size=s) for s in shapes] for _ in range(STEPS)]


def run(make: Callable[[Any], torch.optim.Optimizer], start: list[Array], gradients: list[list[Array]]) -> list[Array]:
    tensors = [torch.tensor(array, requires_grad=True) for array in start]
    optimizer = make(tensors)
    for step in gradients:
        for tensor, gradient in zip(tensors, step, strict=True):
            tensor.grad = torch.tensor(gradient)
        optimizer.step()
    return [tensor.detach().numpy() for tensor in tensors]


rates, decays, momenta = st.floats(1e-3, 1.0), st.floats(0, 0.5), st.floats(0, 0.99)


@given(st.integers(0, 99), rates, decays, momenta, st.floats(1e-4, 0.1))
def test_lars_is_algorithm_1_of_its_paper(seed: int, lr: float, decay: float, momentum: float, trust: float) -> None:
    start, gradients = drawn(seed)
    found = run(lambda p: LARS(p, lr, momentum=momentum, weight_decay=decay, trust=trust), start, gradients)
    for place, wanted in enumerate(start):
        velocity = np.zeros_like(wanted)
        for step in gradients:
            g = step[place]
            norm = np.linalg.norm(wanted)
            local = trust * norm / (np.linalg.norm(g) + decay * norm)
            velocity = momentum * velocity + lr * local * (g + decay * wanted)
            wanted = wanted - velocity
        np.testing.assert_allclose(found[place], wanted, rtol=1e-10)


@given(st.integers(0, 99), rates, decays, momenta, momenta, st.floats(1e-8, 1e-2))
def test_lamb_is_algorithm_2_of_its_paper(
    seed: int, lr: float, decay: float, one: float, two: float, eps: float
) -> None:
    start, gradients = drawn(seed)
    found = run(lambda p: LAMB(p, lr, betas=(one, two), eps=eps, weight_decay=decay), start, gradients)
    for place, x in enumerate(start):
        m, v = np.zeros_like(x), np.zeros_like(x)
        for t, step in enumerate(gradients, 1):
            g = step[place]
            m, v = one * m + (1 - one) * g, two * v + (1 - two) * g**2
            r = (m / (1 - one**t)) / (np.sqrt(v / (1 - two**t)) + eps)
            update = r + decay * x
            x = x - lr * np.linalg.norm(x) / np.linalg.norm(update) * update
        np.testing.assert_allclose(found[place], x, rtol=1e-8)


def test_without_adaptation_they_are_sgd_and_adamw() -> None:
    start, gradients = drawn(1)
    pairs: list[tuple[Any, Any]] = [
        (
            lambda p: LARS(p, 0.1, weight_decay=0.1, adapt=False),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
        ),
        (
            lambda p: LAMB(p, 0.1, weight_decay=0.1, adapt=False),
            lambda p: torch.optim.AdamW(p, 0.1, eps=1e-6, weight_decay=0.1),
        ),
    ]
    for ours, theirs in pairs:
        for mine, wanted in zip(run(ours, start, gradients), run(theirs, start, gradients), strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=1e-9)


@pytest.mark.parametrize("make", [lambda p: LARS(p, 0.1, momentum=0.0), lambda p: LAMB(p, 0.1)])
def test_tensors_of_zeros_and_without_gradients_have_a_ratio_of_1(make: Any) -> None:
    """Biases begin at 0, and would otherwise stay there."""
    (moved,) = run(make, [np.zeros(3)], [[np.full(3, 0.5)]])
    assert np.isfinite(moved).all()
    assert (moved < 0).all()
    (still,) = run(make, [np.ones(3)], [[np.zeros(3)]])
    np.testing.assert_array_equal(still, np.ones(3))


@pytest.mark.parametrize("strategy", ["ring", "ps(servers=1, update=worker)", "ring schedule=priority"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_several_workers_do_what_one_does(group: Any, strategy: str, name: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(4))
        if here.replica is not None:
            here.replica.flush()
        return weights(here.model)

    same_as_alone(group, strategy, 2, making(name), body)


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "ps(servers=1, on=workers)"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_servers_that_hold_slices_refuse_them_by_name(group: Any, strategy: str, name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} cannot run on a parameter server .*use ps\(update=worker\), ring"):
        on_group(group, strategy, 2, making(name), lambda here: train(here, range(1)))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: LARS(p, -0.1), "lr of LARS must be a number from 0 up, got -0.1"),
        (lambda p: LARS(p, float("nan")), "lr of LARS"),
        (lambda p: LARS(p, 0.1, momentum=1.0), "momentum of LARS must be from 0 to below 1, got 1.0"),
        (lambda p: LARS(p, 0.1, trust=0.0), "trust of LARS must be above 0: adapt=False"),
        (lambda p: LARS(p, 0.1, weight_decay=-1.0), "weight_decay of LARS"),
        (lambda p: LAMB(p, float("inf")), "lr of LAMB must be a number from 0 up, got inf"),
        (lambda p: LAMB(p, eps=-1e-9), "eps of LAMB"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), "the second of betas of LAMB must be from 0 to below 1, got 1.0"),
    ],
)
def test_wrong_values_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make([torch.zeros(2, requires_grad=True)])


def test_sparse_gradients_are_refused() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = LAMB(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="LAMB takes dense gradients only"):
        optimizer.step()


@given(st.integers(2, 64), st.integers(1, 50))
def test_linear_scaling_with_warm_up_is_torch_s_linear_rate(workers: int, warm_up: int) -> None:
    """Goyal et al.: from the rate of one worker to ``workers`` times that, in equal steps."""
    base = 0.1
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=workers * base)
    scheduler = LinearLR(optimizer, start_factor=1 / workers, total_iters=warm_up)
    for step in range(warm_up + 3):
        wanted = base * (1 + (workers - 1) * min(1.0, step / warm_up))
        assert optimizer.param_groups[0]["lr"] == pytest.approx(wanted)
        optimizer.step()
        scheduler.step()


def test_a_state_goes_on_where_it_was_saved() -> None:
    start, gradients = drawn(2)
    for make in OPTIMIZERS.values():
        whole = run(make, start, gradients)
        tensors = [torch.tensor(array, requires_grad=True) for array in start]
        optimizer = make(tensors)
        for number, step in enumerate(gradients):
            if number == 2:
                state, optimizer = optimizer.state_dict(), make(tensors)
                optimizer.load_state_dict(state)
            for tensor, gradient in zip(tensors, step, strict=True):
                tensor.grad = torch.tensor(gradient)
            optimizer.step()
        for tensor, wanted in zip(tensors, whole, strict=True):
            np.testing.assert_array_equal(tensor.detach().numpy(), wanted)


def test_a_closure_gives_the_loss() -> None:
    model = mlp()
    optimizer = OPTIMIZERS["LARS"](model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model(batch(0)))
        loss.backward()
        return loss

    before = closure().item()
    assert optimizer.step(closure).item() == before
    assert closure().item() < before


def test_the_package_does_not_load_them() -> None:
    program = "import sys, syncline; print('torch' in sys.modules, hasattr(syncline, 'LARS'))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False False"
