"""Training with pushes that are updates by themselves: an optimizer that counts, a small model, a whole group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ends import network
from numpy.typing import NDArray

from syncline.engine.driver import LIMIT_S
from syncline.engine.trace import Observer
from syncline.nouns import Bucket, Group, Layer, Slice, Spec
from syncline.serving.records import State
from syncline.serving.shard import Groups, Holding
from syncline.session.layout import Layout
from syncline.session.member import Membership, Process
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy
from syncline.training.exchange import BucketExchange
from syncline.training.memory import Blocks, Staging
from syncline.training.model import Framework, TrainedModel
from syncline.training.owners import OwnedModel, serve_model

Array = NDArray[np.float64]

SIZES = (7, 12, 1)
"""Of three tensors, of which the first two share a bucket."""
LR = 0.75
"""Three workers have shares of it that are exact."""


@dataclass
class Sgd:
    """Gradient descent on whatever slices it is given, which keeps what each update has made of them.

    With momentum where the values say so, as torch.optim.SGD has it.
    """

    holdings: Sequence[Holding]
    history: list[list[Array]] = field(default_factory=list)
    applied: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self._momenta = [np.zeros_like(held.weights) for held in self.holdings]
        self._keep()

    def _keep(self) -> None:
        self.history.append([held.weights.copy() for held in self.holdings])

    def squared_norm(self) -> float:
        return float(sum(np.square(held.gradient).sum() for held in self.holdings))

    def apply(self, groups: Groups, scale: float) -> None:
        momentum = groups[0].get("momentum", 0.0)
        for held, memory in zip(self.holdings, self._momenta, strict=True):
            memory[:] = momentum * memory + scale * held.gradient
            ahead = scale * held.gradient + momentum * memory
            held.weights[:] -= groups[0]["lr"] * (ahead if groups[0].get("nesterov") else memory)
        self._keep()
        self.applied(len(self.history) - 1)

    def state(self) -> list[State]:
        return [{"updates": len(self.history) - 1} for _ in self.holdings]

    def load(self, states: Sequence[State]) -> None:
        """Nothing is learnt."""


def gradient_of(rank: int, step: int) -> Array:
    """Whole numbers, whose sums do not depend on their order."""
    return np.random.default_rng([rank, step]).integers(-8, 8, sum(SIZES)).astype(np.float64)


def expected(steps: Sequence[int]) -> Array:
    """What so many steps of each rank make of the weights, in any order."""
    return 1 - LR / len(steps) * np.sum(
        [gradient_of(rank, step) for rank, count in enumerate(steps) for step in range(count)], 0
    )


class Training:
    """A model of three tensors in two buckets on one process of a run; the first is ``longer`` by so much."""

    def __init__(self, session: Session, longer: int = 0) -> None:
        self.session, sizes = session, (SIZES[0] + longer, *SIZES[1:])
        layers = [Layer(Spec(f"tensor {number}", (size,), "float64")) for number, size in enumerate(sizes)]
        parts = [Slice(number, 0, size) for number, size in enumerate(sizes)]
        buckets = [Bucket((parts[0], parts[1]), "float64"), Bucket((parts[2],), "float64")]
        self.blocks = [Blocks(layers, buckets, session.engine.allocate) for _ in range(2)]
        self.gradients, self.weights = (blocks.arrays for blocks in self.blocks)
        for array in self.weights:
            array[:] = 1
        self.layout = Layout(tuple(layers), tuple(buckets), (0.0,) * len(buckets))
        self.owner: Sgd | None = None
        self.applied: Callable[[int], None] = lambda _: None

    def build(self, holdings: Sequence[Holding]) -> Sgd:
        self.owner = Sgd(holdings, applied=self.applied)
        return self.owner

    def start(self) -> OwnedModel | None:
        """This process's worker; on a server, None once all is over."""
        gradients, weights = self.blocks
        if not self.session.is_worker:
            serve_model(self.session, self.layout, gradients, weights, self.build)
            return None
        exchange = BucketExchange(self.session, 0, self.layout, [gradients], Staging(self.session.engine))
        return OwnedModel(exchange, TrainedModel(self.session, exchange, len(SIZES), Framework()), weights, self.build)

    def push(self, worker: OwnedModel, step: int) -> None:
        mine = gradient_of(self.session.rank, step)
        self.gradients[0][:], self.gradients[1][:] = np.resize(mine[:-1], self.gradients[0].size), mine[-1:]
        self.session.engine.wait(*[worker.start(bucket) for bucket in range(2)])

    def tell(self, worker: OwnedModel, groups: Groups) -> None:
        worker.begin(groups)
        worker.owners.told()

    def pull(self, worker: OwnedModel) -> Array:
        self.session.engine.wait(*[worker.pull(bucket) for bucket in range(2)])
        return np.concatenate(self.weights)

    def step(self, worker: OwnedModel, step: int, rate: float = LR, **values: Any) -> Array:
        """Push, have applied with these values of the optimizer, pull; the weights."""
        self.push(worker, step)
        self.tell(worker, [{"lr": rate, **values}])
        return self.pull(worker)

    def owned(self, version: int = -1) -> Array:
        """All weights, with what this process owned at a version in its place, and NaN elsewhere."""
        at, found = np.cumsum([0, *SIZES]), np.full(sum(SIZES), np.nan)
        if self.owner is not None:
            for held, weights in zip(self.owner.holdings, self.owner.history[version], strict=True):
                found[at[held.slice.tensor] + held.slice.start : at[held.slice.tensor] + held.slice.stop] = weights
        return found


def joined(parts: Sequence[Array]) -> Array:
    """What several owners own, put together."""
    return np.nansum(parts, axis=0)


@contextmanager
def sessions_over(
    kind: str,
    strategy: str,
    workers: int,
    limit_s: float = LIMIT_S,
    observe: Callable[[int], Observer | None] = lambda _: None,
) -> Iterator[list[Session]]:
    """The sessions of a group over a transport, all in this process, each with an observer if there is one for it."""
    chosen = Strategy.parse(strategy).resolve(Group(workers), inproc=True)
    group = Group(workers, chosen.servers)
    with network(kind, group.processes) as net:
        sessions = [
            Session(chosen, Membership(Process(group, index, end, limit_s=limit_s, observer=observe(index))))
            for index, end in enumerate(net.ends)
        ]
        for session in sessions:
            session.process.neighbours = [other.process for other in sessions if other is not session]
        yield sessions


def on_group(
    run_on: Callable[..., list[Any]], kind: str, strategy: str, workers: int, body: Any, **options: Any
) -> list[Any]:
    """Run ``body`` on every process of such a group."""
    with sessions_over(kind, strategy, workers, **options) as sessions:
        found: list[Any] = run_on(sessions, body)
        return found
