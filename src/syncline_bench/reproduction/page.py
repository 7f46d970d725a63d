"""The page: all chapters, and what the model cannot explain.

Owns the order of chapters and the page's words around them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from syncline.errors import UsageError

from ..predict.networks import load_network
from ..report.units import significant
from .blocks import CLOSE, FIT, FOLLOWS, LEFT_OUT, REACHED, UNEXPLAINED, Chapter, Grid, held_of, markdown
from .measured import bcaffe, fair_sharing
from .stages import stages
from .systems import systems
from .taihulight import against_servers, against_the_library, curves
from .tianhe import tianhe

_HEAD = f"""# Published figures, and what the models give

Written by `syncline reproduce --data FOLDER -o docs/reproduction.md`: every figure of ours is computed when the command
runs, from the networks and layers that are named beside it, by the simulator that drives the schedules and state
machines that trainings run. A figure *{FOLLOWS}* where no constant was chosen for it and ours deviates by at most
{100 * CLOSE:.0f} %, or, where the most that was seen is published, where the model gives as much, or up to
{100 * REACHED:.0f} % more. It is *{FIT}* where a constant was chosen to come near it, *{UNEXPLAINED}* where the model
gives something else, and *{LEFT_OUT}* where there is nothing to simulate it with."""

_NETWORKS = ("taihulight", "10gbe", "1gbe", "25gbe", "ib100", "pcie")


def chapters_of(data: Path | None) -> list[Chapter]:
    """All of them; raises UsageError for a folder that does not exist."""
    if data is not None and not data.is_dir():
        raise UsageError(f"there is no folder {data}: give the one that holds the published tables, or leave it out")
    makers: tuple[Callable[[], Chapter], ...] = (
        against_the_library,
        against_servers,
        curves,
        tianhe,
        stages,
        lambda: bcaffe(data),
        lambda: fair_sharing(data),
        systems,
    )
    return [make() for make in makers]


def page(data: Path | None) -> str:
    """The page as Markdown; ``data`` is the folder of the published tables."""
    chapters = chapters_of(data)
    every = [*chapters, _limits(chapters), _constants()]
    return f"{_HEAD}\n\n{_counts(chapters)}\n\n{markdown(every)}\n"


def _counts(chapters: Sequence[Chapter]) -> str:
    found = Counter(held.verdict for held in held_of(chapters))
    counts = ", ".join(f"{verdict} {found[verdict]}" for verdict in (FOLLOWS, FIT, UNEXPLAINED, LEFT_OUT))
    return f"Verdicts on {found.total()} figures: {counts}."


def _limits(chapters: Sequence[Chapter]) -> Chapter:
    points = [f"* {chapter.title}: {limit}" for chapter in chapters for limit in chapter.limits]
    return Chapter("What the model cannot explain", ("\n".join(points),))


def _constants() -> Chapter:
    rows = []
    for name in _NETWORKS:
        for key, constant in load_network(name).constants.items():
            known = "measured" if constant.measured else "assumed"
            rows.append((f"`{name}`", key, f"{significant(1e9 * constant.value, 5)}", known, constant.source))
    head = ("network", "constant", "ns, or ns per byte", "it is", "where it comes from")
    return Chapter("Constants of the networks", (Grid(head, tuple(rows)),))
