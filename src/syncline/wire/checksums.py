"""Checksums of the frames of a link: bytes that were altered on their way are an error.

A header is followed by its checksum, so it is known to be right before its size is believed, and a body by its own. A
large body is summed piece by piece as it leaves and as it arrives, while the pieces are in the cache. Every checksum
starts from the sender, the receiver and the number of the frame between them: a frame that comes twice, at another
place in the order, or on another connection is found, too.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from ..errors import AlteredError
from ..kernels import rows
from .scratch import address_of

_SUM = struct.Struct("<q")
BYTES = _SUM.size
"""The size of a checksum."""

_PLACE = struct.Struct("<qq")


class Checksums:
    """Both directions of the link from process ``rank`` to ``peer``; for one thread."""

    def __init__(self, rank: int, peer: int, row: NDArray[np.int64]) -> None:
        """Compiled code also sums the bytes that it moves for ``row``."""
        from ..kernels import checksums, streams  # compiled code: loaded where it is used

        whole, out, come = (checksums.new_state() for _ in range(3))
        row[rows.SUM_OUT], row[rows.SUM_IN] = address_of(out), address_of(come)
        self._whole = streams.sum_all.bind(whole)
        self._begin_out, self._begin_in = streams.sum_all.bind(out), streams.sum_all.bind(come)
        self._more_out, self._more_in = streams.sum_more.bind(out), streams.sum_more.bind(come)
        self._end_out, self._end_in = streams.sum_end.bind(out), streams.sum_end.bind(come)
        self._peer = peer
        self._out, self._in = (self._of(_PLACE.pack(*ends), 0) for ends in ((rank, peer), (peer, rank)))

    def seal(self, head: memoryview) -> tuple[memoryview, int]:
        """The next header to send with its checksum, and the start of the checksum of its body."""
        self._out = first = self._out + 2 & _MOST
        return memoryview(bytes(head) + _SUM.pack(self._of(head, first))), first + 1

    def of_body(self, body: memoryview, first: int) -> memoryview:
        """The checksum to send behind a body."""
        return memoryview(_SUM.pack(self._of(body, first)))

    def begin(self, first: int) -> None:
        """Begin the checksum of a body that leaves in pieces."""
        self._begin_out(0, 0, first)

    def leaves(self, piece: memoryview) -> None:
        """Go on with the checksum of a body that leaves."""
        self._more_out(*_place(piece))

    def end(self) -> memoryview:
        """The checksum to send behind a body that has left."""
        return memoryview(_SUM.pack(self._end_out()))

    def check_head(self, head: memoryview) -> None:
        """Check the next header, which its checksum follows. Raises AlteredError."""
        self._in = first = self._in + 2 & _MOST
        if self._of(head[:-BYTES], first) != _SUM.unpack_from(head, head.nbytes - BYTES)[0]:
            raise self._altered("the header of a message")
        self._begin_in(0, 0, first + 1)

    def comes(self, piece: memoryview) -> None:
        """Go on with the checksum of the body that arrives."""
        self._more_in(*_place(piece))

    def check_body(self, come: memoryview, size: int) -> None:
        """Compare the checksum that has come behind a body of this size. Raises AlteredError."""
        if self._end_in() != _SUM.unpack(come)[0]:
            raise self._altered(f"a message of {size} bytes")

    def _of(self, data: bytes | memoryview, first: int) -> int:
        found: int = self._whole(*_place(data), first)
        return found

    def _altered(self, what: str) -> AlteredError:
        return AlteredError(
            f"{what} from rank {self._peer} was altered on its way (checksum=on found it): look for a faulty network"
            " card, cable, switch or memory on both hosts and between them (ethtool -S, dmesg), and start again from"
            " the last checkpoint",
            rank=self._peer,
        )


_MOST = 2**63 - 2
"""The greatest start of a header's checksum; its body's starts at one more."""


def _place(data: bytes | memoryview) -> tuple[int, int]:
    """The address of these bytes, and their number."""
    array = np.frombuffer(data, np.uint8)
    return address_of(array), array.nbytes
