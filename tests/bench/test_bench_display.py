"""What a bench shows while it runs."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from syncline_bench.display import Display


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
