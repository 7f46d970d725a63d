"""The command line: ``syncline run | compare | accuracy | bench | bench-codecs | lab | show | strategies``.

Owns options, their texts and exit statuses, and nothing else: each verb imports what does the work when it is called,
so that ``--help`` loads neither numpy nor a framework. Errors that Syncline raises on purpose are printed as one
message: status 2 for a user's mistake, 1 for what went wrong later, 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from .nouns import Group
    from .strategy.grammar import Part

INTERRUPTED = 130


class _Verbs(click.Group):
    """A group whose verbs may raise any of Syncline's errors."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("syncline: interrupted", err=True)
            ctx.exit(INTERRUPTED)
        except Exception as error:
            from .errors import SynclineError, UsageError

            if not isinstance(error, SynclineError):
                raise
            click.echo(f"syncline: {error}", err=True)
            ctx.exit(2 if isinstance(error, UsageError) else 1)


class _Lists(click.Command):
    """A command whose ``multiple`` options take all values up to the next option: ``--ranks 2 4``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        lists = {
            name
            for option in self.params
            if isinstance(option, click.Option) and option.multiple
            for name in option.opts
        }
        return super().parse_args(ctx, spread(args, lists))


def spread(args: Sequence[str], lists: Iterable[str]) -> list[str]:
    """``--o a b`` as ``--o a --o b`` for the options in ``lists``, up to ``--``."""
    names = set(lists)
    found: list[str] = []
    option: str | None = None  # the list that is open
    fresh = False  # it has no value yet
    for position, arg in enumerate(args):
        if arg == "--":
            return found + list(args[position:])
        if arg.startswith("-"):
            head, has_value, _ = arg.partition("=")
            option, fresh = (head, not has_value) if head in names else (None, False)
        elif option is not None:
            if not fresh:
                found.append(option)
            fresh = False
        found.append(arg)
    return found


def _version(ctx: click.Context, option: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value and not ctx.resilient_parsing:
        from . import __version__

        click.echo(f"syncline {__version__}")
        ctx.exit()


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """Every way to exchange gradients, for real, under one interface, side by side."""


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("-n", "--workers", type=click.IntRange(min=1), required=True, help="Workers to start.")
@click.option(
    "--servers", type=click.IntRange(min=0), help="Server processes to start beside them; from --strategy if left out."
)
@click.option("--strategy", help="What syncline.init() takes when the script does not say.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as with python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: int, servers: int | None, strategy: str | None, module: bool, script: str, args: tuple[str, ...]
) -> None:
    """Run SCRIPT with ARGS in WORKERS processes of this machine (and servers, after them).

    The exit status is that of the first process that failed.
    """
    from .errors import UsageError
    from .launch.local import launch

    env = {}
    if strategy is not None:
        from .nouns import Group
        from .strategy.strategy import Strategy

        parsed = Strategy.parse(strategy)
        if servers is not None and servers != parsed.servers:
            raise UsageError(f"{str(parsed)!r} needs {parsed.servers} servers, --servers says {servers}: leave it out")
        servers = parsed.servers
        parsed.resolve(Group(workers, servers))  # some are impossible for so many workers only
        env["SYNCLINE_STRATEGY"] = str(parsed)
    if not module and not Path(script).is_file():
        raise UsageError(f"there is no file {script!r} to run (for a module, use -m)")
    servers = servers or 0
    command = [sys.executable, *(["-m"] if module else []), script, *args]
    outcome = launch(command, workers + servers, servers=servers, env=env)
    if outcome.status:
        click.echo(f"syncline: {outcome.text}", err=True)
    sys.exit(outcome.status)


@cli.command(cls=_Lists)
@click.option(
    "--workload",
    default="digits",
    show_default=True,
    help="digits, cifar10:PATH, synthetic:alexnet, replay:googlenet, trace:FILE.csv, ...",
)
@click.option("--workers", type=click.IntRange(min=1), default=4, show_default=True, help="Workers of every strategy.")
@click.option(
    "--strategies",
    multiple=True,
    default=("ring", "ps(servers=1)"),
    show_default=True,
    metavar="TEXT...",
    help="Strategies to compare, each quoted (see `syncline strategies`), and peers: ddp, ddp(bucket=5MiB, hook=fp16).",
)
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data; default: the workload's.")
@click.option("--iterations", type=click.IntRange(min=1), help="Training steps, instead of --epochs.")
@click.option("--batch", type=click.IntRange(min=1), help="Batch size; default and meaning: the workload's.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights and the order of the data.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--report", "report_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a page here.")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds a row may be silent.")
@click.option("--lab", metavar="RATE", help="Give every process a host of its own behind links of RATE, such as 1Gbit.")
def compare(
    workload: str,
    workers: int,
    strategies: tuple[str, ...],
    epochs: int | None,
    iterations: int | None,
    batch: int | None,
    seed: int,
    json_path: Path | None,
    report_path: Path | None,
    timeout: float | None,
    lab: str | None,
) -> None:
    """Train one workload on a single worker and under every strategy, side by side."""
    if epochs is not None and iterations is not None:
        raise click.UsageError("--epochs and --iterations exclude each other")
    from .bench import compare as bench

    status = bench.run(
        workload,
        workers,
        strategies,
        epochs=epochs,
        iterations=iterations,
        batch=batch,
        seed=seed,
        json_path=json_path,
        report_path=report_path,
        timeout=timeout,
        lab=lab,
    )
    sys.exit(status)


@cli.command(cls=_Lists)
@click.option("--workload", default="digits", show_default=True, help="One with a test set: digits or cifar10:PATH.")
@click.option("--workers", type=click.IntRange(min=2), default=4, show_default=True, help="Workers of every training.")
@click.option("--seeds", multiple=True, metavar="N...", help="Of weights and order of the data; default: 0 1 2.")
@click.option(
    "--codecs", multiple=True, metavar="TEXT...",
    help="What to train with, such as int8 topk(ratio=0.01) feedback(onebit); default: every codec, and with feedback.",
)  # fmt: skip
@click.option(
    "--strategies", multiple=True, metavar="TEXT...",
    help="Whole strategies instead, each quoted, as compare takes them, and single: one worker, beside which the others"
    " then stand.",
)  # fmt: skip
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the data; default: the workload's.")
@click.option("--iterations", type=click.IntRange(min=1), help="Training steps, instead of --epochs.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option(
    "--markdown", "markdown_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the table here."
)
@click.option("--report", "report_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a page here.")
@click.option(
    "--resume", "resume_path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keep this file's trainings, run the others, and write them to it (or to --json).",
)  # fmt: skip
def accuracy(
    workload: str,
    workers: int,
    seeds: tuple[str, ...],
    codecs: tuple[str, ...],
    strategies: tuple[str, ...],
    epochs: int | None,
    iterations: int | None,
    json_path: Path | None,
    markdown_path: Path | None,
    report_path: Path | None,
    resume_path: Path | None,
) -> None:
    """Train one workload with every codec, or under strategies, from several seeds, and show what accuracy is left."""
    if epochs is not None and iterations is not None:
        raise click.UsageError("--epochs and --iterations exclude each other")
    from .bench import accuracy as table
    from .strategy.grammar import read_list, read_value

    status = table.run(
        workload,
        workers,
        [read_value(seed, int, "--seeds") for seed in read_list(seeds)] or table.SEEDS,
        read_list(codecs),
        strategies,
        epochs=epochs,
        iterations=iterations,
        json_path=json_path,
        markdown_path=markdown_path,
        report_path=report_path,
        resume_path=resume_path,
    )
    sys.exit(status)


@cli.command(cls=_Lists)
@click.option("--collective", default="allreduce", show_default=True, help="Or reduce-scatter, all-gather, broadcast.")
@click.option(
    "--sizes", multiple=True, metavar="SIZE...", help="Bytes of the array: 1KB,60.97MB; default: 1KB to 256MB."
)
@click.option("--ranks", multiple=True, metavar="N...", help="Numbers of ranks: 2,4; default: 2,4, and 4 in a lab.")
@click.option(
    "--with", "contenders", multiple=True, metavar="TRANSPORT:ALGORITHM...",
    help="What to compare: strategies such as shm:auto,tcp:ring and peers such as gloo:native,mpi:native,mpi:ring.",
)  # fmt: skip
@click.option("--lab", metavar="RATE", help="One rank per host of a lab with links of RATE, such as 1gbit; needs root.")
@click.option("--repetitions", type=click.IntRange(min=1), help="Of every size; default: 60, 20 or 9 by size.")
@click.option("--goals", is_flag=True, help="Measure what the table of goals needs, and print it.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option(
    "--resume", "resume_path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keep this file's rows, measure the others, and write them to it (or to --json).",
)  # fmt: skip
@click.option("--report", "report_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a page here.")
def bench(
    collective: str,
    sizes: tuple[str, ...],
    ranks: tuple[str, ...],
    contenders: tuple[str, ...],
    lab: str | None,
    repetitions: int | None,
    goals: bool,
    json_path: Path | None,
    resume_path: Path | None,
    report_path: Path | None,
) -> None:
    """Measure collectives beside what one would use instead, all contenders taking turns in the same processes."""
    if goals and (ranks or contenders or lab or repetitions or collective != "allreduce"):
        raise click.UsageError("--goals says itself what is measured: it goes with --sizes and the files only")
    from .bench.collectives import command, request
    from .nouns import Rate, Size
    from .strategy.grammar import read_list, read_value

    nbytes = [read_value(size, Size, "--sizes") for size in read_list(sizes)]
    if goals:
        requests = command.goal_requests(nbytes)
    else:
        asked = request.request_of(
            sizes=nbytes,
            ranks=[read_value(count, int, "--ranks") for count in read_list(ranks)],
            contenders=read_list(contenders),
            kind=collective,
            lab_rate=None if lab is None else read_value(lab, Rate, "--lab"),
            repetitions=repetitions,
        )
        requests = [asked]
    status = command.run(requests, json_path=json_path, resume_path=resume_path, report_path=report_path, goals=goals)
    sys.exit(status)


@cli.command("bench-codecs", cls=_Lists)
@click.option(
    "--elements", type=click.IntRange(min=1), default=15_242_500, show_default=True, help="Size of the float32 array."
)
@click.option(
    "--codecs", multiple=True, metavar="TEXT...",
    help="What to measure, such as int8 topk(ratio=0.01) feedback(onebit); default: every codec, and with feedback.",
)  # fmt: skip
@click.option("--repetitions", type=click.IntRange(min=1), default=5, show_default=True, help="Of every row.")
@click.option(
    "--workers", type=click.IntRange(min=2), default=4, show_default=True, help="Ranks of the allreduce to speed up."
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
def bench_codecs(
    elements: int, codecs: tuple[str, ...], repetitions: int, workers: int, json_path: Path | None
) -> None:
    """Measure what every codec costs on one core, and say below which link speed it makes an allreduce faster."""
    from .bench.codecs import command
    from .strategy.grammar import read_list

    command.run(elements, read_list(codecs), repetitions=repetitions, workers=workers, json_path=json_path)


@cli.command("bench-gradients", cls=_Lists)
@click.option(
    "--workloads", multiple=True, metavar="TEXT...",
    help="Whose networks; default: synthetic:alexnet synthetic:googlenet synthetic:resnet50.",
)  # fmt: skip
@click.option("--ranks", multiple=True, metavar="N...", help="Numbers of ranks; 1 is the copies alone; default: 1,2.")
@click.option(
    "--with", "forms", multiple=True, metavar="FORM...",
    help="What to compare: contiguous, placed, accumulated, copied:mul, copied:foreach, copied:cat, "
    "copied:flatten, layerwise:all, layerwise:one; default: all.",
)  # fmt: skip
@click.option("--repetitions", type=click.IntRange(min=1), default=15, show_default=True, help="Of every row.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path), help="Write the results here.")
@click.option("--report", "report_path", type=click.Path(dir_okay=False, path_type=Path), help="Write a page here.")
def bench_gradients(
    workloads: tuple[str, ...],
    ranks: tuple[str, ...],
    forms: tuple[str, ...],
    repetitions: int,
    json_path: Path | None,
    report_path: Path | None,
) -> None:
    """Measure what gradients cost that are copied together and back, beside buckets that are their memory."""
    from .bench.gradients import command, request
    from .strategy.grammar import read_list, read_value

    asked = request.request_of(
        workloads=read_list(workloads),
        ranks=[read_value(count, int, "--ranks") for count in read_list(ranks)],
        forms=read_list(forms),
        repetitions=repetitions,
    )
    sys.exit(command.run(asked, json_path=json_path, report_path=report_path))


@cli.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--hosts", type=click.IntRange(min=1), default=4, show_default=True, help="Hosts to make.")
@click.option("--rate", default="1gbit", show_default=True, help="Of every host's link, each way; none: unshaped.")
@click.option("--per-host", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks on every host.")
@click.option("--strategy", help="What syncline.init() takes when COMMAND does not say; servers are the last ranks.")
@click.option("--mpi", type=click.Choice(["openmpi", "mpich"]), help="Start COMMAND as a job of this MPI library.")
@click.option("--name", help="What the lab is called; default: the first free one of lab0, lab1, ...")
@click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds until everything is ended.")
@click.option("--list", "listing", is_flag=True, help="Show the labs of this machine and end.")
@click.option("--clean", is_flag=True, help="Remove what killed labs left behind and end.")
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
    """Run COMMAND on hosts of its own: network namespaces joined by links of a chosen rate. Needs root.

    The exit status is that of the first process that failed.
    """
    from .lab import job
    from .nouns import Group, Rate
    from .strategy.grammar import read_value

    if listing or clean:
        if command:
            raise click.UsageError("--list and --clean take no command")
        job.show_labs() if listing else job.clean()
        return
    if not command:
        raise click.UsageError("there is no command to run: syncline lab --hosts 4 -- COMMAND ARGS...")
    env, servers = {}, 0
    if strategy is not None:
        from .strategy.strategy import Strategy

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


@cli.command()
@click.argument("algorithm")
@click.option("--ranks", type=click.IntRange(min=1), help="Workers; default: those of --nodes, else 4.")
@click.option("--nodes", help="Workers of each node: 2x4 is two nodes of four, or 4,4,2.")
@click.option("--servers", type=click.IntRange(min=1), help="Short for ps(servers=...).")
def show(algorithm: str, ranks: int | None, nodes: str | None, servers: int | None) -> None:
    """Draw the plan of ALGORITHM, such as ring, "ps(servers=2)" or broadcast."""
    from .report.draw import draw_plan
    from .strategy.parts import bind, build

    part = _planned(algorithm)
    if servers is not None:
        part = type(part)(part.name, (*part.args, ("servers", servers)))
    part = bind("algorithms", part)
    own = part.arguments.get("servers", 0) if part.arguments.get("on", "ranks") == "ranks" else 0
    click.echo(draw_plan(build("algorithms", part, _group(ranks, nodes, own))))


@cli.command()
def strategies() -> None:
    """List every word that a strategy may say."""
    from .strategy.words import vocabulary

    words = vocabulary()
    for word in dict.fromkeys(item.word for item in words):
        click.secho(word, bold=True)
        for item in words:
            if item.word == word and item.built:
                click.echo(f"  {item.text}\n      {item.summary}" if item.summary else f"  {item.text}")
        later = [item.text for item in words if item.word == word and not item.built]
        if later:
            click.echo(f"  not built yet: {', '.join(later)}")


def _planned(text: str) -> Part:
    """The algorithm that a text names, or the architecture of a whole strategy; UsageError when it has no plan."""
    from . import registry
    from .errors import UsageError
    from .strategy.grammar import read_words
    from .strategy.strategy import Strategy
    from .strategy.words import built_names, known_as

    words = read_words(text)
    part = words[0][1] if len(words) == 1 and not words[0][0] else Strategy.parse(text).architecture
    names = ", ".join(name for name in built_names("architecture") if name not in registry.names("collectives"))
    if part.name == "auto":
        raise UsageError(
            "auto has no plan of its own: which algorithm runs at which size is measured when a run starts, and"
            f" syncline.stats().algorithms says it; show one of {names}"
        )
    if part.name in registry.names("collectives"):
        raise UsageError(f"{part.name} has no plan: what the library sends is its own affair; show one of {names}")
    plain = part.name.replace("-", "_")  # as bench --collective writes them
    if part.name not in registry.names("algorithms") and plain in registry.names("algorithms"):
        part = type(part)(plain, part.args)
    if part.name not in registry.names("algorithms") and (remedy := known_as("architecture", part.name)):
        raise UsageError(f"unknown algorithm {part.name!r}{remedy}")
    registry.get("algorithms", part.name)
    return part


def _group(ranks: int | None, nodes: str | None, servers: int) -> Group:
    """The group to draw; raises UsageError when --ranks and --nodes disagree."""
    from .errors import UsageError
    from .nouns import Group

    if nodes is None:
        return Group(4 if ranks is None else ranks, servers)
    try:
        if "x" in nodes:
            count, each = nodes.split("x")
            sizes = [int(each)] * int(count)
        else:
            sizes = [int(size) for size in nodes.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise UsageError(f"--nodes must look like 2x4 or 4,4,2, got {nodes!r}")
    if ranks is not None and ranks != sum(sizes):
        raise UsageError(f"--ranks {ranks} and --nodes {nodes} disagree: the nodes have {sum(sizes)} workers")
    return Group(sum(sizes), servers, tuple(node for node, size in enumerate(sizes) for _ in range(size)))


def main() -> None:
    """The entry point of the installed script."""
    cli(prog_name="syncline")
