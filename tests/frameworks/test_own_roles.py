"""An architecture of another package that declares the roles of a parameter server works like one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from toy import Here, adam, batch, loss_of, making, on_group, same_as_alone, weights
from toy import train as steps

from syncline import registry
from syncline.algorithms import Roles
from syncline.algorithms.ps import ps, push_and_pull
from syncline.algorithms.ring import ring
from syncline.errors import StrategyError, UsageError
from syncline.nouns import Group
from syncline.plans.plan import Plan
from syncline.registry import register
from syncline.strategy.strategy import Strategy
from syncline.testing.schedules import Bound
from syncline.tuning.algorithm_choice import candidates
from syncline_bench.cli import cli

WORKERS = 3


def roles(count: int, beside: bool, apply: str) -> Roles:
    halves = partial(push_and_pull, servers=count, on="ranks" if beside else "workers")
    return Roles(
        count, apart=beside, holds_weights=apply == "owners", halves=halves, beside="watched" if beside else "ring"
    )


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.names("algorithms")  # so that all are loaded
    monkeypatch.setitem(registry._entries, "algorithms", dict(registry._entries["algorithms"]))

    @register("algorithms", "aggregator", goal="allreduce", roles=roles)
    def aggregator(
        group: Group,
        *,
        count: int = 1,
        beside: bool = True,
        apply: Literal["owners", "workers"] = "owners",  # noqa: ARG001 - read by the roles
    ) -> Plan:
        """Other words for the same."""
        return replace(ps(group, servers=count, on="ranks" if beside else "workers"), name="aggregator")


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("ps(servers=1)", "aggregator"),
        ("ps(servers=2, on=workers)", "aggregator(count=2, beside=off)"),
        ("ps(servers=2, update=worker)", "aggregator(count=2, apply=workers)"),
        ("ps(servers=2) codec=int8", "aggregator(count=2) codec=int8"),
        ("ps(servers=2, on=workers) codec=int8", "aggregator(count=2, beside=off) codec=int8"),
        ("ps(servers=1, update=worker) codec=topk(ratio=0.3)", "aggregator(apply=workers) codec=topk(ratio=0.3)"),
    ],
)
def test_it_trains_as_a_parameter_server_does(group: Any, ours: str, theirs: str) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(here.share(batch(step)))).backward()
            here.optimizer.step()
        return weights(here.model)

    wanted, found = (on_group(group, text, WORKERS, adam, body) for text in (ours, theirs))
    for one, other in zip(wanted, found, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("text", ["aggregator(count=2)", "aggregator(count=2, beside=off)"])
def test_its_owners_take_every_workers_push_by_itself(group: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.names("sync")
    monkeypatch.setitem(registry._entries, "sync", dict(registry._entries["sync"]))
    register("sync", "bound")(Bound)

    def body(here: Here) -> dict[str, torch.Tensor]:
        steps(here, range(3))
        return weights(here.model)

    same_as_alone(group, f"{text} sync=bound", WORKERS, making("sgd"), body, weight=1)


def test_what_the_workers_reduce_among_themselves_goes_by_the_algorithm_that_is_named(group: Any) -> None:
    asked: list[Group] = []

    @register("algorithms", "watched", goal="allreduce")
    def watched(its: Group) -> Plan:
        asked.append(its)
        return ring(its)

    def body(session: Any) -> float:
        array = np.ones(5)
        if session.is_worker:
            session.allreduce(array, average=False)
        return float(array[0])

    assert group("aggregator", WORKERS, body)[:WORKERS] == [3.0] * WORKERS
    assert set(asked) == {Group(WORKERS)}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("aggregator(count=0)", "has no server.*the nearest that works is 'aggregator'"),
        ("aggregator codec=powersgd(rank=2)", "which servers do not support"),
        ("aggregator codec=sign(vote=on)", r"works is 'aggregator\(apply=workers\) codec=sign\(vote=on\)'"),
    ],
)
def test_the_same_rules_hold(text: str, says: str) -> None:
    with pytest.raises(StrategyError, match=says):
        Strategy.parse(text)


def test_its_roles_are_the_strategys() -> None:
    strategy = Strategy.parse("aggregator(count=2) codec=int8")
    assert (strategy.servers, strategy.server_holds_weights) == (2, True)
    assert "send the encoded change" in strategy.resolve(Group(WORKERS)).exchange
    assert Strategy.parse("aggregator(beside=off)").servers == 0
    with pytest.raises(UsageError, match="ring has no servers"):
        Strategy.parse("ring").halves(Group(WORKERS))


def test_halves_that_leave_parts_with_others_are_refused() -> None:
    @register("algorithms", "mistaken", goal="allreduce", roles=lambda: replace(roles(1, True, "owners"), apart=False))
    def mistaken(group: Group) -> Plan:
        return ps(group)

    with pytest.raises(UsageError, match="let the algorithm declare the owners of its plans"):
        Strategy.parse("mistaken").halves(Group(WORKERS, 1))


def test_auto_leaves_it_out_and_show_draws_it() -> None:
    strategy = Strategy.parse("auto").resolve(Group(WORKERS))
    assert not {"ps", "aggregator"} & set(candidates(strategy, Group(WORKERS)))
    drawn = CliRunner().invoke(cli, ["show", "aggregator(count=2)", "--ranks", str(WORKERS)])
    assert drawn.exit_code == 0
    assert "aggregator" in drawn.output
