"""What scripts read of their place: ranks and world sizes of workers, in the variables that torch.distributed reads.

The numbers count workers only, since scripts share out their data by them. A server, which runs the script up to
``prepare``, sees the place of the last worker, on its own host if there is one, as ``syncline.rank()`` says there.
``syncline run`` sets them so from the start; other launchers count all processes, until ``init`` knows better.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .environment import Environment, recognise

NO_GROUP = (
    "none: a server takes no part in torch.distributed; call init_process_group() after syncline.prepare(), from which"
    " servers do not return"
)
"""What a server finds for MASTER_PORT: init_process_group() fails there with this text instead of waiting for ever."""

_COUNTING_ALL = ("torchrun", "variables")


def worker_places(hosts: Sequence[str], servers: int) -> list[dict[str, str]]:
    """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of every process, given its host; the last are servers."""
    workers = len(hosts) - servers
    on_host = Counter(hosts[:workers])
    local: Counter[str] = Counter()
    found = []
    for process, host in enumerate(hosts):
        number = local[host] if process < workers else max(0, on_host[host] - 1)
        local[host] += 1
        place = (min(process, workers - 1), workers, number, max(1, on_host[host]))
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        found.append({name: str(value) for name, value in zip(names, place, strict=True)})
    return found


class Variables:
    """This process's variables, in which ``count_workers`` replaces some; ``recognise`` still finds the launcher's."""

    def __init__(self) -> None:
        self._replaced: dict[str, tuple[str, str]] = {}  # the launcher's value, and the one in its place

    def recognise(self, **place: Any) -> Environment:
        """``environment.recognise`` of what the launcher has set."""
        variables = dict(os.environ)
        for name, (before, after) in self._replaced.items():
            if variables.get(name) == after:  # else somebody else has set it since
                variables[name] = before
        return recognise(variables, **place)

    def count_workers(self, environment: Environment, servers: int) -> None:
        """Let the variables that are there count workers only, where the launcher has counted the servers too."""
        if servers == 0 or environment.launcher not in _COUNTING_ALL:
            return
        first = environment.rank - environment.local_rank
        here = range(first, first + environment.local_world)
        hosts = ["here" if process in here else "elsewhere" for process in range(environment.world)]
        seen = worker_places(hosts, servers)[environment.rank]
        if environment.rank >= environment.world - servers:
            seen["MASTER_PORT"] = NO_GROUP
        for name in seen.keys() & os.environ.keys():
            before, after = self._replaced.get(name, ("", None))
            if os.environ[name] != after:
                before = os.environ[name]
            os.environ[name] = seen[name]
            self._replaced[name] = before, seen[name]
