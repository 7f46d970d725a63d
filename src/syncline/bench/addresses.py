"""The addresses of a run's processes, told to all of them: for peers whose library wants to be given all.

Owns a meeting at rank 0 of one line each; nothing of a run's own start uses it. Who says anything else there is passed
over, and named where not all have come.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

from ..errors import GroupError
from ..launch.environment import Environment

_RETRY_S = 0.05
_LINE = 1 << 20
"""How many characters of a line are read."""
_SAYS_S = 5.0
"""How long a process that has called has for its line, which it sends at once."""


def all_addresses(environment: Environment, port: int, timeout_s: float) -> list[str]:
    """An address with a free port of every process, in the order of ranks; all call it, rank 0 listens at ``port``.

    Raises GroupError where not all have come within that time.
    """
    due = time.monotonic() + timeout_s
    try:
        if environment.rank == 0:
            return _gathered(environment.address, port, environment.world, due)
        with _called(environment.address, port, due) as line, line.makefile("rw", encoding="utf-8") as file:
            file.write(json.dumps([environment.rank, _free(line.getsockname()[0])]) + "\n")
            file.flush()
            return _told(file.readline(_LINE), environment.world)
    except (OSError, ValueError) as error:
        raise GroupError(
            f"rank {environment.rank} of {environment.world} has not met the others at {environment.address}:{port}"
            f" within {timeout_s:.0f} s: {error}"
        ) from error


def _gathered(address: str, port: int, world: int, due: float) -> list[str]:
    """What all say, told to all."""
    found, files, refused = {0: _free(address)}, [], ""
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server((address, port)))
        while len(found) < world:
            door.settimeout(max(0.1, due - time.monotonic()))
            try:
                line, caller = door.accept()
            except TimeoutError as error:
                missing = [rank for rank in range(world) if rank not in found]
                raise TimeoutError(f"missing: ranks {missing}{refused}") from error
            with ExitStack() as guest:
                guest.enter_context(line).settimeout(min(_SAYS_S, max(0.1, due - time.monotonic())))
                file = guest.enter_context(line.makefile("rw", encoding="utf-8"))
                try:
                    rank, place = _place(file.readline(_LINE), world)
                    if rank in found:
                        raise ValueError(f"rank {rank} has come already")
                except (OSError, ValueError) as error:
                    refused = f"; refused {caller[0]}: {error}"
                    continue
                found[rank] = place
                files.append(file)
                stack.enter_context(guest.pop_all())
        every = [found[rank] for rank in range(world)]
        for file in files:
            file.write(json.dumps(every) + "\n")
            file.flush()
    return every


def _place(line: str, world: int) -> tuple[int, str]:
    """The rank and the address in what a process says; ValueError for anything else."""
    match json.loads(line):
        case [int(rank), str(place)] if type(rank) is int and 0 <= rank < world:
            return rank, place
    raise ValueError(f"{line[:80]!r} is no address of a rank below {world}")


def _told(line: str, world: int) -> list[str]:
    """The addresses that rank 0 tells; ValueError for anything else."""
    match json.loads(line):
        case [*places] if len(places) == world and all(isinstance(place, str) for place in places):
            return places
    raise ValueError(f"{line[:80]!r} is no list of {world} addresses")


def _called(address: str, port: int, due: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), max(0.1, due - time.monotonic()))
        except OSError:
            if time.monotonic() > due:
                raise
            time.sleep(_RETRY_S)


def _free(host: str) -> str:
    """An address that nobody listens at now."""
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"
