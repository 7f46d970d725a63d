"""``auto(budget=60s)``: what a strategy has to be for schedules to be tried on the live run, within so many seconds.

On the live run only what leaves the weights equal to the bit is tried: other schedules, and other sizes of buckets and
slices, under architectures that add in one order wherever an element lies (``plans.sums``). So all else of the strategy
has to be such that a schedule changes nothing but time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import StrategyError
from ..nouns import Seconds
from .grammar import Part, nearest, read_value
from .parts import write
from .words import AUTO, NONE, known_sync

if TYPE_CHECKING:
    from .strategy import Strategy

SAME_BITS = "halving_doubling"
"""A ring's bytes, and one order of additions."""


def budget_of(part: Part) -> float:
    """The seconds of ``auto(budget=...)``; raises StrategyError for other arguments and for none at all."""
    for name, value in part.args:
        if name != "budget":
            hint = nearest(name, ["budget"]) if name else ""
            raise StrategyError(f"architecture=auto takes budget, as in auto(budget=60s), not {name or value!r}{hint}")
    if len(part.args) > 1:
        raise StrategyError("auto has an argument that is given twice")
    value = part.args[0][1]
    seconds = float(read_value(value, Seconds, "budget of auto")) if isinstance(value, str) else float(value)
    if not seconds > 0:
        raise StrategyError("budget of auto has to be more than 0 seconds, such as 60s: leave it out to try nothing")
    return seconds


def check_live(strategy: Strategy) -> None:
    """Raise StrategyError, with the remedy, for words beside which a schedule could change more than time."""
    text = f"syncline tune --strategy {str(strategy).partition(')')[2].strip()!r}"
    if strategy.architecture != AUTO:
        return
    for word, plain, why in (
        ("sync", known_sync(strategy), "workers come together in every step"),
        ("codec", strategy.codec == NONE, "gradients travel as they are"),
    ):
        if not plain:
            part = getattr(strategy, word)
            shown = part.name if part == AUTO else write({"sync": "sync", "codec": "codecs"}[word], part)
            raise StrategyError(
                f"auto(budget=) tries on the live run what leaves the weights equal to the bit, for which {why}, and"
                f" {word}={shown} is asked for: leave the budget out, or search beforehand with {text}"
            )


def check_asked(strategy: Strategy) -> None:
    """Raise StrategyError for a budget beside a schedule: a strategy that runs has both, and none may ask for both."""
    if strategy.budget_s and strategy.architecture == AUTO and strategy.schedule != AUTO:
        raise StrategyError(
            f"auto(budget=) tries schedules, and schedule={write('schedules', strategy.schedule)} is asked for: leave"
            " one of them out"
        )
