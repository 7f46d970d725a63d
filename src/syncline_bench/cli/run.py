"""The commands that run a script or another command, and the check before it."""

from __future__ import annotations

import io
import os
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ._options import FILE, JSON, TRACE

if TYPE_CHECKING:
    from syncline.launch.local import Outcome, Placing
    from syncline.launch.relay import Lines, Relay
    from syncline.strategy.strategy import Strategy
    from syncline.timeline.flight_memory import FlightMemory

_FLIGHT = "syncline-flight.json"

MODULE = click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
_VERBATIM = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""What follows the command's first argument is passed on as it is."""


def _check_script(script: str, module: bool) -> None:
    from syncline.errors import UsageError

    if not module and not Path(script).is_file():
        raise UsageError(f"there is no file {script!r} to run (for a module, use -m)")


@click.command(context_settings=_VERBATIM)
@click.option("-n", "--workers", type=click.IntRange(min=1), help="Number of workers; with --join: 1 if left out.")
@click.option("--servers", type=click.IntRange(min=0), help="Number of server processes; default: that of --strategy.")
@click.option("--strategy", help="Default strategy of syncline.init() in SCRIPT.")
@click.option(
    "--check", is_flag=True, help="First check this machine as syncline doctor does, and end if a check fails."
)
@click.option(
    "--tls",
    envvar="SYNCLINE_TLS",
    help="Encrypt the connections: on, or a folder with ca.pem, cert.pem and key.pem; with --join, as in the run.",
)
@click.option(
    "--metrics",
    metavar="[HOST:]PORT[,error=N]",
    envvar="SYNCLINE_METRICS",
    help="Serve Prometheus metrics, of rank 0 at PORT and of the others at the next ports; syncline top shows them.",
)
@click.option("--check-replicas", type=click.IntRange(min=0), metavar="N", help="Compare the weights every N steps.")
@click.option(
    "--check-finite", type=click.Choice(["on", "warn"]), help="End, or warn, at NaN or infinity in gradients."
)
@click.option(
    "--elastic",
    metavar="LEAST[:MOST]",
    help="Go on without workers that end early, while LEAST are left; with MOST, start new ones in their place, at most"
    " so many at once: for scripts with syncline.elastic(). SYNCLINE_ELASTIC is the default.",
)
@click.option(
    "--join",
    "where",
    metavar="HOST:PORT",
    help="Add the workers to a running syncline run --elastic LEAST:MOST, which has printed this address. Both need the"
    " same SYNCLINE_SECRET.",
)
@click.option(
    "--interface",
    metavar="NAME",
    envvar="SYNCLINE_INTERFACE",
    help="Network interface or address of this machine for the run's connections, where others also join it. Default:"
    " SYNCLINE_INTERFACE, else the loopback address; with --join, the address on the way to the run.",
)
@click.option(
    "--samples",
    "samples_path",
    type=FILE,
    metavar="FILE.jsonl",
    help="Write the samples of each committed step, and its workers, to this file: of samplers with global_batch=, and"
    " in elastic runs under asp and ssp.",
)
@TRACE
@click.option(
    "--flight",
    "flight_path",
    type=FILE,
    metavar="FILE.json",
    envvar="SYNCLINE_FLIGHT",
    default=_FLIGHT,
    show_default=True,
    help="Write who waited for whom to this file if the run ends badly while a process waits; off: keep no record.",
)
@MODULE
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int | None,
    servers: int | None,
    strategy: str | None,
    check: bool,
    tls: str | None,
    metrics: str | None,
    check_replicas: int | None,
    check_finite: str | None,
    elastic: str | None,
    where: str | None,
    interface: str | None,
    samples_path: Path | None,
    timeline_path: Path | None,
    flight_path: Path,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS in several worker processes (and server processes) on this machine.

    The exit status is that of the first process that failed.
    """
    from syncline.errors import UsageError
    from syncline.launch.local import here, launch

    if where is not None:
        _check_joining(servers, elastic, timeline_path, check_replicas, check_finite)
    elif workers is None:
        raise click.MissingParameter(param_hint="'-n' / '--workers'", param_type="option")
    workers = workers or 1
    env = {} if tls is None else {"SYNCLINE_TLS": tls}
    parsed: Strategy | None = None
    if strategy is not None:
        from syncline.nouns import Group
        from syncline.strategy.strategy import Strategy

        parsed = Strategy.parse(strategy)
        if servers is not None and servers != parsed.servers:
            raise UsageError(
                f"{str(parsed)!r} needs {parsed.servers} servers, but --servers is {servers}: leave it out"
            )
        servers = parsed.servers
        if where is None:
            parsed.resolve(Group(workers, servers))  # some strategies are impossible for some numbers of workers
        env["SYNCLINE_STRATEGY"] = str(parsed)
    relay = None if where is not None else _relay(workers, servers or 0, elastic, parsed)
    _check_script(script, module)
    if metrics:
        from syncline.metrics import VARIABLE, read_serving

        read_serving(metrics, "--metrics")
        env[VARIABLE] = metrics
    if check_replicas is not None:
        env["SYNCLINE_CHECK_REPLICAS"] = str(check_replicas)
    if check_finite is not None:
        env["SYNCLINE_CHECK_FINITE"] = check_finite
    servers = servers or 0
    if check:
        _check_machine(workers + servers)
    if samples_path is not None:
        env["SYNCLINE_SAMPLES"] = _new_log(samples_path)
    assembly = None
    if timeline_path is not None:
        from syncline.timeline.folder import Assembly

        assembly = Assembly(timeline_path)
        env |= assembly.environ()
    command = [sys.executable, *(["-m"] if module else []), script, *args]
    flight = _flight_memory(flight_path, 1 if where is not None else workers + servers)
    env |= flight.environ()
    lines: Lines | None = relay
    address: str | None
    if where is not None:
        lines, address = _guest(where, workers, interface, tls)
    else:
        address = _received(relay, interface, tls, traced=assembly is not None)
    env |= {} if interface is None else {"SYNCLINE_INTERFACE": interface}
    place = here if address is None else _at(address)
    outcome = launch(
        command, workers + servers, servers=servers, env=env, pass_fds=flight.fds, relay=lines, place=place
    )
    if assembly is not None:
        click.echo(f"syncline: {assembly.finish()}", err=True)
    if any(ending.status for ending in outcome.endings):
        went_on = "" if outcome.status else "; the run went on"
        click.echo(f"syncline: {outcome.text}{went_on}", err=True)
    if outcome.status:
        _keep_flight(flight, flight_path, outcome, renumbered=relay is not None and relay.renumbered)
    flight.close()
    sys.exit(outcome.status)


@click.command(context_settings=_VERBATIM)
@MODULE
@click.argument("log", type=FILE)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def repeat(log: Path, module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGS in one process that makes the steps of LOG, the file of an earlier syncline run --samples.

    Each step has the samples and the workers of the log, one worker after another, and adds their gradients in the
    order of the run. The weights show whether the run has lost or repeated anything.
    """
    from syncline.global_batches import read_log
    from syncline.launch.environment import REPEATS
    from syncline.launch.local import launch

    _check_script(script, module)
    read_log(str(log))
    command = [sys.executable, *(["-m"] if module else []), script, *args]
    sys.exit(launch(command, 1, env={REPEATS: str(log.resolve())}).status)


