"""What holds for every searcher, and what some promise beside it."""

from __future__ import annotations

import subprocess
import sys
from statistics import mean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import AXES, FASTEST, NAMES, asked, made, spaces, truth, valid

from syncline.errors import UsageError
from syncline_bench.searchers import Candidate, Space

GUIDED = [name for name in NAMES if name != "random"]
SPACE = Space(AXES, valid, truth)


def first_hit(name: str, space: Space, seed: int = 0, budget: int = 60) -> int:
    """How many measurements until the fastest was asked for; one more than the budget where it was not."""
    found = asked(made(name, space, seed), truth, budget)
    return [*found, space.candidate(FASTEST)].index(space.candidate(FASTEST)) + 1


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(space=spaces(), seed=st.integers(0, 9), failing=st.integers(1, 5))
def test_asks_for_every_valid_candidate_once_and_then_for_none(
    name: str, space: Space, seed: int, failing: int
) -> None:
    searcher = made(name, space, seed)
    found = asked(searcher, lambda candidate: None if space.index(candidate) % failing == 1 else truth_of(candidate))
    assert sorted(map(space.index, found)) == list(range(len(space.candidates)))
    assert searcher.ask() is None


def truth_of(candidate: Candidate) -> float:
    return 0.5 + sum((place + 1) * value for place, value in enumerate(candidate.values()))


@pytest.mark.parametrize("name", NAMES)
def test_asks_the_same_again_after_the_same_answers(name: str) -> None:
    def measure(candidate: Candidate) -> float | None:
        return None if candidate["codec"] == "fp16" else truth(candidate)

    first, again = (asked(made(name, SPACE, seed=3), measure, 30) for _ in range(2))
    assert first == again


