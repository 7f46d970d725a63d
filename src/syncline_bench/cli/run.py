"""The command ``syncline run``: starts a script in several processes of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ._options import TRACE


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--workers", type=click.IntRange(min=1), required=True, help="Number of workers.")
@click.option("--servers", type=click.IntRange(min=0), help="Number of server processes; default: that of --strategy.")
@click.option("--strategy", help="Default strategy of syncline.init() in SCRIPT.")
@TRACE
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int,
    servers: int | None,
    strategy: str | None,
    trace: Path | None,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS in several worker processes (and server processes) on this machine.

    The exit status is that of the first process that failed.
    """
    from syncline.errors import UsageError
    from syncline.launch.local import launch

    env = {}
    if strategy is not None:
        from syncline.nouns import Group
        from syncline.strategy.strategy import Strategy

        parsed = Strategy.parse(strategy)
        if servers is not None and servers != parsed.servers:
            raise UsageError(f"{str(parsed)!r} needs {parsed.servers} servers, --servers is {servers}: leave it out")
        servers = parsed.servers
        parsed.resolve(Group(workers, servers))  # some strategies are impossible for some numbers of workers
        env["SYNCLINE_STRATEGY"] = str(parsed)
    if not module and not Path(script).is_file():
        raise UsageError(f"there is no file {script!r} to run (for a module, use -m)")
    servers = servers or 0
    assembly = None
    if trace is not None:
        from syncline.timeline.folder import Assembly

        assembly = Assembly(trace)
        env |= assembly.environ()
    command = [sys.executable, *(["-m"] if module else []), script, *args]
    outcome = launch(command, workers + servers, servers=servers, env=env)
    if assembly is not None:
        click.echo(f"syncline: {assembly.finish()}", err=True)
    if outcome.status:
        click.echo(f"syncline: {outcome.text}", err=True)
    sys.exit(outcome.status)
