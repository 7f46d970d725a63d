"""Models of NumPy that go back to a state in the middle of a run: nothing of the steps that are given up stays."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from syncline.errors import UsageError
from syncline.frameworks.numpy import adapt
from syncline.session.session import Session

OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
SYNCS = ["local(steps=3)", "easgd(steps=3)", "diloco(steps=3)", "post_local(after=2, steps=3)"]
KEPT = [f"ring sync={sync}" for sync in SYNCS]
KEPT += ["ring codec=topk(ratio=0.2)", "ring codec=powersgd(rank=1)", "ps(servers=1, on=workers) codec=topk(ratio=0.2)"]
KEPT += [
    "ring sync=diloco(steps=3) codec=feedback(int8)",
    "ring sync=post_local(after=3, steps=2) codec=topk(ratio=0.2)",
]


def sgd(weights: Any, gradient: Any, state: dict[str, Any], *, lr: float = 0.1) -> None:  # noqa: ARG001
    weights -= lr * gradient


def gradient(step: int) -> Any:
    return np.cos(np.arange(12.0) * (step + 1)).reshape(4, 3)


def save(session: Session) -> Any:
    """The state after four steps, as one worker has it."""
    handed = adapt(session, {"a": np.zeros((4, 3))}, sgd, OPTIONS)
    assert handed is not None
    for step in range(4):
        handed.result[1].step({"a": gradient(step)})
    return handed.result[1].state_dict()


def go_on(session: Session, state: Any, given_up: int) -> Any:
    """Steps that go on from a state, after some that are given up."""
    handed = adapt(session, {"a": np.zeros((4, 3))}, sgd, OPTIONS)
    assert handed is not None
    weights, optimizer = handed.result
    for step in range(given_up):
        optimizer.step({"a": 1000 * gradient(step + 7 + session.rank)})
    optimizer.load_state_dict(state)
    for step in range(4, 11):
        optimizer.step({"a": gradient(step)})
    return weights["a"].copy()


@pytest.mark.filterwarnings("ignore:this state lacks the residuals of the codec")
@pytest.mark.parametrize("given_up", [1, 4])
@pytest.mark.parametrize("strategy", KEPT)
def test_one_workers_state_leaves_nothing_of_the_steps_before(group: Any, strategy: str, given_up: int) -> None:
    """It knows nothing of codecs and of what is agreed on: both begin anew, as in a fresh run."""
    (state,) = group(strategy, 1, save)
    fresh = group(strategy, 2, partial(go_on, state=state, given_up=0))
    late = group(strategy, 2, partial(go_on, state=state, given_up=given_up))
    for wanted, found in zip(fresh, late, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (2, 1)])
def test_what_was_left_open_may_be_another_thing_after(group: Any, before: int, after: int) -> None:
    """Neither the transport nor an algorithm that nobody has asked for belongs to what is resumed."""
    state = group("auto", before, save)[0]
    elsewhere = state | {"strategy": state["strategy"].replace("transport=inproc", "") + " transport=tcp"}
    wanted = group("ring", before, partial(go_on, state=group("ring", before, save)[0], given_up=0))
    for one in (state, elsewhere):
        for found in group("auto", after, partial(go_on, state=one, given_up=0)):
            np.testing.assert_allclose(found, wanted[0], rtol=1e-12)


@pytest.mark.parametrize("change", ["sync=local(steps=2)", "codec=int8", "ps(servers=1)"])
def test_what_was_asked_for_has_to_be_the_same(group: Any, change: str) -> None:
    state = group("auto", 2, save)[0]
    with pytest.raises(UsageError, match=r"this state belongs to a run with '.*give syncline.init"):
        group("auto", 2, partial(go_on, state=state | {"strategy": change}, given_up=0))
    with pytest.raises(UsageError, match="this state belongs to a run with 'tree"):
        group("ring", 2, partial(go_on, state=state | {"strategy": "tree"}, given_up=0))


@pytest.mark.parametrize(("strategy", "own"), [("ps(servers=1) sync=asp", True), ("ps(servers=1)", False)])
def test_states_are_the_same_but_for_steps_of_workers_that_go_by_themselves(
    group: Any, strategy: str, own: bool
) -> None:
    def body(session: Session) -> Any:
        handed = adapt(session, {"a": np.zeros((4, 3))}, sgd, OPTIONS)
        if handed is None:
            return None
        for step in range(3 + own * session.rank):
            handed.result[1].step({"a": gradient(step)})
        return handed.result[1].state_dict()

    first, second = group(strategy, 2, body)[:2]
    assert (first["steps"], second["steps"]) == (3, 3 + own)
    np.testing.assert_array_equal(first["weights"]["a"], second["weights"]["a"])
    assert first.keys() == second.keys()
