"""What ranks of the pool do. Each function gets a line to the test, then its place in a group, then its case."""

from __future__ import annotations

import gc
import logging
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import torch

import syncline
from remade import Remade
from syncline import registry
from syncline.errors import ClosedError, GroupError, SynclineError
from syncline.launch import connecting
from syncline.session.communicator import Communicator
from syncline.wire.watch import Watcher

SECRET = "the secret of these tests"
BATCH = 60  # for two to six workers alike
Place = tuple[int, int, str]
"""Process index, number of processes, address."""


@contextmanager
def joined(place: Place, strategy: str, **options: Any) -> Iterator[None]:
    index, processes, address = place
    options.setdefault("secret", SECRET)
    syncline.init(strategy, rank=index, world_size=processes, address=address, **options)
    yield
    syncline.shutdown()


# Training.

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def build(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, 5),
    ).to(dtype)


def batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 5, (BATCH,), generator=generator)


def steps(optimizer: str, kind: str, count: int = 4) -> dict[str, np.ndarray] | None:
    """The weights after some steps on this rank's share of every batch; None on a server. Alone without a session."""
    dtype = getattr(torch, kind)
    model = build(dtype)
    update = OPTIMIZERS[optimizer](model.parameters())
    rank, world = 0, 1
    if syncline.is_initialized():
        rank, world = syncline.rank(), syncline.world_size()
        try:
            syncline.prepare(model, update)
        except SystemExit as end:  # a server's part ends in prepare
            if end.code != 0:
                raise
            return None
    for step in range(count):
        x, y = batch(step, dtype)
        mine = slice(BATCH * rank // world, BATCH * (rank + 1) // world)
        update.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        update.step()
    return {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}


def train(line: Connection, place: Place, strategy: str, cases: list[list[str]]) -> None:
    """One world after the other in the same processes; the weights of all."""
    registry.register("schedules", "remade")(Remade)
    found = []
    for optimizer, kind in cases:
        with joined(place, strategy):
            found.append(steps(optimizer, kind))
    line.send(found)


# Collectives.

SIZES = (0, 1, 2, 3, 7, 1023, 65_537, 1_200_001)
DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int64, np.int32, np.uint8)


def grid(line: Connection, place: Place, strategy: str) -> None:
    """Rows and columns of a 2 x 2 grid, and all workers: a thread for each, all at the same time."""
    with joined(place, strategy):
        session = syncline.api.session()
        rank = session.rank
        made = [session.split(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))]
        groups = [session, *(group for group in made if group is not None)]

        def work(group: Communicator) -> list[float]:
            found = []
            for size in (1, 1000, 300_001) * 3:
                array = np.full(size, 10.0**rank)
                group.allreduce(array, average=False)
                assert (array == array[0]).all()
                found.append(float(array[0]))
                assert group.gather(b"%d" % rank) == [b"%d" % other for other in group.ranks]
            return found

        with ThreadPoolExecutor(len(groups)) as threads:
            line.send([set(found) for found in threads.map(work, groups)])


def collectives(line: Connection, place: Place, strategy: str) -> None:
    with joined(place, strategy):
        rank, world = syncline.rank(), syncline.world_size()
        assert [rank, world] == list(place[:2])
        for number, size in enumerate(SIZES):
            # Every type with small sizes, one type with each of the large ones.
            chosen = DTYPES if size < 1000 else (DTYPES[number % 4], DTYPES[4])
            for dtype in chosen:
                reduce_and_broadcast(size, np.dtype(dtype), rank, world)
        torch_tensors(rank, world)
        for sizes in ([0] * world, list(range(world)), [100_000 * (rank == 1) for rank in range(world)]):
            found = syncline.gather(bytes([rank]) * sizes[rank])
            assert found == [bytes([other]) * sizes[other] for other in range(world)]
        for _ in range(5):
            syncline.barrier()
        stats = syncline.stats()
        assert set(stats.bytes_sent) == set(range(world)) - {rank}
        assert stats.strategy.startswith(strategy.split()[0])
        assert stats.blocked_s > 0
    line.send((sum(stats.bytes_sent.values()), sum(stats.bytes_received.values())))


