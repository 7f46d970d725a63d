"""Peers: the alternatives to Syncline, measured next to it; one file each, in a registry of their own.

A peer declares where it takes part. For ``syncline compare`` it declares ``trains=True`` and the ``framework`` whose
training it takes part in. Its ``join()`` makes this process a member of the run's group and returns a
``syncline_bench.sides.Side``. Its name may have arguments, like a strategy's parts: ``ddp(bucket=5MiB)``. For
``syncline bench`` it is registered under the name ``LIBRARY:ALGORITHM`` and declares

* ``collectives``: the collectives that it has,
* ``moves``: ``memory`` when its ranks of one machine share memory, ``link`` when they talk over sockets there,
* ``needs``: a Python package, or ``mpi`` with the ``library`` that has to be installed,
* ``settings``: per library (an empty name for a package), settings by name, each with its environment variables.

The bench reads these without importing the library: a file of this folder imports its library when an object is made. A
peer of a bench has processes of its own, which do only what a plain script of its library does. If different settings
are the best at different sizes, the bench on one machine tries all of them, measures the fastest of each size, and
names it in the row. In a lab it measures the first one, with the library's own choice of algorithm. ``NAME(SETTING)``
requests one.

Each MPI library can have an environment of its own, because not all libraries fit into one (``library_of``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from syncline.launch.mpi_library import LIBRARIES, MpiLibrary, find_library

Array = NDArray[np.float32]

Settings = Mapping[str, Mapping[str, str]]
"""Settings by name, each with its environment variables."""

ENVIRONMENTS = Path(__file__).parents[3] / ".peers"
"""Where ``make bench-peers`` makes an environment for each MPI library, under the library's name."""

INSTALLED = ".installed"
"""The file that ``make`` writes into an environment when all of it is installed."""

REMEDY = "make bench-peers"


def library_of(name: str) -> MpiLibrary | str:
    """The MPI library of a peer, the first of all for ``mpi``: in an environment of its own, else in this one.

    A text says why there is none, with the remedy. An environment of its own that is broken is not passed over.
    """
    reasons = []
    for candidate in LIBRARIES if name == "mpi" else (name,):
        folder = ENVIRONMENTS / candidate
        found = _in_its_own(candidate, folder) if folder.is_dir() else find_library(candidate)
        if isinstance(found, MpiLibrary):
            return found
        reasons.append(found if folder.is_dir() else f"{found}, or in a clone {REMEDY}")
    return "; ".join(reasons)


def _in_its_own(name: str, folder: Path) -> MpiLibrary | str:
    if (folder / INSTALLED).is_file() and (folder / "bin" / "python").exists():
        found = find_library(name, prefix=folder, which=lambda _: None)
        if isinstance(found, MpiLibrary):
            return found
    return f"the environment {folder} is incomplete: rm -r {folder} && {REMEDY}"


@dataclass(frozen=True)
class Seat:
    """One rank's place among the ranks of its contender, and the greatest number of ``elements`` that it will get.

    ``share`` sends a text to all ranks and returns the texts of all, in rank order, such as addresses for a library
    that has no rendezvous of its own. All ranks call it.
    """

    rank: int
    world: int
    collective: str
    elements: int
    share: Callable[[str], list[str]]


class Contender(Protocol):
    """One way to run a collective; every rank of a bench has an object of it and makes the same calls.

    Raises its library's exceptions; an error ends the rank.
    """

    def select(self, elements: int) -> Array:
        """The array that ``run`` works on from now on; its contents are the caller's to write.

        For the halves of an allreduce ``elements`` is a multiple of the world size, so that all parts are equal.
        """
        ...

    def run(self) -> None:
        """Run the collective once on the selected array, and return when this rank's result is complete."""
        ...

    def result(self) -> Array:
        """This rank's result: the whole array, or its own part after a reduce-scatter."""
        ...

    def chosen(self) -> str | None:
        """The algorithm that runs at the selected size, if the contender's name leaves it open; else None."""
        ...

    def close(self) -> None:
        """End the connections; called by all ranks together."""
        ...
