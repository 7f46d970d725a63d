"""What a server process does: take gradients in, apply updates, send weights out, until the workers leave.

The state machine of ``serving.protocol`` decides; this file moves what it says over the session, and nothing else.
``Traffic`` is how gradients come and weights go: ``Planned`` as they are, ``Coded`` as a codec's payloads.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any, Protocol

from ...compression.compression import Compression
from ...compression.updates import Updates
from ...engine.work import Work
from ...plans.messages import Program, compile_program
from ...plans.plan import Plan
from ...serving.protocol import Action, Apply, Ledger, Measure, Release, Request
from ...session.communicator import WEIGHT_KEYS
from ...session.session import Session
from .messages import check_fields, nonsense, read_message, receive_body, send_body
from .records import pack, unpack
from .shard import Record, Shard
from .storage import Storage

REQUEST_BYTES = 1 << 20
"""The longest request of a worker: the values of its parameter groups."""

REPLY_BYTES = 1 << 10
"""The longest answer of a server."""

_FIELDS: dict[str, dict[str, type]] = {
    "state": {},
    "weights": {},
    "load": {"size": int},
    "replace": {"size": int},
    "resume": {"size": int, "step": int},
    "norm": {"clock": int},
    "push": {"clock": int, "values": dict},
}
"""What each kind of request has to say."""


class Traffic(Protocol):
    """A server's part in the exchanges of every bucket."""

    def receive(self) -> list[Work]:
        """Post the next exchange of gradients; it never ends when the workers leave."""
        ...

    def release(self) -> list[Work]:
        """Send the updated weights."""
        ...

    def know(self, records: list[Record]) -> None:
        """The workers have other weights than they were sent: these."""
        ...

    def resume_at(self, step: int) -> None:
        """Go on from that step, counted from 0."""
        ...


class Planned:
    """Gradients are summed by the plan ``push``, weights copied by ``pull``."""

    def __init__(self, session: Session, gradients: Storage, weights: Storage, push: Plan, pull: Plan) -> None:
        self._session, self._gradients, self._weights = session, gradients, weights
        self._push, self._pull = compile_program(push, session.index), compile_program(pull, session.index)

    def receive(self) -> list[Work]:
        """One exchange for each bucket."""
        return receive_buckets(self._session, self._push, self._gradients)

    def release(self) -> list[Work]:
        """One exchange for each bucket."""
        return [
            self._session.engine.exchange(self._pull, array, WEIGHT_KEYS + number, f"weights of bucket {number}")
            for number, array in enumerate(self._weights.arrays)
        ]

    def know(self, records: list[Record]) -> None:
        """What is sent next says all."""

    def resume_at(self, step: int) -> None:
        """Nothing depends on the step."""


class Coded:
    """Gradients come as a codec's payloads, and what the updates change goes so."""

    def __init__(self, session: Session, known: Storage, compression: Compression, updates: Updates) -> None:
        self._session, self._known, self._compression, self._updates = session, known, compression, updates

    def receive(self) -> list[Work]:
        """The first half of a reduction for each bucket."""
        return reduce_buckets(self._session, self._compression)

    def release(self) -> list[Work]:
        """What corresponds to the second half, for each bucket."""
        return [
            self._session.pull(self._updates, number, WEIGHT_KEYS + number, f"weights of bucket {number}")
            for number in range(self._compression.buckets)
        ]

    def know(self, records: list[Record]) -> None:
        """What is sent next says the difference to these."""
        for record in records:
            self._known.flat_of(record.piece.tensor)[record.piece.start : record.piece.stop] = record.value

    def resume_at(self, step: int) -> None:
        """Told to the codec behind what ``receive`` has posted, in the thread that drives."""
        engine = self._session.engine
        engine.wait(engine.then("resume", (), partial(self._compression.resume_at, step)))