def reduce_and_broadcast(size: int, dtype: np.dtype[Any], rank: int, world: int) -> None:
    """The numbers are small integers, so that sums are exact in every type."""
    pattern = np.resize(np.arange(5), size)
    mine = (pattern + rank).astype(dtype)
    total = (world * pattern + sum(range(world))).astype(dtype)
    assert np.array_equal(syncline.allreduce(mine.copy(), op="sum"), total), (size, dtype)
    if dtype.kind not in "iu":
        assert np.array_equal(syncline.allreduce(mine.copy()), total / dtype.type(world)), (size, dtype)
    for root in range(world):
        found = syncline.broadcast(mine.copy(), root)
        assert np.array_equal(found, (pattern + root).astype(dtype)), (size, dtype, root)


def torch_tensors(rank: int, world: int) -> None:
    total = sum(range(1, world + 1))
    for tensor in (
        torch.tensor(rank + 1.0, dtype=torch.float64),  # no dimension
        torch.full((3, 4), rank + 1.0, dtype=torch.bfloat16),
        torch.full((3, 4), rank + 1.0, dtype=torch.float16).t(),  # not contiguous
        torch.full((2, 5, 3), rank + 1)[:, ::2],  # int64
        torch.nn.Parameter(torch.full((6,), rank + 1.0)),
        torch.empty(0, 3),
    ):
        assert syncline.allreduce(tensor, op="sum") is tensor
        assert bool((tensor == total).all())


# What is left behind.


def again_and_again(line: Connection, place: Place, strategies: list[str]) -> None:
    """Worlds one after the other; after each, what this process holds."""
    held, before = [], tasks()
    for strategy in strategies:
        with joined(place, strategy):
            syncline.allreduce(np.ones(200_000, np.float32))
        # A library may keep threads; of our own transports all threads have been joined.
        held.append(holdings(before, 30.0 if "transport=shm" in strategy or "transport=tcp" in strategy else 0.2))
    line.send(held)


