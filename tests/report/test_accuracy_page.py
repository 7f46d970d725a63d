"""The page of an accuracy table: every strategy with its figures, and its curves over the seeds."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from syncline_bench.report.accuracy import AccuracyResult, AccuracyRun
from syncline_bench.report.charts import learning, spots_of
from syncline_bench.report.comparison import Point
from syncline_bench.report.figures import RC, Style
from syncline_bench.report.page import accuracy_page


def curve(height: float, points: int = 5) -> tuple[Point, ...]:
    losses = (Point(step, step * 0.1, loss=height / step) for step in range(1, points))
    return (*losses, Point(points, 0.9, accuracy=height, test_loss=0.3))


def run_of(strategy: str, seed: int, accuracy: float, **more: object) -> AccuracyRun:
    values = {"accuracy": accuracy, "bytes_sent_per_step": 1e6, "chosen": f"{strategy} transport=shm", **more}
    return AccuracyRun(None, None, seed, strategy, curve=curve(accuracy), **values)  # type: ignore[arg-type]


@pytest.fixture
def result() -> AccuracyResult:
    heights = {"single": (0.5, 0.54, 0.52), "ring": (0.51, 0.52, 0.53), "ps(servers=1)": (0.4, 0.41, 0.42)}
    runs = [run_of(name, seed, value) for name, values in heights.items() for seed, value in enumerate(values)]
    runs.append(run_of("direct codec=feedback(int8)", 0, 0.51))
    origin = ("a <processor>", 2, {"torch": "2.13"}, "0" * 40, None, "1", "2026-01-01")
    return AccuracyResult(
        *origin,
        workload="cifar10:/home/somebody",
        workers=4,
        epochs=None,
        iterations=4000,
        batch=100,
        runs=tuple(runs),
        reference="single",
    )


def test_every_strategy_has_its_figures(result: AccuracyResult) -> None:
    text = accuracy_page(result)
    for row in result.rows:
        assert row.strategy in text
    for figure in ("52.00", "51.00 - 53.00", "one seed", "a &lt;processor&gt;", "4000 iterations of 100 images"):
        assert figure in text
    assert "<td>11.00</td><td>no</td>" in text
    assert "all but ps(servers=1) lie within the scatter of the seeds of single" in text
    assert "ran as ring transport=shm" in text
    assert "4 workers, seed 0<" in text
    assert "1 worker, seeds 0, 1, 2<" in text
    assert "somebody" not in text
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    assert accuracy_page(result) == text


def test_curves_are_lines_over_the_seeds_with_a_band(result: AccuracyResult) -> None:
    text = accuracy_page(result)
    drawings = re.findall(r"<svg [^>]*role=.img.*?</svg>", text, re.DOTALL)
    assert [ElementTree.fromstring(drawing)[0].text for drawing in drawings] == ["Training loss", "Test accuracy"]
    assert drawings[0].count("FillBetween") == 3  # one seed has no band
    assert text.count("its band reaches") == 2
    alone = replace(result, runs=tuple(run for run in result.runs if run.seed == 0))
    shown = accuracy_page(alone)
    assert "FillBetween" not in shown
    assert "its band reaches" not in shown


def test_a_row_that_failed_says_why_and_has_no_line(result: AccuracyResult) -> None:
    failed = AccuracyRun(None, None, 0, "tree", error="rank 1 <b>died</b>")
    one_seed = replace(result.runs[3], accuracy=None, error="rank 2 was lost")
    text = accuracy_page(replace(result, runs=(*result.runs[:3], one_seed, *result.runs[4:], failed)))
    assert "2 of 11 trainings could not be finished" in text
    assert "failed: seed 0: rank 1 &lt;b&gt;died&lt;/b&gt;" in text
    assert "failed: seed 0: rank 2 was lost" in text
    assert "52.00 - 53.00" in text
    assert re.findall(r"<figure>.*?</ul>", text, re.DOTALL)[0].count("<li>") == 4


def test_codecs_are_strategies_on_a_page(result: AccuracyResult) -> None:
    runs = [replace(result.runs[seed], codec="none", feedback=False, strategy="direct") for seed in (0, 1)]
    text = accuracy_page(replace(result, runs=tuple(runs), reference="direct"))
    assert "points below direct" in text
    assert "of direct<" in text


@pytest.mark.parametrize("runs", [0, 1])
def test_little_makes_a_page(result: AccuracyResult, runs: int) -> None:
    bare = replace(result, runs=tuple(replace(run, curve=()) for run in result.runs[:runs]))
    assert "<figure>" not in accuracy_page(bare)


def test_numbers_that_went_wrong_are_left_out_of_the_curves(result: AccuracyResult) -> None:
    bad = tuple(replace(point, loss=float("nan"), accuracy=float("inf")) for point in result.runs[0].curve)
    text = accuracy_page(replace(result, runs=(replace(result.runs[0], curve=bad), *result.runs[1:])))
    assert text.count("<figure>") == 2


def test_a_line_is_the_median_of_those_that_came_so_far() -> None:
    trainings = [curve(1.0), curve(4.0), curve(2.0, points=3)]
    found = spots_of(trainings, lambda point: point.iteration, lambda point: point.loss)
    assert found[0] == (1, 2.0, 1.0, 4.0)
    assert found[1] == (2, 1.0, 0.5, 2.0)
    assert found[-1] == (4, 0.625, 0.25, 1.0)
    style = Style("#0072B2", "", 1.0)
    with mpl.rc_context(RC):  # type: ignore[arg-type]
        timed = learning([("ring", style, (trainings[0],)), ("tree", style, ())], timed=True)
    assert [chart.title for chart in timed] == ["Training loss", "Test accuracy", "Test accuracy over time"]
    assert [[key.label for key in chart.keys] for chart in timed] == [["ring"]] * 3
