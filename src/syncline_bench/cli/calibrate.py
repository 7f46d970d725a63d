"""``syncline calibrate``: what messages and computing take here, as a network file for predictions."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import FILE, Lists, node_sizes


@click.command(cls=Lists)
@click.option("-o", "--output", type=FILE, metavar="FILE.json", help="Write the network here.")
@click.option("--ranks", type=int, metavar="N", help="Ranks to start here; default: 2.")
@click.option("--lab", metavar="RATE", help="Give every rank a host of a lab with links of RATE, such as 1gbit.")
@click.option("--nodes", help="Ranks of the lab's hosts: 2x2 is two hosts of two.")
@click.option("--transport", default="auto", show_default=True, help="What carries messages, as a strategy has it.")
@click.option(
    "--codecs", multiple=True, metavar="TEXT...",
    help="Which codecs to measure, with and without feedback, or none; default: all.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True,
    help="What the messages of one kind of link may take, about.",
)  # fmt: skip
@click.option("--request", "told", hidden=True, help="What a rank is told instead of all others.")
def calibrate(
    output: Path | None,
    ranks: int | None,
    lab: str | None,
    nodes: str | None,
    transport: str,
    codecs: tuple[str, ...],
    seconds: float,
    told: str | None,
) -> None:
    """Measure links, processor time, memory and codecs, and write them as a network for `syncline predict`.

    Starts ranks on this machine or in a lab. Started by torchrun, mpirun, srun or `syncline run`, on the hosts that are
    to be joined, it measures between those.
    """
    from syncline.nouns import Rate
    from syncline.strategy.grammar import read_list, read_value

    from ..calibration import command, request

    if told is not None:
        chosen = request.Request.from_json(told)
    else:
        chosen = request.request_of(
            ranks=ranks,
            nodes=() if nodes is None else node_sizes(nodes),
            lab_rate=None if lab is None else read_value(lab, Rate, "--lab"),
            transport=transport,
            codecs=read_list(codecs),
            budget_s=seconds,
            output=output,
        )
    sys.exit(command.run(chosen))
