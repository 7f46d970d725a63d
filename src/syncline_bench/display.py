"""Progress of long commands: bars with the remaining time on a terminal, plain lines elsewhere.

``Display`` shows the parts of a benchmark. Its bars count expected seconds, so a size of 256 MB weighs more than one of
1 KB. They are drawn at most once a second, because drawing takes time from ranks that use all cores.

``RowDisplay`` shows the rows of a comparison with their loss and rate; the remaining time is the current row's. A
narrow terminal drops the elapsed time first, then the rate, the loss and the bar. Without a terminal, a line appears at
each tenth of a row, which keeps logs short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from .report import units
from .report.files import STANDARD_OUTPUT, ResultFile, replace_text, result_paths

if TYPE_CHECKING:
    from typing_extensions import Self

    from .report.columns import Sheet

Result = TypeVar("Result", bound=ResultFile)


class Task:
    """One part of a bench under way."""

    def __init__(self, bars: Progress | None, task: TaskID | None, console: Console, title: str) -> None:
        self._bars, self._task, self._console, self._title = bars, task, console, title
        self._doing = ""

    def at(self, done: float, doing: str) -> None:
        """``done`` of the task's total is done, and ``doing`` is in progress."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done, doing=doing)
        elif doing and doing != self._doing:
            self._console.print(Text(f"{self._title}: {doing}"), soft_wrap=True)
        self._doing = doing or self._doing


class Display:
    """Shows the parts of a bench one after the other; used as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = self._new_bars() if console.is_terminal else None

    def __enter__(self) -> Self:
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

    def _new_bars(self) -> Progress:
        return Progress(*_columns(self.console.width), console=self.console, refresh_per_second=1)


def _columns(width: int) -> list[ProgressColumn]:
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if width >= 60:
        columns.append(BarColumn(bar_width=max(8, min(30, width - 60))))
    columns.append(TextColumn("{task.fields[doing]}", markup=False))
    if width >= 70:
        columns.append(TimeElapsedColumn())
    columns += [TextColumn("left"), TimeRemainingColumn()] if width >= 50 else [TimeRemainingColumn(compact=True)]
    return columns


_NAME_LEAST = 8


class RowDisplay(Display):
    """Shows one row after the other."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._first: tuple[int, float] | None = None  # the first iteration that was reported, and when
        self._task: TaskID | None = None
        self._strategy = ""
        self._iterations = 1
        self._tenth = 0

    def begin(self, strategy: str, processes: int, iterations: int) -> None:
        """Add a bar for the row that starts, or print a line."""
        self._strategy, self._iterations, self._tenth, self._first = strategy, iterations, 0, None
        text = f"starting {processes} process" + ("es" if processes > 1 else "")
        if self._bars is not None:
            most = max(_NAME_LEAST, self.console.width // 3)
            name = strategy if len(strategy) <= most else f"{strategy[: most - 3]}..."
            self._task = self._bars.add_task(name, total=iterations, loss=text, rate="")
        else:
            self.say(f"{strategy}: {text}")

    def advance(self, iteration: int, loss: float | None, images_per_s: float | None) -> None:
        """Update the row's bar, or print a line at each tenth of its iterations."""
        now = self._clock()
        self._first = self._first or (iteration, now)
        loss_text, rate_text = f"loss {units.number(loss)}", f"{units.significant(images_per_s)} img/s"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=iteration, loss=loss_text, rate=rate_text)
        elif iteration * 10 // self._iterations > self._tenth:
            self._tenth = iteration * 10 // self._iterations
            left = self._left(iteration, now)
            self.say(f"{self._strategy}: iteration {iteration}/{self._iterations}, {loss_text}, {rate_text}{left}")

    def _left(self, iteration: int, now: float) -> str:
        """The remaining time of the row as text, at the pace since its first report; empty if unknown."""
        assert self._first is not None
        done = iteration - self._first[0]
        if done <= 0 or iteration >= self._iterations:
            return ""
        minutes, seconds = divmod(round((now - self._first[1]) / done * (self._iterations - iteration)), 60)
        return f", {minutes}:{seconds:02} left"

    def end(self, outcome: str) -> None:
        """Stop the row's bar and show ``outcome``, a few words on the end."""
        if self._bars is not None and self._task is not None:
            self._bars.stop_task(self._task)
            self._bars.update(self._task, loss=outcome, rate="")
        else:
            self.say(f"{self._strategy}: {outcome}")

    def _new_bars(self) -> Progress:
        return Progress(*_row_columns(self.console.width), console=self.console)


def _row_columns(width: int) -> list[ProgressColumn]:
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if width >= 60:
        columns.append(BarColumn(bar_width=max(8, min(30, width - 82))))
    columns.append(MofNCompleteColumn())
    if width >= 40:
        columns.append(TextColumn("{task.fields[loss]}", markup=False))
    if width >= 80:
        columns.append(TextColumn("{task.fields[rate]}", markup=False))
    if width >= 90:
        columns.append(TimeElapsedColumn())
    if width >= 30:
        columns += [TimeRemainingColumn(compact=True), TextColumn("left")]
    return columns


def console_beside(*paths: Path | None) -> Console:
    """The console for the user: standard output, or standard error if a result is written to standard output."""
    return Console(stderr=STANDARD_OUTPUT in paths)


def shown(
    measure: Callable[[Display], Result],
    render: Callable[[Result], Sheet],
    *,
    json_path: Path | None = None,
    report_path: Path | None = None,
    page: Callable[[Result], str] | None = None,
    console: Console | None = None,
) -> Result:
    """Measure with a display, write the files and print the table. ``page`` makes the report.

    Raises UsageError before anything is measured. An interrupt leaves no files, because medians of an interrupted run
    are not comparable.
    """
    target, report = result_paths({"--json": json_path, "--report": report_path})
    console = console or console_beside(target, report)
    with Display(console) as display:
        result = measure(display)
    if target is not None:
        result.save(target)
    if report is not None and page is not None:
        replace_text(report, page(result))
    console.print(render(result))
    return result
