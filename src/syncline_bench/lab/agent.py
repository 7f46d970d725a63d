"""The launch agent of MPI jobs in a lab: ``python -m syncline_bench.lab.agent HOST COMMAND...``.

Stands where an MPI launcher would call ssh, and does what ssh does: the arguments after the host, joined by blanks, are
a line for a shell on that host. Which namespaces the host has is read from the lab's record, as the launchers start
their agents from several hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from syncline.errors import UsageError

from .namespaces import enter
from .naming import read_host_name
from .records import Registry


def command_line(arguments: Sequence[str], registry: Registry) -> list[str]:
    """What runs the command on the host; raises UsageError when there is no such host, or nothing to run."""
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
    """Become the command, or end with status 255, as ssh does when it cannot connect."""
    try:
        line = command_line(sys.argv[1:], Registry())
        os.execv(line[0], line)
    except (UsageError, OSError) as error:
        print(f"syncline: {error}", file=sys.stderr)
        sys.exit(255)


if __name__ == "__main__":
    main()
