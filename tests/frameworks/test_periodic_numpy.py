"""Models of NumPy under modes whose workers train by themselves: as each mode's formulas have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from syncline.errors import GradientError
from syncline.frameworks.numpy import adapt
from syncline.session.session import Session

OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
STEPS, WORKERS = 6, 3


class Descent:
    def __init__(self, lr: float = 0.05) -> None:
        self.lr = lr

    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:
        state["sum"] = state.get("sum", 0.0) + gradient * gradient
        weights -= self.lr * gradient / np.sqrt(state["sum"] + 1)


def model() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {"first": draw.standard_normal((4, 3)), "bias": draw.standard_normal(3)}


def gradient(step: int, rank: int) -> dict[str, Any]:
    return {name: np.sin(array + step + 10 * rank) for name, array in model().items()}


def train(session: Session) -> Any:
    handed = adapt(session, model(), Descent(), OPTIONS)
    if handed is None:
        return None
    found, optimizer = handed.result
    for step in range(STEPS):
        optimizer.step(gradient(step, session.rank))
    return np.concatenate([array.reshape(-1) for array in found.values()])


Agree = Callable[[Any, Any, dict[str, Any]], Any]


def by_hand(agree: Agree, synchronous: int = 0) -> Any:
    """Weights of all workers, one row each."""
    shapes = {name: array.shape for name, array in model().items()}
    agreed = np.concatenate([array.reshape(-1) for array in model().values()])
    rows, states, optimizer = np.tile(agreed, (WORKERS, 1)), [{} for _ in range(WORKERS)], Descent()  # type: ignore[var-annotated]
    memory: dict[str, Any] = {}
    for step in range(STEPS):
        each = [np.concatenate([gradient(step, rank)[name].reshape(-1) for name in shapes]) for rank in range(WORKERS)]
        if step < synchronous:
            each = [np.mean(each, axis=0)] * WORKERS
        for row, mine, state in zip(rows, each, states, strict=True):
            optimizer.update(row, mine, state)
        if step < synchronous:
            agreed = rows[0].copy()
        elif (step - synchronous) % 2 == 1:
            rows, agreed = agree(rows, agreed, memory)
    return rows


def mean(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:  # noqa: ARG001
    return np.tile(rows.mean(axis=0), (WORKERS, 1)), rows.mean(axis=0)


def elastic(rows: Any, centre: Any, memory: dict[str, Any]) -> Any:  # noqa: ARG001
    return rows - 0.6 / WORKERS * (rows - centre), centre + 0.6 * (rows.mean(axis=0) - centre)


def outer(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:
    pseudo = agreed - rows.mean(axis=0)
    memory["momentum"] = 0.9 * memory.get("momentum", 0.0) + pseudo
    agreed = agreed - 0.7 * (pseudo + 0.9 * memory["momentum"])
    return np.tile(agreed, (WORKERS, 1)), agreed


@pytest.mark.parametrize("strategy", ["ring", "direct schedule=wait_free", "ps(servers=2, update=worker)"])
@pytest.mark.parametrize(
    ("sync", "agree", "synchronous"),
    [
        ("local(steps=2)", mean, 0),
        ("post_local(after=2, steps=2)", mean, 2),
        ("easgd(steps=2, beta=0.6)", elastic, 0),
        ("diloco(steps=2)", outer, 0),
    ],
)
def test_workers_meet_as_the_formulas_have_it(
    group: Any, strategy: str, sync: str, agree: Agree, synchronous: int
) -> None:
    found = group(f"{strategy} sync={sync}", WORKERS, train)[:WORKERS]
    for mine, wanted in zip(found, by_hand(agree, synchronous), strict=True):
        assert np.allclose(mine, wanted, rtol=1e-12, atol=0)
    if agree is not elastic:
        assert all(np.array_equal(mine, found[0]) for mine in found)


def neighbours(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:  # noqa: ARG001
    """Of three workers all are."""
    return np.tile(rows.mean(axis=0), (WORKERS, 1)), agreed


def exponential(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:
    turn = memory["turn"] = memory.get("turn", -1) + 1
    return (rows + np.roll(rows, 1 << turn % 2, axis=0)) / 2, agreed


@pytest.mark.parametrize("schedule", ["fixed", "wait_free"])
@pytest.mark.parametrize(("graph", "mix"), [("ring", neighbours), ("exponential", exponential)])
def test_workers_average_with_some_others(group: Any, schedule: str, graph: str, mix: Agree) -> None:
    found = group(f"ring schedule={schedule} sync=gossip(graph={graph}, steps=2)", WORKERS, train)
    for mine, wanted in zip(found, by_hand(mix), strict=True):
        assert np.allclose(mine, wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("sync", "centre"),
    [("local(steps=4)", False), ("diloco(steps=4)", False), ("gossip(steps=4)", False), ("easgd(steps=2)", True)],
)
def test_all_end_with_the_mean_or_the_centre(group: Any, sync: str, centre: bool) -> None:
    def body(session: Session) -> Any:
        handed = adapt(session, model(), Descent(), OPTIONS)
        assert handed is not None
        found, optimizer = handed.result
        for step in range(STEPS):
            optimizer.step(gradient(step, session.rank))
        before = {name: array.copy() for name, array in found.items()}
        for bring_together in session.consolidates.values():
            bring_together()
        return before, found

    results = group(f"ring sync={sync}", WORKERS, body)
    for before, after in results:
        for name, array in after.items():
            assert np.array_equal(array, results[0][1][name])
            mean = np.mean([other[name] for other, _ in results], axis=0)
            assert np.allclose(array, mean, rtol=1e-12, atol=0) != centre
            assert not np.array_equal(array, before[name])


@pytest.mark.parametrize("codec", ["int8", "topk(ratio=0.3)"])
def test_a_codec_leaves_them_equal(group: Any, codec: str) -> None:
    found = group(f"ring sync=post_local(after=2, steps=2) codec={codec}", WORKERS, train)
    assert all(np.array_equal(mine, found[0]) for mine in found)


def test_other_weights_on_a_rank_are_refused_where_all_are_to_agree(group: Any) -> None:
    """Silently, what theirs differ by would be added to weights that it does not belong to."""

    def body(session: Session) -> None:
        handed = adapt(session, model(), Descent(), OPTIONS)
        assert handed is not None
        found, optimizer = handed.result
        found["bias"] += session.rank
        for step in range(2):
            optimizer.step(gradient(step, session.rank))

    with pytest.raises(GradientError, match="different weights"):
        group("ring sync=local(steps=2)", WORKERS, body)
