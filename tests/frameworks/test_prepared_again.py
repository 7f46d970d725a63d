"""Arrays that are prepared again, for another phase of a run: by another rule, in another group, in part."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from syncline.errors import GradientError, MismatchError, UsageError
from syncline.frameworks.numpy import adapt
from syncline.frameworks.torch import adapt as adapt_module
from syncline.session.session import Session

OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}


def sgd(weights: Any, gradient: Any, state: dict[str, Any], *, lr: float = 0.1) -> None:  # noqa: ARG001
    weights -= lr * gradient


def prepare(session: Session, arrays: Any) -> Any:
    handed = adapt(session, arrays, sgd, OPTIONS)
    assert handed is not None
    return handed.result[1]


def consolidate(session: Session) -> None:
    for one in session.family:
        for bring_together in one.consolidates.values():
            bring_together()


@pytest.mark.parametrize("sync", ["easgd(steps=2)", "local(steps=2)", "diloco(steps=2)"])
def test_what_was_prepared_before_leaves_the_arrays_alone(group: Any, sync: str) -> None:
    def body(session: Session) -> None:
        arrays = {"a": np.zeros(3), "b": np.zeros((2, 2))}
        optimizer = prepare(session, arrays)
        for _ in range(5):
            optimizer.step({name: np.full(array.shape, 1.0 + session.rank) for name, array in arrays.items()})
        for array in arrays.values():
            array[...] = 7
        again = prepare(session, {"b": arrays["b"]})
        consolidate(session)
        assert all((array == 7).all() for array in arrays.values())
        again.step({"b": np.ones((2, 2))})
        assert len(session.consolidates) == 1

    group(f"ring sync={sync}", 2, body)


def test_arrays_can_be_prepared_any_number_of_times(group: Any) -> None:
    """They have their keys again, and what was allocated for them before is given back, at once."""

    def body(session: Session) -> Any:
        arrays, before = {"a": np.zeros(3)}, []
        for _ in range(20):
            optimizer = prepare(session, arrays)
            optimizer.step({"a": np.ones(3)})
            before.append(weakref.ref(optimizer._steps))
        assert [made() is None for made in before] == [True] * 19 + [False]
        return arrays["a"]

    gc.disable()
    try:
        results = group("ring", 2, body)
    finally:
        gc.enable()
    for found in results:
        np.testing.assert_allclose(found, -2.0)


def test_the_optimizer_of_before_is_refused(group: Any) -> None:
    def body(session: Session) -> None:
        arrays = {"a": np.zeros(3)}
        before = prepare(session, arrays)
        prepare(session, arrays)
        before.step({"a": np.ones(3)})

    with pytest.raises(GradientError, match=r"'a' has been prepared again: use the result of the last"):
        group("ring", 2, body)


def test_arrays_are_not_prepared_again_in_the_middle_of_a_step(group: Any) -> None:
    def body(session: Session) -> None:
        arrays = {"a": np.zeros(3), "b": np.zeros(2)}
        prepare(session, arrays).produced("b", np.ones(2))
        prepare(session, arrays)

    with pytest.raises(GradientError, match=r"prepare\(\) in the middle of a step"):
        group("ring", 2, body)


def test_owners_have_them_as_they_were_prepared_first(group: Any) -> None:
    def body(session: Session) -> None:
        arrays = {"a": np.zeros(3)}
        optimizer = prepare(session, arrays)
        with pytest.raises(UsageError, match="owners of the weights hold 'a' from the first prepare"):
            prepare(session, arrays)
        optimizer.step({"a": np.ones(3)})

    group("ps(servers=1, on=workers)", 2, body)


def test_arrays_that_are_prepared_again_on_one_rank_only_are_named(group: Any) -> None:
    def body(session: Session) -> None:
        arrays = {"a": np.zeros(3)}
        prepare(session, arrays)
        prepare(session, arrays if session.rank else {"a": np.zeros(3)})

    with pytest.raises(MismatchError, match="rank 1 prepares its model 0, and rank 0 prepares its model 1"):
        group("ring", 2, body)


def test_a_group_takes_them_over(group: Any) -> None:
    def body(session: Session) -> None:
        arrays = {"a": np.zeros(3)}
        first = prepare(session, arrays)
        first.step({"a": np.ones(3)})
        pair = Session.within(session, (0, 1), 1)
        again = prepare(pair, arrays)
        arrays["a"][...] = 5
        assert session.consolidates == {}
        again.step({"a": np.full(3, 1.0 + session.rank)})
        np.testing.assert_allclose(arrays["a"], 4.85)

    group("ring", 2, body)


def test_a_model_of_pytorch_trains_beside(group: Any) -> None:
    """It looks at all models of the run, those that are arrays too."""

    def body(session: Session) -> Any:
        arrays = {"a": np.zeros(3)}
        ours, model = prepare(session, arrays), torch.nn.Linear(2, 1, bias=False)
        theirs = torch.optim.SGD(model.parameters(), lr=0.1)
        adapt_module(session, model, theirs, OPTIONS)
        for _ in range(2):
            theirs.zero_grad()
            (model(torch.ones(1, 2)) * (1 + session.rank)).sum().backward()
            theirs.step()
            ours.step({"a": np.ones(3)})
        return arrays["a"], model.weight.detach().numpy()

    (one, weight), (other, same) = group("ring", 2, body)
    np.testing.assert_allclose(one, -0.2)
    np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(weight, same)
