"""``syncline bench-gradients``: what gradients cost that are copied together and back."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import JSON, REPORT, Lists


@click.command("bench-gradients", cls=Lists)
@click.option(
    "--workloads", multiple=True, metavar="TEXT...",
    help="Whose networks; default: synthetic:alexnet synthetic:googlenet synthetic:resnet50.",
)  # fmt: skip
@click.option("--ranks", multiple=True, metavar="N...", help="Numbers of ranks; 1 is the copies alone; default: 1,2.")
@click.option(
    "--with", "forms", multiple=True, metavar="FORM...",
    help="What to compare: contiguous, placed, accumulated, copied:mul, copied:foreach, copied:cat, "
    "copied:flatten, layerwise:all, layerwise:one; default: all.",
)  # fmt: skip
@click.option("--repetitions", type=click.IntRange(min=1), default=15, show_default=True, help="Of every row.")
@JSON
@REPORT
def bench_gradients(
    workloads: tuple[str, ...],
    ranks: tuple[str, ...],
    forms: tuple[str, ...],
    repetitions: int,
    json_path: Path | None,
    report_path: Path | None,
) -> None:
    """Measure what gradients cost that are copied together and back, beside buckets that are their memory."""
    from syncline.strategy.grammar import read_list, read_value

    from ..gradients import command, request

    asked = request.request_of(
        workloads=read_list(workloads),
        ranks=[read_value(count, int, "--ranks") for count in read_list(ranks)],
        forms=read_list(forms),
        repetitions=repetitions,
    )
    sys.exit(command.run(asked, json_path=json_path, report_path=report_path))
