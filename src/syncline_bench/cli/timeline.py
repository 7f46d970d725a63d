"""The command ``syncline timeline``: merges the parts of a timeline that the processes of a run have left."""

from __future__ import annotations

from pathlib import Path

import click

from ._options import FILE


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", type=FILE, help="The file to write; default: FOLDER without .parts.")
def timeline(folder: Path, output: Path | None) -> None:
    """Merge the parts in FOLDER, such as trace.json.gz.parts, into a timeline. A failed run leaves such a folder.

    The parts are kept. Copy the parts of other hosts into the folder first.
    """
    from syncline.errors import UsageError
    from syncline.timeline.folder import checked_target, write_all

    from ..report.files import result_paths

    target = checked_target(folder.resolve().with_suffix("") if output is None else output)
    result_paths({"-o": target})
    written = write_all(target, folder)
    if written is None:
        raise UsageError(f"there are no parts of a timeline in {folder}")
    click.echo(f"timeline: {target} ({written.text})")
