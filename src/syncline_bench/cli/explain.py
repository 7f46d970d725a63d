"""The command ``syncline explain``: its options and help text."""

from __future__ import annotations

from pathlib import Path

import click

from ._options import FILE, JSON, REPORT


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
