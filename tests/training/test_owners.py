"""Owners and workers without a framework: an optimizer in NumPy behind the same interface as any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from syncline.engine.order import When
from syncline.errors import MismatchError, ProtocolError
from syncline.nouns import Bucket, Layer, Slice, Spec
from syncline.serving.records import Elements, Record, State, states_of
from syncline.serving.shard import Groups, Holding
from syncline.session.layout import Layout
from syncline.session.session import Session
from syncline.training.exchange import BucketExchange
from syncline.training.memory import Blocks, Staging
from syncline.training.model import Framework, TrainedModel
from syncline.training.owners import OwnedModel, serve_model

Array = NDArray[Any]

PLACES = ["ps(servers=1)", "ps(servers=2)", "ps(servers=5)", "ps(servers=1, on=workers)", "ps(servers=3, on=workers)"]
SIZES = (7, 12, 1)
"""Of three tensors, of which the first two share a bucket."""
WORKERS = 3


class Momentum:
    """Stochastic gradient descent with momentum, on whatever slices it is given."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings
        self._momentum = [np.zeros_like(held.weights) for held in holdings]

    def squared_norm(self) -> float:
        return float(sum(np.square(held.gradient, dtype=np.float64).sum() for held in self._holdings))

    def apply(self, groups: Groups, scale: float) -> None:
        for held, momentum in zip(self._holdings, self._momentum, strict=True):
            momentum *= 0.5
            momentum += held.gradient * held.gradient.dtype.type(scale)
            held.weights[:] -= momentum.dtype.type(groups[0]["lr"]) * momentum

    def state(self) -> list[State]:
        return [{"momentum": Elements.of(momentum)} for momentum in self._momentum]

    def load(self, states: Sequence[State]) -> None:
        for momentum, state in zip(self._momentum, states, strict=True):
            found = state.get("momentum")
            momentum[:] = found.data.view(momentum.dtype) if isinstance(found, Elements) else 0


def gradient_of(rank: int, step: int, dtype: type = np.float32) -> Array:
    """Whole numbers, whose sums do not depend on their order."""
    return np.random.default_rng([rank, step]).integers(-8, 8, sum(SIZES)).astype(dtype)


@dataclass
class Training:
    """A model of three tensors on one process of a run."""

    session: Session
    dtype: type = np.float32
    learnt: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        session, name = self.session, np.dtype(self.dtype).name
        layers = [Layer(Spec(f"tensor {number}", (size,), name)) for number, size in enumerate(SIZES)]
        parts = [Slice(number, 0, size) for number, size in enumerate(SIZES)]
        self.buckets = [Bucket((parts[0], parts[1]), name), Bucket((parts[2],), name)]
        self.blocks = [Blocks(layers, self.buckets, session.engine.allocate) for _ in range(2)]
        self.gradients, self.weights = (blocks.arrays for blocks in self.blocks)
        for array in self.weights:
            array[:] = 1
        self.layout = Layout(tuple(layers), tuple(self.buckets), (0.0,) * len(self.buckets))

    def start(self, apart: bool = False) -> OwnedModel | None:
        """This process's worker; on a server, None once all is over."""
        session, layout, (gradients, weights) = self.session, self.layout, self.blocks
        if not session.is_worker:
            serve_model(session, layout, gradients, weights, Momentum, self.learnt, apart=apart)
            return None
        exchange = BucketExchange(session, 0, layout, [gradients], Staging(session.engine))
        trained = TrainedModel(session, exchange, len(SIZES), Framework())
        return OwnedModel(exchange, trained, weights, Momentum, self.learnt, apart=apart)

    def compute(self, number: int) -> None:
        """The gradients of a step."""
        mine = gradient_of(self.session.rank, number, self.dtype)
        for bucket, array in enumerate(self.gradients):
            array[:] = mine[: array.size] if bucket == 0 else mine[-array.size :]

    def step(self, worker: OwnedModel, number: int, max_norm: float | None = None) -> None:
        """Push, have applied, pull."""
        session = self.session
        self.compute(number)
        session.engine.wait(*[worker.start(bucket) for bucket in range(len(self.buckets))])
        if max_norm is not None:
            worker.clip(max_norm)
        worker.begin([{"lr": 0.25}])
        worker.owners.told()
        session.engine.wait(*[worker.pull(bucket) for bucket in range(len(self.buckets))])


def alone(steps: Sequence[int], max_norm: float | None = None, dtype: type = np.float32) -> tuple[Array, Array]:
    """Weights and momentum of one process that has all workers' gradients."""
    weights, momentum = np.ones(sum(SIZES), dtype), np.zeros(sum(SIZES), dtype)
    optimizer = Momentum([])
    for number in steps:
        total = np.sum([gradient_of(rank, number, dtype) for rank in range(WORKERS)], axis=0, dtype=dtype)
        optimizer._holdings = [Holding(Slice(0, 0, total.size), weights, total)]
        optimizer._momentum = [momentum]
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (optimizer.squared_norm() ** 0.5 + 1e-6))
        optimizer.apply([{"lr": 0.25}], scale)
    return weights, momentum


