"""The whole page of ``syncline reproduce``: all chapters, the unexplained results and the networks' constants.

Owns the order of the chapters and the page's own text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from syncline.errors import UsageError

from ..predict.networks import load_network
from ..report.units import significant
from .blocks import CLOSE, FIT, FOLLOWS, LEFT_OUT, REACHED, UNEXPLAINED, Chapter, Grid, held_of, markdown
from .clusters import against_servers, against_the_library, curves, tianhe
from .measured import bcaffe, fair_sharing
from .systems import stages, systems

_HEAD = f"""# Published figures, and what the models give

`syncline reproduce --data FOLDER -o docs/results/reproduction.md` writes this page. It recomputes all our figures
from the networks and layers named next to them. The simulator runs the schedules and state machines of real trainings.
A figure *{FOLLOWS}* if no constant was chosen for it and ours deviates by at most {100 * CLOSE:.0f} %. A published
maximum also follows if ours is up to {100 * REACHED:.0f} % larger. A figure is *{FIT}* if a constant was chosen to
match it, *{UNEXPLAINED}* if the model gives another value, and *{LEFT_OUT}* if data for a simulation are missing."""

_NETWORKS = ("taihulight", "10gbe_k80", "1gbe", "25gbe", "ib100", "pcie")


def chapters_of(data: Path | None) -> list[Chapter]:
    """All chapters. Raises UsageError if the folder does not exist."""
    if data is not None and not data.is_dir():
        raise UsageError(f"there is no folder {data}: give the folder with the published tables, or leave --data out")
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
    head = ("network", "constant", "ns, or ns per byte", "status", "source")
    return Chapter("Constants of the networks", (Grid(head, tuple(rows)),))
