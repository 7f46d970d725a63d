"""Any number of buckets, on every transport and architecture: whole sessions, one past every limit that once was.

A parameter server posts the next step's exchanges of all buckets before this step's weights have gone out, and ranks
may complete buckets in different orders: no run may need something that only the end of another one sets free.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from ends import network

from syncline.frameworks.torch import Prepared, prepare
from syncline.kernels.board import SLOTS
from syncline.nouns import Group
from syncline.session.member import Membership, Process
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy

STEPS = 3
STRATEGIES = ["ps(servers=1)", "ps(servers=2, on=workers)", "ps(servers=2, update=worker)", "ring", "direct", "tree"]
CODECS = ["ps(servers=1) codec=topk(ratio=0.5)", "ring codec=int8"]

Check = Callable[..., None]


class Tiny(torch.nn.Module):
    """One parameter of two elements per layer; in which order they are used differs from rank to rank."""

    def __init__(self, layers: int, turn: int = 0) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.full((2,), 1.0 + index / layers) for index in range(layers))
        self.register_buffer("seen", torch.zeros(2))
        self._turn = turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        order = [*self.weights[self._turn :], *self.weights[: self._turn]]
        return sum((x * weight for weight in order), torch.zeros(()))


def train(session: Session, layers: int, models: int = 1, shuffled: bool = False) -> Any:
    """Some steps on as many models, the second of which accumulates two passes; the weights."""
    made: list[Prepared] = []
    for _ in range(models):
        model = Tiny(layers, 7 * session.index if shuffled else 0)
        one = prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.01))
        if one is None:
            return None
        made.append(one)
    for step in range(STEPS):
        if step == 1:
            for one in made:
                with one.replica.no_sync():
                    one.model(torch.ones(2)).sum().backward()
        x = torch.full((2,), float(session.rank + 1))
        sum((one.model(x).sum() for one in made), torch.zeros(())).backward()
        for one in made:
            one.optimizer.step()
            one.optimizer.zero_grad()
    for one in made:
        one.replica.detach()
    return [weight.detach().clone() for one in made for weight in one.model.weights]


def expected(workers: int, layers: int, models: int) -> list[torch.Tensor]:
    """By hand: the gradient of a step is the mean of 1 to N, and one more where two passes were accumulated."""
    change = 0.01 * (STEPS * (workers + 1) / 2 + 1)
    return [torch.full((2,), 1.0 + index / layers - change) for _ in range(models) for index in range(layers)]


@pytest.fixture
def trained(run_on: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """``train`` on every process of a group over a transport; what the workers return."""

    def on_sessions(kind: str, strategy: str, workers: int, *case: Any) -> list[Any]:
        chosen = Strategy.parse(f"{strategy} schedule=wait_free").resolve(Group(workers), inproc=True)
        group = Group(workers, chosen.servers)
        with network(kind, group.processes) as net:
            sessions = [Session(chosen, Membership(Process(group, index, end))) for index, end in enumerate(net.ends)]
            for session in sessions:
                session.process.neighbours = [other.process for other in sessions if other is not session]
            return run_on(sessions, lambda session: train(session, *case))[:workers]

    return on_sessions


@pytest.fixture
def check(trained: Callable[..., list[Any]]) -> Check:
    """Whether the weights are those that were expected."""

    def equal(kind: str, strategy: str, workers: int, layers: int, models: int = 1, shuffled: bool = False) -> None:
        for found in trained(kind, strategy, workers, layers, models, shuffled):
            assert all(map(torch.allclose, found, expected(workers, layers, models)))

    return equal


@pytest.mark.parametrize("strategy", STRATEGIES[::2])
def test_over_shared_memory(check: Check, strategy: str) -> None:
    check("shm", strategy, 2, SLOTS + 1)


@pytest.mark.parametrize("layers", [SLOTS, 200])
def test_as_many_as_there_is_room_for_and_far_more(check: Check, layers: int) -> None:
    check("shm", "ps(servers=1)", 2, layers)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("ps(servers=1)", 1), ("ps(servers=2, on=workers)", 5)],
)
def test_at_other_world_sizes(check: Check, strategy: str, workers: int) -> None:
    """Three workers are below."""
    check("shm", strategy, workers, SLOTS + 1)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        *zip(
            ["inproc", "tcp", "auto-near", "auto-far", "torch"],
            cycle(["ps(servers=1)", "ps(servers=2, on=workers)", "ring"]),
        )
    ],
)
def test_over_every_transport(check: Check, kind: str, strategy: str) -> None:
    check(kind, strategy, 3, SLOTS + 1)


@pytest.mark.parametrize("strategy", STRATEGIES[1::2])
def test_ranks_may_complete_buckets_in_different_orders(check: Check, strategy: str) -> None:
    check("shm", strategy, 3, SLOTS + 1, shuffled=True)


@pytest.mark.parametrize(("kind", "strategy"), [*zip(["shm", "tcp"], cycle(["ps(servers=2, on=workers)", "ring"]))])
def test_two_models_at_once(check: Check, kind: str, strategy: str) -> None:
    check(kind, strategy, 2, SLOTS + 1, models=2)


@pytest.mark.parametrize("strategy", CODECS)
def test_compressed(trained: Callable[..., list[Any]], strategy: str) -> None:
    """What a codec loses is not the point: replicas are equal, and nobody waits for ever."""
    first, *others = trained("shm", strategy, 2, SLOTS + 1)
    assert all(all(map(torch.equal, first, found)) for found in others)
