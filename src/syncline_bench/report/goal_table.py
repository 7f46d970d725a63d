"""The closing table of a bench: goal, measured, reached. Owns its looks; the goals themselves belong to ``bench``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from .units import MISSING


@dataclass(frozen=True)
class Verdict:
    """A goal and the worst figure found for it; ``measured`` is empty and ``reached`` None when there is none."""

    goal: str
    measured: str = ""
    at: str = ""
    reached: bool | None = None

    @property
    def answer(self) -> str:
        """In one word."""
        return {True: "yes", False: "NO", None: MISSING}[self.reached]


def render(verdicts: Sequence[Verdict]) -> Table:
    """The table; its columns fold on a narrow terminal."""
    table = Table(title="goals, each by the worst of its rows", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("goal", "measured", "at", "reached"):
        table.add_column(name, no_wrap=name in ("measured", "reached"))
    for verdict in verdicts:
        color = {True: "green", False: "red", None: ""}[verdict.reached]
        table.add_row(verdict.goal, verdict.measured or MISSING, verdict.at, Text(verdict.answer, style=color))
    return table
