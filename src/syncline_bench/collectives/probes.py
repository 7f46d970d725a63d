"""The limits of the machine, measured by the ranks themselves between their repetitions.

A limit is what plain copies or plain sockets get out of the hardware when *all ranks do it at once*, as in a
collective; it is taken in turn with the contenders, so that a busy moment lowers both. What a collective must move at
least is in ``kinds``; the time that this takes at the measured speed is the limit of the rows, and ``of_limit`` the
share reached.

*Memory.* Every rank copies from one half of an array of the collective's size to the other and back, and read and
written bytes both count: the footprint per rank is that of the collective, so that arrays that fit the caches are held
against the speed of the caches and large ones against that of memory. This is an upper bound: a
copy has its data in the core's own cache, a collective has to fetch the others' from theirs. C's memcpy, which numpy
calls, writes large arrays past the cache, as a good collective would. For small arrays what counts is latency, and the
share says little.

*Link*, on one machine: every rank sends to the next one and receives from the one before it, both at once, over plain
TCP sockets in blocks of 128 KiB, as iperf3 does; the kernel's two copies per byte are in it. In a lab the link is
measured by iperf3 itself before the ranks start.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from syncline.errors import SynclineError

from ..ranks import Line

Array = NDArray[np.float32]

_LEAST_BYTES = 256 << 10
"""Smaller arrays are held against a footprint of this size, which lies in a core's cache: a copy of less would measure
the call."""

_SPAN_BYTES = 128 << 20
"""At least so much is copied per measurement by a rank: some 10 ms, or the ranks would hardly meet."""
_LEAST_LINK_BYTES, _MOST_LINK_BYTES = 8 << 20, 64 << 20
_LINK_BLOCK_BYTES = 128 << 10
_TIMEOUT_S = 120.0


class MemoryProbe:
    """Copies by all ranks at once; ``measure`` gives bytes per second, read and written, of all ranks together."""

    def __init__(self, line: Line, nbytes: int) -> None:
        self._line = line
        half = max(nbytes, _LEAST_BYTES) // 8
        self._there, self._back = np.ones((2, half), np.float32)
        self._rounds = max(1, round(_SPAN_BYTES / (16 * half)))

    def measure(self) -> float:
        """Called by all ranks together; cost: some 10 ms or two copies of the array."""
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
    """A ring of plain sockets on one machine; ``measure`` gives the bytes per second that every rank receives."""

    def __init__(self, line: Line, address: str) -> None:
        self._line = line
        self._block = np.zeros(_LINK_BLOCK_BYTES, np.uint8)
        self._into = np.empty(_LINK_BLOCK_BYTES, np.uint8)
        self._to, self._source = _ring(line, address)

    def measure(self, nbytes: int) -> float:
        """Called by all ranks together, with the size that is being measured; cost: 8 to 64 MiB moved by each."""
        blocks = min(max(nbytes, _LEAST_LINK_BYTES), _MOST_LINK_BYTES) // _LINK_BLOCK_BYTES
        self._line.wait()
        sender = threading.Thread(target=self._send, args=(blocks + 1,), name="syncline-bench-link")
        sender.start()
        self._receive(_LINK_BLOCK_BYTES)  # from here on the stream flows
        begun = time.monotonic()
        self._receive(blocks * _LINK_BLOCK_BYTES)
        elapsed = time.monotonic() - begun
        sender.join()
        return float(blocks * _LINK_BLOCK_BYTES / self._line.gather(elapsed).max())

    def _send(self, blocks: int) -> None:
        for _ in range(blocks):
            self._to.sendall(self._block)

    def _receive(self, nbytes: int) -> None:
        while nbytes:
            got = self._source.recv_into(self._into, min(nbytes, _LINK_BLOCK_BYTES))
            if not got:
                raise SynclineError("the rank before this one closed the socket that measures the link")
            nbytes -= got

    def close(self) -> None:
        """Close the sockets."""
        self._to.close()
        self._source.close()


def _ring(line: Line, address: str) -> tuple[socket.socket, socket.socket]:
    """A connection to the next rank and one from the rank before."""
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
        found.close()  # somebody else who tried the port
