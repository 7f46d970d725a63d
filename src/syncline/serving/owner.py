"""The owner's side: it takes gradients in, applies updates, and lets the workers have the new weights.

``Owner`` does what the protocol's state machine decides, wherever the owner is: ``Moves`` is how pushes, weights and
answers travel there. ``Server`` is a process that does nothing else, until the workers leave: it is asked by messages.
Owners on workers are in ``worker``, since there everybody comes to the same call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from ..compression.compression import Compression
from ..engine.work import Work
from ..plans.messages import Program
from ..session.session import Session
from .messages import check_fields, nonsense, read_message, receive_body, send_body
from .protocol import Apply, Ledger, Measure, Release, Request
from .records import Array, Record, pack, unpack
from .shard import Build, Shard
from .traffic import Model, Traffic, push_coded, push_plan, traffic_of

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


class Moves(Protocol):
    """What moves between an owner and its workers."""

    def settle(self) -> None:
        """Return when the next push lies in the gradients, and nothing under way reads the weights."""
        ...

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:
        """Tell these workers the squared norm of the gradients here."""
        ...

    def take_next(self) -> None:
        """The gradients have been applied: the next push may come."""
        ...

    def release(self, workers: Sequence[int]) -> None:
        """Let these workers have the weights, and go on."""
        ...


class Owner:
    """Keeps the ledger of one shard and does what it says.

    The modes that a strategy accepts merge, and workers push a step at once: every action is of ``ALL``.
    """

    def __init__(self, session: Session, shard: Shard, moves: Moves) -> None:
        self._shard, self._moves = shard, moves
        self.ledger = Ledger(session.group.workers, session.strategy.sync_mode())

    def handle(self, request: Request) -> None:
        """Take a worker's message; raises MismatchError for one that is not its next, or differs from the others'."""
        moves, optimizer = self._moves, self._shard.optimizer
        for action in self.ledger.handle(request):
            if isinstance(action, Measure):
                moves.settle()
                moves.tell_norm(action.workers, optimizer.squared_norm())
            elif isinstance(action, Apply):
                moves.settle()
                optimizer.apply(action.values["groups"], action.values["scale"])
                moves.take_next()
            elif isinstance(action, Release):
                moves.release(action.workers)


class Server:
    """Serves the shard of a model of so many ``buckets`` to workers that send requests."""

    def __init__(self, session: Session, shard: Shard, traffic: Traffic, buckets: int) -> None:
        self._session, self._shard, self._traffic, self._buckets = session, shard, traffic, buckets
        self._owner = Owner(session, shard, self)
        self._pulls: list[Work] = []
        self._pushes = traffic.push()
        self._requests = {worker: self._listen(worker) for worker in range(session.group.workers)}
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

    # As ``Moves``.

    def settle(self) -> None:
        """Wait for what is under way."""
        self._session.engine.wait(*self._pushes, *self._pulls)

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:
        """They have asked for it."""
        for worker in workers:
            self._reply(worker, {"squared": squared})

    def take_next(self) -> None:
        """Post it."""
        self._pushes = self._traffic.push()

    def release(self, workers: Sequence[int]) -> None:
        """Send the weights and answer what they have asked."""
        self._pulls = [self._traffic.pull(number) for number in range(self._buckets)]
        for worker in workers:
            self._reply(worker, {})

    # Requests.

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
        return {worker: f"step {step} of the optimizer" for worker, step in self._owner.ledger.awaited.items()}

    def _answer(self, worker: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        if kind in ("norm", "push"):
            self._owner.handle(Request(kind, worker, message["clock"], message.get("values", {})))
            return
        if kind != "load":  # which alone does not touch the weights
            self._session.engine.wait(*self._pulls)
        if kind in ("state", "weights"):
            body = pack(self._shard.state() if kind == "state" else self._shard.weights())
            self._reply(worker, {"size": len(body)})
            send_body(self._session, worker, body, f"the owner's {kind}")
            return
        records = self._body(worker, message)
        if kind == "load":
            self._shard.load(records)
        else:
            self._take_weights(worker, kind, records)
        if kind == "resume":
            self._traffic.resume_at(message["step"])
        self._reply(worker, {})

    def _take_weights(self, worker: int, kind: str, records: list[Record]) -> None:
        """The owner's; what ``replace`` brings all workers have."""
        try:
            if kind == "replace":
                self._traffic.know(records)
            self._shard.load_weights(records)
        except ValueError as error:
            raise nonsense(self._session, worker, f"the body of a {kind}", str(error)) from error

    def _body(self, worker: int, message: dict[str, Any]) -> list[Record]:
        """The records that follow a message."""
        body = receive_body(self._session, worker, message["size"], f"the body of a {message['kind']}")
        return unpack(body, self._session.name(worker), worker)

    def _listen(self, worker: int) -> Work:
        return self._session.recv(worker, f"a request of rank {worker}", REQUEST_BYTES, tolerant=True)

    def _reply(self, worker: int, message: dict[str, object]) -> None:
        self._session.send(worker, json.dumps(message).encode(), f"an answer to rank {worker}")


def serve(session: Session, model: Model, build: Build, learnt: Sequence[Record]) -> None:
    """Own a part of that model's weights, with what the optimizer has ``learnt`` before, until the workers leave."""
    traffic = traffic_of(session, model)
    holdings = traffic.holdings()
    if holdings is not None:
        Server(session, Shard(holdings, build, learnt), traffic, len(model.buckets)).serve()


def serve_plan(session: Session, program: Program, gradients: Sequence[Array], compression: Compression | None) -> None:
    """Take part in the workers' allreduce as a server that only sums, until they leave."""
    left = session.ending.workers_left
    while not left():
        works = push_plan(session, program, gradients) if compression is None else push_coded(session, compression)
        for work in works:
            session.engine.wait_any([work], until=left)
