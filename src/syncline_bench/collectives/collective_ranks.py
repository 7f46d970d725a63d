"""The program of each rank of ``syncline bench``: ``python -m syncline_bench.collectives.collective_ranks WORK LINES``.

A set of ranks runs one contender or measures the limits; its processes import nothing else but numpy. Owns the course
of a repetition: what is timed and what is checked. The starter decides whose turn it is.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from syncline.launch.address import listen_address
from syncline.launch.environment import recognise

from ..peers import Array, Seat
from ..ranks import Line
from .contenders import connect, load_library, read_name
from .kinds import collective
from .probes import LinkProbe, MemoryProbe
from .request import Work, calls_per_repetition, warm_calls


def main(text: str, lines: str) -> None:
    """Execute the starter's orders for WORK. An error is reported before it ends the process."""
    work, environment = Work.from_json(text), recognise()
    line = Line(lines, environment)
    with line.telling():
        bench = Measurement(work, line) if work.contender else Limits(work, line)
        for order in line.orders():
            bench.turn(**order)
        bench.close()


class Limits:
    """One rank of the set that measures the machine's limits."""

    def __init__(self, work: Work, line: Line) -> None:
        self._line = line
        self._link = LinkProbe(line, listen_address(recognise(), None)) if work.link else None

    def turn(self, nbytes: int, repetitions: int) -> None:
        """Measure copies and the link at arrays of ``nbytes``. Rank 0 reports bytes per second of each repetition."""
        memory = MemoryProbe(self._line, nbytes)
        speeds: dict[str, list[float]] = {"memory": [], "link": []}
        for _ in range(repetitions):
            speeds["memory"].append(memory.measure())
            if self._link is not None:
                speeds["link"].append(self._link.measure(nbytes))
        if self._line.rank == 0:
            self._line.send("limits", **speeds)

    def close(self) -> None:
        """Close the sockets of the link."""
        if self._link is not None:
            self._link.close()


class Measurement:
    """One connected rank of a contender, with an array of the largest size."""

    def __init__(self, work: Work, line: Line) -> None:
        self._line, self._kind, self._name = line, collective(work.collective), read_name(work.contender)
        load_library(self._name)
        self._before = pss_bytes()
        elements = self._kind.elements(line.world, work.most_bytes)
        self._contender = connect(self._name, Seat(line.rank, line.world, self._kind.name, elements, line.share))

    def turn(self, nbytes: int, repetitions: int = 0, seeds: Sequence[int] = (), memory: bool = False) -> None:
        """Check the collective with inputs of these seeds, then time repetitions, or measure its ``memory``."""
        self._array = self._contender.select(self._kind.elements(self._line.world, nbytes))
        checked = [
            self._check(seed) for seed in seeds
        ]  # all of them even after a wrong result: the other ranks take part
        wrong = bool(self._line.gather(float(not all(checked))).any())
        timed = [self._time(calls_per_repetition(nbytes), len(seeds)) for _ in range(repetitions)]
        grown = self._memory_bytes() if memory else None
        if self._line.rank == 0:
            self._line.send(
                "measured",
                times_s=[seconds for seconds, _ in timed],
                cpu_s=[used for _, used in timed],
                correct=not wrong,
                chosen=self._contender.chosen(),
                memory_bytes=grown,
                threads=sum(1 for _ in Path("/proc/self/task").iterdir()),
            )

    def close(self) -> None:
        """Close the connections when all ranks are done."""
        self._line.wait()
        self._contender.close()

    def _memory_bytes(self) -> int:
        """The largest growth of any rank's memory by its connections, one array, and a few collectives."""
        for _ in range(3):
            self._array.fill(1.0)
            self._line.wait()
            self._contender.run()
        return int(self._line.gather(pss_bytes() - self._before).max())

    def _check(self, seed: int) -> bool:
        self._kind.fill(self._array, self._line.rank, self._line.world, seed)
        self._line.wait()  # one-sided transports may write into a peer's array as soon as they run
        self._contender.run()
        if self._name.exact:
            right = self._kind.is_right(self._contender.result(), self._line.rank, self._line.world, seed)
        else:
            right = self._all_alike(self._contender.result())
        self._line.wait()
        return right

    def _all_alike(self, result: Array) -> bool:
        """Whether results that a codec has changed are finite, and equal on all ranks."""
        marks = self._line.gather(float(zlib.crc32(result.tobytes())))
        return bool(np.isfinite(result).all() and (marks == marks[0]).all())

    def _time(self, calls: int, seed: int) -> tuple[float, float]:
        """The slowest rank's seconds per call, and all ranks' processor seconds per call."""
        run = self._contender.run
        if self._name.exact:
            self._array.fill(1.0)
        else:  # a codec has less to do with equal numbers
            self._kind.fill(self._array, self._line.rank, self._line.world, seed)
        self._line.wait()
        for _ in range(warm_calls(calls)):
            run()
        used, begun = time.process_time(), time.perf_counter()
        for _ in range(calls):
            run()
        elapsed, used = time.perf_counter() - begun, time.process_time() - used
        found = self._line.gather(elapsed / calls, used / calls)
        return float(found[:, 0].max()), float(found[:, 1].sum())


def pss_bytes() -> int:
    """This process's proportional set size: memory that n processes share counts 1/n. 0 if the kernel does not tell."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
