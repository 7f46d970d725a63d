"""Keys tell the messages of exchanges in flight apart: which are whose, and which is that of the next call.

The lowest are those of models' buckets, then those of what all processes tell each other and of models' weights; above
them each communicator has a block of its own for its calls. A group of workers with models of its own is a run in
small: all of its keys are put into a block above these (``within``).
"""

from __future__ import annotations

from ..engine.order import Work
from .numbers import COMMUNICATORS

BUCKET_KEYS = 1 << 20
WEIGHT_KEYS = 2 * BUCKET_KEYS
CALL_KEYS = 4 * BUCKET_KEYS
"""Of the calls of all workers; those of further communicators come after them."""
CALLS_IN_FLIGHT = 1 << 12
"""So many exchanges of one communicator's calls have keys of their own."""
assert CALL_KEYS + COMMUNICATORS * CALLS_IN_FLIGHT <= 8 * BUCKET_KEYS


class CallKeys:
    """The keys of the calls of communicator ``number``: each in its turn, then the first again, and what holds them."""

    def __init__(self, number: int) -> None:
        self._first, self._in_flight = CALL_KEYS + number * CALLS_IN_FLIGHT, CALLS_IN_FLIGHT
        self._next = 0
        self._holders: dict[int, Work] = {}

    def take(self) -> tuple[int, Work | None]:
        """The next one, and the work that may hold it still: it has to be waited for."""
        self._next = (self._next + 1) % self._in_flight
        key = self._first + self._next
        return key, self._holders.pop(key, None)

    def hold(self, key: int, work: Work) -> None:
        """Keep a key until a work that goes on behind the script is done."""
        self._holders[key] = work

    @property
    def held(self) -> bool:
        """Whether something goes on."""
        return not all(work.done for work in self._holders.values())
