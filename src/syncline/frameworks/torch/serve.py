"""What a server process does: take gradients in, apply updates, send weights out, until the workers leave.

The state machine of ``sync.server`` decides; this file moves what it says over the session and never anything else.
"""

from __future__ import annotations

import json

from ...compression import Compression
from ...engine import Work
from ...program import Program
from ...session import WEIGHT_KEYS, Session
from ...sync.server import Action, Apply, Measure, Release, Request, Server
from .records import pack, unpack
from .shard import Shard
from .storage import Storage

REQUEST_BYTES = 1 << 20
"""The longest request of a worker: the values of its parameter groups."""

REPLY_BYTES = 1 << 10
"""The longest answer of a server."""


class ShardServer:
    """Serves one shard: ``push`` and ``pull`` are this process's programs, ``gradients`` what is pushed."""

    def __init__(
        self, session: Session, shard: Shard, gradients: Storage, weights: Storage, push: Program, pull: Program
    ) -> None:
        self._session, self._shard = session, shard
        self._gradients, self._weights = gradients, weights
        self._push, self._pull = push, pull
        self._server = Server(session.group.workers, session.strategy.sync_mode())
        self._pulls: list[Work] = []
        self._pushes = self._receive()
        workers = range(session.group.workers)
        self._requests = {worker: self._listen(worker) for worker in workers}

    def serve(self) -> None:
        """Return when every worker has left; raises the fault when there is one."""
        engine, left = self._session.engine, self._session.workers_left
        while not left():
            engine.wait_any(self._requests.values(), until=left)
            for worker, work in list(self._requests.items()):
                if work.done:
                    self._answer(worker, json.loads(work.result))
                    self._requests[worker] = self._listen(worker)

    def _answer(self, worker: int, message: dict[str, object]) -> None:
        kind = message["kind"]
        if kind == "state":
            body = pack(self._shard.state())
            self._reply(worker, {"size": len(body)})
            self._session.send(worker, body, "optimizer state")
        elif kind == "load":
            self._load(worker, int(str(message["size"])))
        else:
            request = Request(kind, worker, message["clock"], message.get("values", {}))  # type: ignore[arg-type]
            for action in self._server.handle(request):
                self._do(action)

    def _do(self, action: Action) -> None:
        engine = self._session.engine
        if isinstance(action, Measure):
            engine.wait(*self._pushes)
            squared = self._shard.squared_norm()
            for worker in action.workers:
                self._reply(worker, {"squared": squared})
        elif isinstance(action, Apply):
            engine.wait(*self._pushes, *self._pulls)
            self._shard.apply(action.values["groups"], action.values["scale"])
            self._pushes = self._receive()
        elif isinstance(action, Release):
            self._pulls = [
                engine.exchange(self._pull, array, WEIGHT_KEYS + number, f"weights of bucket {number}")
                for number, array in enumerate(self._weights.arrays)
            ]
            for worker in action.workers:
                self._reply(worker, {})

    def _load(self, worker: int, size: int) -> None:
        body = self._session.recv(worker, "optimizer state", size)
        self._session.engine.wait(body)
        self._shard.load(unpack(body.result))
        self._reply(worker, {"size": size})

    def _receive(self) -> list[Work]:
        return receive_buckets(self._session, self._push, self._gradients)

    def _listen(self, worker: int) -> Work:
        return self._session.recv(worker, f"a request of rank {worker}", REQUEST_BYTES, tolerant=True)

    def _reply(self, worker: int, message: dict[str, object]) -> None:
        self._session.send(worker, json.dumps(message).encode(), f"an answer to rank {worker}")


def serve_plan(session: Session, program: Program, gradients: Storage, compression: Compression | None) -> None:
    """Take part in the workers' allreduce as a server that only sums, until they leave."""
    while not session.workers_left():
        works = receive_buckets(session, program, gradients) if compression is None else _reduce(session, compression)
        for work in works:
            session.engine.wait_any([work], until=session.workers_left)


def _reduce(session: Session, compression: Compression) -> list[Work]:
    """The same for compressed gradients."""
    return [
        session.reduce(compression, number, number, f"bucket {number}", tolerant=True)
        for number in range(compression.buckets)
    ]


def receive_buckets(session: Session, program: Program, gradients: Storage) -> list[Work]:
    """Post this server's part in the next exchange of every bucket; it never ends when the workers leave."""
    return [
        session.engine.exchange(program, array, number, f"bucket {number}", tolerant=True)
        for number, array in enumerate(gradients.arrays)
    ]
