"""The command ``syncline compare``: its options and help texts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import EPOCHS, ITERATIONS, JSON, LAUNCHER, REPORT, TRACE, Lists, check_length


@click.command(cls=Lists)
@click.option(
    "--workload",
    default="digits",
    show_default=True,
    help="digits, text, cifar10:PATH, synthetic:alexnet, replay:googlenet, trace:FILE.csv, each with arguments:"
    " replay:alexnet(loading=5ms), digits(step=30ms, slow_rank=1, slowdown=3), digits(step=30ms, jitter=1), ...",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    multiple=True,
    default=(4,),
    show_default=True,
    metavar="N...",
    help="Workers of every strategy; with several numbers, every strategy has a row for each.",
)
@click.option(
    "--strategies",
    multiple=True,
    default=("ring", "ps(servers=1)"),
    show_default=True,
    metavar="TEXT...",
    help="Strategies and presets to compare, each quoted (see `syncline strategies`), and peers: ddp, ddp(hook=fp16)"
    " under torch, multiworker under tensorflow, spmd under jax.",
)
@click.option(
    "--framework",
    multiple=True,
    default=("torch",),
    show_default=True,
    metavar="NAME...",
    help="Frameworks that train: torch, tensorflow, jax, numpy; with several, each has all rows.",
)
@EPOCHS
@ITERATIONS
@click.option("--batch", type=click.IntRange(min=1), help="Batch size, in place of the workload's default.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and data order.")
@JSON
@REPORT
@TRACE
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds without a report after which a row fails."
)
@click.option("--target", type=float, metavar="ACCURACY", help="Show each row's time to this accuracy, such as 0.97.")
@click.option(
    "--evaluate-every",
    type=click.IntRange(min=1),
    metavar="STEPS",
    help="Steps between evaluations; default: one evaluation per epoch, or eight with --target.",
)
@click.option("--lab", metavar="RATE", help="Give every process a host of its own behind links of RATE, such as 1Gbit.")
@LAUNCHER
def compare(
    workload: str,
    workers: tuple[int, ...],
    strategies: tuple[str, ...],
    framework: tuple[str, ...],
    epochs: int | None,
    iterations: int | None,
    batch: int | None,
    seed: int,
    json_path: Path | None,
    report_path: Path | None,
    trace: Path | None,
    timeout: float | None,
    target: float | None,
    evaluate_every: int | None,
    lab: str | None,
    launcher: str,
) -> None:
    """Train a workload on a single worker and under each strategy, and compare the results."""
    check_length(epochs, iterations)
    from .. import compare as bench

    status = bench.run(
        workload,
        workers,
        strategies,
        epochs=epochs,
        iterations=iterations,
        batch=batch,
        seed=seed,
        json_path=json_path,
        report_path=report_path,
        timeline_path=trace,
        timeout=timeout,
        lab=lab,
        target=target,
        evaluate_every=evaluate_every,
        framework=framework,
        launcher=launcher,
    )
    sys.exit(status)
