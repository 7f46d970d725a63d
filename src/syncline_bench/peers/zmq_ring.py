"""A ring on ZeroMQ's messages, written as pyzmq's documentation advises.

Scatter-reduce, then all-gather, N-1 steps each (Patarasuk and Yuan, 2009), over a PUSH socket to the next rank and a
PULL socket from the previous one. It follows the documentation's advice for large arrays: ``send(copy=False)`` from the
array's own memory, pieces that are added where ZeroMQ has received them (``recv(copy=False)``) or received into the
array (``recv_into``), no limit on queues, and ``ipc`` between ranks of one host. Parts travel in pieces, so that one
piece is added while the next travels. There is no authentication.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import Any

import numpy as np

from syncline.launch.address import listen_address
from syncline.launch.environment import recognise
from syncline.registry import register

from . import Array, Seat
from ._ring import Ring, pieces


@register("peers", "pyzmq:ring", collectives=("allreduce", "reduce-scatter", "all-gather"), moves="link", needs="zmq")
class ZmqRing(Ring):
    """Ring allreduce, or one of its halves, on PUSH and PULL."""

    def __init__(self, seat: Seat) -> None:
        import zmq

        super().__init__(seat, f"pyzmq {zmq.pyzmq_version()}, libzmq {zmq.zmq_version()}")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._next, self._last = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for end in (self._next, self._last):
            end.setsockopt(zmq.SNDHWM, 0)
            end.setsockopt(zmq.RCVHWM, 0)
            end.setsockopt(zmq.LINGER, 0)
        self._next.connect(self._meet(seat))

    def _meet(self, seat: Seat) -> str:
        """Listen, and find out the next rank's address: ``ipc`` if both are on one host."""
        host = f"{socket.gethostname()} {Path('/proc/self/ns/net').readlink()}"
        near = seat.share(host)[self._rank - 1] == host
        where = f"tcp://{listen_address(recognise(), None)}:*"
        port = self._last.bind(f"ipc://@pyzmq-{secrets.token_hex(12)}" if near else where)
        return seat.share(port.addr)[(self._rank + 1) % self._ranks]

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _reduce_scatter(self) -> None:
        """Rank r ends with the sum of part r: in step s it passes on part r-1-s."""
        for turn in range(1, self._ranks):
            sending = self._send(self._part(self._rank - turn))
            for piece in pieces(self._part(self._rank - turn - 1)):
                arrived = self._last.recv(copy=False)
                np.add(piece, np.frombuffer(arrived.buffer, np.float32), out=piece)
            self._end(sending)

    def _all_gather(self) -> None:
        """Part r goes from rank r to all: in step s a rank passes on part r-s."""
        for turn in range(self._ranks - 1):
            sending = self._send(self._part(self._rank - turn))
            for piece in pieces(self._part(self._rank - turn - 1)):
                self._last.recv_into(piece)
            self._end(sending)

    def _send(self, part: Array) -> list[Any]:
        """Send a part. Returns trackers that tell when ZeroMQ no longer uses its memory."""
        return [self._next.send(piece, copy=False, track=True) for piece in pieces(part)]

    def _end(self, sending: list[Any]) -> None:
        """Wait until the sent memory may be written again."""
        for message in sending:
            message.wait()
