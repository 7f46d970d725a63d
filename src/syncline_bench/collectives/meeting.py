"""A rank's line to the process that has started it: orders come down, reports go up, and the ranks meet over it.

Meetings favour no contender's own barrier, and cost nothing between them: whoever waits is blocked in a read. The
starter is awake anyway when the ranks meet, and asleep while they are timed. A rank whose starter is gone ends at once.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages import Connection

Table = NDArray[np.float64]


class Line:
    """One rank's end; all ranks meet in the same order. ``lines`` has the address of every rank's, as JSON."""

    def __init__(self, lines: str, rank: int, world: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing here is worth waiting for a tidy end
        self.rank, self.world = rank, world
        self._connection = Connection(json.loads(lines)[rank])

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error inside is told to the starter, and ends the process: a group's other ranks may never come."""
        try:
            yield
        except Exception as error:
            self._connection.fail(error)
            traceback.print_exc()
            # At once: MPI would wait for all ranks at this one's exit.
            os._exit(1)

    def orders(self) -> Iterator[dict[str, Any]]:
        """What the starter wants done, one thing after the other, until it wants the end."""
        self.send("done")  # with what comes before the first one
        while order := self._hear():
            yield order
            self.send("done")

    def finish(self) -> None:
        """The last word."""
        self.send("done")

    def send(self, kind: str, **content: Any) -> None:
        """Report something."""
        try:
            self._connection.send(kind, **content)
        except BrokenPipeError:
            os._exit(1)  # nobody listens any more

    def wait(self) -> None:
        """Return when all ranks have called."""
        self.gather()

    def gather(self, *mine: float) -> Table:
        """Every rank's numbers, a line per rank. Cost: a message to the starter and one back for each rank."""
        return np.array(self._meet(mine), np.float64)

    def share(self, mine: str) -> list[str]:
        """Every rank's text, in rank order."""
        found: list[str] = self._meet(mine)
        return found

    def _meet(self, mine: object) -> Any:
        self.send("meet", mine=mine)
        return self._hear()

    def _hear(self) -> Any:
        told = self._connection.hear()
        if told is None:
            os._exit(1)  # the starter is gone
        return told
