"""``benchmarks/tuning``: what is near the best is measured again, and searchers get only their runs."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from types import ModuleType

import pytest

from syncline import registry
from syncline.strategy.strategy import Strategy
from syncline_bench.searchers import Space
from syncline_bench.tuner.candidates import Offer, text_of

Program = Callable[[str], ModuleType]
REPEATS = 3


def test_turns_go_on_until_whatever_is_near_the_best_has_all_its_measurements(program: Program) -> None:
    tuning = program("tuning")
    draws = {  # the lucky ones look best until they are measured again
        tuning.DDP: [2.0] * REPEATS,
        tuning.DEFAULT: [1.5] * REPEATS,
        "lucky": [0.5, 1.4, 1.4],
        "near": [1.0, 1.0, 1.0],
        "nearer": [1.0 + tuning.NEAR / 2] * REPEATS,
        "far": [1.1 + tuning.NEAR] * REPEATS,
    }
    times: dict[str, list[float]] = {}
    while wanted := tuning._lacking(list(draws), times, REPEATS):
        for text in wanted:
            times.setdefault(text, []).append(draws[text][len(times.get(text, []))])
    best = min((text for text in times if text != tuning.DDP), key=lambda text: median(times[text]))
    assert best == "near"
    assert {text for text, found in times.items() if len(found) == REPEATS} >= {"near", "nearer", "ddp"}
    assert len(times["far"]) == 1


@pytest.fixture(scope="module")
def space() -> Space:
    return Offer(Strategy.parse("schedule=fixed transport=tcp"), 2, one_host=False).space(lambda _: 1.0)


@pytest.mark.parametrize("name", sorted(registry.names("searchers")))
def test_a_searcher_finds_the_best_when_it_may_run_all_and_the_default_when_it_may_run_one(
    program: Program, space: Space, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = program("tuning")
    default, *others = (text_of(one) for one in space.candidates)
    monkeypatch.setattr(tuning, "DEFAULT", default)
    times = {text: [1.0 + number] for number, text in enumerate((*others, default))}
    assert tuning.found(name, space, times, 1, seed=0) == default
    every = -(-len(times) * 3 // 2) + tuning.FINALISTS  # a third of the runs is for the best in turn
    assert tuning.found(name, space, times, every, seed=0) == others[0]
