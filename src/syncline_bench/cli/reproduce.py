"""``syncline reproduce``: published figures beside what the models give."""

from __future__ import annotations

from pathlib import Path

import click

from ._options import FILE


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path), metavar="FOLDER",
    help="Where published tables lie as CSV files; without it the page says what is missing and where it is public.",
)  # fmt: skip
@click.option("-o", "--output", type=FILE, help="Write the page here instead of printing it.")
def reproduce(folder: Path | None, output: Path | None) -> None:
    """Write published figures beside what the models give for them, as Markdown."""
    from ..report.files import STANDARD_OUTPUT, replace_text, result_paths
    from ..reproduction.page import page

    (target,) = result_paths({"-o": output})
    replace_text(target or STANDARD_OUTPUT, page(folder))
