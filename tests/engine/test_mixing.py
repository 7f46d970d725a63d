"""Mixes on the exchange: each rank gets the sum of its own array and its neighbours', by messages and in memory."""

from __future__ import annotations

import numpy as np
import pytest
from exchanging import Case, chooser, drive
from hypothesis import given, settings
from hypothesis import strategies as st
from mapped import anyone, machine, placed, run_of, turn

from syncline.engine.exchange import Exchange
from syncline.sync.gossip import Gossip


@settings(deadline=None, max_examples=40)
@given(
    st.data(),
    st.sampled_from(["ring", "exponential"]),
    st.integers(1, 7),
    st.integers(0, 4),
    st.sampled_from([0, 1, 5, 100]),
)
def test_neighbours_are_added_by_messages_in_any_order(
    data: st.DataObject, graph: str, workers: int, turn: int, size: int
) -> None:
    plan = Gossip(graph).mix(workers, turn)  # type: ignore[arg-type]
    case = Case(plan, size, "float64", data.draw(st.sampled_from([8, 100, 1 << 20])), 2)
    inputs = case.inputs()
    outputs = [array.copy() for array in inputs]
    drive(case, [[array] for array in outputs], chooser(data))
    for found, of in zip(outputs, plan.sums, strict=True):
        assert np.allclose(found, np.sum([inputs[rank] for rank in of], axis=0))


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_neighbours_are_added_in_shared_memory(graph: str, workers: int, shared: bool) -> None:
    plan = Gossip(graph).mix(workers, 1)  # type: ignore[arg-type]
    inputs = [np.arange(10.0) + 100.0 * rank for rank in range(workers)]
    with machine(workers) as ends:
        exchanges = [Exchange(end, 16) for end in ends]
        arrays = [placed(end, array, shared) for end, array in zip(ends, inputs, strict=True)]
        runs = [run_of(plan, rank, array) for rank, array in enumerate(arrays)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        turn(exchanges, runs, anyone())
        for found, of in zip(arrays, plan.sums, strict=True):
            assert np.array_equal(found, np.sum([inputs[rank] for rank in of], axis=0))
