"""The commands ``syncline predict``, ``reproduce`` and ``explain``: their options and help texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ._options import FILE, JSON, REPORT, Lists


@click.command(cls=Lists)
@click.option(
    "--workload", metavar="TEXT",
    help="The training: googlenet, alexnet, resnet50, gpt2, bert_base, vit_b16, replay:googlenet(loading=5ms),"
    " trace:FILE.csv.",
)  # fmt: skip
@click.option(
    "--strategies", multiple=True, metavar="TEXT...",
    help="Strategies to train under, each quoted, as for compare; default: ring.",
)  # fmt: skip
@click.option(
    "--collective", "collectives", multiple=True, metavar="ALGORITHM...",
    help='Collectives without a training: ring,recursive_doubling,"ps(servers=2)", and so on.',
)  # fmt: skip
@click.option("--bytes", "sizes", multiple=True, metavar="SIZE...", help="Sizes of the array: 60.97MB,243.9MB.")
@click.option("--workers", multiple=True, metavar="N...", help="Numbers of workers: 2,4,8.")
@click.option(
    "--network", "networks", multiple=True, required=True, metavar="NAME|FILE|CONSTANTS...",
    help='Network: a name such as 10gbe, a file, "alpha=45us,beta=1.2ns,gamma=2.5ns", or LogGP\'s'
    ' "L=5us,o=2us,g=3us,G=1ns"; several with --workload.',
)  # fmt: skip
@click.option("--per-node", type=click.IntRange(min=1), help="Workers per host; default: the network's.")
@click.option("--price", type=click.FloatRange(min=0), help="Price of a worker per hour; needs --epoch-images.")
@click.option("--epoch-images", type=click.IntRange(min=1), help="Images per epoch; adds an epoch's time to the rows.")
@JSON
@REPORT
def predict(
    workload: str | None,
    strategies: tuple[str, ...],
    collectives: tuple[str, ...],
    sizes: tuple[str, ...],
    networks: tuple[str, ...],
    **options: Any,
) -> None:
    """Predict the time of a training, or of collectives alone, on a network, with an interval."""
    from ..machine import provenance

    if (workload is None) == (not collectives):
        raise click.UsageError("give either --workload, such as googlenet, or --collective, such as ring")
    if workload is not None:
        if sizes:
            raise click.UsageError("--bytes belongs to --collective: a workload's gradients have their sizes")
        from ..predict import rows

        rows.workload(workload, networks, strategies=strategies or ("ring",), origin=provenance(), **options)
        return
    given = [options.pop(name) for name in ("price", "epoch_images", "report_path")]
    if len(networks) > 1 or strategies or any(value is not None for value in given):
        raise click.UsageError("--collective takes one network, and no strategies, price, images of an epoch or report")
    from syncline.nouns import Size
    from syncline.strategy.grammar import read_list, read_value

    from ..predict.asked import worker_counts
    from ..predict.collectives import collectives as predict_collectives

    nbytes = [read_value(size, Size, "--bytes") for size in read_list(sizes)]
    counts = worker_counts(options.pop("workers"))
    predict_collectives(read_list(collectives), nbytes, counts, networks[0], origin=provenance(), **options)


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Folder with published tables as CSV files; without it, the page names the missing tables and their sources.",
)  # fmt: skip
@click.option("-o", "--output", type=FILE, help="Write the page to this file instead of printing it.")
def reproduce(folder: Path | None, output: Path | None) -> None:
    """Write published figures next to the models' predictions of them, as Markdown."""
    from ..report.files import STANDARD_OUTPUT, replace_text, result_paths
    from ..reproduction.page import page

    (target,) = result_paths({"-o": output})
    replace_text(target or STANDARD_OUTPUT, page(folder))


@click.command()
@click.argument("file", type=FILE)
@click.option(
    "--only", default="", metavar="TEXT",
    help="Explain the run or row whose name contains TEXT; default: the slowest in FILE.",
)  # fmt: skip
@JSON
@REPORT
def explain(file: Path, only: str, json_path: Path | None, report_path: Path | None) -> None:
    """Tell why a run is as slow as it is, and what would be faster.

    FILE is a timeline (run --trace), a flight record, or a result (--json) of compare, tune or bench.
    """
    from ..explain.command import run

    run(file, only, json_path, report_path)
