"""The launch agent of MPI jobs in a lab: ``python -m syncline_bench.lab.agent HOST COMMAND...``.

An MPI launcher calls it in place of ssh. Like ssh, it joins the arguments after the host with blanks and runs the line
in a shell on that host. It reads the host's namespaces from the lab's record on disk, because launchers start agents
from several hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from syncline.errors import UsageError

from .namespaces import enter
from .records import Registry, read_host_name


def command_line(arguments: Sequence[str], registry: Registry) -> list[str]:
    """The command line that runs the command on the host. Raises UsageError if the host or the command is missing."""
    rest = list(arguments)
    while rest and rest[0].startswith("-"):  # ssh's options without a value, such as -x
        rest.pop(0)
    if len(rest) < 2:
        raise UsageError("usage: python -m syncline_bench.lab.agent HOST COMMAND...")
    name, *command = rest
    lab, host = read_host_name(name)
    record = registry.read(lab)
    if record is None or not record.owner.alive or host >= len(record.holders):
        known = ", ".join(f"{lab.name} ({lab.hosts} hosts)" for lab in registry.labs()) or "none"
        raise UsageError(f"no running lab has a host {name!r}; the labs of this machine: {known}")
    return [*enter(record.holders[host]), "sh", "-c", " ".join(command)]


def main() -> None:
    """Replace this process by the command. If that fails, end with status 255, like ssh without a connection."""
    try:
        line = command_line(sys.argv[1:], Registry())
        os.execv(line[0], line)
    except (UsageError, OSError) as error:
        print(f"syncline: {error}", file=sys.stderr)
        sys.exit(255)


if __name__ == "__main__":
    main()
