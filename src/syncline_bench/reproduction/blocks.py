"""The parts of the page: chapters of paragraphs, tables, and figures that are compared with published ones.

Owns the verdict on a figure and the Markdown of all parts. Contains no figure itself. A verdict is always computed from
the numbers, so no author can merely claim a reproduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..report.units import MISSING, significant

Verdict = Literal["follows from the model", "a fit", "not explained", "not simulated"]

FOLLOWS: Verdict = "follows from the model"
FIT: Verdict = "a fit"
UNEXPLAINED: Verdict = "not explained"
LEFT_OUT: Verdict = "not simulated"

CLOSE = 0.15
"""The largest relative deviation of a figure that follows from the model."""

REACHED = 0.5
"""The largest relative excess over a published maximum at which it still follows from the model."""

Format = Callable[[float], str]


def times(value: float) -> str:
    """A ratio, such as 2.30x."""
    return f"{significant(value)}x"


def share(value: float) -> str:
    """A share of one, in percent."""
    return f"{significant(100 * value)} %"


def gain(value: float) -> str:
    """A ratio as its difference from one, in percent with a sign."""
    return f"{100 * (value - 1):+.0f} %"


def deviation_text(value: float) -> str:
    """A relative deviation in percent with a sign."""
    return f"{100 * value:+.1f} %"


@dataclass(frozen=True)
class Compared:
    """A published figure and ours. ``reported`` is a number, or the ends of a range.

    ``fit`` says that a constant was chosen to match it. ``most`` says that both figures are maxima: it follows from the
    model if ours is at least as large, but not much larger.
    """

    what: str
    reported: float | tuple[float, float]
    ours: float
    written: Format = times
    fit: bool = False
    most: bool = False
    remark: str = ""

    @property
    def deviation(self) -> float:
        """The relative deviation of our figure; from the nearer end of a range, and 0 inside the range."""
        low, high = self.reported if isinstance(self.reported, tuple) else (self.reported, self.reported)
        nearest = min(max(self.ours, low), high)
        return self.ours / nearest - 1

    @property
    def verdict(self) -> Verdict:
        """The verdict, from the deviation."""
        if self.fit:
            return FIT
        near = abs(self.deviation) <= CLOSE or (self.most and 0 < self.deviation <= REACHED)
        return FOLLOWS if near else UNEXPLAINED

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its row in the table."""
        ends = self.reported if isinstance(self.reported, tuple) else (self.reported,)
        reported, ours = " to ".join(map(self.written, ends)), self.written(self.ours)
        at_most = "up to " if self.most else ""
        cells = (at_most + reported, at_most + ours, deviation_text(self.deviation), self.verdict, self.remark)
        return (self.what, *cells)


@dataclass(frozen=True)
class Uncompared:
    """A published figure without a figure of ours, and the reason."""

    what: str
    reported: str
    remark: str
    verdict: Verdict = LEFT_OUT

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of its row in the table."""
        return (self.what, self.reported, MISSING, MISSING, self.verdict, self.remark)


Held = Compared | Uncompared

_HEAD = ("figure", "published", "ours", "deviation", "verdict", "method and assumptions")


@dataclass(frozen=True)
class Figures:
    """A table of published figures and ours."""

    held: tuple[Held, ...]


@dataclass(frozen=True)
class Grid:
    """A table of our own figures; the first column names the rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = str | Figures | Grid


@dataclass(frozen=True)
class Chapter:
    """A section of the page. ``limits`` are results that the model cannot explain, for the page's last section."""

    title: str
    blocks: tuple[Block, ...]
    limits: tuple[str, ...] = field(default=())


def markdown(chapters: Sequence[Chapter]) -> str:
    """The Markdown of some chapters."""
    return "\n\n".join(part for chapter in chapters for part in (f"## {chapter.title}", *map(_block, chapter.blocks)))


def held_of(chapters: Sequence[Chapter]) -> list[Held]:
    """All published figures of some chapters."""
    blocks = [block for chapter in chapters for block in chapter.blocks]
    return [held for block in blocks if isinstance(block, Figures) for held in block.held]


def _block(block: Block) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, Figures):
        return _table(_HEAD, [held.cells for held in block.held])
    return _table(block.head, block.rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
