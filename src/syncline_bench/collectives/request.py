"""The request of ``syncline bench``, checked as a whole before any process starts, and the part that the ranks get.

Owns the ``Request``, the number of repetitions of each size, every refusal of bad input (sizes, ranks, contenders,
memory), and ``Work``, the argument of a set of ranks. A peer whose library is missing is not refused: its rows state
this, and the others run. Starts nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from syncline.errors import UsageError
from syncline.launch.mpi_library import LIBRARIES, MpiLibrary
from syncline.nouns import Rate

from ..machine import available_memory_bytes
from ..messages import Task
from ..report.bench import Measured
from .contenders import Name, check_name, read_name
from .kinds import ITEM_BYTES, Collective, collective

DEFAULT_SIZES = (1_000, 64_000, 1_000_000, 4_000_000, 16_000_000, 60_970_000, 256_000_000)
DEFAULT_RANKS = (2, 4)
_MPI = tuple(f"{library}:native" for library in LIBRARIES)
DEFAULT_CONTENDERS = ("shm:auto", "shm:ring", "tcp:auto", "tcp:ring", "gloo:native", *_MPI, "mpi:ring")
LAB_RANKS = (4,)
LAB_CONTENDERS = ("tcp:auto", "tcp:ring", "gloo:native", "mpi:native", "mpi:ring")
_BROADCAST_CONTENDERS = ("shm:auto", "tcp:auto", "gloo:native", "mpi:native", *_MPI)

WARM_UP = 2
"""Untimed repetitions before the timed ones. They check the results of every contender."""

MOST_RANKS = 256
_PROCESS_BYTES, _TORCH_BYTES = 64 << 20, 200 << 20
"""The memory of a rank before its first array: interpreter and numpy, and torch in addition."""
_EXTRA_ARRAYS = 3
"""In addition to the contenders' arrays: one for copies, a library's scratch, and a transport's messages."""
_MPI_SEGMENT_BYTES = 32 << 20
"""The most that an MPI library uses of /dev/shm per rank."""
_SHM = "/dev/shm"


@dataclass(frozen=True)
class Request:
    """Contenders x sizes x ranks of one collective, on this machine or in a lab with links of ``lab_rate`` bit/s.

    A host of the lab runs ``per_host`` ranks.
    """

    collective: Collective
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    contenders: tuple[Name, ...]
    lab_rate: Rate | None = None
    repeat: int | None = None
    """The repetitions of every size; None lets the size decide (``usual_repetitions``)."""
    optional: bool = False
    """Whether the run continues without this request if no lab can be made."""
    per_host: int = 1

    def repetitions(self, nbytes: int) -> int:
        """The number of repetitions of a size."""
        return usual_repetitions(nbytes) if self.repeat is None else self.repeat

    def empty_row(self, ranks: int, size: int, name: Name) -> Measured:
        """The row of one cell before its measurement."""
        kind, rate = self.collective.name, self.lab_rate
        found = Measured(name.transport, name.algorithm, ranks, size, collective=kind, lab_bit_per_s=rate)
        return replace(found, per_host=self.per_host)

    @property
    def keys(self) -> tuple[tuple[str, float | None, int, int, int, str], ...]:
        """The keys of all requested rows, in order."""
        return tuple(self.empty_row(ranks, *cell).key for ranks in self.ranks for cell in self.cells())

    def cells(self) -> Iterator[tuple[int, Name]]:
        """Every size with every contender."""
        for size in self.sizes:
            for name in self.contenders:
                yield size, name


def request_of(
    *,
    sizes: Sequence[int] = (),
    ranks: Sequence[int] = (),
    contenders: Sequence[str] = (),
    kind: str = "allreduce",
    lab_rate: Rate | None = None,
    repetitions: int | None = None,
    per_host: int = 1,
) -> Request:
    """A checked request. Empty sequences mean the defaults. Raises UsageError."""
    chosen = collective(kind)
    if not contenders:
        contenders = _default_contenders(chosen, lab_rate is not None, per_host)
    if lab_rate is not None and lab_rate <= 0:
        raise UsageError(f"--lab needs the rate of its links, such as 1gbit, got {lab_rate:g} bit/s")
    if per_host > 1 and lab_rate is None:
        raise UsageError("--per-host describes the hosts of a lab: give the rate of its links too, such as --lab 1gbit")
    worlds = tuple(dict.fromkeys(ranks or (LAB_RANKS if lab_rate is not None else DEFAULT_RANKS)))
    counts = tuple(sorted(set(sizes or DEFAULT_SIZES)))
    for size in counts:
        if size < ITEM_BYTES or size % ITEM_BYTES:
            raise UsageError(f"{size} bytes are not a number of float32 elements: use multiples of 4 bytes")
    names = tuple(read_name(text) for text in dict.fromkeys(contenders))
    for world in worlds:
        if not 2 <= world <= MOST_RANKS:
            raise UsageError(f"{world} ranks are too few to exchange, or too many: use 2 to {MOST_RANKS}")
        if world % per_host or world == per_host:
            raise UsageError(f"{world} ranks do not fill two hosts or more with {per_host} each: use {2 * per_host}")
        for name in names:
            check_name(name, chosen, world)
    if lab_rate is not None:
        _check_reach(names)
    request = Request(chosen, counts, worlds, names, lab_rate, repetitions, per_host=per_host)
    for world in sorted(worlds, reverse=True):
        _check_memory(request, world)
    return request


