"""The arithmetic of collectives, on arrays of pretended ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from syncline.errors import UsageError
from syncline_bench.collectives.kinds import COLLECTIVES, Collective, collective

Array = NDArray[np.float32]
KINDS = list(COLLECTIVES.values())


def played(kind: Collective, ranks: int, nbytes: int, seed: int) -> list[Array]:
    """What every rank holds after the collective, computed in one place."""
    arrays = [np.full(kind.elements(ranks, nbytes), np.nan, np.float32) for _ in range(ranks)]
    for rank, array in enumerate(arrays):
        kind.fill(array, rank, ranks, seed)
    part = arrays[0].size // ranks
    total = np.sum(arrays, axis=0)
    match kind.name:
        case "allreduce":
            return [total.copy() for _ in arrays]
        case "reduce-scatter":
            return [total[rank * part : (rank + 1) * part] for rank in range(ranks)]
        case "all-gather":
            whole = np.concatenate([array[rank * part : (rank + 1) * part] for rank, array in enumerate(arrays)])
            return [whole.copy() for _ in arrays]
        case _:
            return [arrays[0].copy() for _ in arrays]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@given(ranks=st.integers(2, 9), items=st.integers(1, 3000), seed=st.integers(0, 100), at=st.integers(0, 10**6))
def test_right_results_pass_and_one_wrong_element_does_not(
    kind: Collective, ranks: int, items: int, seed: int, at: int
) -> None:
    results = played(kind, ranks, 4 * items, seed)
    for rank, result in enumerate(results):
        assert kind.is_right(result, rank, ranks, seed)
        result[at % result.size] += 1
        assert not kind.is_right(result, rank, ranks, seed)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_large_arrays_are_checked_to_their_end(kind: Collective) -> None:
    results = played(kind, 2, 10_000_000, 3)
    assert all(kind.is_right(result, rank, 2, 3) for rank, result in enumerate(results))
    results[1][-1] = 0.5
    assert not kind.is_right(results[1], 1, 2, 3)


def test_inputs_differ_in_every_element_and_rank() -> None:
    first, second = np.zeros(5000, np.float32), np.zeros(5000, np.float32)
    COLLECTIVES["allreduce"].fill(first, 0, 2, 1)
    COLLECTIVES["allreduce"].fill(second, 1, 2, 1)
    assert len(np.unique(first)) == first.size
    assert (first != second).all()


@given(ranks=st.integers(2, 64), nbytes=st.integers(1, 10**6).map(lambda items: 4 * items))
def test_an_allreduce_is_its_halves(ranks: int, nbytes: int) -> None:
    whole, scatter, gather, broadcast = KINDS
    assert whole.bus_factor(ranks) == pytest.approx(scatter.bus_factor(ranks) + gather.bus_factor(ranks))
    assert whole.link_bytes(ranks, nbytes) == pytest.approx(2 * (ranks - 1) / ranks * nbytes)
    # One pass saves writing the sums and reading them again.
    assert whole.memory_bytes(ranks, nbytes) < scatter.memory_bytes(ranks, nbytes) + gather.memory_bytes(ranks, nbytes)
    assert broadcast.bus_factor(ranks) == 1
    for kind in KINDS:
        elements = kind.elements(ranks, nbytes)
        assert 0 <= 4 * elements - nbytes < 4 * ranks
        assert not kind.equal_parts or elements % ranks == 0


def test_an_unknown_collective_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'broadcast'"):
        collective("brodcast")
