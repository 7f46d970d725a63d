"""The command ``syncline accuracy``: its options and help texts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import EPOCHS, FILE, ITERATIONS, JSON, LAUNCHER, OLD_FILE, REPORT, Lists, check_length


@click.command(cls=Lists)
@click.option(
    "--workload", default="digits", show_default=True, help="A workload with a test set: digits, text or cifar10:PATH."
)
@click.option("--workers", type=click.IntRange(min=2), default=4, show_default=True, help="Workers of every training.")
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
def accuracy(
    workload: str,
    workers: int,
    seeds: tuple[str, ...],
    codecs: tuple[str, ...],
    strategies: tuple[str, ...],
    epochs: int | None,
    iterations: int | None,
    launcher: str,
    json_path: Path | None,
    markdown_path: Path | None,
    report_path: Path | None,
    resume_path: Path | None,
) -> None:
    """Train a workload with every codec, or under strategies, from several seeds, and compare the accuracies."""
    check_length(epochs, iterations)
    from syncline.strategy.grammar import read_list, read_value

    from .. import accuracy as table

    status = table.run(
        workload,
        workers,
        [read_value(seed, int, "--seeds") for seed in read_list(seeds)] or table.SEEDS,
        read_list(codecs),
        strategies,
        epochs=epochs,
        iterations=iterations,
        json_path=json_path,
        markdown_path=markdown_path,
        report_path=report_path,
        resume_path=resume_path,
        launcher=launcher,
    )
    sys.exit(status)
