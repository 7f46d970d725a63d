"""How a comparison shows that it advances: a bar per strategy on a terminal, plain lines elsewhere.

Owns the display only. A narrow terminal loses the rate and the remaining time before the bar; without a terminal a line
appears at every tenth of a row, so that a log stays short.
"""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..report import units


class Display:
    """Shows one row after the other; used as a context manager."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bars = Progress(*_columns(console.width), console=console) if console.is_terminal else None
        self._task: TaskID | None = None
        self._strategy = ""
        self._iterations = 1
        self._tenth = 0

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, strategy: str, processes: int, iterations: int) -> None:
        """A row starts."""
        self._strategy, self._iterations, self._tenth = strategy, iterations, 0
        text = f"starting {processes} process" + ("es" if processes > 1 else "")
        if self._bars is not None:
            self._task = self._bars.add_task(strategy, total=iterations, loss=text, rate="")
        else:
            self.say(f"{strategy}: {text}")

    def advance(self, iteration: int, loss: float | None, images_per_s: float | None) -> None:
        """The row has come that far."""
        loss_text, rate_text = f"loss {units.number(loss)}", f"{units.rate(images_per_s)} img/s"
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=iteration, loss=loss_text, rate=rate_text)
        elif iteration * 10 // self._iterations > self._tenth:
            self._tenth = iteration * 10 // self._iterations
            self.say(f"{self._strategy}: iteration {iteration}/{self._iterations}, {loss_text}, {rate_text}")

    def end(self, outcome: str) -> None:
        """The row has ended; ``outcome`` is a few words on how."""
        if self._bars is not None and self._task is not None:
            self._bars.stop_task(self._task)
            self._bars.update(self._task, loss=outcome, rate="")
        else:
            self.say(f"{self._strategy}: {outcome}")

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self.console.print(Text(line), soft_wrap=True)


def _columns(width: int) -> list[ProgressColumn]:
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if width >= 50:
        columns.append(BarColumn(bar_width=max(8, min(30, width - 72))))
    columns.append(MofNCompleteColumn())
    if width >= 40:
        columns.append(TextColumn("{task.fields[loss]}", markup=False))
    if width >= 72:
        columns.append(TextColumn("{task.fields[rate]}", markup=False))
    if width >= 90:
        columns.append(TimeElapsedColumn())
    return columns