class ShardServer:
    """Serves one shard."""

    def __init__(self, session: Session, shard: Shard, traffic: Traffic) -> None:
        self._session, self._shard, self._traffic = session, shard, traffic
        self._ledger = Ledger(session.group.workers, session.strategy.sync_mode())
        self._pulls: list[Work] = []
        self._pushes = traffic.receive()
        workers = range(session.group.workers)
        self._requests = {worker: self._listen(worker) for worker in workers}
        session.engine.expects = self._expects

    def serve(self) -> None:
        """Return when every worker has left; raises the fault when there is one."""
        engine, left = self._session.engine, self._session.ending.workers_left
        while not left():
            engine.wait_any(self._requests.values(), until=left)
            for worker, work in list(self._requests.items()):
                if work.done:
                    self._answer(worker, self._read(worker, work.result))
                    self._requests[worker] = self._listen(worker)

    def _read(self, worker: int, data: bytes) -> dict[str, Any]:
        """A worker's request, checked."""
        label = f"a request of rank {worker}"
        message = read_message(self._session, worker, label, data, {"kind": str})
        fields = _FIELDS.get(message["kind"])
        if fields is None:
            raise nonsense(self._session, worker, label, f"kind is {message['kind']!r:.100}")
        check_fields(self._session, worker, label, message, fields)
        if message["kind"] == "push":
            values = message["values"]
            check_fields(self._session, worker, label, values, {"groups": list, "scale": float})
            if not all(isinstance(group, dict) for group in values["groups"]):
                raise nonsense(self._session, worker, label, "its groups are no groups")
        return message

    def _expects(self) -> dict[int, str]:
        """The workers that others wait for here; asked from any thread."""
        return {worker: f"step {step} of the optimizer" for worker, step in self._ledger.awaited.items()}

    def _answer(self, worker: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("state", "weights"):
            self._session.engine.wait(*self._pulls)
            body = pack(self._shard.state() if kind == "state" else self._shard.weights())
            self._reply(worker, {"size": len(body)})
            send_body(self._session, worker, body, f"the owner's {kind}")
        elif kind == "load":
            self._shard.load(self._body(worker, message))
            self._reply(worker, {})
        elif kind == "replace":
            self._session.engine.wait(*self._pulls)
            records = self._body(worker, message)
            self._traffic.know(records)
            self._shard.load_weights(records)
            self._reply(worker, {})
        elif kind == "resume":
            self._session.engine.wait(*self._pulls)
            self._shard.load_weights(self._body(worker, message))
            self._traffic.resume_at(message["step"])
            self._reply(worker, {})
        else:
            request = Request(kind, worker, message["clock"], message.get("values", {}))
            for action in self._ledger.handle(request):
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
            self._pushes = self._traffic.receive()
        elif isinstance(action, Release):
            self._pulls = self._traffic.release()
            for worker in action.workers:
                self._reply(worker, {})

    def _body(self, worker: int, message: dict[str, Any]) -> list[Record]:
        """The records that follow a message."""
        body = receive_body(self._session, worker, message["size"], f"the body of a {message['kind']}")
        return unpack(body, self._session.name(worker), worker)

    def _listen(self, worker: int) -> Work:
        return self._session.recv(worker, f"a request of rank {worker}", REQUEST_BYTES, tolerant=True)

    def _reply(self, worker: int, message: dict[str, object]) -> None:
        self._session.send(worker, json.dumps(message).encode(), f"an answer to rank {worker}")


def serve_plan(session: Session, program: Program, gradients: Storage, compression: Compression | None) -> None:
    """Take part in the workers' allreduce as a server that only sums, until they leave."""
    while not session.ending.workers_left():
        if compression is None:
            works = receive_buckets(session, program, gradients)
        else:
            works = reduce_buckets(session, compression)
        for work in works:
            session.engine.wait_any([work], until=session.ending.workers_left)


def reduce_buckets(session: Session, compression: Compression) -> list[Work]:
    """The same as ``receive_buckets`` for compressed gradients."""
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
