"""``syncline bench``: collectives beside what one would use instead."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import JSON, OLD_FILE, REPORT, Lists


@click.command(cls=Lists)
@click.option("--collective", default="allreduce", show_default=True, help="Or reduce-scatter, all-gather, broadcast.")
@click.option(
    "--sizes", multiple=True, metavar="SIZE...", help="Bytes of the array: 1KB,60.97MB; default: 1KB to 256MB."
)
@click.option("--ranks", multiple=True, metavar="N...", help="Numbers of ranks: 2,4; default: 2,4, and 4 in a lab.")
@click.option(
    "--with", "contenders", multiple=True, metavar="TRANSPORT:ALGORITHM...",
    help="What to compare: strategies such as shm:auto,tcp:ring and peers such as gloo:native,mpi:native,mpi:ring.",
)  # fmt: skip
@click.option("--lab", metavar="RATE", help="In a lab with links of RATE, such as 1gbit; needs root.")
@click.option(
    "--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on each of its hosts."
)
@click.option("--repetitions", type=click.IntRange(min=1), help="Of every size; default: 60, 20 or 9 by size.")
@click.option("--goals", is_flag=True, help="Measure what the table of goals needs, and print it.")
@JSON
@click.option(
    "--resume", "resume_path", type=OLD_FILE,
    help="Keep this file's rows, measure the others, and write them to it (or to --json).",
)  # fmt: skip
@REPORT
def bench(
    collective: str,
    sizes: tuple[str, ...],
    ranks: tuple[str, ...],
    contenders: tuple[str, ...],
    lab: str | None,
    per_host: int,
    repetitions: int | None,
    goals: bool,
    json_path: Path | None,
    resume_path: Path | None,
    report_path: Path | None,
) -> None:
    """Measure collectives beside what one would use instead, each in processes of its own, in turn."""
    if goals and (ranks or contenders or lab or per_host > 1 or repetitions or collective != "allreduce"):
        raise click.UsageError("--goals says itself what is measured: it goes with --sizes and the files only")
    from syncline.nouns import Rate, Size
    from syncline.strategy.grammar import read_list, read_value

    from ..collectives import command, request

    nbytes = [read_value(size, Size, "--sizes") for size in read_list(sizes)]
    if goals:
        requests = command.goal_requests(nbytes)
    else:
        asked = request.request_of(
            sizes=nbytes,
            ranks=[read_value(count, int, "--ranks") for count in read_list(ranks)],
            contenders=read_list(contenders),
            kind=collective,
            lab_rate=None if lab is None else read_value(lab, Rate, "--lab"),
            repetitions=repetitions,
            per_host=per_host,
        )
        requests = [asked]
    status = command.run(requests, json_path=json_path, resume_path=resume_path, report_path=report_path, goals=goals)
    sys.exit(status)
