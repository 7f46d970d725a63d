"""Peers: the alternatives to Syncline, measured next to it; one file each, in a registry of their own.

A peer declares where it takes part. For ``syncline compare`` it declares ``trains=True`` and the ``framework`` whose
training it takes part in. Its ``join()`` makes this process a member of the run's group and returns a
``syncline_bench.sides.Side``. Its name may have arguments, like a strategy's parts: ``ddp(bucket=5MiB)``. For
``syncline bench`` it is registered under the name ``LIBRARY:ALGORITHM`` and declares

* ``collectives``: the collectives that it has,
* ``moves``: ``memory`` when its ranks of one machine share memory, ``link`` when they talk over sockets there,
* ``needs``: a Python package, or ``mpi`` with the ``library`` that has to be installed,

The bench reads these without importing the library: a file of this folder imports its library when an object is made. A
peer of a bench has processes of its own, which do only what a plain script of its library does. Each peer runs in its
best documented setting. If that is an environment variable, ``launch.mpi_library`` or the bench sets it before the
library is loaded, and the file states it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


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
