"""The bench's result file, tables and page."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from syncline.errors import DataError
from syncline_bench.report import bench, units
from syncline_bench.report.bench import BenchResult, Measured, Verdict, places
from syncline_bench.report.page import bench_page

ERROR = "rank 1 was killed by SIGKILL <b>during</b> mpi:ring"


def measured(name: str, nbytes: int, ranks: int = 2, **changes: object) -> Measured:
    transport, _, algorithm = name.partition(":")
    median_s = nbytes * (1e-9 if transport == "shm" else 4e-9) + 1e-5
    row = Measured(
        transport, algorithm, ranks, nbytes, repetitions=9, median_s=median_s, p99_s=2 * median_s,
        algbw_bytes_per_s=nbytes / median_s, busbw_bytes_per_s=nbytes / median_s, cpu_s_per_gb=1.5, limit="memory",
        limit_s=median_s / 2, of_limit=0.5, correct=True,
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> BenchResult:
    names = ("shm:auto", "tcp:ring", "gloo:native", "mpi:native", "mpi:ring")
    rows = [measured(name, nbytes) for nbytes in (1000, 60_970_000) for name in names]
    rows.append(measured("shm:auto", 1000, ranks=4, chosen="direct transport=shm", memory_bytes=1 << 20))
    rows.append(Measured("mpi", "ring", 4, 1000, error=ERROR))
    rows.append(measured("tcp:auto", 1000, ranks=4, lab_bit_per_s=1e9, limit="link"))
    return BenchResult("x86_64, a <processor>", 2, {"torch": "2.13"}, "0" * 40, source_sha256="1", rows=tuple(rows))


@pytest.fixture(scope="module")
def plain(result: BenchResult) -> str:
    """Its page without goals."""
    return bench_page(result)


def shown(result: BenchResult, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(bench.render(result))
    return out.getvalue()


def test_what_was_written_is_read_back(result: BenchResult) -> None:
    assert BenchResult.from_json(result.to_json()) == result
    newer = result.to_json().replace('"ranks"', '"of_a_later_version": 1,\n"ranks"')
    assert BenchResult.from_json(newer) == result
    for text in ("", "[]", "{}", '{"rows": [{"transport": "shm"}]}'):
        with pytest.raises(DataError, match="not a result file"):
            BenchResult.from_json(text)


def test_a_row_replaces_the_one_that_measured_the_same(result: BenchResult) -> None:
    mended = measured("mpi:ring", 1000, ranks=4)
    after = result.with_rows((mended,))
    assert len(after.rows) == len(result.rows)
    assert mended in after.rows
    assert all(row.error is None for row in after.rows)


def test_places_are_apart_and_sizes_rise(result: BenchResult) -> None:
    parts = places(tuple(reversed(result.rows)))
    assert sorted(len(rows) for rows in parts) == [1, 2, 10]
    for rows in parts:
        assert [row.bytes for row in rows] == sorted(row.bytes for row in rows)
        assert len({row.place for row in rows}) == 1


@pytest.mark.parametrize("width", [62, 80, 100, 140])
def test_the_table_fits_the_terminal_and_loses_no_ratio(result: BenchResult, width: int) -> None:
    text = shown(result, width)
    assert max(map(len, text.splitlines())) <= width
    assert "shm:auto" in text
    assert "gloo:native" in text
    assert "60.97 MB" in text
    # 60.97 MB: four times faster than every peer.
    assert re.search(r"shm:auto .* 4\.00 +4\.00 +4\.00 +yes", text)
    head = text.partition("1 KB")[0]
    assert width < 140 or "p99" in head
    assert width > 62 or "p99" not in head
    assert " ".join(ERROR.split()) in " ".join(text.split())


def test_the_page_is_self_contained_and_escaped(result: BenchResult, plain: str) -> None:
    text = bench_page(result, [Verdict("shm <fast>", "1 x", "shm:auto", reached=False), Verdict("tcp")])
    assert text.count("<figure>") == 2 * 3
    assert "&lt;b&gt;during&lt;/b&gt;" in text
    assert "<b>during" not in text
    assert "a &lt;processor&gt;" in text
    assert "shm &lt;fast&gt;" in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    for row in result.rows:
        assert units.decimal_size(row.bytes) in text
    assert "<h2>Goals</h2>" not in plain


def test_a_failed_row_of_the_page_says_its_size(result: BenchResult) -> None:
    failed = tuple(replace(Measured("shm", "ring", 2, nbytes), error="boom") for nbytes in (1_000, 64_000))
    text = bench_page(replace(result, rows=failed))
    assert [text.count(f"<small>{size}</small>") for size in ("1 KB", "64 KB")] == [1, 1]


def test_goals_say_yes_no_or_nothing() -> None:
    out = io.StringIO()
    verdicts = [Verdict("a", "1 x", "here", True), Verdict("b", "2 x", "there", False), Verdict("c")]
    Console(file=out, width=60).print(bench.goals(verdicts))
    assert [line.split()[-1] for line in out.getvalue().splitlines()[-4:-1]] == ["yes", "NO", "-"]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(4, "4 B"), (1000, "1 KB"), (60_970_000, "60.97 MB"), (256_000_000, "256 MB"), (10**9, "1 GB")]
)
def test_sizes_of_a_bench_are_decimal(nbytes: int, text: str) -> None:
    assert units.decimal_size(nbytes) == text


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), pytest.param(1e308, marks=pytest.mark.slow)], ids=str)
def test_a_number_that_has_gone_wrong_keeps_nobody_from_reading_the_page(
    result: BenchResult, plain: str, bad: float
) -> None:
    numbers = ("median_s", "p99_s", "algbw_bytes_per_s", "busbw_bytes_per_s", "cpu_s_per_gb", "limit_s", "of_limit")
    rows = (replace(result.rows[0], **dict.fromkeys(numbers, bad)), *result.rows[1:])
    found = replace(result, rows=rows)
    assert bench_page(found).count("<svg") == plain.count("<svg")
    assert max(map(len, shown(found, 100).splitlines())) <= 100
