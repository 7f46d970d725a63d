"""``syncline bench-steps``: what a step takes beyond the bare framework's and the exchange's."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import JSON, LAUNCHER, Lists


@click.command("bench-steps", cls=Lists)
@click.option("--frameworks", multiple=True, metavar="NAME...", help="numpy, jax, torch; default: those installed.")
@click.option("--strategy", default="ring transport=shm", show_default=True, help="An allreduce and a transport.")
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Processes.")
@click.option("--tensors", multiple=True, metavar="N...", help="Numbers of tensors, each a bucket; default: 1 10 40.")
@click.option("--elements", type=click.IntRange(min=1), default=1000, show_default=True, help="float32 in a tensor.")
@click.option("--repetitions", type=click.IntRange(min=1), default=300, show_default=True, help="Of every row.")
@LAUNCHER
@JSON
def bench_steps(
    frameworks: tuple[str, ...],
    strategy: str,
    ranks: int,
    tensors: tuple[str, ...],
    elements: int,
    repetitions: int,
    launcher: str,
    json_path: Path | None,
) -> None:
    """Measure what a step takes beyond the bare framework's and the exchange's, framework by framework."""
    from syncline.strategy.grammar import read_list, read_value

    from ..steps import command, run

    request = run.request_of(
        read_list(frameworks),
        strategy,
        ranks=ranks,
        tensors=[read_value(count, int, "--tensors") for count in read_list(tensors)],
        elements=elements,
        repetitions=repetitions,
        launcher=launcher,
    )
    sys.exit(command.run(request, json_path=json_path))
