"""Predicted collectives for the terminal and the file."""

from __future__ import annotations

import pytest
from rich.console import Console

from syncline.errors import DataError
from syncline_bench.report.predictions import CollectivePrediction, CollectiveRow, remarks, render_collectives

CONSTANTS = {
    "between.alpha": {"value": 1e-6, "low": None, "high": None, "measured": True, "source": "a clock"},
    "gamma": {"value": 1e-9, "low": None, "high": None, "measured": False, "source": "assumed"},
}


def result(*rows: CollectiveRow) -> CollectivePrediction:
    return CollectivePrediction(
        network="mine",
        about="two hosts",
        source="a paper",
        date="2020",
        topology="switch",
        ports_per_host=1,
        constants=CONSTANTS,
        assumed=["gamma"],
        notes=["A note."],
        rows=rows,
    )


ROWS = (
    CollectiveRow("ring", 60_970_000, 8, 0.5, 0.4, 0.6),
    CollectiveRow("ps(servers=2)", 60_970_000, 8, 0.75, 0.7, 0.8, model="formula"),
    CollectiveRow("ring", 1000, 1, 0.0, 0.0, 0.0),
)


def shown(width: int) -> str:
    console = Console(width=width)
    with console.capture() as text:
        console.print(render_collectives(result(*ROWS)))
    return text.get()


def test_the_table_has_times_and_intervals():
    text = shown(120)
    for word in ("ring", "ps(servers=2)", "60.97 MB", "500 ms", "400 ms", "600 ms", "formula", "busbw"):
        assert word in text


def test_a_narrow_terminal_loses_the_bandwidth_and_keeps_the_times():
    text = shown(62)
    assert "GB/s" not in text.partition("No room for busbw GB/s")[0]
    assert all(word in text for word in ("500 ms", "400 ms", "600 ms"))


def test_remarks_say_what_is_measured_and_what_assumed():
    assert remarks(result()) == (
        "Network mine: two hosts (a paper, 2020).",
        "Measured: between.alpha.",
        "Assumed, not measured: gamma.",
        "A note.",
    )


def test_the_bus_bandwidth_of_an_allreduce():
    assert ROWS[0].busbw_bytes_per_s == pytest.approx(2 * 7 / 8 * 60_970_000 / 0.5)
    assert ROWS[2].busbw_bytes_per_s is None


def test_the_file_is_read_back():
    assert CollectivePrediction.from_json(result(*ROWS).to_json()) == result(*ROWS)
    with pytest.raises(DataError, match="predict --collective"):
        CollectivePrediction.from_json("{}")
