"""Runs a cell between real processes, and judges how it ends.

A cell ends as promised if every process but the victim goes on to the end, or ends within ``PROMISED_S`` of the fault
with a status other than 0 and an error that names a culprit, and if nothing is left: no process, no file in shared
memory. While the group forms, the time that processes have to come counts too. Where nothing can be wrong
(``HARMLESS``) all must go on.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cell_bodies
from cell_bodies import START_S, VICTIM, WORKERS
from fault_cells import OF_LINKS, POINTS, Cell, without_meaning

from pool import Group, Pool, Rank
from syncline.strategy.strategy import Strategy
from syncline_bench.lab import Lab

PROMISED_S = 10.0
HARMLESS = ("clock", "stranger")
NAMED = re.compile(rf"\b(rank|process) {VICTIM}\b|counts? \d+ processes|\bis taken by\b")
"""The texts by which an error names the culprit: its rank, or what is wrong with a group that does not form."""
FOUND = {"altered": "was altered on its way"}
"""What one of the others must print of a fault, where many messages follow it."""
_OTHER = re.compile(rf"\brank (?!{VICTIM}\b)\d+\b")

_SHARED = Path("/dev/shm")
_PORT = 29500  # free on every new host


@contextmanager
def warm_pool() -> Iterator[Pool]:
    pool = Pool(Path(__file__).parent, "cell_bodies", "numpy.random")
    try:
        yield pool
    finally:
        pool.close()


def run_cell(pool: Pool, cell: Cell) -> str:
    """The fault in the end of a cell; empty if it ends as promised."""
    backend = cell.strategy == "backend"
    between = cell.transport == "hosts"
    text = f"{'ring' if backend else cell.strategy} transport={'tcp' if between else cell.transport}"
    text += "(checksum=on)" if cell.fault == "altered" else ""
    processes = WORKERS + Strategy.parse(text).servers
    before = _in_shared_memory()
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    strategy = f"backend {text}" if backend else text
    try:
        with _places(processes if between else 0) as (address, hosts):
            how = [processes, address, strategy, cell.fault, cell.point, str(folder), hosts]
            with pool.start(cell_bodies.run, [[index, *how] for index in range(processes)]) as group:
                found = _judge(group, cell)
        left = _in_shared_memory() - before
        return found or (f"left in /dev/shm: {', '.join(sorted(path.name for path in left))}" if left else "")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _places(hosts: int) -> Iterator[tuple[str, list[int]]]:
    """An address to meet at, and the processes that hold the hosts of a new lab and its switch, if there are any."""
    if not hosts:
        yield _free_address(), []
        return
    with Lab(hosts) as lab:
        assert lab._switch is not None
        yield f"{lab.address(0)}:{_PORT}", [*(host.pid for host in lab._hosts), lab._switch.pid]


def _in_shared_memory() -> set[Path]:
    """The files in shared memory, but those of MPI libraries, which other tests may use meanwhile."""
    return {path for path in _SHARED.iterdir() if not path.name.startswith(("mpich_shm_", "sm_segment"))}


def _judge(group: Group, cell: Cell) -> str:
    others = [rank for rank in group.ranks if rank.index != VICTIM]
    group.hear(1 + place_of_point(cell), among=[VICTIM])
    begun = time.monotonic()
    try:
        group.end(2 * PROMISED_S, among=[rank.index for rank in others])
    except TimeoutError as late:
        return f"hangs: {_short(str(late))}"
    took_s = time.monotonic() - begun
    victim = group.ranks[VICTIM]
    if cell.fault == "stop":
        os.kill(victim.pid, signal.SIGKILL)
    try:
        group.end(PROMISED_S, among=[VICTIM])
    except TimeoutError:
        return f"the victim hangs: {_short(str(victim))}"
    text = FOUND.get(cell.fault, "") if cell.point in ("prepare", "step") else ""
    if text and not any(text in rank.printed() for rank in others):
        return f"nobody prints that something {text}: {_short(str(others[0]))}"
    if all(rank.status == 0 for rank in others) and (victim.status == 0 or cell.point == "end"):
        return ""
    if cell.fault in HARMLESS:
        return f"does not go on: {_short(next(str(rank) for rank in group.ranks if rank.status))}"
    if took_s > PROMISED_S + (START_S if cell.point == "start" else 0.0):
        return f"takes {took_s:.1f} s to end"
    # At the end a process may have done its part before the fault.
    judged = [rank for rank in others if rank.status or cell.point != "end"]
    wrong = next((wrong for rank in judged if (wrong := _wrong(rank, NAMED))), "")
    if wrong or cell.fault not in OF_LINKS or (cell.point == "end" and victim.status == 0):
        return wrong
    return _wrong(victim, _OTHER)  # to which the others are out of reach


def place_of_point(cell: Cell) -> int:
    """How many points the victim passes before that of the fault."""
    passed = [point for point in POINTS if not without_meaning(cell._replace(point=point, fault="clock"))]
    return passed.index(cell.point)


def _wrong(rank: Rank, named: re.Pattern[str]) -> str:
    """The fault in the end of a process, whose error must have such a text."""
    if rank.status == 0:
        return f"process {rank.index} has status 0, but others have not"
    if not named.search(rank.printed()):
        return f"process {rank.index} names nobody: {_short(str(rank))}"
    return ""


def _short(text: str) -> str:
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[-600:]


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"