def test_asks_the_same_in_another_process_whatever_its_hashes_are() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from spaces import *\n"
        "for name in NAMES: print(*asked(made(name, Space(AXES, valid, truth), 5), truth, 15), sep='; ')"
    )
    folder = __file__.rpartition("/")[0]
    printed = {
        subprocess.run(
            [sys.executable, "-c", program, folder],
            env={"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert printed.pop().count(";") == 14 * len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_leaves_global_random_numbers_alone(name: str) -> None:
    before = np.random.get_state()[1].tolist()
    asked(made(name, SPACE), truth, 5)
    assert np.random.get_state()[1].tolist() == before


def test_bayes_leaves_other_cores_to_the_training_run() -> None:
    """The threads of a BLAS spin for work: they took five times the processor time of the questions."""
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from spaces import *\n"
        "plain = lambda each: truth({name: each[name] for name in each if name in EFFECTS})\n"
        "space = Space([*AXES, Axis('transport', tuple(range(12)))], valid, plain)\n"
        "searcher = made('bayes', space); searcher.tell(searcher.ask(), 1.0)\n"
        "own, all = time.thread_time(), time.process_time()\n"
        "asked(searcher, lambda each: plain(each) * (1 + each['transport'] / 9), 15)\n"
        "own, all = time.thread_time() - own, time.process_time() - all\n"
        "print((all - own) / own)"
    )
    folder = __file__.rpartition("/")[0]
    printed = subprocess.run(
        [sys.executable, "-c", program, folder],
        env={"PYTHONPATH": ":".join(sys.path), "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert float(printed) < 0.2


@pytest.mark.parametrize("name", GUIDED)
def test_begins_with_what_is_predicted_to_be_fastest(name: str) -> None:
    assert made(name, SPACE).ask() == FASTEST


@pytest.mark.parametrize("name", NAMES)
def test_best_is_the_fastest_that_was_told(name: str) -> None:
    searcher = made(name, SPACE)
    assert searcher.best is None
    found = asked(searcher, lambda candidate: None if candidate["codec"] == "int8" else truth(candidate), 12)
    assert searcher.best == min((each for each in found if each["codec"] != "int8"), key=truth)


@pytest.mark.parametrize(("name", "budget"), [("bayes", 25), ("rl", 60), ("descent", 40)])
@pytest.mark.parametrize("seed", range(3))
def test_finds_the_fastest_without_a_prediction(name: str, budget: int, seed: int) -> None:
    """Of 168 candidates."""
    assert first_hit(name, Space(AXES, valid), seed, budget) <= budget


@pytest.mark.parametrize("name", GUIDED)
@pytest.mark.parametrize("factor", [1e-3, 0.5, 2.0, 1e4])
def test_a_prediction_wrong_by_one_factor_is_no_harm(name: str, factor: float) -> None:
    space = Space(AXES, valid, lambda candidate: factor * truth(candidate))
    assert asked(made(name, space), truth, 6) == asked(made(name, SPACE), truth, 6)


def biased(candidate: Candidate) -> float:
    """What is predicted has two codecs and all sizes of buckets the wrong way round."""
    wrong = {"none": 0.8, "fp16": 0.75, "int8": 1.3}.get(candidate["codec"], 1.0)
    return truth(candidate) * wrong * (1.25 if candidate.get("bucket") == 4 else 1.0)


@pytest.mark.slow
def test_bayes_corrects_a_prediction_that_is_biased_on_an_axis() -> None:
    space = Space(AXES, valid, biased)
    needed = {name: mean(first_hit(name, space, seed) for seed in range(4)) for name in NAMES}
    assert needed["bayes"] <= 12
    assert needed["bayes"] < needed["random"] / 3
    assert needed["bayes"] < needed["exhaustive"] / 2


def test_rl_corrects_it_too() -> None:
    space = Space(AXES, valid, biased)
    needed = {name: mean(first_hit(name, space, seed) for seed in range(4)) for name in ("rl", "random", "exhaustive")}
    assert needed["rl"] < needed["random"] / 2
    assert needed["rl"] < needed["exhaustive"]


@pytest.mark.parametrize("name", NAMES)
def test_keeps_away_from_what_is_like_failures(name: str) -> None:
    """A codec that always fails is asked for more rarely than its share, although it is predicted to be the fastest."""
    space = Space(AXES, valid, truth)
    share = mean(each["codec"] == "int8" for each in space.candidates)
    failed = [sum(each["codec"] == "int8" for each in asked(made(name, space, seed), fails, 20)) for seed in range(4)]
    assert mean(failed) < 20 * share


def fails(candidate: Candidate) -> float | None:
    return None if candidate["codec"] == "int8" else truth(candidate)


@pytest.mark.parametrize("name", NAMES)
def test_may_be_asked_for_several_before_it_is_told(name: str) -> None:
    searcher = made(name, SPACE)
    first = [searcher.ask() for _ in range(8)]
    assert len(set(first)) == 8
    for candidate in first:
        assert candidate is not None
        searcher.tell(candidate, truth(candidate))
    assert not set(asked(searcher, truth, 20)) & set(first)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_told_unasked_is_not_asked_for(name: str) -> None:
    searcher = made(name, SPACE)
    searcher.tell({**FASTEST, "slice": 4}, 0.3)
    assert searcher.best == FASTEST
    searcher.tell(FASTEST, 0.5)
    assert SPACE.candidate(FASTEST) not in asked(searcher, truth, 40)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    searcher = made("exhaustive", SPACE)
    with pytest.raises(UsageError, match=r"ring.*positive number"):
        searcher.tell(FASTEST, seconds)
    with pytest.raises(UsageError, match=r"prediction for architecture=ring.*positive"):
        made("exhaustive", Space(AXES, valid, lambda _: seconds)).ask()


def test_a_candidate_of_another_space_is_refused() -> None:
    with pytest.raises(UsageError, match="not a valid candidate"):
        made("random", SPACE).tell({**FASTEST, "architecture": "tree", "codec": "topk", "ratio": 0.1}, 1.0)
