from __future__ import annotations

import io

import pytest
from rich.console import Console

from syncline.bench.progress import Display


def show(console: Console) -> str:
    with Display(console) as display:
        display.begin("ring [bold]x[/bold]", 4, 100)
        for iteration in range(1, 101):
            display.advance(iteration, 0.5, 1234.0)
        display.advance(100, None, None)
        display.end("done")
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_without_a_terminal_there_are_a_few_plain_lines() -> None:
    lines = show(Console(file=io.StringIO(), force_terminal=False, width=80)).splitlines()
    assert lines[0] == "ring [bold]x[/bold]: starting 4 processes"
    assert lines[-1] == "ring [bold]x[/bold]: done"
    assert len(lines) == 12
    assert "iteration 50/100, loss 0.5000, 1,230 img/s" in lines[5]
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_on_a_terminal_the_bar_ends_full_whatever_the_width(width: int) -> None:
    text = show(Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False))
    assert "ring" in text
    if width >= 80:
        assert "100/100" in text
