"""Training of PyTorch with codecs: replicas learn what dense ones learn, also where codecs begin later."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from toy import batch, loss_of, mlp

from syncline import registry
from syncline.errors import StrategyError, UsageError
from syncline.frameworks.torch import prepare
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy

TEXTS = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]


def trained(session: Session, steps: int = 6, dtype: torch.dtype = torch.float32) -> list[bytes] | None:
    model = mlp().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = prepare(session, model, optimizer)
    if made is None:
        return None
    for step in range(steps):
        x = batch(step).to(dtype)
        mine = x[len(x) * session.rank // session.world_size : len(x) * (session.rank + 1) // session.world_size]
        optimizer.zero_grad()
        loss_of(model(mine)).backward()
        optimizer.step()
    return [parameter.detach().view(torch.uint8).numpy().tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("architecture", ["ring", "ps(servers=2)", "ps(servers=1, on=workers, update=worker)"])
def test_nothing_is_compressed_while_it_warms_up(group: Any, architecture: str) -> None:
    def weights(codec: str, steps: int) -> np.ndarray:
        one, *_ = group(f"{architecture} codec={codec}", 3, functools.partial(trained, steps=steps))
        return np.concatenate([np.frombuffer(found, np.float32) for found in one])

    warmed = "feedback(onebit, warmup=3)"
    np.testing.assert_allclose(weights(warmed, 3), weights("none", 3), rtol=1e-4, atol=1e-6)
    assert np.abs(weights(warmed, 4) - weights("none", 4)).max() > 1e-3
    with pytest.raises(UsageError, match="warmup=-1: choose a number of steps"):
        Strategy.parse("codec=feedback(onebit, warmup=-1)")


LEARNING = [
    text
    for text in TEXTS
    if (Strategy.parse(f"codec={text}").codec_object().contraction or text == "ternary")
    and "0.01" not in text  # some elements would wait for longer than this test takes
]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("text", "architecture"),
    [pytest.param(text, "direct", marks=[pytest.mark.slow] * (n % 2)) for n, text in enumerate(LEARNING)]
    + [(text, "ps(servers=1)") for text in ("int8", "onebit", "topk(ratio=0.3)", "qsgd", "ternary")],
)
def test_what_is_learnt_is_what_the_gradients_say(group: Any, text: str, architecture: str) -> None:
    """Replicas that are equal and wrong would pass elsewhere: here they have to come near the minimum."""
    wanted = [torch.randn(30, 20, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def body(session: Session) -> Any:
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.zeros(30, 20))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
        if prepare(session, model, optimizer) is None:
            return None
        for _ in range(50):
            optimizer.zero_grad()
            (0.5 * (model.w - wanted[session.rank]).square().sum()).backward()
            optimizer.step()
        return model.w.detach().clone()

    mean = (wanted[0] + wanted[1]) / 2
    found = group(f"{architecture} codec={text}", 2, body)[0]
    assert (found - mean).norm() < 0.35 * mean.norm()


@pytest.mark.parametrize("text", ["none", "int8", "fp16"])
def test_half_and_double_precision_models(group: Any, text: str) -> None:
    for dtype in (torch.float64, torch.bfloat16):

        def body(session: Session, dtype: torch.dtype = dtype) -> Any:
            model = mlp().to(dtype)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            prepare(session, model, optimizer)
            loss_of(model(batch(session.rank).to(dtype))).backward()
            return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

        one, two = group(f"ring codec={text}", 2, body)
        assert all(torch.equal(a, b) and a.dtype == dtype for a, b in zip(one, two, strict=True))


def test_the_strategy_says_what_really_happens() -> None:
    from syncline.nouns import Group

    resolved = Strategy.parse("ring codec=int8").resolve(Group(2))
    assert resolved.architecture.name == "direct"
    assert "encode the sums" in resolved.exchange
    assert Strategy.parse("ps(update=worker) codec=int8").resolve(Group(2)).architecture.name == "ps"
    assert "send the encoded change" in Strategy.parse("ps codec=int8").resolve(Group(2)).exchange
    with pytest.raises(StrategyError, match=r"servers do not support; the nearest.*'codec=feedback\(powersgd"):
        Strategy.parse("ps codec=powersgd(rank=2)")
    with pytest.raises(StrategyError, match=r"still warms up; the nearest.*'ps\(servers=2\) codec=feedback\(onebit"):
        Strategy.parse("ps(servers=2, update=worker) codec=feedback(onebit, warmup=9)")
    with pytest.raises(StrategyError, match="still warms up"):
        Strategy.parse("ps(servers=2, update=worker) codec=adaptive(feedback(onebit, warmup=9))")
    for inner in ("momentum=0.9", "clip=1", "warmup=5"):
        with pytest.raises(UsageError, match="would begin only after these steps"):
            Strategy.parse(f"codec=feedback(threshold(ratio=0.01, {inner}), warmup=9)")
    assert "what" not in Strategy.parse("ps(update=worker) codec=int8").resolve(Group(2)).exchange


def test_an_overflow_skips_the_step_of_everyone(group: Any) -> None:
    """GradScaler sees infinities in the average wherever they came from, and the next step is sound."""

    def body(session: Session) -> Any:
        model = mlp().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(session, model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        finite = []
        for step in range(3):
            x = batch(10 * session.rank + step).float()
            if step == 1 and session.rank == 1:
                x[0, 0] = float("inf")
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x))).backward()
            scaler.step(optimizer)
            scaler.update()
            after = [parameter.detach().clone() for parameter in model.parameters()]
            finite.append(all(torch.isfinite(one).all() for one in after))
            moved = not all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            finite.append(moved)
            before = after
        return finite, scaler.get_scale()

    for found, scale in group("ring codec=int8", 2, body):
        assert found == [True, True, True, False, True, True]
        assert scale == 2.0


def test_complex_gradients_are_refused_by_name(group: Any) -> None:
    def body(session: Session) -> Any:
        model = torch.nn.Module()
        model.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
        with pytest.raises(UsageError, match="'weight' is complex64"):
            prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1))

    group("ring codec=int8", 2, body)
