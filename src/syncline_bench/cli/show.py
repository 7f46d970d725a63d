"""The commands that show something: ``syncline show``, ``strategies``, ``timeline``, ``flight`` and ``top``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import dumps
from typing import TYPE_CHECKING

import click

from ._options import FILE, MOST_RANKS, REPORT, node_sizes

if TYPE_CHECKING:
    from syncline.nouns import Group
    from syncline.strategy.grammar import Part


@click.command()
@click.argument("algorithm")
@click.option(
    "--ranks", type=click.IntRange(1, MOST_RANKS), help="Number of workers; default: that of --nodes, else 4."
)
@click.option("--nodes", help="Workers of each node: 2x4 is two nodes of four, or 4,4,2.")
@click.option("--servers", type=click.IntRange(1, MOST_RANKS), help="Short for ps(servers=...).")
@click.option("--svg", type=FILE, help="Write a picture of all transfers to this file, instead.")
def show(algorithm: str, ranks: int | None, nodes: str | None, servers: int | None, svg: Path | None) -> None:
    """Draw the plan of ALGORITHM, such as ring, "ps(servers=2)" or broadcast."""
    from syncline.errors import UsageError
    from syncline.strategy.words import bind, build, roles_of, write

    from ..report.files import replace_text, result_paths

    (target,) = result_paths({"--svg": svg})
    part = _planned(algorithm)
    if servers is not None:
        part = type(part)(part.name, (*part.args, ("servers", servers)))
    part = bind("algorithms", part)
    roles = roles_of(part)
    if roles is not None and roles.owners > MOST_RANKS:
        raise UsageError(f"{write('algorithms', part)} has too many servers to draw: use up to {MOST_RANKS}")
    group = _group(ranks, nodes, 0 if roles is None else roles.servers)
    plan = build("algorithms", part, group)
    if target is None:
        from ..report.plan_drawing import draw_plan

        click.echo(draw_plan(plan))
    else:
        from ..report.plan_drawing import plan_svg

        replace_text(target, plan_svg(plan))


def _planned(text: str) -> Part:
    """The algorithm that a text names, or the architecture of a whole strategy. UsageError if it has no plan."""
    from syncline import registry
    from syncline.errors import UsageError
    from syncline.strategy.grammar import read_words
    from syncline.strategy.strategy import Strategy
    from syncline.strategy.words import built_names, known_as, preset_of

    words = read_words(text)
    alone = len(words) == 1 and not words[0][0] and preset_of(words) is None
    part = words[0][1] if alone else Strategy.parse(text).architecture
    names = ", ".join(name for name in built_names("architecture") if name not in registry.names("collectives"))
    if part.name == "auto":
        raise UsageError(
            "auto has no plan of its own: each run chooses the algorithm for each size by measuring at its start, and"
            f" syncline.stats().algorithms shows the choice; show one of {names}"
        )
    if part.name in registry.names("collectives"):
        raise UsageError(f"{part.name} has no plan: its library chooses the messages itself; show one of {names}")
    plain = part.name.replace("-", "_")  # as bench --collective writes them
    if part.name not in registry.names("algorithms") and plain in registry.names("algorithms"):
        part = type(part)(plain, part.args)
    if part.name not in registry.names("algorithms") and (remedy := known_as("architecture", part.name)):
        raise UsageError(f"unknown algorithm {part.name!r}{remedy}")
    registry.get("algorithms", part.name)
    return part


def _group(ranks: int | None, nodes: str | None, servers: int) -> Group:
    """The group to draw. Raises UsageError if --ranks and --nodes disagree."""
    from syncline.errors import UsageError
    from syncline.nouns import Group

    if nodes is None:
        return Group(4 if ranks is None else ranks, servers)
    sizes = node_sizes(nodes)
    if ranks is not None and ranks != sum(sizes):
        raise UsageError(f"--ranks {ranks} and --nodes {nodes} disagree: the nodes have {sum(sizes)} workers")
    return Group(sum(sizes), servers, tuple(node for node, size in enumerate(sizes) for _ in range(size)))


@click.command()
def strategies() -> None:
    """List the words of strategies with a sentence on each, and the presets, which name whole strategies."""
    from syncline.strategy.words import PRESETS, vocabulary

    words = vocabulary()
    for word in dict.fromkeys(item.word for item in words):
        click.secho(word, bold=True)
        for item in words:
            if item.word == word:
                click.echo(f"  {item.text}\n      {item.summary}" if item.summary else f"  {item.text}")
    click.secho("presets", bold=True)
    for preset in PRESETS.values():
        noted = f"; {preset.note}" if preset.note else ""
        click.echo(f"  {preset.name}\n      {preset.text}{noted}\n      {preset.summary} [{preset.source}]")


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


@click.command()
@click.argument("addresses", nargs=-1, metavar="[HOST:PORT]...")
def top(addresses: tuple[str, ...]) -> None:
    """Show the ranks of runs that were started with --metrics in a live table: step times, communication, traffic.

    Without an address, those of your runs on this machine. HOST:PORT of a run's first process stands for all of its
    host. Ctrl-C ends it, and so does the end of the run.
    """
    from .. import top as watching

    watching.run(addresses)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=FILE, help="The file to write; default: FOLDER without .parts.")
@REPORT
@click.option(
    "--torch", "torch_path", type=click.Path(file_okay=False, path_type=Path),
    help="Write a new folder for torchfrtrace, PyTorch's analyzer of flight records.",
)  # fmt: skip
def flight(path: Path, output: Path | None, report_path: Path | None, torch_path: Path | None) -> None:
    """Show a flight record: who waited for whom in which operation when a run ended badly.

    PATH is the file that syncline run has written, or the folder of parts that processes of other launchers have left,
    such as flight.json.parts. The parts are merged into one file; copy those of other hosts into the folder first.
    """
    from syncline.errors import UsageError
    from syncline.timeline.flight import dump, load
    from syncline.timeline.flight_memory import flight_target, record_in

    from ..report.files import replace_text, result_paths
    from ..report.flight import lines, torch_dumps

    target = None if output is None else flight_target(output)
    if path.is_dir() and target is None:
        target = flight_target(path.resolve().with_suffix(""))
    result_paths({"-o": target, "--report": report_path})
    record = record_in(path) if path.is_dir() else load(path)
    if record is None:
        raise UsageError(f"there are no parts of a flight record in {path}")
    if target is not None:
        replace_text(target, dump(record))
        click.echo(f"flight record: {target}")
    if report_path is not None:
        from ..report.page import flight_page

        replace_text(report_path, flight_page(record))
    if torch_path is not None:
        _write_dumps(torch_path, torch_dumps(record))
    for line in lines(record):
        click.echo(line)


def _write_dumps(folder: Path, objects: Mapping[int, object]) -> None:
    """Write pickles as PyTorch's flight recorder does, into a new folder."""
    from syncline.errors import UsageError

    try:
        folder.mkdir()
        for rank, said in objects.items():
            (folder / f"rank_{rank}").write_bytes(dumps(said))
    except OSError as error:
        raise UsageError(f"cannot write {folder}: {error.strerror or error}; choose a new folder") from None