def _new_log(path: Path) -> str:
    """Make an empty file for the samples of a run; its absolute name."""
    from ..report.files import checked, replace_text

    checked(path)
    replace_text(path, "")
    return str(path.resolve())


def _relay(workers: int, servers: int, elastic: str | None, strategy: Strategy | None) -> Relay | None:
    """The relay of an elastic run. UsageError for numbers, and NotBuiltError for a strategy, that cannot work."""
    from syncline.errors import UsageError
    from syncline.launch.relay import VARIABLE, Relay, read_range, text_of_user

    name = "--elastic" if elastic is not None else f"{VARIABLE}:"
    elastic = text_of_user() or None if elastic is None else elastic
    if elastic is None:
        return None
    least, most = read_range(elastic, name)
    if strategy is not None or servers:  # each process checks that of its script
        from syncline.strategy.strategy import Strategy, check_elastic

        check_elastic(strategy or Strategy.parse(f"ps(servers={servers}, replicas=1)"), least)
    if least > workers:
        raise UsageError(f"--elastic {elastic} needs {least} workers, more than -n {workers} starts")
    if most is not None and most < workers:
        raise UsageError(f"--elastic {elastic} allows {most} workers at once, fewer than -n {workers} starts")
    return Relay(workers + servers, least, most, servers)


def _check_joining(*given: object) -> None:
    """Raise UsageError for options that a launcher decides whose run others join."""
    from syncline.errors import UsageError

    names = ("--servers", "--elastic", "--trace", "--check-replicas", "--check-finite")
    if wrong := [name for name, value in zip(names, given, strict=True) if value is not None]:
        raise UsageError(f"{wrong[0]} belongs to the launcher whose run these workers join: leave it out with --join")


def _guest(where: str, workers: int, interface: str | None, tls: str | None) -> tuple[Lines, str]:
    """The lines of workers that join the run at an address, and this machine's address in it."""
    from syncline.errors import UsageError
    from syncline.launch.address import interface_address
    from syncline.launch.joining import Guest

    secret = os.environ.get("SYNCLINE_SECRET")
    if not secret:
        raise UsageError("--join needs the secret of the run: set SYNCLINE_SECRET to the same text as there")
    guest = Guest.ask(where, workers, secret, tls)
    return guest, guest.address if interface is None else interface_address(interface)


def _received(relay: Relay | None, interface: str | None, tls: str | None, traced: bool) -> str | None:
    """Let other launchers join an elastic run, if it has a secret that they can know.

    Returns the address at which its workers meet, or None for the default.
    """
    from syncline.launch.address import interface_address
    from syncline.launch.joining import Reception

    secret = os.environ.get("SYNCLINE_SECRET")
    if relay is None or not relay.may_grow or not secret:
        return None
    address = interface_address(interface or "127.0.0.1")
    refuses = "it writes a timeline (--trace), which others cannot join" if traced else ""
    reception = relay.reception = Reception(relay, secret, address, refuses, tls)
    relay.shared = {"SYNCLINE_SECRET": secret}
    click.echo(f"syncline: more workers join by: syncline run --join {reception.place} ...", err=True)
    return address


