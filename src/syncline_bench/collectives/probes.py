"""The limits of the machine, which its ranks measure between the turns of the contenders.

A limit is the rate of plain copies or plain sockets when *all ranks use them at once*, as in a collective. Limits and
contenders take turns, so a busy moment lowers both. ``kinds`` has the least traffic of a collective; a row's limit is
the time of that traffic at the measured rate, and ``of_limit`` is the limit over the measured time.

*Memory.* Every rank copies one half of an array of the collective's size to the other half and back; bytes read and
bytes written both count. The footprint equals the collective's, so small arrays are compared with the speed of caches
and large arrays with the speed of memory. The limit is optimistic: a copy finds its data in the core's own cache, while
a collective fetches the data of other ranks from theirs. C's memcpy, which numpy calls, writes large arrays past the
cache, as a good collective would. For small arrays latency dominates, and the share says little.

*Link*, on one machine: every rank sends to the next rank and receives from the previous one at the same time, over
plain TCP sockets without pacing, in blocks of 128 KiB, as iperf3 does. The blocks are those of arrays of the
collective's size, one that is sent and one that is received, since a collective cannot send the same block again and
again from a cache. The kernel's two copies per byte are included. In a lab, iperf3 itself measures the link before the
ranks start.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from syncline.errors import SynclineError
from syncline.wire.links import leave_unpaced

from ..ranks import Line

Array = NDArray[np.float32]

_LEAST_BYTES = 256 << 10
"""The smallest array that is copied: it fits a core's cache, and the call takes little of the time of its copy."""

_SPAN_BYTES = 128 << 20
"""A rank copies at least this much per measurement, about 10 ms, so that the ranks' copies overlap."""
_LEAST_LINK_BYTES, _MOST_LINK_BYTES = 8 << 20, 64 << 20
_LINK_BLOCK_BYTES = 128 << 10
_TIMEOUT_S = 120.0


class MemoryProbe:
    """Copies by all ranks at once."""

    def __init__(self, line: Line, nbytes: int) -> None:
        self._line = line
        half = max(nbytes, _LEAST_BYTES) // 8
        self._there, self._back = np.ones((2, half), np.float32)
        self._rounds = max(1, round(_SPAN_BYTES / (16 * half)))

    def measure(self) -> float:
        """The bytes per second that all ranks together read and write. All ranks call this together.

        Cost: about 10 ms, or two copies of the array if these take longer.
        """
        self._line.wait()
        begun = time.monotonic()
        for _ in range(self._rounds):
            np.copyto(self._back, self._there)
            np.copyto(self._there, self._back)
        ended = time.monotonic()
        # From the first start to the last end: with more ranks than cores they do not all copy at the same time.
        times = self._line.gather(begun, ended)
        moved = self._line.world * self._rounds * 4 * self._there.nbytes
        return float(moved / (times[:, 1].max() - times[:, 0].min()))


class LinkProbe:
    """A ring of plain sockets on one machine."""

    def __init__(self, line: Line, address: str) -> None:
        self._line = line
        self._to, self._source = _ring(line, address)
        for sock in (self._to, self._source):
            leave_unpaced(sock)

    def measure(self, nbytes: int) -> float:
        """The bytes per second that every rank receives, at arrays of ``nbytes``. All ranks call this together.

        Cost: every rank moves 8 to 64 MiB.
        """
        count = min(max(nbytes, _LEAST_LINK_BYTES), _MOST_LINK_BYTES) // _LINK_BLOCK_BYTES
        own = min(max(nbytes // _LINK_BLOCK_BYTES, 1), count)
        out, into = np.ones((2, own, _LINK_BLOCK_BYTES), np.uint8)
        self._line.wait()
        sender = threading.Thread(target=self._send, args=(out, count + 1), name="syncline-bench-link")
        sender.start()
        self._receive(into, 1)  # from here on the stream flows
        begun = time.monotonic()
        self._receive(into, count)
        elapsed = time.monotonic() - begun
        sender.join()
        return float(count * _LINK_BLOCK_BYTES / self._line.gather(elapsed).max())

    def _send(self, blocks: NDArray[np.uint8], count: int) -> None:
        for number in range(count):
            self._to.sendall(blocks[number % len(blocks)])

    def _receive(self, blocks: NDArray[np.uint8], count: int) -> None:
        for number in range(count):
            rest = memoryview(blocks[number % len(blocks)])
            while rest:
                got = self._source.recv_into(rest)
                if not got:
                    raise SynclineError("the rank before this one closed the socket that measures the link")
                rest = rest[got:]

    def close(self) -> None:
        """Close both sockets."""
        self._to.close()
        self._source.close()


def _ring(line: Line, address: str) -> tuple[socket.socket, socket.socket]:
    """A connection to the next rank, and the connection from the previous rank."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(_TIMEOUT_S)
        ports = line.gather(listener.getsockname()[1])
        to = socket.create_connection((address, int(ports[(line.rank + 1) % line.world, 0])), _TIMEOUT_S)
        own = line.gather(to.getsockname()[1])
        expected = int(own[(line.rank - 1) % line.world, 0])
        source = _accept(listener, lambda port: port == expected)
    return to, source


def _accept(listener: socket.socket, known: Callable[[int], bool]) -> socket.socket:
    while True:
        found, (_, port) = listener.accept()
        if known(port):
            found.settimeout(_TIMEOUT_S)
            return found
        found.close()  # a stranger on the port
