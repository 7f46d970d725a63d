"""The table of algorithms by size: how it follows from times, is looked up, printed and read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.strategy.choice import BEYOND, LARGE_BYTES, MARGIN, MARGIN_LARGE, Choice, choose, time_at

SIZES = (1 << 10, 64 << 10, 1 << 20, 8 << 20)
NAMES = ("direct", "ring", "tree", "recursive_doubling")
row = st.lists(st.floats(1e-6, 10.0), min_size=len(SIZES), max_size=len(SIZES))
times = st.lists(row, min_size=1, max_size=len(NAMES)).map(lambda rows: dict(zip(NAMES, rows, strict=False)))


@given(times)
def test_the_fastest_is_taken_at_every_measured_size(found: dict[str, list[float]]) -> None:
    exact, lenient = choose(SIZES, found, margins=(0.0, 0.0)), choose(SIZES, found)
    for position, nbytes in enumerate(SIZES):
        best = min(column[position] for column in found.values())
        assert found[exact.at(nbytes)][position] <= best * (1 + 1e-9)
        margin = MARGIN_LARGE if nbytes >= LARGE_BYTES else MARGIN
        assert found[lenient.at(nbytes)][position] <= best * (1 + margin) * (1 + 1e-9)


@given(times)
def test_outside_the_measured_sizes_the_nearest_decides_or_above_them_the_first(found: dict[str, list[float]]) -> None:
    choice = choose(SIZES, found)
    assert choice.at(0) == choice.at(1) == choice.at(SIZES[0])
    first, winner = next(iter(found)), choice.at(SIZES[-1])
    clearly = found[first][-1] > found[winner][-1] * BEYOND
    assert choice.at(1 << 40) == (winner if clearly else first)


@given(row)
def test_what_is_first_stays_where_nothing_is_clearly_faster(first: list[float]) -> None:
    other = [seconds / (1 + MARGIN / 2) for seconds in first]
    assert choose(SIZES, {"direct": first, "ring": other}) == Choice(((0, "direct"),))


@given(row, st.integers(0, len(SIZES) - 2), st.floats(0, 1), st.floats(0, 1))
def test_between_two_sizes_time_lies_between_theirs_and_is_monotone(
    seconds: list[float], position: int, first: float, second: float
) -> None:
    low, high = SIZES[position : position + 2]
    places = sorted(low * (high / low) ** part for part in (first, second))
    found = [time_at(SIZES, seconds, nbytes) for nbytes in (low, *places, high)]
    ends = seconds[position : position + 2]
    assert found[0] == pytest.approx(ends[0])
    assert found[-1] == pytest.approx(ends[1])
    ordered = sorted(found, reverse=ends[0] > ends[1])
    assert found == pytest.approx(ordered)


def test_two_lines_that_cross_change_where_they_cross() -> None:
    """Few messages against few bytes: 10 us + 4 ns/B and 100 us + 1 ns/B meet at 30 000 bytes."""
    sizes = tuple(1 << bit for bit in range(8, 24))
    found = {"tree": [10e-6 + 4e-9 * n for n in sizes], "ring": [100e-6 + 1e-9 * n for n in sizes]}
    (_, small), (start, large) = choose(sizes, found, margins=(0.0, 0.0)).table
    assert (small, large) == ("tree", "ring")
    assert start == pytest.approx(30_000, rel=0.15)


tables = st.lists(st.tuples(st.integers(1, 1 << 40), st.sampled_from(NAMES)), unique_by=lambda row: row[0]).map(
    lambda rows: Choice(((0, "tree"), *sorted(rows)))
)


@given(tables)
def test_a_table_survives_json_and_says_what_holds_where(choice: Choice) -> None:
    assert Choice.read(json.loads(json.dumps(choice.table))) == choice
    for (start, name), (end, _) in zip(choice.table, [*choice.table[1:], (1 << 41, "")], strict=True):
        assert choice.at(start) == choice.at(end - 1) == name
        assert name in choice.names


def test_a_table_in_words() -> None:
    assert str(Choice(((0, "ring"),))) == "ring"
    assert (
        str(Choice(((0, "tree"), (65536, "direct"), (1 << 20, "ring")))) == "tree below 64KiB, direct below 1MiB, ring"
    )


@pytest.mark.parametrize(
    "table",
    [None, 3, [], [[1, "ring"]], [[0, "ring"], [0, "tree"]], [[0, 1]], [["0", "ring"]], [[0]], {"0": "ring"}, "ring"],
)
def test_what_is_no_table_is_refused(table: Any) -> None:
    with pytest.raises(UsageError, match="a table of algorithms"):
        Choice.read(table)


@given(times, st.integers(1, 1 << 30), st.integers(0, 1 << 31))
def test_a_table_can_end_in_one_algorithm(found: dict[str, list[float]], until: int, nbytes: int) -> None:
    choice = choose(SIZES, found)
    assert choice.until(until, "direct").at(nbytes) == ("direct" if nbytes >= until else choice.at(nbytes))
