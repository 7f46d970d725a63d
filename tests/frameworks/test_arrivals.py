"""Whatever order gradients become ready in, on whichever rank first: the weights are those of one worker, to the bit.

Every rank goes through its layers in an order of its own in each step, and ranks take turns in an order that is drawn:
one may have made all its gradients before another has made its first. Gradients are small whole numbers that depend on
the weights, and steps powers of two, so that every sum is exact in any order, and a weight read too early shows.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy import Here, on_group

from syncline import registry
from syncline.errors import UsageError
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import built_names

SIZES = (3, 7, 1, 4, 12)
STEPS = 4
"""Of a schedule that measures some, so many after these."""
LIMIT_S = 20.0
PASSES_S = 0.002
"""How long a turn is waited for where all ranks may have to do something together in the middle of a backward pass."""

SMALL = {"fixed": ["fixed(bucket=20B)"], "priority": ["priority", "priority(slice=12B)"], "split": ["split(slice=12B)"]}
SMALL["delayed"] = ["delayed(bucket=20B)", "delayed(local=off)"]
SCHEDULES = [text for name in registry.names("schedules") for text in SMALL.get(name, [name])]
SERVED = ["ps(servers=1)", "ps(servers=2, update=worker)", "ps(servers=1, on=workers)"]


@cache
def architectures(schedule: str) -> list[str]:
    """Those that go with a schedule."""
    found = []
    for name in [name for name in built_names("architecture") if name not in ("ps", "native")] + SERVED:
        try:
            Strategy.parse(f"{name} schedule={schedule}")
        except UsageError:
            continue
        found.append(name)
    return found


@dataclass(frozen=True)
class Arrivals:
    """By step and rank the order in which layers are gone through; by step whose turn it is to make a gradient."""

    orders: tuple[tuple[tuple[int, ...], ...], ...]
    turns: tuple[tuple[int, ...], ...]


@st.composite
def arrivals(draw: st.DrawFn, workers: int, steps: int) -> Arrivals:
    layers, ranks = list(range(len(SIZES))), [rank for rank in range(workers) for _ in SIZES]
    orders = [[tuple(draw(st.permutations(layers))) for _ in range(workers)] for _ in range(steps)]
    return Arrivals(tuple(map(tuple, orders)), tuple(tuple(draw(st.permutations(ranks))) for _ in range(steps)))


class Turns:
    """Ranks make their gradients in the order of a list; a turn that does not come in time is passed over."""

    def __init__(self, order: tuple[int, ...], patience_s: float) -> None:
        self._left, self._patience_s = list(order), patience_s
        self._changed = threading.Condition()

    def take(self, rank: int) -> None:
        """Wait for this rank's next turn."""
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._left[0] == rank, self._patience_s)
            assert in_time or self._patience_s == PASSES_S, f"rank {rank} has waited for {self._left[0]} in vain"

    def leave(self, rank: int) -> None:
        """Its gradient is made."""
        with self._changed:
            self._left.remove(rank)
            self._changed.notify_all()


class Layers(torch.nn.Module):
    """The gradient of every layer is what it is told plus a whole number that depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ParameterList([torch.full((size,), float(size)) for size in SIZES])

    def forward(self, order: tuple[int, ...], gradients: list[torch.Tensor]) -> torch.Tensor:
        total = torch.zeros(())
        for number in order:  # backward goes the other way round
            weight = self.layers[number]
            total = total + (weight * (gradients[number] + torch.floor(weight.detach()).remainder(3))).sum()
        return total


def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = Layers()
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)


def gradients_of(step: int, rank: int, exact: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if exact:
        return [torch.randint(-4, 5, (size,), generator=generator).float() for size in SIZES]
    return [torch.randn(size, generator=generator) for size in SIZES]


def measured_by(schedule: str) -> int:
    """Steps after which all ranks take up other buckets together."""
    return Strategy.parse(f"schedule={schedule}").schedule_object().measures


def trained(group: Any, strategy: str, workers: int, drawn: Arrivals, exact: bool = False) -> list[list[torch.Tensor]]:
    """The weights that every rank ends with."""
    patience_s = LIMIT_S if len(drawn.turns) <= STEPS else PASSES_S
    turns = [Turns(order, patience_s) for order in drawn.turns]

    def body(here: Here) -> list[torch.Tensor]:
        now = [0]
        for weight in here.model.parameters():
            weight.register_hook(lambda _: turns[now[0]].take(here.rank))  # type: ignore[no-untyped-call]
            weight.register_post_accumulate_grad_hook(lambda _: turns[now[0]].leave(here.rank))  # type: ignore[no-untyped-call]
        for step in range(len(turns)):
            now[0] = step
            here.optimizer.zero_grad()
            here.model(drawn.orders[step][here.rank], gradients_of(step, here.rank, exact)).backward()
            here.optimizer.step()
        if here.replica is not None:
            here.replica.flush()
        return [weight.detach().clone() for weight in here.model.parameters()]

    found: list[list[torch.Tensor]] = on_group(group, strategy, workers, make, body, weight=1)
    return found


@cache
def alone(workers: int, steps: int) -> list[torch.Tensor]:
    """What one worker makes of all their gradients."""
    model, optimizer = make(0)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(workers):
            (model(tuple(range(len(SIZES))), gradients_of(step, rank, exact=True)) / workers).backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


def equal(found: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    for weights in found:
        assert all(map(torch.equal, weights, wanted))


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", [text for text in SCHEDULES if not text.startswith("delayed")])
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_lossless_schedules_give_one_workers_weights_whoever_is_early(
    group: Any, schedule: str, data: st.DataObject
) -> None:
    steps = STEPS + measured_by(schedule)
    workers = data.draw(st.sampled_from([2, 4]))
    architecture = data.draw(st.sampled_from(architectures(schedule)))
    strategy = f"{architecture} schedule={schedule}"
    drawn = data.draw(arrivals(workers, steps))
    equal(trained(group, strategy, workers, drawn, exact=True), alone(workers, steps))


@pytest.mark.every(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_two_runs_of_one_layout_give_the_same_bits_whoever_is_early(
    group: Any, schedule: str, data: st.DataObject
) -> None:
    """With three workers and gradients whose sums are rounded."""
    architecture = data.draw(st.sampled_from(architectures(schedule)))
    strategy = f"{architecture} schedule={schedule}"
    first, second = (trained(group, strategy, 3, data.draw(arrivals(3, STEPS))) for _ in range(2))
    equal(first, first[0])
    equal(second, first[0])
