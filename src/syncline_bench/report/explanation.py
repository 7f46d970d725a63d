"""The result of ``syncline explain``: causes, changes and the critical path, their file and their lines.

Owns the words for causes. A word is never renamed, because programs read it. The rules of ``files`` apply.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from . import units
from .columns import Column, Table
from .files import ResultFile

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

CAUSES: Mapping[str, str] = {
    "slow_rank": "one rank computes longer than the others, which wait for it",
    "late_loader": "one rank begins its forward pass later than the others, which wait for it",
    "slow_loading": "all ranks spend time before their forward passes",
    "jitter": "another rank is late in each iteration",
    "slow_link": "one link, or all links of one process, is slower than the others",
    "shared_server": "workers wait for servers that are fewer than the workers",
    "small_buckets": "many small exchanges, whose cost hardly depends on their bytes",
    "no_overlap": "the exchange begins only after the backward pass",
    "codec": "workers wait for encoding and decoding",
    "network": "the exchange takes longer than the computation beside it",
    "fixed_cost": "the time of an exchange hardly depends on its bytes",
    "strategy": "another strategy was measured to be faster on the same work",
    "failure": "the run ended badly: the process that failed first, or that others waited for",
}
"""The words for causes, with their meanings."""


_COMMUNICATION = {"slow_link", "shared_server", "small_buckets", "no_overlap", "codec", "network", "fixed_cost"}
_COMPUTING = {"forward", "backward", "optimizer", "script", "update"}
_MOSTLY, _LITTLE = 0.6, 0.25
"""The share of a critical path from which computation dominates it, and that of communication up to which it does."""


@dataclass(frozen=True)
class Cause:
    """One cause. ``seconds`` is what an iteration could be shorter without it, at most."""

    cause: Annotated[str, "a word of the list below"]
    seconds: Annotated[float, "what an iteration could be shorter without it, at most"]
    rank: Annotated[int | None, "the process at fault; servers are numbered after the workers"] = None
    link: Annotated[tuple[int, int] | None, "sender and receiver"] = None
    said: Annotated[str, "the cause as a sentence"] = ""
    remedy: Annotated[str | None, "what to do"] = None


@dataclass(frozen=True)
class Change:
    """The predicted gain of a change."""

    change: Annotated[str, "the change: words of a strategy, or a repair"]
    iteration_s: Annotated[float, "the iteration after it"]
    low_s: Annotated[float | None, "the low end of its interval; `null` if it has none"] = None
    high_s: Annotated[float | None, "the high end"] = None
    measured: Annotated[bool, "measured in the same file, else predicted"] = False

    @property
    def known(self) -> str:
        """Whether it was measured or predicted, with its interval."""
        if self.low_s is None or self.high_s is None:
            return "measured" if self.measured else "predicted"
        return f"predicted ({units.seconds(self.low_s)} to {units.seconds(self.high_s)})"


@dataclass(frozen=True)
class Leg:
    """A part of the critical path, summed over the iteration."""

    what: Annotated[str, "a stage, `message` or `exchange`"]
    seconds: Annotated[float, "in this iteration"]
    rank: Annotated[int | None, "the process"] = None
    thread: Annotated[str | None, "`training thread`, or `progress` for exchanges"] = None
    link: Annotated[tuple[int, int] | None, "sender and receiver of messages"] = None

    @property
    def text(self) -> str:
        """The text of a leg for the terminal."""
        if self.link is not None:
            return f"messages {self.link[0]} to {self.link[1]}"
        return f"{self.what} on {'' if self.rank is None else f'rank {self.rank}'}"


@dataclass(frozen=True, kw_only=True)
class Explanation(ResultFile):
    """A whole explanation. ``kind`` is ``timeline``, ``flight record``, or the command of the result file.

    ``causes`` has the main cause first and is empty for a ``healthy`` run. ``iteration_s`` is the median iteration,
    ``stages_s`` its stages on the median worker, ``model_s`` the prediction of the run as it is.
    """

    verb: ClassVar = "explain"

    file: str = ""
    kind: str = ""
    name: str = ""
    healthy: bool = False
    iteration_s: float | None = None
    iterations: int = 0
    workers: int = 0
    stages_s: Mapping[str, float] | None = None
    causes: tuple[Cause, ...] = ()
    changes: tuple[Change, ...] = ()
    path: tuple[Leg, ...] = ()
    model_s: float | None = None
    remarks: tuple[str, ...] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Three to ten lines, before they are broken at the terminal's width."""
        from rich.text import Text

        yield from map(Text, self.lines())

    def lines(self) -> list[str]:
        """The lines for a terminal: the cause, its remedy, and what changes would bring."""
        found = [self._first()]
        if not self.causes:
            found.append(self._sound() if self.healthy else "No cause is known.")
        for number, cause in enumerate(self.causes[:3]):
            head = "Cause" if number == 0 else "Also"
            found.append(f"{head}: {cause.cause}{self._share(cause)}: {cause.said}.")
            if number == 0 and cause.remedy:
                found.append(f"Remedy: {cause.remedy}.")
        if self.path and len(found) < 7:
            found.append(f"Critical path: {', '.join(self._legs())}.")
        room = 9 - len(found) - bool(self.remarks)
        for change in self.changes[: max(1, min(3, room))]:
            found.append(self._change(change))
        if self.remarks:
            found.append(" ".join(self.remarks))
        return found

    def _first(self) -> str:
        who = f"{self.name}: " if self.name else ""
        workers = f", {self.workers} workers" if self.workers else ""
        if self.iteration_s is None:
            return f"{who}{self.kind}{workers}."
        over = f", median of {self.iterations}" if self.iterations else ""
        takes = f"{who}an iteration takes {units.seconds(self.iteration_s)}{over}{workers}."
        return f"{takes} {self.computing}" if self.computing else takes

    @property
    def computing(self) -> str:
        """A sentence for a critical path that is mostly the script's computation; else empty."""
        length = sum(leg.seconds for leg in self.path)
        if not length or not self.iteration_s:
            return ""
        own = sum(leg.seconds for leg in self.path if leg.what in _COMPUTING) / length
        exchanged_s = sum(leg.seconds for leg in self.path if leg.what in ("message", "exchange"))
        waited_s = sum(cause.seconds for cause in self.causes if cause.cause in _COMMUNICATION)
        most = max(exchanged_s / length, min(1.0, waited_s / self.iteration_s))
        if own < _MOSTLY or most > _LITTLE:
            return ""
        # Rounded up: "at most" must hold.
        return f"Computation dominates: communication can gain at most {math.ceil(100 * most)} % here."

    def _sound(self) -> str:
        stages = self.stages_s or {}
        parts = [
            f"{name} {units.percent(seconds / self.iteration_s)}"
            for name, seconds in stages.items()
            if self.iteration_s and seconds >= 0.01 * self.iteration_s
        ]
        return "Healthy: nothing keeps the ranks from computing" + (f" ({', '.join(parts)})" if parts else "") + "."

    def causes_table(self) -> Table[Cause]:
        """The causes, the main one first."""
        columns: tuple[Column[Cause], ...] = (
            Column("cause", "cause", kind="name"),
            Column("costs", "seconds", units.seconds, when=lambda one: one.seconds),
            Column(
                "share",
                by=lambda one: units.percent(self._part(one.seconds)),
                when=lambda one: self._part(one.seconds),
                means="the same as a share of an iteration; causes overlap",
            ),
        )
        return Table(columns, self.causes, title="Causes")

    def changes_table(self) -> Table[Change]:
        """The gains of changes, measured or predicted."""

        columns: tuple[Column[Change], ...] = (
            Column("change", "change", kind="name"),
            Column("iteration", "iteration_s", units.seconds),
            Column(
                "less",
                by=lambda one: units.percent(self._gain(one)),
                when=self._gain,
                means="the share of the iteration that it saves",
            ),
        )
        return Table(columns, self.changes, title="Changes")

    def _part(self, seconds: float) -> float | None:
        return seconds / self.iteration_s if self.iteration_s else None

    def _gain(self, change: Change) -> float | None:
        return 1 - change.iteration_s / self.iteration_s if self.iteration_s else None

    def _share(self, cause: Cause) -> str:
        if not self.iteration_s or not cause.seconds:
            return ""
        return f", {units.seconds(cause.seconds)} ({units.percent(cause.seconds / self.iteration_s)} of it)"

    def _legs(self) -> list[str]:
        length = sum(leg.seconds for leg in self.path)
        return [
            f"{leg.text} {units.percent(leg.seconds / length)}" for leg in self.path[:4] if leg.seconds > 0.01 * length
        ]

    def _change(self, change: Change) -> str:
        found = f"{change.change}: {units.seconds(change.iteration_s)} {change.known}"
        if (gain := self._gain(change)) is not None:
            found += f", {units.percent(abs(gain))} {'less' if gain >= 0 else 'more'}"
        return f"{found}."
