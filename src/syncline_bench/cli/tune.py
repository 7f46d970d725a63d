"""``syncline tune``: the strategy that trains a workload fastest here, found by prediction and by real steps."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import JSON, OLD_FILE


@click.command()
@click.option(
    "--workload", default="digits", show_default=True, help="As compare takes it: digits, replay:googlenet, ..."
)
@click.option("--workers", type=click.IntRange(min=2), default=4, show_default=True, help="Workers of every training.")
@click.option("--lab", metavar="RATE", help="Give every process a host of its own behind links of RATE, such as 1Gbit.")
@click.option(
    "--budget", default="60s", show_default=True, metavar="TIME", help="For everything, such as 5min or 300s."
)
@click.option("--searcher", default="bayes", show_default=True, help="bayes, rl, descent, random, exhaustive.")
@click.option("--strategy", default="", help="Words that are kept; those that are left open are searched.")
@click.option("--lossy", is_flag=True, help="Try codecs and modes that change the mathematics, behind the guard.")
@click.option(
    "--loss", type=click.FloatRange(min=0), default=0.02, show_default=True,
    help="What a lossy candidate may lose in a short paired run: of the accuracy (0.02: 2 points), or of the loss.",
)  # fmt: skip
@click.option("--framework", default="torch", show_default=True, help="What trains: torch, tensorflow, jax, numpy.")
@click.option("--batch", type=click.IntRange(min=1), help="Batch size; default and meaning: the workload's.")
@click.option("--network", metavar="NAME|FILE", help="What predictions rest on, in place of a measurement.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights, batches and the search.")
@JSON
@click.option(
    "--resume", "resume_path", type=OLD_FILE,
    help="Keep this file's measurements, go on, and write it again (or --json).",
)  # fmt: skip
def tune(
    workload: str,
    workers: int,
    lab: str | None,
    budget: str,
    searcher: str,
    strategy: str,
    lossy: bool,
    loss: float,
    framework: str,
    batch: int | None,
    network: str | None,
    seed: int,
    json_path: Path | None,
    resume_path: Path | None,
) -> None:
    """Find the strategy that trains a workload fastest here, and say why it does."""
    from syncline.nouns import Seconds
    from syncline.strategy.grammar import read_value

    from ..tuner import search

    status = search.run(
        workload,
        workers,
        budget_s=read_value(budget, Seconds, "--budget"),
        strategy=strategy,
        searcher=searcher,
        framework=framework,
        seed=seed,
        lab=lab,
        batch=batch,
        network=network,
        lossy=lossy,
        loss=loss,
        json_path=json_path,
        resume_path=resume_path,
    )
    sys.exit(status)
