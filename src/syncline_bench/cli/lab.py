"""The command ``syncline lab``: its options and help texts."""

from __future__ import annotations

import sys

import click


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--hosts", type=click.IntRange(min=1), default=4, show_default=True, help="Number of hosts.")
@click.option(
    "--rate", default="1gbit", show_default=True, help="Rate of every host's link in each direction; none: no limit."
)
@click.option("--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on every host.")
@click.option("--strategy", help="Default strategy of syncline.init() in COMMAND; servers are the last ranks.")
@click.option("--mpi", type=click.Choice(["openmpi", "mpich"]), help="Start COMMAND as a job of this MPI library.")
@click.option("--name", help="Name of the lab; default: the first free one of lab0, lab1, ...")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds after which all processes end.")
@click.option("--list", "listing", is_flag=True, help="Only show the labs of this machine.")
@click.option("--clean", is_flag=True, help="Only remove the remains of killed labs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def lab(
    hosts: int,
    rate: str,
    per_host: int,
    strategy: str | None,
    mpi: str | None,
    name: str | None,
    timeout: float | None,
    listing: bool,
    clean: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND on simulated hosts: network namespaces joined by links of a chosen rate. Needs root.

    The exit status is that of the first process that failed.
    """
    from syncline.nouns import Group, Rate
    from syncline.strategy.grammar import read_value

    from ..lab import job

    if listing or clean:
        if command:
            raise click.UsageError("--list and --clean take no command")
        job.show_labs() if listing else job.clean()
        return
    if not command:
        raise click.UsageError("there is no command to run: syncline lab --hosts 4 -- COMMAND ARGS...")
    env, servers = {}, 0
    if strategy is not None:
        from syncline.strategy.strategy import Strategy

        parsed = Strategy.parse(strategy)
        servers = parsed.servers
        if servers < hosts * per_host:
            nodes = tuple(rank // per_host for rank in range(hosts * per_host - servers))
            parsed.resolve(Group(len(nodes), servers, nodes), hosts=hosts)
        env["SYNCLINE_STRATEGY"] = str(parsed)
    status = job.run(
        command,
        hosts=hosts,
        rate=read_value(rate, Rate | None, "--rate"),
        per_host=per_host,
        servers=servers,
        name=name,
        mpi=mpi,
        env=env,
        timeout_s=timeout,
    )
    sys.exit(status)
