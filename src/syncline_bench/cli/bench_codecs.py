"""``syncline bench-codecs``: what codecs cost."""

from __future__ import annotations

from pathlib import Path

import click

from ._options import JSON, Lists


@click.command("bench-codecs", cls=Lists)
@click.option(
    "--elements", type=click.IntRange(min=1), default=15_242_500, show_default=True, help="Size of the float32 array."
)
@click.option(
    "--codecs", multiple=True, metavar="TEXT...",
    help="What to measure, such as int8 topk(ratio=0.01) feedback(onebit); default: every codec, and with feedback.",
)  # fmt: skip
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Of every row.")
@click.option(
    "--workers", type=click.IntRange(min=2), default=4, show_default=True, help="Ranks of the allreduce to speed up."
)
@JSON
def bench_codecs(
    elements: int, codecs: tuple[str, ...], repetitions: int, workers: int, json_path: Path | None
) -> None:
    """Measure what every codec costs on one core, and say below which link speed it makes an allreduce faster."""
    from syncline.strategy.grammar import read_list

    from ..codecs import command

    command.run(elements, read_list(codecs), repetitions=repetitions, workers=workers, json_path=json_path)
