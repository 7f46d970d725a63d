"""What each rank of ``syncline bench`` runs: ``python -m syncline.bench.allreduce_rank WORK``.

Every contender has connections of its own, all open at once; between repetitions they are idle. The array lies where a
training run has it: in the transport's memory for Syncline, in a tensor for a peer.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..connecting import connect_session
from ..launch.environment import Environment, recognise
from ..launch.store import TorchStore, find_secret, listen_address, open_store
from ..session import Session
from .allreduce import GLOO, Work, calls_per_repetition, repetitions, strategy_of
from .messages import Sender

_WARM_UP = 2
_TIMEOUT_S = 120.0


class Contender(Protocol):
    """One way to reduce."""

    def array(self, elements: int) -> NDArray[np.float32]:
        """An array that ``reduce`` works on."""
        ...

    def reduce(self) -> None:
        """Sum the array over all ranks in place, and return when it is there."""
        ...

    def close(self) -> None:
        """End the connections."""
        ...


class Syncline:
    """A strategy of ours, through the engine as a training step uses it."""

    def __init__(self, text: str, number: int, environment: Environment, store: TorchStore) -> None:
        run = f"{environment.run_id}/bench/{number}"
        self._session: Session = connect_session(
            strategy_of(text),
            environment.rank,
            environment.world,
            store,
            run=run,
            secret=find_secret(store, run, environment, None),
            address=listen_address(environment, None),
        )
        self._program = self._session.allreduce_program()
        self._array = np.empty(0, np.float32)

    def array(self, elements: int) -> NDArray[np.float32]:
        """In the transport's memory."""
        self._array = self._session.engine.allocate(4 * elements, np.dtype(np.float32))
        return self._array

    def reduce(self) -> None:
        """One exchange of a whole bucket."""
        engine = self._session.engine
        engine.wait(engine.exchange(self._program, self._array, 0, "bench"))

    def close(self) -> None:
        """Leave the group."""
        self._session.shutdown()


class Gloo:
    """torch.distributed's own all_reduce."""

    def __init__(self, environment: Environment, store: Any) -> None:
        prefix = dist.PrefixStore("gloo", store)  # type: ignore[no-untyped-call,attr-defined,unused-ignore]
        dist.init_process_group("gloo", store=prefix, rank=environment.rank, world_size=environment.world)
        self._tensor = torch.empty(0)

    def array(self, elements: int) -> NDArray[np.float32]:
        """A tensor's memory."""
        self._tensor = torch.zeros(elements)
        found: NDArray[np.float32] = self._tensor.numpy()
        return found

    def reduce(self) -> None:
        """The library's call."""
        dist.all_reduce(self._tensor)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


def main(text: str) -> None:
    """Measure what WORK asks for and report it."""
    torch.set_num_threads(1)
    work = Work.from_json(text)
    environment = recognise()
    sender = Sender(work.fds[environment.rank])
    before = pss_bytes()
    store = open_store(environment, _TIMEOUT_S)
    assert isinstance(store, TorchStore)
    meeting = Meeting(store, environment)
    contenders: list[Contender] = []
    for number, name in enumerate(work.contenders):
        gloo = name == GLOO
        contenders.append(Gloo(environment, store.raw) if gloo else Syncline(name, number, environment, store))
    for size in work.sizes:
        if work.memory:
            _measure_memory(contenders[0], size, meeting, sender, before)
        else:
            _measure(size, contenders, environment, meeting, sender)
    meeting.wait()
    for contender in contenders:
        contender.close()
    sender.close()


def _measure(
    size: int,
    contenders: list[Contender],
    environment: Environment,
    meeting: Meeting,
    sender: Sender,
) -> None:
    """All contenders at one size, in turn; rank 0 reports."""
    arrays = [contender.array(size // 4) for contender in contenders]
    times: list[list[float]] = [[] for _ in contenders]
    spent = [0.0] * len(contenders)
    correct = [True] * len(contenders)
    count, calls = repetitions(size), calls_per_repetition(size)
    for repetition in range(_WARM_UP + count):
        for index, (contender, array) in enumerate(zip(contenders, arrays, strict=True)):
            if repetition < _WARM_UP or repetition == count:
                fill(array, environment.rank, repetition)
                contender.reduce()
                correct[index] &= is_sum(array, environment.world, repetition)
            array.fill(1.0)
            meeting.wait()
            used, begun = processor_seconds(), time.perf_counter()
            for _ in range(calls):
                contender.reduce()
            elapsed, used = time.perf_counter() - begun, processor_seconds() - used
            slowest, total = meeting.slowest_and_sum(elapsed / calls, used / calls)
            if repetition >= _WARM_UP:
                times[index].append(slowest)
                spent[index] += total
        if environment.rank == 0 and repetition >= _WARM_UP:
            sender.send("repetition")
    for index in range(len(contenders)):
        wrong, _ = meeting.slowest_and_sum(float(not correct[index]), 0.0)
        if environment.rank == 0:
            sender.send(
                "measured", contender=index, bytes=size, times_s=times[index], cpu_s=spent[index], correct=not wrong
            )


def _measure_memory(contender: Contender, size: int, meeting: Meeting, sender: Sender, before: int) -> None:
    """The growth of this rank's memory with one array and everything a few reductions leave behind."""
    array = contender.array(size // 4)
    for _ in range(3):
        array.fill(1.0)
        contender.reduce()
    meeting.wait()
    sender.send("measured", memory_bytes=pss_bytes() - before)
    meeting.wait()


class Meeting:
    """Brings the ranks together before a repetition, over the store, so that no contender's own barrier is favoured."""

    def __init__(self, store: TorchStore, environment: Environment) -> None:
        self._store, self._rank, self._world = store, environment.rank, environment.world
        self._round = 0

    def wait(self) -> None:
        """Return when all ranks have called."""
        self.slowest_and_sum(0.0, 0.0)

    def slowest_and_sum(self, mine: float, other: float) -> tuple[float, float]:
        """The greatest of all ranks' first numbers, the sum of their second ones."""
        self._round += 1  # keys are never used again, so nobody can read an old value
        key = f"bench/round/{self._round}"
        self._store.set(f"{key}/{self._rank}", np.array([mine, other]).tobytes())
        self._store.raw.wait([f"{key}/{rank}" for rank in range(self._world)])
        found = np.array([np.frombuffer(self._store.raw.get(f"{key}/{rank}")) for rank in range(self._world)])
        return float(found[:, 0].max()), float(found[:, 1].sum())


def fill(array: NDArray[np.float32], rank: int, repetition: int) -> None:
    """Whole numbers that differ in every element, rank and repetition; their sums are exact in float32."""
    array[:] = _pattern(array.size, repetition)
    array += rank


def is_sum(array: NDArray[np.float32], world: int, repetition: int) -> bool:
    """Whether every element is the sum over the ranks."""
    expected = _pattern(array.size, repetition) * np.float32(world) + np.float32(world * (world - 1) // 2)
    return bool(np.array_equal(array, expected))


def _pattern(size: int, repetition: int) -> NDArray[np.float32]:
    global _base
    if _base.size < size:
        _base = (np.arange(size, dtype=np.int64) * 7919 % 65537).astype(np.float32)
    return _base[:size] + np.float32(repetition)


_base = np.empty(0, np.float32)


def processor_seconds() -> float:
    """User and system time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def pss_bytes() -> int:
    """Proportional set size: memory shared by n processes counts 1/n."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(sys.argv[1])
