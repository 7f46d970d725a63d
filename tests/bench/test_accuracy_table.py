"""Tables of ``syncline accuracy``: rows over all that finished, beside dense, that fit and can be read back."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from accuracies import CURVE, result_of, run_of
from rich.console import Console

from syncline.errors import DataError
from syncline_bench import accuracy
from syncline_bench.accuracy import strategy_of
from syncline_bench.report import accuracy as report
from syncline_bench.report.accuracy import AccuracyResult, AccuracyRun


def test_rows_are_medians_over_what_finished_beside_dense() -> None:
    dense = [run_of("none", seed, value, bytes_sent_per_step=1000.0) for seed, value in enumerate((0.9, 0.99, 0.98))]
    found = result_of(
        *dense,
        run_of("int8", 0, 0.97, True, bytes_sent_per_step=240.0),
        run_of("int8", 1, None, True, error="rank 1 died"),
        run_of("int8", 2, 0.99, True, bytes_sent_per_step=260.0),
        run_of("sign", 0, 0.99, bytes_sent_per_step=30.0),
        run_of("onebit", 0, 0.5, error="the replicas differ"),
    )
    none, int8, sign, onebit = found.rows
    assert (none.median_accuracy, none.lowest, none.highest) == (0.98, 0.9, 0.99)
    assert (none.of_dense_bytes, none.points_below_dense, none.error) == (1.0, 0.0, None)
    assert int8.accuracy == (0.97, None, 0.99)
    assert int8.seeds == (0, 1, 2)
    assert int8.median_accuracy == pytest.approx(0.98)
    assert int8.of_dense_bytes == pytest.approx(0.25)
    assert int8.error == "seed 1: rank 1 died"
    assert sign.points_below_dense == pytest.approx(-1.0)
    assert [row.scatter_points for row in (none, int8, sign)] == [pytest.approx(9), pytest.approx(2), None]
    assert [row.within_scatter for row in (none, int8, sign, onebit)] == [None, True, True, None]
    assert onebit.accuracy == (None,)
    assert onebit.median_accuracy is onebit.points_below_dense is onebit.of_dense_bytes is None
    alone = result_of(run_of("int8", 0, 0.9, bytes_sent_per_step=1.0)).rows[0]
    assert alone.points_below_dense is alone.of_dense_bytes is None


def test_the_file_can_be_read_back() -> None:
    found = result_of(run_of("none", 0, 0.9, curve=CURVE), run_of("int8", 0, None, error="no"))
    assert AccuracyResult.from_json(found.to_json()) == found
    for text in ("", "[]", "{}", '{"runs": [{"codec": "int8"}]}'):
        with pytest.raises(DataError, match="not a result file of syncline accuracy"):
            AccuracyResult.from_json(text)


@pytest.mark.parametrize("width", [80, 100])
def test_tables_of_strategies_fit(width: int) -> None:
    names = ["single", *map(strategy_of, accuracy.ways_of(()))]
    runs = [AccuracyRun(None, None, seed, name, 0.98765, 0.1, 1.2e6) for name in names for seed in (0, 1)]
    found = replace(result_of(*runs), epochs=None, reference="single")
    out = io.StringIO()
    Console(file=out, width=width).print(report.render(found))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert sum("98.77 - 98.77" in line and line.rstrip().endswith("1.14 MiB  100 %") for line in lines) == len(names)
    assert "…" not in out.getvalue()
    text = report.markdown(found)
    assert all(f"| `{name}` |" in text for name in names)
    assert "| strategy | accuracy % | lowest to highest | points below single |" in text
    assert "; 276 iterations of 64 images" in text


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_have_every_row_and_fit(width: int) -> None:
    runs = [
        run_of(name, seed, 0.98765, feedback, bytes_sent_per_step=1.2e6)
        for name, feedback in accuracy.ways_of(())
        for seed in (0, 1)
    ]
    failed = run_of("int8(block=64)", 1, None, True, error="rank 1 died\nin a second line")
    found = replace(result_of(*runs, failed), workload="cifar10:/home/somebody/data")
    out = io.StringIO()
    Console(file=out, width=width).print(report.render(found))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert (
        sum("98.77 - 98.77" in line and line.rstrip().endswith("1.14 MiB  100 %") for line in lines) == len(runs) // 2
    )
    assert any("…" in line for line in lines) is False
    assert "int8(block=64) with feedback, seed 1: rank 1 died" in out.getvalue()
    page = report.markdown(found)
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) == len(found.rows)
    assert {line.count("|") for line in page.splitlines() if line.startswith("|")} == {9}
    assert "| `topk(ratio=0.01)` | yes | 98.77 | 98.77 - 98.77 | 0.00 | yes | 1.14 MiB | 100 % |" in rows
    assert "Failed: int8(block=64) with feedback, seed 1: rank 1 died." in page
    assert page.startswith("cifar10, 4 workers, seeds 0, 1; 12 epochs, 276 iterations of 64 images.")
    assert "somebody" not in page
    out = io.StringIO()
    Console(file=out, width=width).print(report.render(result_of()))
    assert "no rows" in out.getvalue()


@pytest.mark.parametrize("width", [60, 40])
def test_a_narrow_terminal_loses_columns_and_never_the_name(width: int) -> None:
    ways = (("none", False), ("int8", True), ("topk(ratio=0.01)", True))
    runs = [run_of(name, seed, 0.98765, fed, bytes_sent_per_step=1.2e6) for name, fed in ways for seed in (0, 1)]
    out = io.StringIO()
    Console(file=out, width=width).print(report.render(result_of(*runs)))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in out.getvalue()
    head = next(line.split() for line in lines if "below" in line)
    assert head == ["codec", "fb", "acc", "%", "below", "bytes", *(["share"] if width == 60 else [])]
    assert any(line.split()[:4] == ["int8", "yes", "98.77", "0.00"] for line in lines)
    assert "No room for range, within" in " ".join(out.getvalue().split())
