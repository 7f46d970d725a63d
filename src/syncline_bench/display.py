"""How a bench shows that it advances: a bar with the remaining time on a terminal, plain lines elsewhere.

The bar counts expected seconds, so that a size of 256 MB weighs more than one of 1 KB. It is drawn once a second at
most: on a machine whose cores all belong to the ranks, drawing takes time from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Task:
    """One part of a bench under way."""

    def __init__(self, bars: Progress | None, task: TaskID | None, console: Console, title: str) -> None:
        self._bars, self._task, self._console, self._title = bars, task, console, title
        self._doing = ""

    def at(self, done: float, doing: str) -> None:
        """So much of the task's total is done, and this is what happens now."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done, doing=doing)
        elif doing and doing != self._doing:
            self._console.print(Text(f"{self._title}: {doing}"), soft_wrap=True)
        self._doing = doing or self._doing


class Display:
    """Shows the parts of a bench one after the other; used as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = None
        if console.is_terminal:
            self._bars = Progress(*_columns(console.width), console=console, refresh_per_second=1)

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    @contextmanager
    def task(self, title: str, total: float) -> Iterator[Task]:
        """A part of the bench, worth ``total``; it ends full."""
        task = None if self._bars is None else self._bars.add_task(title, total=total, doing="")
        yield Task(self._bars, task, self.console, title)
        if self._bars is not None and task is not None:
            self._bars.update(task, completed=total, doing="")

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.console.print(Text(line), soft_wrap=True)


def _columns(width: int) -> list[ProgressColumn]:
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if width >= 60:
        columns.append(BarColumn(bar_width=max(8, min(30, width - 60))))
    columns.append(TextColumn("{task.fields[doing]}", markup=False))
    if width >= 70:
        columns.append(TimeElapsedColumn())
    columns += [TextColumn("left"), TimeRemainingColumn()] if width >= 50 else [TimeRemainingColumn(compact=True)]
    return columns
