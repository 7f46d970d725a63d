"""What each rank of ``syncline bench`` runs: ``python -m syncline.bench.collectives.rank WORK``.

Every contender has connections and an array of its own, made before the first repetition; between its turns it is idle.
Owns the course of a repetition: whose turn it is, what is timed and what is checked.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...launch.environment import Environment, recognise
from ...launch.meeting import MeetingPoint, listen_address
from ...launch.placement import bind_here
from ..messages import Sender, reports_path
from ..peers import Array, Contender, Seat
from ..store import open_store
from .contenders import Name, connect, read_name
from .kinds import Collective, collective
from .meeting import Meeting
from .probes import LinkProbe, MemoryProbe
from .request import WARM_UP, calls_per_repetition, usual_repetitions
from .work import Turn, Work

_TIMEOUT_S = 120.0


def main(text: str) -> None:
    """Measure what WORK asks for and report it; an error is reported before it ends the process."""
    work = Work.from_json(text)
    os.environ["GLOO_SOCKET_IFNAME"] = work.interface
    environment = _under_mpi(work) if work.library else recognise()
    sender = Sender(os.open(reports_path(work.folder, environment.rank), os.O_WRONLY))
    try:
        bench = _Bench(work, environment, sender)
        bench.connect()
        if work.memory:
            bench.measure_memory()
        else:
            for nbytes, numbers in work.cells:
                bench.measure(nbytes, numbers)
        bench.close()
    except Exception as error:
        sender.send("error", at=time.time(), text=f"{type(error).__name__}: {error}")
        if work.library:
            # MPI would wait for all ranks at this one's exit; dying at once lets the launcher end them.
            traceback.print_exc()
            os._exit(1)
        raise
    sender.send("finished")
    sender.close()


def _under_mpi(work: Work) -> Environment:
    """This rank's place as MPI numbers it; MPI tells the ports of rank 0 for the meeting and for torch's store."""
    import mpi4py

    names = [read_name(text) for text in work.contenders]
    # Peers call MPI from this thread; a transport of Syncline's calls it from its progress thread.
    mpi4py.rc.thread_level = "funneled" if all(name.peer is not None for name in names) else "multiple"
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, ports = world.Get_rank(), np.zeros(2, np.int32)
    if rank == 0:
        _kept.extend(bind_here(work.address) for _ in ports)
        ports[:] = [sock.getsockname()[1] for sock in _kept]
    world.Bcast(ports, 0)
    os.environ["MASTER_PORT"] = str(ports[1])
    return recognise(rank=rank, world_size=world.Get_size(), address=f"{work.address}:{ports[0]}")


_kept: list[socket.socket] = []
"""Keep the ports from being given to others before rank 0 listens there, and between its starts."""


class _Bench:
    """One rank's contenders and what it measures of them."""

    def __init__(self, work: Work, environment: Environment, sender: Sender) -> None:
        import torch

        torch.set_num_threads(1)
        self._work, self._environment, self._sender = work, environment, sender
        self._kind: Collective = collective(work.collective)
        self._rank, self._world = environment.rank, environment.world
        self._before = pss_bytes()
        self._store = open_store(environment, _TIMEOUT_S)
        self._point = MeetingPoint(environment)
        self._meeting = Meeting(self._store, self._rank, self._world)
        self._turn = Turn(work.folder) if self._rank == 0 else None
        self._names: list[Name] = [read_name(text) for text in work.contenders]
        self._contenders: list[Contender] = []
        self._link = LinkProbe(self._meeting, listen_address(environment, None)) if work.link else None

    def connect(self) -> None:
        """Make all contenders, each with an array of the greatest size it will need."""
        greatest = max(nbytes for nbytes, _ in self._work.cells)
        elements = self._kind.elements(self._world, greatest)
        seat = Seat(self._rank, self._world, self._store, self._point, self._kind.name, elements)
        for number, name in enumerate(self._names):
            self._begin(number, 0)
            self._contenders.append(connect(name, number, seat, self._environment))
            self._meeting.wait()
            self._end()

    def measure(self, nbytes: int, numbers: Sequence[int]) -> None:
        """The contenders of these numbers at one size, in turn; rank 0 reports."""
        for number in numbers:
            self._contenders[number].select(self._kind.elements(self._world, nbytes))
        count = usual_repetitions(nbytes) if self._work.repeat is None else self._work.repeat
        times: dict[int, list[float]] = {number: [] for number in numbers}
        spent = dict.fromkeys(numbers, 0.0)
        correct = dict.fromkeys(numbers, True)
        memory = MemoryProbe(self._meeting, nbytes)
        speeds: dict[str, list[float]] = {"memory": [], "link": []}
        for repetition in range(WARM_UP + count):
            shift = repetition % len(numbers)
            for number in (*numbers[shift:], *numbers[:shift]):
                self._begin(number, nbytes)
                if repetition < WARM_UP or repetition == WARM_UP + count - 1:
                    correct[number] &= self._check(number, nbytes, repetition)
                elapsed, used = self._time(number, nbytes)
                if repetition >= WARM_UP:
                    times[number].append(elapsed)
                    spent[number] += used
                self._end()
            speeds["memory"].append(memory.measure())
            if self._link is not None:
                speeds["link"].append(self._link.measure(nbytes))
        typical = {name: float(np.median(found)) for name, found in speeds.items() if found}
        for number in numbers:
            self._report(number, nbytes, times[number], spent[number], correct[number], typical)

    def measure_memory(self) -> None:
        """The growth of this rank's memory with one array and what a few collectives leave behind, all connected."""
        for nbytes, numbers in self._work.cells:
            for number in numbers:
                array = self._contenders[number].select(self._kind.elements(self._world, nbytes))
                for _ in range(3):
                    array.fill(1.0)
                    self._contenders[number].run()
                self._meeting.wait()
                grown = self._meeting.gather(pss_bytes() - self._before)
                if self._rank == 0:
                    self._sender.send("memory", contender=number, memory_bytes=int(grown.max()))

    def close(self) -> None:
        """End all connections; ranks end together."""
        self._meeting.wait()
        for contender in self._contenders:
            contender.close()
        if self._link is not None:
            self._link.close()
        self._meeting.leave()

    def _check(self, number: int, nbytes: int, seed: int) -> bool:
        contender = self._contenders[number]
        array = contender.select(self._kind.elements(self._world, nbytes))
        self._kind.fill(array, self._rank, self._world, seed)
        self._meeting.wait()  # one-sided transports may write into a peer's array as soon as they run
        contender.run()
        if self._names[number].exact:
            right = self._kind.is_right(contender.result(), self._rank, self._world, seed)
        else:
            right = self._all_alike(contender.result())
        self._meeting.wait()
        return right

    def _all_alike(self, result: Array) -> bool:
        """What can be said of numbers that a codec has changed: they are numbers, and the same ones on all ranks."""
        marks = self._meeting.gather(float(zlib.crc32(result.tobytes())))
        return bool(np.isfinite(result).all() and (marks == marks[0]).all())

    def _time(self, number: int, nbytes: int) -> tuple[float, float]:
        """Seconds per call of the slowest rank, and processor seconds per call of all ranks together."""
        contender, calls = self._contenders[number], calls_per_repetition(nbytes)
        array = contender.select(self._kind.elements(self._world, nbytes))
        if self._names[number].exact:
            array.fill(1.0)
        else:  # a codec has less to do with equal numbers
            self._kind.fill(array, self._rank, self._world, len(self._names))
        self._meeting.wait()
        if calls > 1:
            contender.run()  # brings the ranks together closer than the meeting can
        used, begun = time.process_time(), time.perf_counter()
        for _ in range(calls):
            contender.run()
        elapsed, used = time.perf_counter() - begun, time.process_time() - used
        found = self._meeting.gather(elapsed / calls, used / calls)
        return float(found[:, 0].max()), float(found[:, 1].sum())

    def _report(
        self, number: int, nbytes: int, times: list[float], spent: float, correct: bool, speeds: dict[str, float]
    ) -> None:
        wrong = self._meeting.gather(float(not correct)).any()
        if self._rank == 0:
            self._sender.send(
                "measured",
                contender=number,
                bytes=nbytes,
                times_s=times,
                cpu_s=spent / len(times),
                correct=not wrong,
                chosen=self._contenders[number].chosen(),
                speeds=speeds,
            )

    def _begin(self, number: int, nbytes: int) -> None:
        if self._turn is not None:
            self._turn.begin(number, nbytes)

    def _end(self) -> None:
        if self._turn is not None:
            self._turn.end()


def pss_bytes() -> int:
    """Proportional set size: memory shared by n processes counts 1/n."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1])
