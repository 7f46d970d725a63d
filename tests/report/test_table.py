from __future__ import annotations

import io

import pytest
from rich.console import Console

from syncline.report import table
from syncline.report.rows import Result


def shown(result: Result, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(table.render(result))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_every_row_and_every_error_is_shown_within_80_columns(mixed: Result) -> None:
    text = shown(mixed)
    assert max(map(len, text.splitlines())) <= 80
    for row in mixed.rows:
        assert row.strategy.split()[0] in text
    assert "PeerLost: rank 3 <b>died</b>" in text
    assert "second line" in text


@pytest.mark.parametrize("width", [40, 60, 200])
def test_other_widths_lose_no_row(mixed: Result, width: int) -> None:
    text = shown(mixed, width)
    assert "failed" in text
    assert max(map(len, text.splitlines())) <= width


def test_strategy_texts_are_not_read_as_markup(mixed: Result) -> None:
    row = mixed.rows[1]
    odd = Result("m", 8, {}, None, "digits", (type(row)("[red]x[/red]", 1, error="[bold]why[/bold]"),))
    assert "[red]x[/red]" in shown(odd, 120)
    assert "[bold]why[/bold]" in shown(odd, 120)


def test_sharing_cores_is_said(mixed: Result) -> None:
    assert any("5 processes shared 2 cores" in line for line in table.remarks(mixed))
    roomy = Result("m", 64, {}, None, "digits", mixed.rows)
    assert not any("cores" in line for line in table.remarks(roomy))


def test_an_empty_result_can_be_shown() -> None:
    assert "strategy" in shown(Result("m", 1, {}, None, "digits"))
