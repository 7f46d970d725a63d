"""What tests of ``syncline accuracy`` share: a stand-in for the processes that train, and results that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from syncline_bench.accuracy import strategy_of
from syncline_bench.cases import Case
from syncline_bench.cli import cli
from syncline_bench.report.accuracy import AccuracyResult, AccuracyRun
from syncline_bench.report.comparison import Point, Row
from syncline_bench.site import AUTO, Site

CURVE = (Point(1, 0.1, loss=2.0), Point(2, 0.2, loss=1.0), Point(2, 0.2, accuracy=0.5, test_loss=1.5))


def command(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["accuracy", *map(str, arguments)])


def read(path: Path) -> AccuracyResult:
    return AccuracyResult.from_json(path.read_text())


class Trained:
    """Stands in for the processes: an accuracy that falls with what is not sent, and a note of what was asked for."""

    def __init__(self, spoil: Callable[[Row, int], Row] = lambda row, _: row) -> None:
        self.asked: list[tuple[str, int]] = []
        self.cases: list[Case] = []
        self._spoil = spoil

    def __call__(self, case: Case, workload: str, seed: int, limit_s: float, progress: Any, site: Site) -> Row:
        assert site.launcher == AUTO
        assert workload == "digits"
        assert limit_s > 0
        self.asked.append((case.strategy, seed))
        self.cases.append(case)
        progress.begin(case.strategy, case.workers, case.iterations)
        progress.advance(case.iterations, 0.5, 100.0)
        accuracy = 0.9 if "codec" in case.strategy else 0.98
        sent = 0.0 if case.workers == 1 else 200.0 if "codec" in case.strategy else 800.0
        row = Row(case.strategy, case.workers, accuracy + seed / 1000, 0.1, bytes_sent_per_step=sent)
        row = replace(row, replicas_equal=True, chosen=f"{case.strategy} sync=bsp", replica_sha256="d", curve=CURVE)
        row = self._spoil(row, len(self.asked))
        progress.end("done")
        return row


def result_of(*runs: AccuracyRun) -> AccuracyResult:
    origin = ("machine", 2, {"python": "3"}, "abc", True, "0", "now")
    work = {"workload": "digits", "workers": 4, "epochs": 12, "iterations": 276, "batch": 64}
    return AccuracyResult(*origin, **work, runs=runs)  # type: ignore[arg-type]


def run_of(codec: str, seed: int, accuracy: float | None, feedback: bool = False, **more: Any) -> AccuracyRun:
    return AccuracyRun(codec, feedback, seed, strategy_of((codec, feedback)), accuracy, **more)
