"""The page of a predicted workload: every strategy, interval and constant is on it, and nothing from outside."""

from __future__ import annotations

import pytest

from syncline_bench.report.page import prediction_page
from syncline_bench.report.predictions import Predicted, Prediction, Stated


def row(strategy: str, workers: int, iteration_s: float) -> Predicted:
    ends = iteration_s * 0.9, iteration_s * 1.2
    rates = workers / iteration_s, 0.5 / iteration_s, 0.1, iteration_s - 0.4
    stages = 0.0, 0.0, 0.1, 0.2, 0.1, 0.0
    where = strategy, strategy, "<net>", workers, 1, 0, workers
    return Predicted(*where, iteration_s, *ends, *rates, "bandwidth", "more of it", {"bandwidth": 0.1}, *stages)


@pytest.mark.parametrize(("counts", "charts"), [((2, 8), 4), ((8,), 1)])
def test_all_that_was_predicted_is_on_the_page(counts: tuple[int, ...], charts: int) -> None:
    rows = tuple(row(name, count, 0.5 + 0.1 * count) for count in counts for name in ("ring", "tree"))
    constant = Stated("<net>", "between.beta", 1e-9, 5e-10, 2e-9, False, "assumed: <source>")
    made = {"machine": "a machine", "versions": {"numpy": "9.9"}, "commit": "c0ffee", "started": "2026-11-23T10:00"}
    text = prediction_page(
        Prediction(workload="layers", rows=rows, constants=(constant,), warnings=("Nothing was measured.",), **made)
    )  # type: ignore[arg-type]
    assert text.count("<figure>") == charts
    for said in (
        "ring",
        "tree",
        "bandwidth",
        "between.beta",
        "Nothing was measured.",
        "&lt;net&gt;",
        "a machine",
        "numpy 9.9",
        "c0ffee",
    ):
        assert said in text
    assert "<net>" not in text
    assert "://" not in text