def momentum_in(records: Sequence[Record], dtype: type = np.float32) -> Array:
    """Put together, tensor by tensor."""
    states = states_of(records, [Slice(number, 0, size) for number, size in enumerate(SIZES)])
    found = [state["momentum"] for state in states]
    return np.concatenate([value.data.view(dtype) for value in found if isinstance(value, Elements)])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_owners_do_what_one_process_does(group: Any, place: str, max_norm: float | None) -> None:
    """To the bit: the sums are exact. More owners than a bucket has elements own nothing of it."""

    def body(session: Session) -> Any:
        training = Training(session, np.float64)
        worker = training.start()
        if worker is None:
            return None
        for number in range(4):
            training.step(worker, number, max_norm)
        return np.concatenate(training.weights), worker.owners.ask("state")

    weights, momentum = alone(range(4), max_norm, np.float64)
    for found, state in group(place, WORKERS, body)[:WORKERS]:
        if max_norm is None:
            assert (found == weights).all()
            assert (momentum_in(state, np.float64) == momentum).all()
        else:  # the parts of the norm are added owner by owner
            np.testing.assert_allclose(found, weights, rtol=1e-12)
            np.testing.assert_allclose(momentum_in(state, np.float64), momentum, rtol=1e-12)


@pytest.mark.parametrize("place", [*PLACES, "ps(servers=2) codec=topk(ratio=1)"])
@pytest.mark.parametrize("told", [0, 1])
def test_a_bucket_comes_back_while_others_have_not_gone(group: Any, place: str, told: int) -> None:
    """So pulls and pushes use the network in both directions; values are told before the first push or behind it."""

    def body(session: Session) -> Any:
        training = Training(session, np.float32)
        worker = training.start(apart=True)
        if worker is None:
            return None
        for number in range(4):
            training.compute(number)
            for turn, bucket in enumerate([1, 0] if number % 2 else [0, 1]):
                if told == 0 and turn == 0:
                    worker.begin([{"lr": 0.25}])
                worker.start(bucket)
                if told == 1 and turn == 0:
                    worker.begin([{"lr": 0.25}])
                session.engine.wait(worker.pull(bucket, When(priority=bucket)))
        return np.concatenate(training.weights), worker.owners.ask("state")

    weights, momentum = alone(range(4))
    for found, state in group(place, WORKERS, body)[:WORKERS]:
        np.testing.assert_allclose(found, weights, rtol=1e-6)  # a codec tells differences of weights
        np.testing.assert_allclose(momentum_in(state), momentum, rtol=1e-6)


def test_an_optimizer_of_which_nobody_knows_waits_for_all_pushes(group: Any) -> None:
    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        if worker is None:
            return None
        training.compute(0)
        worker.start(0)
        worker.begin([{"lr": 0.25}])
        worker.owners.told()
        first = worker.pull(0)
        session.barrier()
        early = first.done
        worker.start(1)
        session.engine.wait(first, worker.pull(1))
        return early, np.concatenate(training.weights)

    for early, found in group("ps(servers=2)", WORKERS, body)[:WORKERS]:
        assert not early
        assert (found == alone(range(1))[0]).all()


@pytest.mark.parametrize("place", PLACES)
def test_a_codec_carries_gradients_and_updates(group: Any, place: str) -> None:
    """One that drops nothing trains as no codec does, and all workers have the same bits."""

    def body(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        if worker is None:
            return None
        for number in range(4):
            training.step(worker, number)
        return np.concatenate(training.weights)

    first, *others = group(f"{place} codec=topk(ratio=1)", WORKERS, body)[:WORKERS]
    np.testing.assert_allclose(first, alone(range(4))[0], rtol=1e-5)
    assert all((other == first).all() for other in others)


@pytest.mark.parametrize("place", ["ps(servers=2)", "ps(servers=2, on=workers)"])
def test_a_run_goes_on_with_other_owners(group: Any, place: str) -> None:
    """What a run with one owner has learnt, and changed weights, are what two owners go on with."""

    def first(session: Session) -> Any:
        training = Training(session)
        worker = training.start()
        if worker is None:
            return None
        for number in range(2):
            training.step(worker, number)
        return np.concatenate(training.weights), worker.owners.ask("state")

    weights, learnt = group("ps(servers=1)", WORKERS, first)[0]

    def second(session: Session) -> Any:
        training = Training(session, learnt=learnt if session.is_worker else [])
        worker = training.start()
        if worker is None:
            return None
        at = np.cumsum([0, *SIZES])
        records = [
            Record(Slice(number, 0, size), "weights", Elements.of(weights[at[number] : at[number + 1]].copy()))
            for number, size in enumerate(SIZES)
        ]
        worker.change(records, 5)
        for number in range(2, 4):
            training.step(worker, number)
        return np.concatenate(training.weights)

    for found in group(place, WORKERS, second)[:WORKERS]:
        assert (found == alone(range(4))[0]).all()


@pytest.mark.parametrize("place", ["ps(servers=1)", "ps(servers=1, on=workers)"])
def test_workers_that_disagree_are_named(group: Any, place: str) -> None:
    def body(session: Session) -> None:
        training = Training(session)
        worker = training.start()
        if worker is not None:
            worker.scale = 1.0 + session.rank
            training.step(worker, 0)

    with pytest.raises(MismatchError, match=r"rank [012]"):
        group(place, WORKERS, body)


def test_weights_that_no_process_sends_name_the_worker(group: Any) -> None:
    def body(session: Session) -> None:
        worker = Training(session).start()
        if worker is not None:
            worker.change([Record(Slice(0, 0, SIZES[0]), "weights", Elements.of(np.ones(SIZES[0], np.int8)))], 1)

    with pytest.raises(ProtocolError, match=r"a replace from rank 0 .*no elements of type float32") as fault:
        group("ps(servers=1)", WORKERS, body)
    assert fault.value.rank == 0