def holdings(before: int, limit_s: float) -> dict[str, Any]:
    gc.collect()
    return {
        "descriptors": sorted(descriptors()),
        "tasks": fewest_tasks(before, limit_s),
        "threads": threading.active_count(),  # counted after the kernel's have had time to end
        "compilers": sorted({"numba", "llvmlite"} & set(sys.modules)),
        "memory": [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:syncline" in line],
        "shared": sorted(path.name for path in Path("/dev/shm").iterdir() if "syncline" in path.name),
    }


def fewest_tasks(before: int, limit_s: float) -> int:
    """The kernel's threads of this process, once they are no more than ``before`` or the time is over.

    One that was joined may take a moment to vanish.
    """
    until, moment = time.monotonic() + limit_s, threading.Event()
    fewest = tasks()
    while fewest > before and time.monotonic() < until:
        moment.wait(0.005)
        fewest = min(fewest, tasks())
    return fewest


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


# Faults.


# Children of ranks.


class Probes(torch.utils.data.Dataset[dict[str, Any]]):
    """Items that tell what a data loader's worker sees; ``sockets`` are those of the training process."""

    def __init__(self, parent: int, sockets: set[str]) -> None:
        self._parent, self._sockets = parent, sockets

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            said = str(syncline.rank())
        except ClosedError as error:
            said = str(error)
        return {
            "x": float(index),
            "forked": os.getpid() != self._parent,
            "inherited": len(self._sockets & sockets()),
            "said": said,
        }


def descriptors() -> list[str]:
    """What the open descriptors of this process are."""
    held = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one with which the directory is read
            held.append(path.readlink().as_posix())
    return held


def sockets() -> set[str]:
    """The connections that this process holds."""
    return {held for held in descriptors() if held.startswith("socket:")}


def loads_data(line: Connection, place: Place, strategy: str, method: str) -> None:
    """Steps on batches of a data loader, whose workers hold none of the session's connections."""
    with joined(place, strategy):
        pass  # opens the store, which stays open for the next time
    before = sockets()
    with joined(place, strategy):
        model = torch.nn.Linear(1, 1)
        model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        dataset = Probes(os.getpid(), sockets() - before)
        loader = torch.utils.data.DataLoader(dataset, 2, num_workers=1, multiprocessing_context=method)
        seen = []
        for item in loader:
            optimizer.zero_grad()
            model(item["x"].float().reshape(-1, 1)).sum().backward()
            optimizer.step()
            seen.append((bool(item["forked"].all()), int(item["inherited"].sum()), item["said"][0]))
        syncline.barrier()
    line.send((len(dataset._sockets), seen))


def forks(line: Connection, place: Place, strategy: str) -> None:
    """A forked child that uses, ends and leaves Syncline does the run no harm."""
    with joined(place, strategy):
        syncline.allreduce(np.ones(100_000))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            texts = []
            for call in (syncline.rank, syncline.barrier, lambda: syncline.allreduce(np.ones(1))):
                try:
                    call()
                except ClosedError as error:
                    texts.append(str(error))
            os.write(writer, "\n".join(texts).encode())
            os.close(writer)
            raise KeyError("the child ends with an exception of its own")
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read().decode().splitlines()
        _, status = os.waitpid(child, 0)
        np.testing.assert_array_equal(syncline.allreduce(np.ones(100_000)), 1)
        syncline.barrier()
    line.send((said, os.waitstatus_to_exitcode(status)))


# Start.


def starts(line: Connection, place: Place, options: dict[str, Any]) -> None:
    """Join, meet, end; or send the error."""
    logging.basicConfig()
    strategy = options.pop("strategy", "ring")
    try:
        with joined(place, strategy, **options):
            syncline.barrier()
    except SynclineError as error:
        line.send((type(error).__name__, str(error)))
        return
    line.send("met")


def raises_at_the_second_try(_line: Connection, place: Place, nowhere: str) -> None:
    """A start that fails, one that does not, and then rank 1 raises."""
    with suppress(GroupError):
        syncline.init("ring", rank=1, world_size=2, address=nowhere, secret=SECRET, timeout=0.1)
    assert not syncline.is_initialized()
    with joined(place, "ring"):
        syncline.barrier()
        if place[0] == 1:
            raise ValueError("the data of this rank are spoilt")
        while True:
            syncline.allreduce(np.ones(1000))


def finds_no_room_to_watch(line: Connection, place: Place) -> None:
    """The group stands, and the thread that is to watch it cannot be started."""
    before = sockets()

    class Unwatched(Watcher):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    connecting.Watcher = Unwatched
    try:
        with joined(place, "ring transport=tcp"):
            pass
    except RuntimeError as error:
        line.send((str(error), len(sockets() - before)))


def tells_its_ports(line: Connection, place: Place) -> None:
    """As ``starts``, and tells the ports on which this process listens while it waits for the others."""

    def tell() -> None:
        me = psutil.Process()
        ports: set[int] = set()
        while len(ports) < 2 and not ended.wait(0.01):
            ports = {end.laddr.port for end in me.net_connections("tcp") if end.status == psutil.CONN_LISTEN}
        line.send(sorted(ports))

    ended = threading.Event()
    thread = threading.Thread(target=tell)
    thread.start()
    try:
        starts(line, place, {})
    finally:
        ended.set()
        thread.join()


# Scripts of users.


def runs_command(line: Connection, place: Place, folder: str, strategy: str, program: str, *arguments: str) -> None:
    """A command of a tutorial in its folder: ``syncline``, or ``python`` with a script that ``strategy`` is for."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    if program == "python":
        runs_script(line, place, *arguments, strategy=strategy)
    else:
        os.environ.pop("SYNCLINE_TUNING", None)  # what a prediction chooses, it chooses as for a reader
        sys.argv = [program, *arguments]
        runpy.run_module("syncline", run_name="__main__")


def runs_script(line: Connection, place: Place, script: str, *arguments: str, strategy: str = "") -> None:  # noqa: ARG001
    """A script in an environment as launchers make it, or alone where there is one process."""
    index, processes, address = place
    os.environ.pop("SYNCLINE_STRATEGY", None)  # its own strategy counts
    if strategy:
        os.environ["SYNCLINE_STRATEGY"] = strategy
    if processes > 1:
        host, _, port = address.rpartition(":")
        world = str(processes)
        os.environ |= {"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port, "SYNCLINE_SECRET": SECRET}
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
