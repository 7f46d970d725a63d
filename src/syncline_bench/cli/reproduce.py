"""The command ``syncline reproduce``: its options and help texts."""

from __future__ import annotations

from pathlib import Path

import click

from ._options import FILE


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
