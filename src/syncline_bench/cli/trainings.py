"""The commands that train a workload: ``syncline compare``, ``accuracy`` and ``tune``.

The names of the options are the parameters of the functions that they are passed on to.
"""

from __future__ import annotations

import sys
from typing import Any

import click

from ._options import FILE, JSON, LAUNCHER, OLD_FILE, REPORT, TRACE, Lists

EPOCHS = click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data; default: the workload's.")
ITERATIONS = click.option("--iterations", type=click.IntRange(min=1), help="Training steps, instead of --epochs.")
WORKERS = click.option(
    "--workers", type=click.IntRange(min=2), default=4, show_default=True, help="Workers of every training."
)
BATCH = click.option("--batch", type=click.IntRange(min=1), help="Batch size, in place of the workload's default.")
LAB = click.option(
    "--lab", metavar="RATE", help="Give every process a host of its own behind links of RATE, such as 1Gbit."
)


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
@BATCH
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of weights and data order."
)
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
@LAB
@LAUNCHER
def compare(**options: Any) -> None:
    """Train a workload on a single worker and under each strategy, and compare the results."""
    from .. import compare as bench

    sys.exit(bench.run(**options))


@click.command(cls=Lists)
@click.option(
    "--workload", default="digits", show_default=True, help="A workload with a test set: digits, text or cifar10:PATH."
)
@WORKERS
@click.option("--seeds", multiple=True, metavar="N...", help="Seeds of weights and data order; default: 0 1 2.")
@click.option(
    "--codecs", multiple=True, metavar="TEXT...",
    help="Codecs, such as int8 topk(ratio=0.01) feedback(onebit); default: all, each with and without error feedback.",
)  # fmt: skip
@click.option(
    "--strategies", multiple=True, metavar="TEXT...",
    help="Whole strategies instead of codecs, each quoted, as for compare. single is one worker, and becomes the"
    " reference of the others.",
)  # fmt: skip
@EPOCHS
@ITERATIONS
@JSON
@click.option("--markdown", "markdown_path", type=FILE, help="Write the table to this file, as Markdown.")
@REPORT
@LAUNCHER
@click.option(
    "--resume", "resume_path", type=OLD_FILE,
    help="Keep the trainings of this file, run the missing ones, and write all to it (or to --json).",
)  # fmt: skip
def accuracy(seeds: tuple[str, ...], codecs: tuple[str, ...], **options: Any) -> None:
    """Train a workload with every codec, or under strategies, from several seeds, and compare the accuracies."""
    from syncline.strategy.grammar import read_list, read_value

    from .. import accuracy as table

    given = [read_value(seed, int, "--seeds") for seed in read_list(seeds)] or table.SEEDS
    sys.exit(table.run(seeds=given, codecs=read_list(codecs), **options))


@click.command()
@click.option(
    "--workload",
    default="digits",
    show_default=True,
    help="The workload, as for compare: digits, replay:googlenet, ...",
)
@WORKERS
@LAB
@click.option(
    "--budget",
    "budget_s",
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
@BATCH
@click.option("--network", metavar="NAME|FILE", help="Network for predictions, in place of a measurement.")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of weights, batches and the search."
)
@JSON
@click.option(
    "--resume", "resume_path", type=OLD_FILE,
    help="Keep the measurements of this file, go on, and write all to it (or to --json).",
)  # fmt: skip
def tune(budget_s: str, **options: Any) -> None:
    """Find the strategy that trains a workload fastest here, and explain the choice."""
    from syncline.nouns import Seconds
    from syncline.strategy.grammar import read_value

    from ..tuner import search

    sys.exit(search.run(budget_s=read_value(budget_s, Seconds, "--budget"), **options))
