"""What the page is made of: sections of paragraphs, tables, and figures that are held against published ones.

Owns how a figure is judged and how all of it is written as Markdown. Knows no figure. What is said of a figure in one
word follows from numbers: nobody can write down that something was reproduced.
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
"""A figure follows from the model where that deviates from it by no more than this."""

REACHED = 0.5
"""So much more than the most that was seen may come out as the most that the model gives."""

Format = Callable[[float], str]


def times(value: float) -> str:
    """A ratio."""
    return f"{significant(value)}x"


def share(value: float) -> str:
    """A share of one, in percent."""
    return f"{significant(100 * value)} %"


def gain(value: float) -> str:
    """A ratio as what it is above or below one, in percent."""
    return f"{100 * (value - 1):+.0f} %"


def deviation_text(value: float) -> str:
    """A relative deviation, with its sign."""
    return f"{100 * value:+.1f} %"


@dataclass(frozen=True)
class Compared:
    """A published figure beside ours; ``reported`` is one number or the ends of a range.

    ``fit``: a constant of ours was chosen to come near it. ``most``: the published figure is what was seen at most, and
    ours is the most that the model gives, so that it follows where ours is not less, nor far more.
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
        """How far ours is from it, relative to it; from the nearer end of a range, and 0 inside."""
        low, high = self.reported if isinstance(self.reported, tuple) else (self.reported, self.reported)
        nearest = min(max(self.ours, low), high)
        return self.ours / nearest - 1

    @property
    def verdict(self) -> Verdict:
        """In words."""
        if self.fit:
            return FIT
        near = abs(self.deviation) <= CLOSE or (self.most and 0 < self.deviation <= REACHED)
        return FOLLOWS if near else UNEXPLAINED

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row."""
        ends = self.reported if isinstance(self.reported, tuple) else (self.reported,)
        reported, ours = " to ".join(map(self.written, ends)), self.written(self.ours)
        at_most = "up to " if self.most else ""
        cells = (at_most + reported, at_most + ours, deviation_text(self.deviation), self.verdict, self.remark)
        return (self.what, *cells)


@dataclass(frozen=True)
class Uncompared:
    """A published figure that nothing here is beside, with the reason."""

    what: str
    reported: str
    remark: str
    verdict: Verdict = LEFT_OUT

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row."""
        return (self.what, self.reported, MISSING, MISSING, self.verdict, self.remark)


Held = Compared | Uncompared

_HEAD = ("what", "held against", "ours", "deviation", "it is", "how, and what was assumed")


@dataclass(frozen=True)
class Figures:
    """Published figures, each beside ours."""

    held: tuple[Held, ...]


@dataclass(frozen=True)
class Grid:
    """A table of its own; the first column names rows."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


Block = str | Figures | Grid


@dataclass(frozen=True)
class Chapter:
    """A part of the page; ``limits`` is what the model cannot explain in it, for the page's last section."""

    title: str
    blocks: tuple[Block, ...]
    limits: tuple[str, ...] = field(default=())


def markdown(chapters: Sequence[Chapter]) -> str:
    """All of it."""
    return "\n\n".join(part for chapter in chapters for part in (f"## {chapter.title}", *map(_block, chapter.blocks)))


def held_of(chapters: Sequence[Chapter]) -> list[Held]:
    """Every published figure of some chapters."""
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
