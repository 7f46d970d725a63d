"""``auto(budget=...)``: how it is written, and beside which words it can stand."""

from __future__ import annotations

import pytest

from syncline.errors import StrategyError, UsageError
from syncline.frameworks._supported import check_schedule
from syncline.nouns import Group
from syncline.strategy.strategy import Strategy, check_asked


@pytest.mark.parametrize("text", ["auto(budget=60s)", "auto(budget=5min) transport=tcp", "auto(budget=250ms)"])
def test_it_is_printed_as_it_is_read(text: str) -> None:
    found = Strategy.parse(text)
    assert Strategy.parse(str(found)) == found
    assert found.budget_s > 0
    assert str(found).startswith("auto(budget=")
    assert str(Strategy.parse("auto(budget=60s)")) == "auto(budget=1min)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("auto(budget=0s)", "more than 0 seconds"),
        ("auto(budgt=60s)", "did you mean 'budget'"),
        ("auto(60s)", "auto\\(budget=60s\\)"),
        ("auto(budget=1s, budget=2s)", "twice"),
        ("auto(budget=soon)", "budget of auto"),
        ("auto(budget=60s) codec=int8", "leave the budget out.*syncline tune"),
        ("auto(budget=60s) codec=auto", "codec=auto"),
        ("auto(budget=60s) sync=local(steps=4)", "sync=local"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(text: str, said: str) -> None:
    with pytest.raises(StrategyError, match=said):
        Strategy.parse(text)


def test_a_schedule_beside_the_budget_is_refused_when_it_is_asked_for_and_printed_when_it_runs() -> None:
    running = Strategy.parse("auto(budget=60s) schedule=priority")
    assert Strategy.parse(str(running)) == running
    with pytest.raises(StrategyError, match="leave one of them out"):
        check_asked(running)
    check_asked(Strategy.parse("auto(budget=60s)"))
    check_asked(Strategy.parse("ring schedule=fixed"))


def test_a_framework_that_replaces_no_layouts_refuses_it() -> None:
    with pytest.raises(UsageError, match=r"leave the budget out.*syncline tune --framework jax"):
        check_schedule(Strategy.parse("auto(budget=60s)").resolve(Group(2)), "JAX")
