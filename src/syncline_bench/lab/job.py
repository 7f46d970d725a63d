"""Runs ``syncline lab``: creates a lab, runs a command on every host and removes the lab.

Owns the output. ``lab`` makes the hosts and reacts to signals, and ``launch.local`` starts and ends the processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

from syncline.errors import UsageError
from syncline.launch.local import Outcome, launch
from syncline.nouns import Rate
from syncline.strategy.grammar import write_value

from .lab import Lab
from .namespaces import check_able, end_marked
from .records import Record, Registry


def run(
    command: Sequence[str],
    *,
    hosts: int,
    rate: Rate | None,
    per_host: int = 1,
    servers: int = 0,
    name: str | None = None,
    mpi: str | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> int:
    """Run ``per_host`` processes of ``command`` on every host. Returns the status of the first that failed.

    The last ``servers`` processes are servers. With ``mpi`` (openmpi or mpich), that library's launcher starts the
    processes and prints their output. After ``timeout_s`` all processes end, and the status is 124.
    """
    ranks = hosts * per_host
    if not 0 <= servers < ranks:
        raise UsageError(f"{servers} servers among {ranks} processes leave no worker: make more hosts")
    if mpi is not None and servers:
        raise UsageError("an MPI job has no server processes: leave --mpi out, or use ps(on=workers)")
    with Lab(hosts, rate, name) as lab:
        if mpi is None:
            outcome = launch(
                command,
                ranks,
                servers=servers,
                env=env,
                on_output=_Printer([_label(lab, rank, per_host) for rank in range(ranks)]),
                place=lambda rank: lab.placement(rank, per_host),
                timeout_s=timeout_s,
            )
        else:
            argv, settings = lab.mpi_command(ranks, command, mpi, per_host)
            outcome = launch(argv, 1, env={**(env or {}), **settings}, ranked=False, timeout_s=timeout_s)
    _report(outcome, mpi)
    return outcome.status


def show_labs() -> None:
    """Print a line on each lab of this machine, dead ones included."""
    for record in Registry().labs():
        click.echo(describe(record))


def clean() -> None:
    """Remove the processes and records of dead labs, and print their names."""
    check_able()
    for name in Registry().clean(end_marked):
        click.echo(f"removed {name}")


def describe(record: Record) -> str:
    """A line about a lab: its name, hosts, rate and owner."""
    state = f"process {record.owner.pid}" if record.owner.alive else "dead: --clean removes it"
    rate = write_value(None if record.rate is None else Rate(record.rate), Rate | None)
    return f"{record.name}: {record.hosts} hosts, rate {rate}, {state}"


class _Printer:
    """Prints the output of the ranks, each line after the name of its host."""

    def __init__(self, labels: Sequence[str]) -> None:
        width = max(map(len, labels))
        self._labels = [click.style(f"{label:{width}} | ", dim=True) for label in labels]

    def __call__(self, rank: int, line: str) -> None:
        click.echo(self._labels[rank] + line)


def _label(lab: Lab, rank: int, per_host: int) -> str:
    host, local = divmod(rank, per_host)
    return lab.host_name(host) if per_host == 1 else f"{lab.host_name(host)}.{local}"


def _report(outcome: Outcome, mpi: str | None) -> None:
    if outcome.status:
        text = outcome.text if mpi is None else f"the MPI job ended with status {outcome.status}"
        click.echo(f"syncline: {text}", err=True)
