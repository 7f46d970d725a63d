"""The command ``syncline tune``: its options and help texts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import JSON, OLD_FILE


@click.command()
@click.option(
    "--workload",
    default="digits",
    show_default=True,
    help="The workload, as for compare: digits, replay:googlenet, ...",
)
@click.option("--workers", type=click.IntRange(min=2), default=4, show_default=True, help="Workers of every training.")
@click.option("--lab", metavar="RATE", help="Give every process a host of its own behind links of RATE, such as 1Gbit.")
@click.option(
    "--budget",
    default="60s",
    show_default=True,
    metavar="TIME",
    help="Time for the whole search, such as 5min or 300s.",
)
@click.option("--searcher", default="bayes", show_default=True, help="bayes, rl, descent, random or exhaustive.")
@click.option("--strategy", default="", help="Fixed words of the strategy; the search varies all others.")
@click.option("--lossy", is_flag=True, help="Also try codecs and sync modes that change the mathematics; see --loss.")
@click.option(
    "--loss", type=click.FloatRange(min=0), default=0.02, show_default=True,
    help="Most accuracy (0.02: 2 points), or loss, that a lossy candidate may lose in a short paired run.",
)  # fmt: skip
@click.option("--framework", default="torch", show_default=True, help="Framework: torch, tensorflow, jax or numpy.")
@click.option("--batch", type=click.IntRange(min=1), help="Batch size, in place of the workload's default.")
@click.option("--network", metavar="NAME|FILE", help="Network for predictions, in place of a measurement.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights, batches and the search.")
@JSON
@click.option(
    "--resume", "resume_path", type=OLD_FILE,
    help="Keep the measurements of this file, go on, and write all to it (or to --json).",
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
    """Find the strategy that trains a workload fastest here, and explain the choice."""
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
