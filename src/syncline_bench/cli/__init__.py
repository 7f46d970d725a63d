"""The command line, a file per verb: ``syncline run``, ``compare``, ``bench``, ``show`` and so on.

Owns options, their texts and exit statuses, and nothing else: a verb imports what does the work when it is called, so
that ``--help`` loads neither numpy nor a framework. Errors that Syncline raises on purpose are printed as one
message: status 2 for a user's mistake, 1 for what went wrong later, 130 after Ctrl-C.
"""

from __future__ import annotations

from typing import Any

import click

from . import (
    accuracy,
    bench,
    calibrate,
    compare,
    lab,
    predict,
    record,
    reproduce,
    run,
    show,
    strategies,
    timeline,
    tune,
)
from ._options import Verbs

INTERRUPTED = 130


class _Verbs(Verbs):
    """A group whose verbs may raise any of Syncline's errors."""

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
    """Every way to exchange gradients, for real, under one interface, side by side."""


for verb in (
    run.run,
    compare.compare,
    accuracy.accuracy,
    bench.bench,
    calibrate.calibrate,
    lab.lab,
    predict.predict,
    record.record,
    reproduce.reproduce,
    show.show,
    strategies.strategies,
    timeline.timeline,
    tune.tune,
):
    cli.add_command(verb)


def main() -> None:
    """The entry point of the installed script."""
    cli(prog_name="syncline")
