"""The command ``syncline record``: runs a script, times its model's layers and writes them as a trace for replays."""

from __future__ import annotations

import io
import runpy
import sys
from pathlib import Path

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-o", "--output", default="trace.csv", show_default=True, help="The file to write.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Training steps to measure.")
@click.option("--skip", type=click.IntRange(min=1), default=5, show_default=True, help="First steps to exclude.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def record(output: str, steps: int, skip: int, module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run the training SCRIPT with ARGS, unchanged and on one worker, and write the times of its model's layers.

    The script ends as soon as the times are known. Use the file as --workload trace:FILE.
    """
    from syncline.errors import UsageError

    from ..report.files import STANDARD_OUTPUT, replace_text, result_paths

    if not module and not Path(script).is_file():
        raise UsageError(f"there is no file {script!r} to run (for a module, use -m)")
    (target,) = result_paths({"-o": output})
    from syncline.frameworks.torch.timing import Recorded, Recording, write_trace

    sys.argv = [script, *args]
    with Recording(steps, skip) as recording:
        try:
            if module:
                sys.path.insert(0, "")
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(script).parent))
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if not isinstance(end, Recorded) and end.code:
                raise
    if not recording.done:
        raise UsageError(
            f"the script ended after {recording.made} steps of its optimizer, but {steps} steps are measured after"
            f" the first {skip}: let it train longer, or lower --skip and --steps"
        )
    file = io.StringIO(newline="")
    write_trace(recording.layers, recording.h2d_s, file)
    replace_text(target or STANDARD_OUTPUT, file.getvalue())
    forward_s, backward_s = (
        sum(getattr(layer, what) for layer in recording.layers) for what in ("forward_s", "backward_s")
    )
    elements = sum(layer.spec.elements for layer in recording.layers)
    click.echo(
        f"{output}: {len(recording.layers)} tensors, {elements:,} elements; forward {1e3 * forward_s:.2f} ms, backward"
        f" {1e3 * backward_s:.2f} ms"
        + (f", copying to the device {1e3 * recording.h2d_s:.2f} ms" if recording.h2d_s else ""),
        err=target == STANDARD_OUTPUT,
    )
    if target != STANDARD_OUTPUT:
        click.echo(f"Replay it with: syncline compare --workload trace:{output} --workers 4")
