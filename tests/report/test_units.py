from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline_bench.report import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.seconds(1.3), "1.30 s"),
        (units.seconds(0.00412), "4.12 ms"),
        (units.seconds(85e-5), "850 us"),
        (units.seconds(0), "0 s"),
        (units.milliseconds(0.0142), "14.2"),
        (units.size(0), "0 B"),
        (units.size(1023), "1023 B"),
        (units.size(1258291), "1.20 MiB"),
        (units.significant(12345.0), "12,300"),
        (units.percent(0.98056, 2), "98.06 %"),
        (units.number(0.0712), "0.0712"),
    ],
)
def test_numbers_are_written_with_their_unit(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize("write", [units.seconds, units.milliseconds, units.size, units.significant, units.percent])
def test_what_was_not_measured_is_a_dash(write: object) -> None:
    assert write(None) == units.MISSING  # type: ignore[operator]


@given(st.floats(1e-6, 1e9), st.integers(2, 5))
def test_rounding_stays_within_half_of_the_last_digit(value: float, digits: int) -> None:
    shown = float(units.significant(value, digits).replace(",", ""))
    assert abs(shown - value) <= 0.5000001 * 10.0 ** (1 - digits) * value


@given(st.floats(0, 1e15))
def test_sizes_are_never_longer_than_a_column(value: float) -> None:
    assert len(units.size(value)) <= 9
