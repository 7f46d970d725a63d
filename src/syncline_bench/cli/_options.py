"""Options, checks and list arguments that several commands share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import click

FILE = click.Path(dir_okay=False, path_type=Path)
OLD_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

JSON = click.option("--json", "json_path", type=FILE, help="Write the results to this file, as JSON.")
REPORT = click.option("--report", "report_path", type=FILE, help="Write a report to this file, as an HTML page.")
TRACE = click.option(
    "--trace",
    "timeline_path",
    type=FILE,
    metavar="FILE.json.gz",
    envvar="SYNCLINE_TRACE",
    help="Write a timeline of all processes to this file, for Perfetto or chrome://tracing.",
)
LAUNCHER = click.option(
    "--launcher",
    default="auto",
    show_default=True,
    metavar="TEXT",
    help="The launcher of the processes: local (this command), mpirun, mpiexec, openmpi, mpich or srun, or a launcher's"
    " path, with arguments if needed: 'mpirun --hostfile hosts'. auto: mpirun for transport=mpi, else local.",
)


class Verbs(click.Group):
    """A group whose help shows each command's whole first sentence, which click would cut at the terminal's width."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self.commands[name].get_short_help_str(limit=1000)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class Lists(click.Command):
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
    option: str | None = None  # the list option that takes the next values
    fresh = False  # whether that option has no value yet
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


MOST_RANKS = 512
"""The most ranks in a drawing, or started here. A ring's plan has about the square of this number of transfers."""


def node_sizes(text: str) -> list[int]:
    """The ranks of each node from ``2x4`` (two nodes of four) or ``4,4,2``. Raises UsageError for other texts."""
    try:
        if "x" in text:
            count, each = map(int, text.split("x"))
            nodes, ranks = count, count * each
            sizes = [each] * min(count, MOST_RANKS)
        else:
            sizes = [int(size) for size in text.split(",")]
            nodes, ranks = len(sizes), sum(sizes)
    except ValueError:
        sizes, nodes, ranks = [], 0, 0
    from syncline.errors import UsageError

    if not sizes or min(sizes) < 1:
        raise UsageError(f"--nodes must look like 2x4 or 4,4,2, got {text!r}")
    if max(nodes, ranks) > MOST_RANKS:
        raise UsageError(f"--nodes {text} has more than {MOST_RANKS} ranks")
    return sizes
