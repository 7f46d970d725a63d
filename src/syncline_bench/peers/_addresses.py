"""Exchanges the addresses of a run's processes, for peers whose library needs all addresses at its start.

Each rank sends rank 0 one line over TCP, and rank 0 answers with the list. Syncline's own start does not use this.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack

from syncline.errors import GroupError
from syncline.launch.environment import Environment

_RETRY_S = 0.05


def all_addresses(environment: Environment, port: int, timeout_s: float) -> list[str]:
    """An address with a free port for each process, in rank order. All ranks call this; rank 0 listens at ``port``.

    Raises GroupError if not all ranks have called within ``timeout_s``.
    """
    due = time.monotonic() + timeout_s
    try:
        if environment.rank == 0:
            return _gathered(environment.address, port, environment.world, due)
        with _called(environment.address, port, due) as line, line.makefile("rw", encoding="utf-8") as file:
            file.write(json.dumps([environment.rank, _free(line.getsockname()[0])]) + "\n")
            file.flush()
            found: list[str] = json.loads(file.readline())
            return found
    except (OSError, ValueError) as error:
        raise GroupError(
            f"rank {environment.rank} of {environment.world} has not met the others at {environment.address}:{port}"
            f" within {timeout_s:.0f} s: {error}"
        ) from error


def _gathered(address: str, port: int, world: int, due: float) -> list[str]:
    """Rank 0's side: collect the address of every rank and send all of them to every rank."""
    found, files = {0: _free(address)}, []
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server((address, port)))
        while len(found) < world:
            door.settimeout(max(0.1, due - time.monotonic()))
            line = stack.enter_context(door.accept()[0])
            line.settimeout(max(0.1, due - time.monotonic()))
            file = stack.enter_context(line.makefile("rw", encoding="utf-8"))
            rank, said = json.loads(file.readline())
            found[int(rank)] = str(said)
            files.append(file)
        every = [found[rank] for rank in range(world)]
        for file in files:
            file.write(json.dumps(every) + "\n")
            file.flush()
    return every


def _called(address: str, port: int, due: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), max(0.1, due - time.monotonic()))
        except OSError:
            if time.monotonic() > due:
                raise
            time.sleep(_RETRY_S)


def _free(host: str) -> str:
    """The host with a port that is free now. Another process may still take it before the caller does."""
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"
