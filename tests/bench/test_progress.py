from __future__ import annotations

import io
import itertools
import re

import pytest
from rich.console import Console

from syncline_bench.progress import Display


def show(console: Console, name: str = "ring [bold]x[/bold]") -> str:
    clock = itertools.count(100.0, 2.0).__next__  # an iteration takes two seconds
    with Display(console, clock) as display:
        display.begin(name, 4, 100)
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
    assert lines[5].endswith("iteration 50/100, loss 0.5000, 1,230 img/s, 1:40 left")
    assert lines[-2].endswith("iteration 100/100, loss 0.5000, 1,230 img/s")
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("name", ["ring [bold]x[/bold]", "ring codec=feedback(topk(ratio=0.01)) transport=tcp " * 2])
def test_on_a_terminal_the_bar_ends_full_whatever_the_width(width: int, name: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False)
    text = show(console, name)
    assert "ring" in text
    assert ("left" in text) == (width >= 30)
    assert all(len(line) <= width for line in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", text).splitlines())
    if width >= 80:
        assert "100/100" in text
