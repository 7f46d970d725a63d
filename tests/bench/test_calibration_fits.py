"""Constants from pretended measurements whose constants are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from syncline_bench.calibration.fits import Row, Samples, fit
from syncline_bench.calibration.links import SIZES, Timed, cells_of, fit_link, fit_processor

MOST_BYTES = 32 << 20
START_S = 20e-6


def link_s(nbytes: int, lines: Sequence[tuple[int, float, float]]) -> float:
    """Seconds of a message on a port; ``lines`` are (from bytes, seconds, seconds per byte), ascending."""
    _, fixed_s, per_byte_s = next(line for line in reversed(lines) if line[0] <= nbytes)
    return fixed_s + nbytes * per_byte_s


def measured(
    lines: Sequence[tuple[int, float, float]], flight_s: float, noise: float = 0.0, seed: int = 0, count: int = 12
) -> list[Timed]:
    """What a link of these lines would have been measured as."""
    random = np.random.default_rng(seed)
    found = []
    for nbytes in SIZES:
        for cell in cells_of(nbytes, MOST_BYTES):
            exact_s = START_S + cell.flights * flight_s + cell.messages * link_s(nbytes, lines)
            cpu_s = 30e-6 + cell.moved * (10e-6 + nbytes * 1e-10)
            times_s, cpus_s = (
                Samples(tuple(seconds * (1 + noise * random.standard_normal(count)))) for seconds in (exact_s, cpu_s)
            )
            found.append(Timed(cell, times_s, cpus_s))
    return found


seconds = st.floats(1e-6, 1e-3)
per_byte = st.floats(1e-11, 1e-8)


@given(alpha=seconds, beta=per_byte, flight=seconds)
@settings(max_examples=25)
def test_without_noise_the_constants_of_a_link_are_found_exactly(alpha: float, beta: float, flight: float) -> None:
    found = fit_link(measured([(0, alpha, beta)], flight))
    assert found.starts == (0,)
    largest_s = START_S + flight + alpha + SIZES[-1] * beta
    assert found.alpha[0].value == pytest.approx(alpha, rel=1e-3, abs=1e-6 * largest_s)
    assert found.beta[0].value == pytest.approx(beta, rel=1e-3)
    assert found.flight.value == pytest.approx(flight, rel=1e-3, abs=1e-6 * largest_s)
    assert max(map(abs, found.off.values())) < 1e-3


def test_intervals_cover_the_constants_as_often_as_they_say() -> None:
    """Of 40 independent calibrations nearly all intervals of 95 % hold each constant."""
    alpha, beta, flight = 30e-6, 1e-9, 80e-6
    covered = {"alpha": 0, "beta": 0, "flight": 0}
    for seed in range(40):
        found = fit_link(measured([(0, alpha, beta)], flight, noise=0.05, seed=seed))
        for name, value, estimate in (
            ("alpha", alpha, found.alpha[0]),
            ("beta", beta, found.beta[0]),
            ("flight", flight, found.flight),
        ):
            covered[name] += estimate.low <= value <= estimate.high
            assert estimate.low <= estimate.value <= estimate.high
    assert min(covered.values()) >= 34, covered


def test_more_noise_makes_wider_intervals() -> None:
    widths = []
    for noise in (0.01, 0.2):
        found = fit_link(measured([(0, 30e-6, 1e-9)], 80e-6, noise=noise)).beta[0]
        widths.append(found.high - found.low)
    assert widths[0] < widths[1] / 4


def test_what_no_line_explains_makes_intervals_wider_too() -> None:
    smooth = measured([(0, 30e-6, 1e-9)], 80e-6)
    uneven = [
        replace(one, times_s=Samples(tuple(1.04 ** (-1) ** place * value for value in one.times_s.every)))
        for place, one in enumerate(smooth)
    ]
    exact, rough = (fit_link(timed).beta[0] for timed in (smooth, uneven))
    assert rough.high - rough.low > 0.01 * rough.value > exact.high - exact.low


@given(later=st.sampled_from([1 << 16, 1 << 18, 1 << 20]), seed=st.integers(0, 100))
@settings(max_examples=10)
def test_another_protocol_from_a_size_on_is_another_piece(later: int, seed: int) -> None:
    lines = [(0, 30e-6, 4e-9), (later, 300e-6, 1e-9)]
    found = fit_link(measured(lines, 50e-6, noise=0.02, seed=seed))
    assert found.starts == (0, later)
    assert [estimate.value for estimate in found.beta] == pytest.approx([4e-9, 1e-9], rel=0.15)


@given(seed=st.integers(0, 100))
@settings(max_examples=10)
def test_one_line_with_noise_is_one_piece(seed: int) -> None:
    assert fit_link(measured([(0, 30e-6, 1e-9)], 50e-6, noise=0.03, seed=seed)).starts == (0,)


def test_a_single_odd_size_is_no_piece() -> None:
    """A piece has several sizes."""
    timed = [
        replace(one, times_s=Samples(tuple((1 + (one.cell.nbytes == 1024)) * value for value in one.times_s.every)))
        for one in measured([(0, 30e-6, 1e-9)], 50e-6, noise=0.01)
    ]
    starts = fit_link(timed).starts
    assert all(len([size for size in SIZES if low <= size < high]) >= 3 for low, high in pairwise((*starts, 1 << 60)))


@given(
    base=st.floats(1e-6, 1.0),
    far=st.lists(st.floats(3.0, 100.0), min_size=0, max_size=3),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50)
def test_what_lies_far_out_is_set_aside_and_nothing_else(base: float, far: list[float], seed: int) -> None:
    random = np.random.default_rng(seed)
    usual = base * (1 + 0.02 * random.uniform(-1, 1, 20))
    samples = Samples((*usual, *(base * times for times in far)))
    assert sorted(samples.far) == pytest.approx(sorted(base * times for times in far))
    assert samples.median == pytest.approx(base, rel=0.02)
    assert (samples.estimate.samples, samples.estimate.outliers) == (20, len(far))


def test_samples_that_agree_are_all_kept() -> None:
    assert len(Samples((1.0,) * 9 + (1.0 + 1e-9,)).far) == 0


def test_of_very_few_samples_none_is_far_out() -> None:
    assert len(Samples((1.0, 1.0, 9.0)).far) == 0


def test_outliers_do_not_move_the_constants() -> None:
    clean = measured([(0, 30e-6, 1e-9)], 80e-6, noise=0.01)
    disturbed = [Timed(one.cell, Samples((*one.times_s.every, 10 * one.times_s.median)), one.cpu_s) for one in clean]
    before, after = fit_link(clean), fit_link(disturbed)
    assert after.beta[0].value == pytest.approx(before.beta[0].value, rel=1e-6)
    assert after.beta[0].outliers == len([one for one in clean if one.cell.pattern != "lone"])


def test_processor_time_is_split_among_buckets_messages_and_bytes() -> None:
    found = fit_processor(measured([(0, 30e-6, 1e-9)], 80e-6))
    assert found["message"].value == pytest.approx(10e-6, rel=1e-3)
    assert found["byte_cpu"].value == pytest.approx(1e-10, rel=1e-3)
    assert found["bucket"].value == pytest.approx(30e-6, rel=1e-2)


@given(noise=st.lists(st.floats(0.2, 5.0), min_size=6, max_size=6))
@settings(max_examples=20)
def test_no_constant_is_negative(noise: list[float]) -> None:
    rows = [
        Row({"base": 1.0, "slope": float(size)}, Samples((times * (1.0 + 1e-3 * size),)))
        for size, times in zip((1, 10, 100, 1000, 10_000, 100_000), noise, strict=True)
    ]
    found = fit(rows)
    assume(found)
    assert all(0 <= estimate.low <= estimate.value <= estimate.high for estimate in found.values())
