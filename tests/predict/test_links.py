"""Links: pieces by size, flights, and LogGP in the words of ports."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline_bench.predict.links import Link, Piece, loggp, piecewise

NUMBERS = st.floats(0, 1, allow_subnormal=False)


def test_a_message_takes_its_own_piece():
    link = piecewise([(1000, 3.0, 0.5), (0, 1.0, 0.25)])
    assert [link.busy_s(size) for size in (0, 999, 1000)] == [1.0, 1.0 + 999 / 4, 3.0 + 500]
    assert [link.bytes_s(size) for size in (0, 999, 1000)] == [0.0, 999 / 4, 500]


@given(st.lists(st.tuples(st.integers(1, 10**9), NUMBERS, NUMBERS), unique_by=lambda row: row[0]), st.data())
def test_arrays_are_as_numbers_one_by_one(rows, data):
    link = piecewise([(0, 0.5, 0.25), *rows])
    sizes = data.draw(st.lists(st.floats(0, 2e9), min_size=1, max_size=5))
    for call in (link.busy_s, link.bytes_s):
        assert call(np.array(sizes)).tolist() == [call(size) for size in sizes]


@pytest.mark.parametrize("pieces", [(), (Piece(1, 0, 0),), (Piece(0, 0, 0), Piece(9, 0, 0), Piece(9, 1, 1))])
def test_pieces_begin_at_zero_and_ascend(pieces):
    with pytest.raises(UsageError, match="begin at 0"):
        Link(pieces)


@pytest.mark.parametrize("number", [-1e-6, math.inf, math.nan])
@pytest.mark.parametrize("place", range(3))
def test_seconds_are_finite_and_not_negative(number, place):
    numbers = [0.0, 0.0, 0.0]
    numbers[place] = number
    with pytest.raises(UsageError, match="not negative"):
        Link.linear(*numbers)


@given(NUMBERS, NUMBERS, NUMBERS, st.floats(0, 1), st.integers(1, 10**6), st.integers(1, 50))
def test_loggp(latency, overhead, gap, share, nbytes, messages):
    """m messages of k bytes, one behind the other: o + (m-1) (max(o, g) + (k-1) G) + (k-1) G + L + o."""
    begins = max(overhead, gap)
    latency += begins  # the flight is longer than what a port waits
    per_byte = share * begins
    link = loggp(latency, overhead, gap, per_byte)
    text = (nbytes - 1) * per_byte
    expected = overhead + (messages - 1) * (begins + text) + text + latency + overhead
    assert messages * link.busy_s(nbytes) + link.flight_s == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("overhead", "gap", "per_byte"), [(1e-6, 1e-6, 2e-6), (0.0, 9e-6, 1e-9)])
def test_what_is_no_loggp_network_is_refused(overhead, gap, per_byte):
    with pytest.raises(UsageError, match="needs G <= max"):
        loggp(5e-6, overhead, gap, per_byte)
