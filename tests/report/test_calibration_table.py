"""The table of a calibration: units, and what a narrow terminal loses."""

from __future__ import annotations

import io

from rich.console import Console

from syncline_bench.report.predictions import ConstantRow, amount, render_constants

ROWS = (
    ConstantRow("between.alpha", 31e-6, 25e-6, 35e-6, 120, 3, True),
    ConstantRow("between.from_131072.beta", 8.45e-9, 8e-9, 9e-9, 60, 0, True),
    ConstantRow("update", 2e-10, 1e-10, 4e-10, 0, 0, False),
)


def shown(width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width).print(render_constants(ROWS, "two hosts", ["Mind this."]))
    return file.getvalue()


def test_messages_are_seconds_and_bytes_nanoseconds() -> None:
    assert amount("between.alpha", 31e-6) == "31.0 us"
    assert amount("between.from_131072.alpha", 2e-3) == "2.00 ms"
    assert amount("bucket", 0.0) == "0 s"
    assert amount("gamma", 9.5e-11) == "0.0950 ns"
    assert amount("codecs.topk(ratio=0.01).encode", 1e-9) == "1.00 ns"


def test_a_row_has_its_interval_and_what_was_assumed_says_so() -> None:
    text = shown(120)
    assert "25.0 us to 35.0 us" in text
    assert "assumed" in text
    assert "Mind this." in text


def test_a_narrow_terminal_keeps_the_intervals() -> None:
    text = shown(64)
    assert "samples " not in text.splitlines()[2]
    assert "25.0 us to 35.0 us" in text
    assert all(len(line) <= 64 for line in text.splitlines())
