"""The commands of ``syncline bench`` (collectives, codecs, gradients, steps), and ``syncline calibrate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ._options import FILE, JSON, LAUNCHER, OLD_FILE, REPORT, Lists, Verbs, node_sizes

USUAL = "collectives"


class _Bench(Verbs):
    """A group that runs ``collectives`` if no command is given."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names):
            args = [USUAL, *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Bench)
def bench() -> None:
    """Measure collectives, codecs, gradients or steps, each next to its alternatives.

    Without a command, `syncline bench` runs `syncline bench collectives`.
    """


@bench.command(cls=Lists)
@click.option(
    "--collective", default="allreduce", show_default=True, help="allreduce, reduce-scatter, all-gather or broadcast."
)
@click.option(
    "--sizes", multiple=True, metavar="SIZE...", help="Sizes of the array: 1KB,60.97MB; default: 1KB to 256MB."
)
@click.option("--ranks", multiple=True, metavar="N...", help="Numbers of ranks: 2,4; default: 2,4, and 4 in a lab.")
@click.option(
    "--with", "contenders", multiple=True, metavar="TRANSPORT:ALGORITHM...",
    help="Contenders: Syncline's, such as shm:auto,tcp:ring, and peers, such as gloo:native,openmpi:native,mpi:ring. "
    "In a clone, `make bench-peers` installs the MPI libraries.",
)  # fmt: skip
@click.option("--lab", metavar="RATE", help="Measure in a lab with links of RATE, such as 1gbit; needs root.")
@click.option(
    "--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on each host of the lab."
)
@click.option(
    "--repetitions", type=click.IntRange(min=1), help="Repetitions of every size; default: 60, 20 or 9 by size."
)
@click.option("--goals", is_flag=True, help="Measure the rows of the table of goals, and print it.")
@JSON
@click.option(
    "--resume", "resume_path", type=OLD_FILE,
    help="Keep the rows of this file, measure the missing ones, and write all to it (or to --json).",
)  # fmt: skip
@REPORT
def collectives(
    collective: str,
    sizes: tuple[str, ...],
    ranks: tuple[str, ...],
    contenders: tuple[str, ...],
    lab: str | None,
    per_host: int,
    repetitions: int | None,
    goals: bool,
    **files: Any,
) -> None:
    """Measure collectives next to peers such as Gloo and MPI, which take turns in processes of their own."""
    if goals and (ranks or contenders or lab or per_host > 1 or repetitions or collective != "allreduce"):
        raise click.UsageError("--goals chooses its own rows: combine it only with --sizes and the files")
    from syncline.nouns import Rate, Size
    from syncline.strategy.grammar import read_list, read_value

    from ..collectives import collective_bench, request

    nbytes = [read_value(size, Size, "--sizes") for size in read_list(sizes)]
    if goals:
        requests = collective_bench.goal_requests(nbytes)
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
    sys.exit(collective_bench.run(requests, goals=goals, **files))


@bench.command(cls=Lists)
@click.option(
    "--elements", type=click.IntRange(min=1), default=15_242_500, show_default=True, help="Size of the float32 array."
)
@click.option(
    "--codecs", multiple=True, metavar="TEXT...",
    help="Codecs, such as int8 topk(ratio=0.01) feedback(onebit); default: all, each with and without error feedback.",
)  # fmt: skip
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Repetitions per row.")
@click.option(
    "--workers",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    help="Ranks of the allreduce that the codecs are to speed up.",
)
@click.option("--device", default="cpu", show_default=True, help="Where codecs work: cpu, or a GPU such as cuda.")
@JSON
def codecs(elements: int, codecs: tuple[str, ...], **options: Any) -> None:
    """Measure the time of every codec, and the link speed below which it makes an allreduce faster."""
    from syncline.strategy.grammar import read_list

    from ..codecs import codec_bench

    codec_bench.run(elements, read_list(codecs), **options)


@bench.command(cls=Lists)
@click.option(
    "--workloads", multiple=True, metavar="TEXT...",
    help="Workloads with the gradients; default: synthetic:alexnet synthetic:googlenet synthetic:resnet50.",
)  # fmt: skip
@click.option(
    "--ranks", multiple=True, metavar="N...", help="Numbers of ranks; 1 measures the copies alone; default: 1,2."
)
@click.option(
    "--with", "forms", multiple=True, metavar="FORM...",
    help="Forms to compare: contiguous, placed, accumulated, copied:mul, copied:foreach, copied:cat, "
    "copied:flatten, layerwise:all, layerwise:one; default: all.",
)  # fmt: skip
@click.option("--repetitions", type=click.IntRange(min=1), default=15, show_default=True, help="Repetitions per row.")
@JSON
@REPORT
def gradients(
    workloads: tuple[str, ...], ranks: tuple[str, ...], forms: tuple[str, ...], repetitions: int, **files: Any
) -> None:
    """Measure the cost of copying gradients into buckets and back, next to gradients that lie in buckets."""
    from syncline.strategy.grammar import read_list, read_value

    from ..gradients import gradient_bench, gradient_cases

    asked = gradient_cases.request_of(
        workloads=read_list(workloads),
        ranks=[read_value(count, int, "--ranks") for count in read_list(ranks)],
        forms=read_list(forms),
        repetitions=repetitions,
    )
    sys.exit(gradient_bench.run(asked, **files))


@bench.command(cls=Lists)
@click.option("--frameworks", multiple=True, metavar="NAME...", help="numpy, jax, torch; default: those installed.")
@click.option("--strategy", default="ring transport=shm", show_default=True, help="Allreduce and transport.")
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Number of ranks.")
@click.option("--tensors", multiple=True, metavar="N...", help="Numbers of tensors, each a bucket; default: 1 10 40.")
@click.option(
    "--elements", type=click.IntRange(min=1), default=1000, show_default=True, help="float32 elements per tensor."
)
@click.option("--repetitions", type=click.IntRange(min=1), default=300, show_default=True, help="Repetitions per row.")
@LAUNCHER
@JSON
def steps(frameworks: tuple[str, ...], tensors: tuple[str, ...], json_path: Path | None, **options: Any) -> None:
    """Measure the time of a step beyond the plain framework's step and the exchange, for each framework."""
    from syncline.strategy.grammar import read_list, read_value

    from ..steps import step_bench

    counts = [read_value(count, int, "--tensors") for count in read_list(tensors)]
    request = step_bench.request_of(read_list(frameworks), tensors=counts, **options)
    sys.exit(step_bench.run(request, json_path=json_path))


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
    "--seconds", "budget_s", type=click.FloatRange(min=0, min_open=True), default=5.0, show_default=True,
    help="Approximate time for the messages of one kind of link.",
)  # fmt: skip
@click.option("--request", "told", hidden=True, help="The request of a rank, in place of all other options.")
def calibrate(lab: str | None, nodes: str | None, codecs: tuple[str, ...], told: str | None, **options: Any) -> None:
    """Measure links, processor time, memory and codecs, and write them as a network for `syncline predict`.

    The command starts its ranks on this machine or in a lab. To measure between other hosts, start it there with
    torchrun, mpirun or srun.
    """
    from syncline.nouns import Rate
    from syncline.strategy.grammar import read_list, read_value

    from ..calibration import command

    if told is not None:
        chosen = command.Request.from_json(told)
    else:
        chosen = command.request_of(
            nodes=() if nodes is None else node_sizes(nodes),
            lab_rate=None if lab is None else read_value(lab, Rate, "--lab"),
            codecs=read_list(codecs),
            **options,
        )
    sys.exit(command.run(chosen))
