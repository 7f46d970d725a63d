"""The command ``syncline calibrate``: its options and help texts."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import FILE, Lists, node_sizes


@click.command(cls=Lists)
@click.option("-o", "--output", type=FILE, metavar="FILE.json", help="Write the network to this file.")
@click.option("--ranks", type=int, metavar="N", help="Number of ranks to start; default: 2.")
@click.option("--lab", metavar="RATE", help="Give every rank a host of a lab with links of RATE, such as 1gbit.")
@click.option("--nodes", help="Hosts and ranks of the lab: 2x2 is two hosts of two ranks.")
@click.option("--transport", default="auto", show_default=True, help="The transport, as in a strategy.")
@click.option(
    "--codecs", multiple=True, metavar="TEXT...",
    help="Codecs to measure, each with and without error feedback, or none; default: all.",
)  # fmt: skip
@click.option(
    "--seconds", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True,
    help="Approximate time for the messages of one kind of link.",
)  # fmt: skip
@click.option("--request", "told", hidden=True, help="The request of a rank, in place of all other options.")
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

    The command starts its ranks on this machine or in a lab. To measure between other hosts, start it there with
    torchrun, mpirun or srun.
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
