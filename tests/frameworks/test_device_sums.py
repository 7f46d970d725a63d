"""Gradients that are added in the memory of GPUs, for which the CPU stands in; it does everything late, in threads."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from toy import batch, fill, loss_of, mlp, sgd, weights

from host_copier import HostCopier, Lagging
from syncline.errors import StrategyError, UsageError
from syncline.frameworks.torch import prepare
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy

STRATEGY = "direct(on=device) transport=inproc"


class Slow(HostCopier):
    """Each rank's streams are late by times of their own."""

    def __init__(self, rank: int) -> None:
        drawn = random.Random(rank)
        super().__init__(before=lambda _: time.sleep(0.003 * drawn.random()))


def trained(session: Session, copier: HostCopier | None, dtype: torch.dtype, steps: int) -> dict[str, torch.Tensor]:
    """The weights after some steps with ranks of different weight."""
    model = fill(torch.nn.Sequential(torch.nn.Linear(4, 30), torch.nn.Tanh(), torch.nn.Linear(30, 3)).to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made = prepare(session, model, optimizer, copier=copier)
    assert made is not None
    try:
        for step in range(steps):
            made.optimizer.zero_grad()
            loss_of(made.model(batch(2 * step + session.rank).to(dtype))).backward()
            made.optimizer.step()
        return weights(made.model)
    finally:
        made.replica.detach()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("dtype", "schedule"),
    [
        *zip(
            [torch.float32, torch.float64, torch.bfloat16, torch.float32],
            ["wait_free", "priority(slice=1KiB)", "delayed", "fixed(bucket=1B)"],
            strict=True,
        )
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_training_has_the_bits_of_direct(group: Any, dtype: torch.dtype, schedule: str, ranks: int) -> None:
    """Buckets of one element have parts without any, with more ranks than elements."""
    here = group(f"direct schedule={schedule}", ranks, lambda session: trained(session, None, dtype, 4))
    asked = f"{STRATEGY} schedule={schedule}"
    there = group(asked, ranks, lambda session: trained(session, Slow(session.rank), dtype, 4))
    for one, other in zip(there, here, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_gradients_do_not_pass_through_the_host(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a bucket is copied to or from the host")

    monkeypatch.setattr(HostCopier, "to_host", refuse)
    monkeypatch.setattr(HostCopier, "to_device", refuse)
    one, two = group(STRATEGY, 2, lambda session: trained(session, HostCopier(), torch.float32, 3))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_rank_that_is_behind_reads_and_writes_in_order(group: Any) -> None:
    """Its training stream gets on when something waits for it: the forward pass reads the old weights, the next
    gradients are written once the others have read these."""

    def body(session: Session) -> dict[str, torch.Tensor]:
        return trained(session, Lagging() if session.rank else HostCopier(), torch.float32, 4)

    there = group(STRATEGY, 2, body)
    here = group("direct", 2, lambda session: trained(session, None, torch.float32, 4))
    for one, other in zip(there, here, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other)


def test_a_model_on_the_processor_is_refused_on_all_ranks(group: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match=r"this model is not on one: use direct"):
            prepare(session, *sgd())

    group(STRATEGY, 2, body)


@pytest.mark.parametrize("what", ["export", "attach"])
def test_memory_that_cannot_be_mapped_is_named(group: Any, what: str) -> None:
    class Closed(HostCopier):
        pass

    def refuse(*_: object) -> None:
        raise RuntimeError("invalid resource handle")

    setattr(Closed, what, refuse)

    def body(session: Session) -> None:
        prepare(session, *sgd(), copier=Closed() if session.rank else HostCopier())

    with pytest.raises(
        UsageError, match=r"(share|use) the memory of .*GPU .RuntimeError: invalid resource handle.: use"
    ):
        group(STRATEGY, 2, body)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("direct(on=device)", "the nearest that works is 'direct\\(on=device\\) transport=shm'"),
        ("direct(on=device) transport=tcp", "which transport=tcp does not promise"),
        ("direct(on=device) transport=shm codec=int8", "codec=feedback encodes them"),
        ("direct(on=device) transport=shm sync=local(steps=2)", "in every step, and sync=local"),
        ("direct(on=device) transport=shm schedule=split", "schedule=split exchanges in two"),
    ],
)
def test_what_gpus_cannot_do_is_refused_with_what_they_can(words: str, text: str) -> None:
    with pytest.raises(StrategyError, match=text):
        Strategy.parse(words)


def test_one_rank_needs_no_other_memory(group: Any) -> None:
    (found,) = group(STRATEGY, 1, lambda session: weights(mlp()) if session.alone else {})
    assert found