def _at(address: str) -> Placing:
    """Ranks on this machine that meet at an address of it."""
    from syncline.launch.local import Placement
    from syncline.wire.listener import bind_here

    placement = Placement(bind=partial(bind_here, address))
    return lambda _: placement


def _flight_memory(path: Path, processes: int) -> FlightMemory:
    """The memory for the flight records of a run. It is empty if the user wants none, or for a single process."""
    from syncline.timeline.flight_memory import OFF, FlightMemory, flight_target

    from ..report.files import checked

    if str(path) == OFF or processes == 1:
        return FlightMemory(0)
    flight_target(path)  # raises UsageError
    if str(path) != _FLIGHT:  # a run in a folder that cannot be written needs no record
        checked(path)
    return FlightMemory(processes)


def _keep_flight(memory: FlightMemory, path: Path, outcome: Outcome, renumbered: bool) -> None:
    """Write the flight record of a failed run if it tells something. Prints the file and the verdict.

    If there is none, it says so only where a file of an earlier run could be taken for it.
    """
    from syncline.errors import UsageError
    from syncline.timeline.flight import dump

    from ..report.files import replace_text

    ended = {ending.rank: ending.how for ending in outcome.endings if ending.status and not ending.told}
    culprit = -1 if outcome.culprit is None else outcome.culprit[0]
    # The record has ranks, the launcher has numbers of processes: those of an elastic run may differ.
    record = memory.record(-1, {}) if renumbered else memory.record(culprit, ended)
    if record is None or not record.tells:
        if memory.fds and path.exists():
            click.echo(f"syncline: nobody waited, so there is no flight record; {path} is of an earlier run", err=True)
        return
    try:
        replace_text(path, dump(record))
        where = f"flight record: {path}"
    except UsageError as error:
        where = f"no flight record: {error}"
    click.echo(f"syncline: {where}\nsyncline: {record.verdict}", err=True)


def _check_machine(processes: int) -> None:
    """Print the warnings and failures of ``syncline doctor``. A failure ends the command: the run could not work."""
    from rich.console import Console

    from ..doctor.checks import before_run
    from ..doctor.command import show

    found = before_run(processes)
    if found:
        show(found, Console(stderr=True))
    if any(one.status == "fail" for one in found):
        click.echo("syncline: a check failed, so the script was not started; leave --check out to start it", err=True)
        sys.exit(1)


@click.command()
@click.option("-n", "--workers", type=click.IntRange(min=1), help="Check a job of this number of ranks, started here.")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True,
    help="Seconds for all ranks of a job to come.",
)  # fmt: skip
@JSON
def doctor(**options: Any) -> None:
    """Check this machine, or under a launcher the hosts of a job pairwise, and name faults with their remedies.

    The exit status is 1 if a check fails: a run could not work. Warnings do not change it.
    """
    from ..doctor import command

    sys.exit(command.run(**options))


@click.command(context_settings=_VERBATIM)
@click.option("-o", "--output", default="trace.csv", show_default=True, help="The file to write.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Training steps to measure.")
@click.option("--skip", type=click.IntRange(min=1), default=5, show_default=True, help="First steps to exclude.")
@MODULE
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def record(output: str, steps: int, skip: int, module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run the training SCRIPT with ARGS, unchanged and on one worker, and write the times of its model's layers.

    The script ends as soon as the times are known. Use the file as --workload trace:FILE.
    """
    from syncline.errors import UsageError

    from ..report.files import STANDARD_OUTPUT, replace_text, result_paths

    _check_script(script, module)
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
    write_trace(recording, file)
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


@click.command(context_settings=_VERBATIM)
@click.option("--hosts", type=click.IntRange(min=1), default=4, show_default=True, help="Number of hosts.")
@click.option(
    "--rate", default="1gbit", show_default=True, help="Rate of every host's link in each direction; none: no limit."
)
@click.option("--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on every host.")
@click.option("--strategy", help="Default strategy of syncline.init() in COMMAND; servers are the last ranks.")
@click.option("--mpi", type=click.Choice(["openmpi", "mpich"]), help="Start COMMAND as a job of this MPI library.")
@click.option("--name", help="Name of the lab; default: the first free one of lab0, lab1, ...")
@click.option(
    "--timeout", "timeout_s", type=click.FloatRange(min=0, min_open=True), help="Seconds after which all processes end."
)
@click.option("--list", "listing", is_flag=True, help="Only show the labs of this machine.")
@click.option("--clean", is_flag=True, help="Only remove the remains of killed labs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def lab(
    hosts: int,
    rate: str,
    per_host: int,
    strategy: str | None,
    listing: bool,
    clean: bool,
    command: tuple[str, ...],
    **options: Any,
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
    given = read_value(rate, Rate | None, "--rate")
    sys.exit(job.run(command, hosts=hosts, rate=given, per_host=per_host, servers=servers, env=env, **options))
