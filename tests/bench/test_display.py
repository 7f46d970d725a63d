"""Progress of benchmarks and of the rows of comparisons: bars on terminals of any width, lines elsewhere."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from rich.console import Console

from syncline_bench.display import Display, RowDisplay


def show(console: Console) -> str:
    with Display(console) as display:
        with display.task("2 ranks [bold]", 10.0) as task:
            for done in range(10):
                task.at(done, "1 KB" if done < 5 else "" if done == 5 else "1 MB")
        display.say("starting [again]")
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_without_a_terminal_every_size_is_a_line() -> None:
    lines = show(Console(file=io.StringIO(), width=80)).splitlines()
    assert lines == ["2 ranks [bold]: 1 KB", "2 ranks [bold]: 1 MB", "starting [again]"]


@pytest.mark.parametrize("width", [30, 60, 100])
def test_on_a_terminal_there_is_a_bar_with_the_time_left(width: int) -> None:
    text = show(Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None, legacy_windows=False))
    assert "2 ranks [bold]" in text
    assert "0:00:00" in text or "00:00" in text


def show_rows(console: Console, name: str = "ring [bold]x[/bold]") -> str:
    clock = itertools.count(100.0, 2.0).__next__  # an iteration takes two seconds
    with RowDisplay(console, clock) as display:
        display.begin(name, 4, 100)
        for iteration in range(1, 101):
            display.advance(iteration, 0.5, 1234.0)
        display.advance(100, None, None)
        display.end("done")
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_without_a_terminal_there_are_a_few_plain_lines() -> None:
    lines = show_rows(Console(file=io.StringIO(), force_terminal=False, width=80)).splitlines()
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
    text = show_rows(console, name)
    assert "ring" in text
    assert ("left" in text) == (width >= 30)
    assert all(len(line) <= width for line in re.sub(r"\x1b\[[^A-Za-z]*[A-Za-z]", "", text).splitlines())
    if width >= 80:
        assert "100/100" in text
