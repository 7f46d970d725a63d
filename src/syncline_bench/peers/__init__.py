"""Peers: what one would use instead of Syncline, measured beside it; one file each, a registry of their own.

A peer declares where it takes part. In ``syncline compare``: ``trains=True`` and ``framework``, whose training it takes
part in; its ``join()`` makes this process a
member of the run's group and returns what ``syncline_bench.sides.Side`` asks for, and it is named with arguments like a
strategy's parts: ``ddp(bucket=5MiB)``. In ``syncline bench`` it is registered under the name ``LIBRARY:ALGORITHM`` and
declares

* ``collectives``: those that it has,
* ``moves``: ``memory`` when its ranks of one machine share memory, ``link`` when they talk over sockets there,
* ``needs``: a Python package, or ``mpi`` with the ``library`` that has to be installed,

which the bench reads without importing the library: files of this folder import theirs when an object is made. A peer
of a bench has processes of its own and does in them what a plain script of its library does, and nothing else. Each
peer runs in its best documented setting; where that is an environment variable, ``launch.mpi_library`` or the bench
sets it before the library is loaded, and the file says so.
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
    """One rank's place among those of its contender, and what it will be asked for: at most so many ``elements``.

    ``share`` tells all ranks a text and returns those of all, in rank order: addresses, where a library has no way of
    its own for that. All ranks call it.
    """

    rank: int
    world: int
    collective: str
    elements: int
    share: Callable[[str], list[str]]


class Contender(Protocol):
    """One way to run a collective; every rank of a bench has an object of it and makes the same calls.

    Raises what its library raises; an error ends the rank.
    """

    def select(self, elements: int) -> Array:
        """The array that ``run`` works on from now on; its contents are the caller's to write.

        For the halves of an allreduce ``elements`` is a multiple of the world size, so that all parts are equal.
        """
        ...

    def run(self) -> None:
        """Run the collective once, on the selected array, and return when this rank's result is there."""
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
