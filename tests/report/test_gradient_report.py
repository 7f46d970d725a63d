"""The result file, tables and page of ``syncline bench gradients``."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from syncline.errors import DataError
from syncline_bench.report.bench import BARE, CONTIGUOUS, GradientResult, GradientRow, gradients, render_gradients
from syncline_bench.report.page import gradient_page

ERROR = "rank 1 was killed by SIGKILL <b>during</b> copied:cat"


def measured(form: str, passes: int, ranks: int = 2, **changes: object) -> GradientRow:
    added_s = 0.005 * passes
    row = GradientRow(
        "synthetic:alexnet", form, ranks, 16, 60_965_224, 243_860_896, passes, repetitions=15,
        median_s=0.05 + added_s, p99_s=0.1, added_s=added_s, share=added_s / (0.05 + added_s),
        limit_s=0.004 * passes, of_limit=0.8 if passes else None, sent_bytes=243e6, correct=True,
    )  # fmt: skip
    return replace(row, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result() -> GradientResult:
    forms = ((BARE, 0), (CONTIGUOUS, 2), ("copied:mul", 4), ("layerwise:all", 0))
    rows = [measured(form, passes, ranks) for ranks in (1, 2) for form, passes in forms]
    rows.append(replace(rows[-1], form="copied:cat", median_s=None, added_s=None, correct=None, error=ERROR))
    return GradientResult("a <processor>", 2, {"torch": "2.13"}, "0" * 40, False, "1", rows=tuple(rows))


def shown(result: GradientResult, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render_gradients(result))
    return out.getvalue()


def test_what_was_written_is_read_back(result: GradientResult) -> None:
    assert GradientResult.from_json(result.to_json()) == result
    newer = result.to_json().replace('"ranks"', '"of_a_later_version": 1,\n"ranks"')
    assert GradientResult.from_json(newer) == result
    for text in ("", "[]", "{}", '{"rows": [{"form": "bare"}]}'):
        with pytest.raises(DataError, match="not a result file"):
            GradientResult.from_json(text)
    assert [len(table.rows) for table in gradients(result)] == [4, 5]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_table_fits_the_terminal_and_keeps_what_a_form_adds(result: GradientResult, width: int) -> None:
    text = shown(result, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    # Twice what the contiguous form adds.
    assert re.search(r"copied:mul .*20\.0 ms .* 2\.0 +yes", text)
    assert re.search(r"bare +50\.0 ms .*yes", text)
    head = next(line for line in text.splitlines() if line.split()[:1] == ["form"])
    assert "p99" in head or width < 100
    assert "share" in head or width < 80
    assert " ".join(ERROR.split()) in " ".join(text.split())
    assert "no rows" in shown(replace(result, rows=()), width)


def figures(result: GradientResult, rows: Sequence[GradientRow], number: int) -> dict[str, str]:
    """A row's cells by the titles of their columns."""
    (table,) = gradients(replace(result, rows=tuple(rows)))
    return {column.title: table.cell(column, table.rows[number]) for column in table.columns}


def test_what_is_no_figure_is_not_shown_as_one(result: GradientResult) -> None:
    rows = list(result.rows[:4])
    rows[2] = replace(rows[2], added_s=-113e-6, share=-0.01, of_limit=None)
    lost = figures(result, rows, 2)
    assert [lost[head] for head in ("added", "share", "x")] == ["noise", "-", "-"]
    assert "within the noise" in " ".join(shown(replace(result, rows=tuple(rows)), 100).split())
    rows[1] = replace(rows[1], added_s=-1e-6, of_limit=None)
    assert figures(result, rows, 3)["x"] == "-"
    for share, said in ((1.02, "no limit"), (0.98, "98 %")):
        rows[2] = replace(rows[2], of_limit=share)
        assert figures(result, rows, 2)["of limit"] == said


def test_the_page_is_self_contained_and_escaped(result: GradientResult) -> None:
    text = gradient_page(result)
    assert text.count("<figure>") == 2
    assert "&lt;b&gt;during&lt;/b&gt;" in text
    assert "<b>during" not in text
    assert "a &lt;processor&gt;" in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    assert "1 of 9 rows could not be measured" in text
    wrong = replace(result, rows=(replace(result.rows[1], correct=False),))
    assert "Results were wrong: contiguous (synthetic:alexnet)" in gradient_page(wrong)


@pytest.mark.every(2)
@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e308, -1.0, 0.0], ids=str)
def test_a_number_that_has_gone_wrong_keeps_nobody_from_reading_it(result: GradientResult, bad: float) -> None:
    numbers = ("median_s", "p99_s", "added_s", "share", "limit_s", "of_limit", "sent_bytes")
    found = replace(result, rows=(replace(result.rows[1], **dict.fromkeys(numbers, bad)), *result.rows[2:]))
    assert gradient_page(found).count("<figure>") == 2
    assert max(map(len, shown(found, 100).splitlines())) <= 100