def missing(name: Name, ranks: int) -> str | None:
    """The reason why a valid contender cannot be measured on this machine; None if it can."""
    if name.needs and find_spec(name.needs) is None:
        return f"{name.needs} is not installed: pip install {name.extra}"
    if name.library:
        found = name.find_library()
        if not isinstance(found, MpiLibrary):
            return found
        free = shutil.disk_usage(_SHM).free if Path(_SHM).is_dir() else 0
        if free < ranks * _MPI_SEGMENT_BYTES:
            return (
                f"{_SHM}, where the MPI library keeps its shared memory, has {free >> 20} MiB free, and {ranks} ranks"
                f" may need {ranks * _MPI_SEGMENT_BYTES >> 20}: free or enlarge it"
            )
    return None


def usual_repetitions(nbytes: int) -> int:
    """The usual number of repetitions of a size: small sizes vary more and have more repetitions."""
    return 60 if nbytes <= 1_000_000 else 20 if nbytes <= 16_000_000 else 9


def calls_per_repetition(nbytes: int) -> int:
    """The number of calls in one timing, enough to hide the skew between ranks at its start."""
    return 20 if nbytes <= 64_000 else 8 if nbytes <= 1_000_000 else 3 if nbytes <= 16_000_000 else 1


def warm_calls(calls: int) -> int:
    """The number of untimed calls before ``calls`` timed ones.

    The first aligns the ranks better than a barrier through the starter. Small sizes need as many as are timed, because
    a core's caches are cold after a sleep and warm in a script that repeats a call.
    """
    return calls if calls > 8 else calls // 2


def expected_s(nbytes: int, ranks: int, lab_rate: float | None) -> float:
    """A rough estimate of the seconds of one repetition, for the progress display."""
    timed = calls_per_repetition(nbytes)
    calls = timed + warm_calls(timed)
    moved = nbytes * ranks * 8 / 1e9 / len(os.sched_getaffinity(0))
    wire = 0.0 if lab_rate is None else 2 * (ranks - 1) / ranks * nbytes * 8 / lab_rate
    return 0.002 + calls * (0.001 * ranks + moved / 8 + wire) + moved / 4


def _default_contenders(kind: Collective, in_lab: bool, per_host: int) -> tuple[str, ...]:
    every = LAB_CONTENDERS if in_lab else DEFAULT_CONTENDERS
    found = tuple(name for name in every if kind.name != "broadcast" or name in _BROADCAST_CONTENDERS)
    return found if per_host == 1 else ("auto:auto", *found)  # ranks of a host share its memory


def _check_reach(names: Sequence[Name]) -> None:
    """Raise UsageError for a transport that cannot leave its host, because a lab has several hosts."""
    for name in names:
        if name.peer is None and name.strategy.transport.name in ("shm", "inproc"):
            raise UsageError(f"{name.text} works inside one host, and a lab has several: use tcp or auto")


def _check_memory(request: Request, ranks: int) -> None:
    """Raise UsageError if the contenders that can run would make the machine swap, or the kernel kill ranks."""
    names = [name for name in request.contenders if missing(name, ranks) is None]
    sizes = sorted(request.sizes, reverse=True)
    size, arrays = sizes[0], len(names) + _EXTRA_ARRAYS
    memory = _EXTRA_ARRAYS * size + _PROCESS_BYTES  # the limits have ranks too
    for name in names:
        settings = len(name.settings()) if request.lab_rate is None else 1
        # Every size has one best setting, so each further set of ranks has an array of a smaller size.
        own = sizes[:settings]
        memory += sum(own) + len(own) * (_PROCESS_BYTES + (_TORCH_BYTES if name.needs == "torch" else 0))
    needed = ranks * memory
    available = available_memory_bytes()
    if needed > available:
        raise UsageError(
            f"{ranks} ranks with {arrays} arrays of {size / 1e6:g} MB each (one per contender, and their working"
            f" memory) take {needed / 1e9:.1f} GB with their processes, but {available / 1e9:.1f} GB of memory are"
            " available: use fewer ranks, a smaller size, or fewer contenders at a time (--resume adds rows)"
        )


TURNS = 6
"""The number of turns over which a contender's repetitions of a size are spread, if there are enough."""


@dataclass(frozen=True)
class Work(Task):
    """The task of one set of ranks.

    They measure ``contender``, or the limits if it is empty: copies, and sockets too with ``link``. No array is larger
    than ``most_bytes``.
    """

    collective: str
    contender: str
    most_bytes: int
    link: bool = False


def turns_of(repetitions: int) -> Sequence[int]:
    """The number of repetitions in each turn, as equal as possible."""
    turns = min(TURNS, repetitions)
    return [repetitions // turns + (turn < repetitions % turns) for turn in range(turns)]
