"""The command line: ``syncline run``, ``compare``, ``bench``, ``predict``, ``show`` and so on, a file for each kind.

Owns the options, help texts and exit statuses. A command imports its implementation when it is called, so ``--help``
loads neither numpy nor a framework. An error of Syncline is printed as one message without a traceback. The exit
status is 2 for a usage error, 1 for any other error and 130 after Ctrl-C.
"""

from __future__ import annotations

from typing import Any

import click

from . import bench, predict, run, show, trainings
from ._options import Verbs

INTERRUPTED = 130


class _Verbs(Verbs):
    """The group of all commands, which prints Syncline's errors and sets the exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("syncline: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            from syncline.errors import SynclineError, UsageError

            if not isinstance(error, SynclineError):
                raise
            click.echo(f"syncline: {error}", err=True)
            ctx.exit(2 if isinstance(error, UsageError) else 1)


def _version(ctx: click.Context, option: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        from syncline import __version__

        click.echo(f"syncline {__version__}")
        ctx.exit()


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """Run, compare, tune and predict distributed training under many ways to exchange gradients."""


for verb in (
    *(run.run, run.repeat, run.doctor, run.record, run.lab),
    *(trainings.compare, trainings.accuracy, trainings.tune),
    *(bench.bench, bench.calibrate),
    *(predict.predict, predict.reproduce, predict.explain),
    *(show.show, show.strategies, show.timeline, show.flight, show.top),
):
    cli.add_command(verb)


def main() -> None:
    """Run the command line as the installed script ``syncline``."""
    cli(prog_name="syncline")
