"""Random numbers by hash: even, different for every seed, and without relation between neighbours."""

from __future__ import annotations

import numpy as np
import pytest
from elementwise import chances
from numpy.typing import NDArray

COUNT = 1 << 19


def drawn(seed: int, first: int, count: int) -> NDArray[np.float32]:
    out = np.empty(count, np.float32)
    chances(seed, first, out)
    return out


SEEDS = [0, 1, 2, 0x80000000, 0xFFFFFFFF, 0x12345678]


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_even(seed: int) -> None:
    """Over 256 equal ranges (chi-squared, 255 degrees of freedom), and in their mean and variance."""
    numbers = drawn(seed, 0, COUNT)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.bincount((numbers * 256).astype(np.int64), minlength=256)
    squared = float(np.sum((counts - COUNT / 256) ** 2) / (COUNT / 256))
    assert abs(squared - 255) < 6 * np.sqrt(2 * 255)
    assert abs(numbers.astype(np.float64).mean() - 0.5) < 6 / np.sqrt(12 * COUNT)


def related(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    return abs(np.corrcoef(one, other)[0, 1]) > 6 / np.sqrt(one.size)


@pytest.mark.every(2)
@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_and_seeds_are_not_related(seed: int) -> None:
    numbers = drawn(seed, 0, COUNT)
    for lag in (1, 2, 4, 256, 1024):
        assert not related(numbers[:-lag], numbers[lag:])
    for bit in range(32):
        assert not related(numbers, drawn(seed ^ (1 << bit), 0, COUNT))


def test_a_number_belongs_to_its_index() -> None:
    np.testing.assert_array_equal(drawn(7, 0, 3000)[1000:], drawn(7, 1000, 2000))
    np.testing.assert_array_equal(drawn(7, 5 + (1 << 32), 9), drawn(7, 5, 9))
