"""A tuning: what it may choose from, its course with ranks that only pretend, and the guard."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from syncline.errors import SynclineError, UsageError
from syncline.nouns import Layer, Spec
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO
from syncline_bench.cases import Case
from syncline_bench.predict.networks import load_network
from syncline_bench.report import tuning
from syncline_bench.report.comparison import Point, Row
from syncline_bench.report.tuning import Tuned
from syncline_bench.tuner import search
from syncline_bench.tuner.candidates import Offer, changes_mathematics, text_of
from syncline_bench.tuner.guard import judge
from syncline_bench.warm import Trained, WarmRanks

LAYERS = tuple(Layer(Spec(f"w{number}", (300_000,)), 1e-3, 2e-3) for number in range(6))


def texts_of(asked: str = "", workers: int = 4, **options: Any) -> list[str]:
    space = Offer(Strategy.parse(asked), workers, **{"one_host": True, "layers": LAYERS, **options}).space(
        lambda _: None
    )
    return [text_of(candidate) for candidate in space.candidates]


# What may be chosen.


@pytest.mark.every(2)
@pytest.mark.parametrize("one_host", [True, False])
def test_nothing_that_is_offered_changes_the_mathematics_unless_that_is_allowed(one_host: bool) -> None:
    found = texts_of(USUAL, one_host=one_host)
    assert len(found) > 50
    assert not any(changes_mathematics(Strategy.parse(text)) for text in found)
    lossy = texts_of(USUAL, one_host=one_host, lossy=True)
    assert set(found) <= set(lossy)
    assert any(changes_mathematics(Strategy.parse(text)) for text in lossy)


def test_no_two_candidates_have_the_same_text_and_none_has_servers_of_its_own() -> None:
    found = texts_of(USUAL, lossy=True)
    assert found == [str(Strategy.parse(text)) for text in found]
    assert len(found) == len(set(found))
    assert all(Strategy.parse(text).servers == 0 for text in found)


def test_sizes_that_make_the_same_buckets_are_one_candidate() -> None:
    fixed = [text for text in texts_of("ring transport=shm") if Strategy.parse(text).schedule.name == "fixed"]
    assert len(fixed) == 4  # of 7.2 MB in tensors of 1.2 MB: 1 and 2 MiB, 4 MiB and 8 MiB differ, larger ones do not
    assert "ring transport=shm" not in fixed


def test_words_that_were_said_are_kept() -> None:
    found = texts_of("tree codec=bf16 schedule=fixed(bucket=4MiB)")
    assert found[:2] == [
        "tree codec=bf16 schedule=fixed(bucket=4MiB)",
        "tree codec=bf16 schedule=fixed(bucket=4MiB) transport=tcp",
    ]
    assert {Strategy.parse(text).architecture.name for text in found} == {"tree"}


def test_the_default_is_a_candidate() -> None:
    assert "auto" in texts_of()
    assert "ring" in texts_of("ring")


# The guard.


def row_of(losses: list[float], accuracy: float | None = None, error: str | None = None) -> Row:
    curve = tuple(Point(number, float(number), loss=loss) for number, loss in enumerate(losses, 1))
    return Row("ring", 2, accuracy=accuracy, iterations=len(losses), curve=curve, error=error)


FALLING = [2.0 * 0.9**step for step in range(50)]


def test_what_learns_alike_is_accepted_and_loses_nothing() -> None:
    found = judge(row_of(FALLING, 0.95), row_of(FALLING, 0.95), 0.0)
    assert found.accepted
    assert (found.loss, found.efficiency) == (0.0, 1.0)


def test_what_learns_half_as_fast_counts_twice_its_seconds() -> None:
    half = [2.0 * 0.9 ** (step / 2) for step in range(50)]
    found = judge(row_of(FALLING, 0.95), row_of(half, 0.94), 0.02)
    assert found.accepted
    assert found.efficiency == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize(
    "lossy",
    [
        row_of([2.0] * 50, 0.1),  # learns nothing
        row_of(FALLING, 0.92),  # loses more than it may
        row_of([*FALLING[:20], *[math.nan] * 30], 0.95),
        row_of([], None),
        row_of(FALLING, 0.95, error="rank 1: broke"),
    ],
)
def test_what_loses_is_refused_with_a_reason(lossy: Row) -> None:
    found = judge(row_of(FALLING, 0.95), lossy, 0.02)
    assert not found.accepted
    assert found.why.startswith("refused: ")


def test_without_a_test_set_the_training_loss_counts() -> None:
    assert not judge(row_of(FALLING), row_of([loss * 1.1 for loss in FALLING]), 0.02).accepted
    assert judge(row_of(FALLING), row_of([loss * 1.01 for loss in FALLING]), 0.02).accepted


# The course.


class Pretended:
    """Ranks whose iterations take what ``seconds`` says of a strategy, on a clock that it moves; None fails."""

    def __init__(
        self, seconds: Callable[[str], float | None], losses: Callable[[str], list[float]] | None = None
    ) -> None:
        self.now_s, self.ran = 0.0, list[str]()
        self._seconds, self._losses = seconds, losses

    def clock(self) -> float:
        return self.now_s

    def start(self) -> float:
        self.now_s += 2.0
        return 2.0

    def calibrate(self, *_: Any) -> Any:
        raise SynclineError("there are no links")

    def train(
        self,
        case: Case,
        *_: object,
        warmup: int | None = None,  # noqa: ARG002
        scored: bool = False,
    ) -> Trained:
        self.ran.append(case.strategy)
        each_s = self._seconds(case.strategy)
        self.now_s += 0.1 + case.iterations * (each_s or 0.0)
        if each_s is None:
            return Trained(Row(case.strategy, case.workers, error="rank 1: it broke"))
        curve: tuple[Point, ...] = ()
        if scored and self._losses is not None:
            curve = row_of(self._losses(case.strategy)).curve
        return Trained(Row(case.strategy, case.workers, iteration_s=each_s, replicas_equal=True, curve=curve))


class Told:
    def say(self, line: str) -> None:
        """Nobody reads it."""


USUAL = "transport=tcp"
"""What a run does that says nothing more; one transport, so that there are few candidates."""


def request_of(budget_s: float = 60.0, **options: Any) -> search.Request:
    values: dict[str, Any] = {
        "workload": "digits", "workers": 2, "budget_s": budget_s, "strategy": USUAL, "searcher": "random",
        "framework": "torch", "seed": 3, "lab": None, "batch": None, "network": None, "lossy": False, "loss": 0.02,
        "json_path": None, "resume_path": None,
    }  # fmt: skip
    return search.request_of_tuning(**{**values, **options})


def tuned(request: search.Request, ranks: Pretended) -> Tuned:
    kept: list[Tuned] = []
    search.Course(request, kept.append, ranks.clock).search(cast(WarmRanks, ranks), cast(Any, Told()))
    return kept[-1]


def by_schedule(text: str) -> float:
    return 0.05 if "priority" in text else 0.1


def test_the_fastest_is_found_and_stands_beside_the_default() -> None:
    ranks = Pretended(by_schedule)
    found = tuned(request_of(), ranks)
    assert "priority" in found.best
    assert (found.iteration_s, found.default_iteration_s) == (0.05, 0.1)
    assert found.tried[0].strategy == found.best
    assert len(found.tried[0].times_s) > 1  # in turn with the default
    assert "50 %" in found.explanation
    assert found.spent_s <= 60.0
    assert all(one.why for one in found.tried)


def test_the_same_seed_asks_for_the_same_candidates() -> None:
    first, second = Pretended(by_schedule), Pretended(by_schedule)
    tuned(request_of(), first)
    tuned(request_of(), second)
    assert first.ran == second.ran


def test_the_default_stays_where_nothing_is_clearly_faster() -> None:
    found = tuned(request_of(), Pretended(lambda text: 0.1 if text == USUAL else 0.0995))
    assert found.best == found.default == USUAL
    assert found.iteration_s == 0.1


def test_candidates_that_fail_are_named_and_skipped() -> None:
    ranks = Pretended(lambda text: None if "fixed" in text else by_schedule(text))
    found = tuned(request_of(300.0, searcher="exhaustive"), ranks)
    failed = [one for one in found.tried if one.why == "failed: rank 1: it broke"]
    assert failed
    assert all("fixed" in one.strategy and one.measured_s is None for one in failed)
    assert "fixed" not in found.best
    assert all(ranks.ran.count(one.strategy) == 1 for one in failed)


def test_a_budget_too_small_for_one_measurement_says_what_one_takes() -> None:
    with pytest.raises(
        UsageError, match=r"--budget 1s is too small: the ranks start in .* and one measurement takes 1\.4 s"
    ):
        tuned(request_of(1.0), Pretended(by_schedule))


def test_a_default_that_fails_ends_the_tuning() -> None:
    with pytest.raises(SynclineError, match=r"the default, transport=tcp, failed.*it broke"):
        tuned(request_of(), Pretended(lambda _: None))


def test_a_resumed_tuning_measures_nothing_twice(tmp_path: Path) -> None:
    path, first = tmp_path / "t.json", Pretended(by_schedule)
    tuned(request_of(), first).save(path)
    second = Pretended(by_schedule)
    found = tuned(request_of(resume_path=path), second)
    asked_again = set(second.ran) & set(first.ran)
    best_few = {one.strategy for one in found.tried[: search.FINALISTS]} | {USUAL}
    assert asked_again <= best_few
    assert len([one for one in found.tried if one.times_s]) > len(set(first.ran))


def test_a_file_of_other_work_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tuned(request_of(), Pretended(by_schedule)).save(path)
    with pytest.raises(UsageError, match="is of another number of workers"):
        request_of(workers=3, resume_path=path)


def test_a_codec_that_loses_is_refused_however_fast_it_is() -> None:
    def seconds(text: str) -> float:
        return 0.02 if "int4" in text else 0.05 if "int8" in text else 0.1

    def losses(text: str) -> list[float]:
        return [2.0] * 50 if "int4" in text else FALLING

    ranks = Pretended(seconds, losses)
    words = "direct schedule=fixed transport=tcp"
    found = tuned(request_of(300.0, strategy=words, lossy=True, searcher="exhaustive"), ranks)
    assert "int8" in found.best
    refused = [one for one in found.tried if "int4" in one.strategy and one.times_s]
    assert refused
    assert all(one.why.startswith("refused: it loses") and one.measured_s is None for one in refused)


def test_a_codec_that_learns_half_as_fast_has_to_be_twice_as_fast() -> None:
    def seconds(text: str) -> float:
        return 0.07 if "int8" in text else 0.1

    def losses(text: str) -> list[float]:
        return [2.0 * 0.9 ** (step / 2) for step in range(50)] if "int8" in text else FALLING

    words = "direct schedule=fixed transport=tcp"
    asked = request_of(300.0, strategy=words, lossy=True, loss=100.0, searcher="exhaustive")
    found = tuned(asked, Pretended(seconds, losses))
    assert "int8" not in found.best


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget_s": 0.0}, "--budget has to be more than 0"),
        ({"strategy": "ps(servers=1)"}, r"on=workers"),
        ({"searcher": "bayess"}, "bayess"),
        ({"strategy": "rong"}, "rong"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        request_of(**options)


def test_layers_that_only_take_time_say_nothing_of_accuracy(tmp_path: Path) -> None:
    trace = tmp_path / "layers.csv"
    trace.write_text("name,elements,forward_s,backward_s\nfc,1000,0.001,0.001\n")
    with pytest.raises(UsageError, match="replays times and learns nothing"):
        request_of(workload=f"trace:{trace}", lossy=True)


class Networked(Pretended):
    """Ranks between which the network is slow, and layers are known."""

    def calibrate(self, *_: Any) -> Any:
        return load_network("alpha=50us,rate=10Mbit")

    def train(self, *arguments: Any, **options: Any) -> Trained:
        return replace(super().train(*arguments, **options), layers=LAYERS)


@pytest.mark.slow
def test_codecs_that_are_predicted_to_be_fast_are_measured_first() -> None:
    """Those too whose payloads only one architecture takes, which is then the one that was left open."""

    def seconds(text: str) -> float:
        return 0.1 if "codec" not in text else 0.02 if "topk" in text else 0.05

    ranks = Networked(seconds, lambda _: FALLING)
    found = tuned(request_of(searcher="bayes", lossy=True), ranks)
    assert "topk" in ranks.ran[1]
    assert "topk" in found.best
    assert "gains" in found.explanation


@pytest.mark.parametrize(
    "schedule",
    ["fixed(bucket=1MiB)", pytest.param("merged", marks=pytest.mark.slow), "priority(slice=2MiB)"],
)
def test_an_architecture_that_is_left_open_is_predicted_as_the_best_with_the_same_words(schedule: str) -> None:
    asked = request_of(workers=4, strategy=f"schedule={schedule} transport=tcp", lossy=True)
    found = tuned(asked, Networked(by_schedule, lambda _: FALLING))
    predicted = {Strategy.parse(one.strategy): one.predicted_s for one in found.tried}
    might_run = [
        seconds
        for one, seconds in predicted.items()
        if one.architecture != AUTO and one.roles is None and replace(one, architecture=AUTO) == asked.asked
        if one.architecture.arguments.get("pieces", 1) == 1
    ]
    assert len(might_run) > 3
    assert predicted[asked.asked] == min(filter(None, might_run))


def test_an_interrupt_ends_ranks_at_once_and_what_is_known_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first measurement there is no row."""
    ended = list[bool]()

    class Interrupted(Pretended):
        def __enter__(self) -> Interrupted:
            return self

        def __exit__(self, *_: object) -> None:
            assert ended

        def train(self, *_: object, **__: object) -> Trained:
            raise KeyboardInterrupt

        def end_at_once(self) -> None:
            ended.append(True)

    ranks = Interrupted(by_schedule)
    monkeypatch.setattr(search, "WarmRanks", lambda *_: ranks)
    course = search.Course(request_of(), lambda _: None, ranks.clock)
    with pytest.raises(KeyboardInterrupt):
        course.run(cast(Any, Told()))
    console = Console(file=io.StringIO(), width=80)
    console.print(tuning.render(course.result))
    assert cast(io.StringIO, console.file).getvalue().startswith("no rows\n0 of 0 candidates ran")
