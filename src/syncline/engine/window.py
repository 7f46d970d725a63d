"""Memory that all processes of a group have mapped, as what runs over it wants to see it. A transport provides it."""

from __future__ import annotations

from typing import Protocol

from ..transports import Bytes, Words


class Window(Protocol):
    """Memory that all processes of a group have mapped, with a board for each (``kernels.onesided``)."""

    rank: int
    world: int
    members: Words
    """Per process: the address of its board, 0 while unknown, and the descriptor of its bell, -1 while unknown."""
    board: Words
    """This process's own board."""
    maps: Words
    """Per process two words for each segment number: where the segment is mapped here, 0 while it is not; its size."""
    gone: set[int]
    """Processes whose connections have closed."""

    def words_of(self, peer: int, segment: int) -> Words:
        """A segment of a process, empty while unknown and after the end; may be asked from any thread."""
        ...

    def allocate(self, nbytes: int) -> Bytes:
        """Zeroed shared memory, for good."""
        ...

    def find(self, address: int, nbytes: int) -> tuple[int, int] | None:
        """Segment number and offset of memory of this process, or None when it is not shared."""
        ...

    def staging(self, nbytes: int) -> Bytes:
        """Shared memory of at least that size, until ``free``."""
        ...

    def free(self, staging: Bytes) -> None:
        """Give back what ``staging`` gave."""
        ...

    def count(self, sent: Words, received: Words) -> None:
        """Add to the traffic: bytes per process."""
        ...
