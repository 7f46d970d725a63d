"""A ring on gRPC's streams, as fast as grpcio allows.

The allreduce of baidu-allreduce: scatter-reduce, then all-gather, N-1 steps each (Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations", 2009). It follows gRPC's advice on performance in Python:
the synchronous interface, and one long stream instead of many calls. Messages are plain bytes, without generated code.
Every rank has one stream, to the next one, and parts travel in pieces of 1 MiB: a piece is sent on as soon as it has
been added. In the all-gather the received message itself is sent on, so it is not copied again. gRPC's sending thread
copies the other messages; the caller's thread adds directly from the received message.

Larger HTTP/2 frames, fixed windows and other piece sizes were not faster here. Proxies are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np

from syncline.registry import register

from . import Array, Seat
from ._ring import Ring, pieces

_SMALL_BYTES = 64 * 1024
_METHOD = "/ring/pass"
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)


@register("peers", "grpcio:ring", collectives=("allreduce", "reduce-scatter", "all-gather"), moves="link", needs="grpc")
class GrpcRing(Ring):
    """Ring allreduce, or one of its halves, on one stream to the next rank."""

    def __init__(self, seat: Seat) -> None:
        import grpc

        super().__init__(seat, f"grpcio {grpc.__version__}")
        self._leaving: SimpleQueue[Any] = SimpleQueue()
        self._come: SimpleQueue[bytes] = SimpleQueue()
        self._copied: SimpleQueue[None] = SimpleQueue()
        self._to_copy = 0
        handler = grpc.stream_unary_rpc_method_handler(self._take)
        service = SimpleNamespace(service=lambda _: handler)
        self._server = grpc.server(ThreadPoolExecutor(1), [service], options=_OPTIONS)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        following = seat.share(str(port))[(seat.rank + 1) % seat.world]
        self._channel = grpc.insecure_channel(f"127.0.0.1:{following}", _OPTIONS)
        stream = self._channel.stream_unary(_METHOD, request_serializer=self._serialize)
        self._passing = stream.future(iter(self._leaving.get, None), wait_for_ready=True)

    def run(self) -> None:
        """Once around for each half, until gRPC has copied all sent data."""
        super().run()
        for _ in range(self._to_copy):  # the array is the caller's again
            self._copied.get()
        self._to_copy = 0

    def close(self) -> None:
        """All ranks end together: the outgoing stream, then the server of the incoming one."""
        self._leaving.put(None)
        self._passing.result()
        self._channel.close()
        self._server.stop(5).wait()

    def _take(self, requests: Iterator[bytes], _context: Any) -> bytes:
        """gRPC's thread: the messages of the previous rank, as they arrive."""
        for message in requests:
            self._come.put(message)
        return b""

    def _reduce_scatter(self) -> None:
        """Rank r ends with the sum of part r: in step s it adds to part r-1-s and passes it on."""
        self._send(self._rank - 1)
        for step in range(1, self._ranks):
            for piece in pieces(self._part(self._rank - 1 - step)):
                np.add(piece, np.frombuffer(self._come.get(), np.float32), out=piece)
                if step < self._ranks - 1:
                    self._pass_on(piece)

    def _all_gather(self) -> None:
        """Part r goes from rank r to all: in step s a rank takes part r-s and passes it on."""
        self._send(self._rank)
        for step in range(1, self._ranks):
            for piece in pieces(self._part(self._rank - step)):
                message = self._come.get()
                piece[:] = np.frombuffer(message, np.float32)
                if step < self._ranks - 1:
                    self._leaving.put(message)

    def _send(self, number: int) -> None:
        for piece in pieces(self._part(number)):
            self._pass_on(piece)

    def _pass_on(self, piece: Array) -> None:
        if piece.nbytes <= _SMALL_BYTES:
            self._leaving.put(piece.tobytes())
        else:
            self._leaving.put(memoryview(piece))
            self._to_copy += 1

    def _serialize(self, message: memoryview | bytes) -> bytes:
        """gRPC's thread: a received message is sent on unchanged, and a piece of the array is copied."""
        if isinstance(message, bytes):
            return message
        copy = message.tobytes()
        self._copied.put(None)
        return copy
