"""The part of a rank in a cell: a short run, in which one of them has a fault. The pool forks them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import syncline
import syncline.torch_backend  # its process group
from syncline.wire.checksums import Checksums
from syncline_bench.lab.namespaces import enter

SECRET = "the secret of these tests"
VICTIM = 1
WORKERS = 3
LIVENESS_S, PROGRESS_S, START_S = 1.0, 4.0, 4.0
DAY_S = 86_400.0

Reach = Callable[[str], None]

LINKS = {
    "partition": [(-1, "ip link set p{} down")],
    "one way": [(VICTIM, "tc qdisc replace dev eth0 root blackhole")],
    "slow": [
        (-1, "tc qdisc replace dev p{} root tbf rate 1mbit burst 3028 latency 50ms"),
        (VICTIM, "tc qdisc replace dev eth0 root tbf rate 1mbit burst 3028 latency 50ms"),
    ],
}
"""What changes the link of the victim's host, on that host or (-1) at the switch."""
_NAMESPACES = {"net": 0x40000000, "ipc": 0x08000000, "uts": 0x04000000, "mnt": 0x00020000}


def run(
    line: Connection, index: int, processes: int, address: str, strategy: str, fault: str, point: str, path: str,
    hosts: Sequence[int],
) -> None:  # fmt: skip
    """Start, prepare, train for four steps, save, end. ``hosts`` are the processes that hold hosts and the switch."""

    def reach(here: str) -> None:
        line.send(here)
        if index == VICTIM and here == point:
            happen(fault, address)
            if fault in LINKS:
                change_link(fault, hosts)

    if hosts:
        enter_host(hosts[index])
    reach("start")
    torch.manual_seed(0)
    width = 50 if fault == "slow" else 200
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if strategy.startswith("backend"):
        under_ddp(reach, model, optimizer, index, processes, address, strategy)
    else:
        under_syncline(reach, model, optimizer, place_of(index, processes, fault), address, strategy, path)
    line.send("done")


def place_of(index: int, processes: int, fault: str) -> tuple[int, int, str]:
    """The number, the number of processes and the secret that a process claims."""
    if index != VICTIM:
        return index, processes, SECRET
    rank = 2 if fault == "duplicate rank" else index
    return rank, processes + (fault == "wrong world"), "another" if fault == "wrong secret" else SECRET


def under_syncline(
    reach: Reach, model: torch.nn.Module, optimizer: torch.optim.Optimizer, place: tuple[int, int, str], address: str,
    strategy: str, path: str,
) -> None:  # fmt: skip
    rank, world, secret = place
    syncline.init(
        strategy, rank=rank, world_size=world, address=address, secret=secret, timeout=START_S, liveness=LIVENESS_S,
        progress=PROGRESS_S,
    )  # fmt: skip
    reach("prepare")
    model, optimizer = syncline.prepare(model, optimizer)  # where servers serve, until the end
    train(reach, model, optimizer)
    reach("checkpoint")
    store = syncline.checkpoints(path)
    store.save(1, {"model": model.state_dict(), "syncline": syncline.state_dict()})
    store.wait()
    reach("end")
    syncline.shutdown()


def under_ddp(
    reach: Reach, model: torch.nn.Module, optimizer: torch.optim.Optimizer, index: int, processes: int, address: str,
    strategy: str,
) -> None:  # fmt: skip
    os.environ["SYNCLINE_STRATEGY"] = strategy.removeprefix("backend ")
    os.environ["SYNCLINE_SECRET"] = SECRET
    import datetime

    limit = datetime.timedelta(seconds=PROGRESS_S)
    dist.init_process_group("syncline", init_method=f"tcp://{address}", rank=index, world_size=processes, timeout=limit)
    reach("prepare")
    wrapped = DistributedDataParallel(model)
    train(reach, wrapped, optimizer)
    reach("end")
    dist.destroy_process_group()


def train(reach: Reach, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        if step == 2:
            reach("step")
        optimizer.zero_grad()
        model(torch.ones(4, next(model.parameters()).shape[1])).sum().backward()
        optimizer.step()


def happen(fault: str, address: str) -> None:
    """Bring the fault about in this process."""
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("the data of this rank are spoilt")
    elif fault == "exit":
        os._exit(3)
    elif fault in ("reset", "garbage", "truncated"):
        for number in connections():
            break_off(number, fault)
    elif fault == "altered":
        right = Checksums.of_body

        def of_body(sums: Checksums, body: memoryview, first: int) -> memoryview:
            """The checksum that another body has, which differs from this one in a bit."""
            other = bytearray(body)
            other[len(other) // 2] ^= 4
            return right(sums, memoryview(other), first)

        Checksums.of_body = of_body  # type: ignore[method-assign]
    elif fault == "no descriptors":
        used = descriptors()
        limit(resource.RLIMIT_NOFILE, next(number for number in range(len(used) + 1) if number not in used))
    elif fault == "no file space":
        limit(resource.RLIMIT_FSIZE, 0)
    elif fault == "no memory":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit(resource.RLIMIT_AS, pages * resource.getpagesize())
    elif fault == "clock":
        clock = time.time
        time.time = lambda: clock() + DAY_S
    elif fault == "stranger":
        threading.Thread(target=call_all_ports, args=(address,), daemon=True).start()


def enter_host(pid: int) -> None:
    """Go on in the namespaces of another process."""
    here, libc = Path.cwd(), ctypes.CDLL(None, use_errno=True)
    for kind, flag in _NAMESPACES.items():
        with open(f"/proc/{pid}/ns/{kind}", "rb") as namespace:  # noqa: PTH123 - setns takes its descriptor
            if libc.setns(namespace.fileno(), flag):
                raise OSError(ctypes.get_errno(), f"cannot enter the {kind} namespace of process {pid}")
    os.chdir(here)


def change_link(fault: str, hosts: Sequence[int]) -> None:
    for where, command in LINKS[fault]:
        words = [*enter(hosts[where]), *command.format(VICTIM).split()]
        subprocess.run(words, check=True, timeout=START_S)


def limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def descriptors() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/fd").iterdir()}


def connections() -> Iterator[int]:
    """The descriptors of this process's TCP connections."""
    for number in descriptors():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
            if sock.family == socket.AF_INET and sock.type == socket.SOCK_STREAM and sock.getpeername():
                yield number


def break_off(number: int, fault: str) -> None:
    """Write what no process of this version writes, or end the connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as sock:
        if fault == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            with Path("/dev/null").open("rb") as nothing:
                sock.close()
                os.dup2(nothing.fileno(), number)
            return
        sock.send(os.urandom(64) if fault == "garbage" else b"\1\0\0\0\0")
        if fault == "truncated":
            sock.shutdown(socket.SHUT_RDWR)


def call_all_ports(address: str) -> None:
    """Send random bytes to the meeting, and hold connections that say nothing, while the group forms."""
    host, _, port = address.rpartition(":")
    held, until = [], time.monotonic() + 1.0
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            sock = socket.create_connection((host, int(port)), 0.1)
            if len(held) % 2:
                sock.send(os.urandom(100))
            held.append(sock)
        time.sleep(0.01)
