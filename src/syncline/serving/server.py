"""A server process until the workers leave: an owner that answers requests, or a server that only sums gradients.

``Server`` is an owner. It is a process of its own or, where every push is an update, a thread beside a worker
(``serve_beside``). It handles each message as soon as that and the gradients it announces are complete, whatever the
order of workers. ``Summing`` takes part in the workers' exchange of gradients and holds no weights.

A server always has its part in the next push posted, and a receive for news of another layout (``session.layout``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..compression.compression import Compression
from ..engine.order import CodedOrder, Order, Work
from ..errors import PeerTimeout, ProtocolError
from ..nouns import Bucket
from ..plans.messages import Program
from ..session.communicator import Heard, compiled
from ..session.layout import LABEL, REPLACING, Layout, Passed, Recompressing, copy_weights, hear_layout
from ..session.session import Session
from .merged import Coded, Planned, coded_posts, planned_posts
from .messages import ANSWERS, TURNS, check_fields, nonsense, read_message, receive_body, send_body
from .owner import MOST_WEIGHT, HeldParts, HeldShards, Owner, shard_of
from .protocol import ALL, Release, Request
from .records import Array, Record, pack, unpack
from .shard import Build, Model, Shard, Traffic
from .single import Single
from .turns import SAMPLES, Take, Tell, Turns, are_samples

REQUEST_BYTES = 1 << 20
"""The longest request of a worker, with the values of its parameter groups."""

REPLY_BYTES = 1 << 10
"""The longest answer of a server."""

_LAST_UPDATE_S = 60.0
"""The time for an update that was under way when the session failed."""

_FIELDS: dict[str, dict[str, type]] = {
    "advanced": {},
    "state": {},
    "weights": {},
    "load": {"size": int},
    "replace": {"size": int},
    "resume": {"size": int, "step": int},
    "norm": {"clock": int},
    "push": {"clock": int, "version": int, "values": dict},
    "shadow": {"clock": int, "version": int},
    "meet": {"clock": int, "call": str},
    "leave": {},
}
"""The fields of each kind of request."""

_MOST_CALL = 64
"""The longest name, in letters, of a call at which workers meet."""

_OF_STEPS = ("norm", "push", "shadow")
"""Requests that follow the gradients of a step."""


Lay = Callable[[Sequence[Bucket]], tuple[Sequence[Array], Sequence[Array]]]
"""Divides a model's memory into other buckets; returns their gradients and their weights."""


class Relay(NamedTuple):
    """A model, and the function that lays its memory out anew."""

    model: Model
    lay: Lay


def traffic_of(session: Session, model: Model) -> Traffic:
    """How a model's gradients and weights travel between workers and owners, as the sync mode and the codec require."""
    if not session.strategy.sync_mode().merges:
        return Single(session, model)
    return Planned(session, model) if model.compression is None else Coded(session, model, model.compression)


@dataclass
class _WaitingWorker:
    """A waiting worker: how many parts it has been sent, its staleness, and when it began to wait."""

    parts: int = 0
    ahead: int = 0
    since: float = 0.0


class Server:
    """Serves a shard to workers that send requests; ``traffic`` carries their gradients and the weights.

    Without ``relay`` the layout never changes.
    """

    def __init__(
        self, session: Session, shard: Shard, traffic: Traffic, relay: Relay | None = None, follows: Shard | None = None
    ) -> None:
        self._session, self._traffic, self._relay = session, traffic, relay
        self._exchanges = traffic.exchanges(shard.apart)
        self._merges = session.strategy.sync_mode().merges
        self._parts = range(traffic.buckets) if shard.apart and not self._merges else (ALL,)
        self._owner = Owner(session, shard, self._exchanges, self, self._parts, follows)
        self._begun: dict[int, set[int]] = {}  # worker -> parts pushed of an unfinished step
        self._waiting = [_WaitingWorker() for _ in range(session.group.workers)]
        self._told = [0] * session.group.workers  # the version of the weights that each worker was sent last
        self._gone: set[int] = set()  # workers that have announced their end
        # Whether it has the optimizer's state with which the session begins. Owners beside workers have it at once.
        self._loaded = not session.group.servers
        self._messages: dict[int, dict[str, Any]] = {}  # requests that have arrived and wait for gradients
        self._requests = {worker: self._listen(worker) for worker in range(session.group.workers)}
        self._heard = None if relay is None else session.everyone.listen(LABEL)
        self._turns = Turns(session.index, self._owners_in_turn(), session.group.workers)
        self._held: dict[int, Request] = {}  # messages of workers whose turn has not come
        self._told_turns = {owner: self._listen_to(owner) for owner in self._turns.heard}
        session.engine.expect(self._expects)

    def _owners_in_turn(self) -> Sequence[int]:
        """The processes that handle pushes in the same order: in an elastic run, or with followers, all of them."""
        session, roles = self._session, self._session.strategy.roles
        if self._merges or roles is None or not (session.elastic or roles.replicas):
            return [session.index]
        return sorted({*roles.places(session.group), *roles.followers(session.group)})

    def serve(self) -> None:
        """Serve until every worker has left; raises the run's fault if there is one."""
        engine, workers = self._session.engine, range(self._session.group.workers)
        while not engine.over(self._all_left):
            coming = [work for worker in self._requests for work in self._next(worker)]
            if self._heard is not None:
                coming.append(self._heard.work)
            coming += self._told_turns.values()
            engine.wait_any(coming, until=self._all_left)
            for owner, told in list(self._told_turns.items()):
                if told.done:
                    self._hear_of_turns(owner, told)
            for worker in workers:
                if worker in self._requests and any(work.done for work in self._next(worker)):
                    self._take(worker)
            if self._heard is not None and self._relay is not None and self._heard.work.done:
                self._replace(self._heard, self._relay)

    def _take(self, worker: int) -> None:
        """Handle a worker's request, and post the receive of its next one."""
        if not self._take_parts(worker):
            return
        message = self._messages.pop(worker)
        if message["kind"] == "leave":
            self._gone.add(worker)
            del self._requests[worker]
            if not self._merges:
                self._hold(Request("leave", worker, self._owner.ledger.clock_of(worker) + 1))
        else:
            self._answer(worker, message)
            self._requests[worker] = self._listen(worker)

    def _take_parts(self, worker: int) -> bool:
        """Handle the arrived buckets of a push that is taken bucket by bucket.

        Returns True for a request that is handled as a whole instead.
        """
        message = self._messages[worker]
        if message["kind"] != "push" or ALL in self._parts:
            return True
        begun = self._begun.setdefault(worker, set())
        for part, work in enumerate(self._exchanges.coming(worker)):
            if work.done and part not in begun:
                begun.add(part)
                if len(begun) == len(self._parts):
                    del self._messages[worker], self._begun[worker]
                    self._requests[worker] = self._listen(worker)
                    self._waiting[worker].since = time.perf_counter()
                self._owner.handle(Request("push", worker, message["clock"], message["values"], part))
        return False

    def _next(self, worker: int) -> Sequence[Work]:
        """The works that a worker's request still waits for, or the request itself if it can be handled."""
        request = self._requests[worker]
        if not request.done:
            return [request]
        if worker not in self._messages:
            self._messages[worker] = self._read(worker, request.result)
        if self._messages[worker]["kind"] in _OF_STEPS:
            begun = self._begun.get(worker, ())
            coming = [work for part, work in enumerate(self._exchanges.coming(worker)) if part not in begun]
            if ALL not in self._parts and self._messages[worker]["kind"] == "push":
                return coming
            return [next((work for work in coming if not work.done), request)]
        return [request]

    def _all_left(self) -> bool:
        left = self._gone | self._session.member.left_already()
        return left.issuperset(range(self._session.group.workers))

    def hold(self) -> HeldParts:
        """End all updates. Returns the parts that this server owns or follows after the last steps.

        None before it has the optimizer's state of its parts.
        """
        if self._merges:
            found = HeldParts.of(self._session, self._owner)
        else:
            found = HeldShards(self._session, self._owner, self._turns, self._held)
        return found if self._loaded else HeldParts()

    # As ``Answers``.

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:
        """Answer the workers' questions."""
        for worker in workers:
            self._reply(worker, {"squared": squared})

    def release(self, released: Release) -> None:
        """Send the weights; with the last part of a step, answer the worker."""
        if self._session.updated is not None:
            self._session.updated()
        self._exchanges.release(released.workers, released.bucket)
        for worker, ahead in zip(released.workers, released.ahead, strict=True):
            waiting = self._waiting[worker]
            waiting.parts += 1
            waiting.ahead = max(waiting.ahead, ahead)
            if waiting.parts == len(self._parts):
                self._answer_step(worker, waiting, released.by, released.met)

    def _answer_step(self, worker: int, waiting: _WaitingWorker, by: int, met: str) -> None:
        """Answer a worker that has been sent everything, the last part because of a message of ``by``."""
        waited_s = 0.0 if worker == by else time.perf_counter() - waiting.since
        version = self._told[worker] = self._owner.version
        clock, lag = self._owner.ledger.clock_of(worker), self._owner.lags[worker]
        self._owner.lags[worker], waiting.parts = 0, 0
        answer: dict[str, object] = {"version": version, "clock": clock, "ahead": waiting.ahead, "lag": lag}
        waiting.ahead = 0
        answer |= {"waited_s": waited_s, "for": by, "met": met}
        made = self._exchanges.made
        if self._owner.follows is None or made is None:
            self._reply(worker, answer)
            return
        # A worker has finished a step only if it is not lost with any server.
        reply = partial(self._reply, worker, answer)
        self._session.engine.then(f"an answer to {self._session.called(worker)}", [made], reply, tolerant=True)

    # Requests.

    def _read(self, worker: int, data: bytes) -> dict[str, Any]:
        """Parse and check a worker's request."""
        label = f"a request of {self._session.called(worker)}"
        message = read_message(self._session, worker, label, data, {"kind": str})
        fields = _FIELDS.get(message["kind"])
        if fields is None:
            raise nonsense(self._session, worker, label, f"kind is {message['kind']!r:.100}")
        check_fields(self._session, worker, label, message, fields)
        if message["kind"] == "push":
            check_values(self._session, worker, label, message["values"])
            if SAMPLES in message["values"] and not are_samples(message["values"][SAMPLES]):
                raise nonsense(self._session, worker, label, f"its samples are {message['values'][SAMPLES]!r:.100}")
        if len(message.get("call", "")) > _MOST_CALL:
            raise nonsense(self._session, worker, label, f"its call is {message['call']!r:.100}")
        if "version" in fields and message["version"] != self._told[worker]:
            why = (
                f"it belongs to version {message['version']} of the weights, but version {self._told[worker]} was sent"
            )
            raise nonsense(self._session, worker, label, why)
        return message

    def _expects(self) -> dict[int, str]:
        """The workers that others wait for here, and for what. Called in any thread."""
        late = {worker: f"step {step} of the optimizer" for worker, step in self._owner.ledger.awaited.items()}
        for worker in list(self._messages):
            if not all(work.done for work in self._exchanges.coming(worker)):
                late[worker] = "the gradients that it says it has pushed"
        if self._session.index in self._gone:
            late |= dict.fromkeys(tuple(self._requests), "its last step")
        return late

    def _answer(self, worker: int, message: dict[str, Any]) -> None:
        kind, shard = message["kind"], self._owner.shard
        if kind in _OF_STEPS or kind == "meet":
            self._waiting[worker].since = time.perf_counter()
            values = {"call": message["call"]} if kind == "meet" else message.get("values", {})
            request = Request(kind, worker, message["clock"], values)
            if kind == "norm" or self._merges:
                self._owner.handle(request)
            else:
                self._hold(request)
            return
        if kind != "load":  # the only request that does not touch the weights
            self._exchanges.rest()
        if kind in ("advanced", "state", "weights"):
            body = pack(shard.told(kind))
            self._reply(worker, {"size": len(body)})
            send_body(self._session, worker, body, f"the owner's {kind}", ANSWERS)
            return
        records = self._body(worker, message)
        if kind == "replace" and not self._merges:
            raise nonsense(self._session, worker, f"a {kind}", "workers cannot change weights if each pushes by itself")
        if kind == "load":
            for one in self._owner.shards:
                one.load(records)
            self._loaded = True
        else:
            self._take_weights(worker, kind, records)
        if kind == "resume":
            self._traffic.resume_at(message["step"])
        self._reply(worker, {})

    def _take_weights(self, worker: int, kind: str, records: list[Record]) -> None:
        """Replace the owner's weights; after ``replace`` all workers have the same ones."""
        try:
            if kind == "replace":
                self._traffic.know(records)
            for shard in self._owner.shards:
                shard.load_weights(records)
        except ValueError as error:
            raise nonsense(self._session, worker, f"the body of a {kind}", str(error)) from error

    def _body(self, worker: int, message: dict[str, Any]) -> list[Record]:
        """Receive the records that follow a request."""
        body = receive_body(self._session, worker, message["size"], f"the body of a {message['kind']}")
        return unpack(body, self._session.name(worker), self._session.member.number(worker))

    def _replace(self, heard: Heard, relay: Relay) -> None:
        """Take part in a change of layout (``session.layout``). All workers' requests have been answered by then."""
        session, model = self._session, relay.model
        layout, passed = hear_layout(session, model.layout.layers, heard)
        self._exchanges.rest()
        if not passed.anew and layout.travels_like(model.layout):
            session.everyone.meet(REPLACING)
        else:
            self._begin_anew(layout, passed, relay)
        self._heard = session.everyone.listen(LABEL)

    def _begin_anew(self, layout: Layout, passed: Passed, relay: Relay) -> None:
        session, model = self._session, relay.model
        compression = Recompressing(session, model.compression)
        self._owner.move_out(self._traffic.keeps)
        session.everyone.meet(REPLACING)
        self._exchanges.settle(ALL)
        self._exchanges.close()
        gradients, weights = relay.lay(layout.buckets)
        copy_weights(session, weights)
        coded = compression.on(layout.buckets, gradients, passed)
        self._relay = Relay(Model(layout, gradients, weights, coded, model.first_key), relay.lay)
        self._traffic = traffic_of(session, self._relay.model)
        self._owner.move_in(self._traffic.holdings() or [], self._traffic.followed())
        self._exchanges = self._owner.pushes = self._traffic.exchanges(self._owner.shard.apart)

    def _listen(self, worker: int) -> Work:
        return self._session.recv(worker, f"a request of {self._session.called(worker)}", REQUEST_BYTES, tolerant=True)

    # The order of pushes.

    def _listen_to(self, owner: int) -> Work:
        label = f"the turns that {self._session.name(owner)} tells of"
        return self._session.recv(owner, label, REPLY_BYTES, tolerant=True, topic=TURNS)

    def _hear_of_turns(self, owner: int, told: Work) -> None:
        """Another owner has told of a worker's message."""
        worker = read_message(self._session, owner, told.label, told.result, {"worker": int})["worker"]
        try:
            if worker >= self._session.group.workers:
                raise ValueError(f"there is no worker {worker}")
            actions = self._turns.hear(owner, worker)
            if any(isinstance(one, Take) and one.worker not in self._held for one in actions):
                raise ValueError(f"worker {worker} has sent nothing")
        except ValueError as error:
            raise nonsense(self._session, owner, told.label, str(error)) from error
        self._told_turns[owner] = self._listen_to(owner)
        self._take_turns(actions)

    def _hold(self, request: Request) -> None:
        """Keep a worker's message until its turn."""
        self._held[request.worker] = request
        self._take_turns(self._turns.hold(request.worker))

    def _take_turns(self, actions: Sequence[Tell | Take]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                label = f"the turn of {self._session.called(action.worker)}"
                data = json.dumps({"worker": action.worker}).encode()
                self._session.send(action.to, data, label, TURNS, tolerant=True)
            else:
                self._turns.take(action.worker)
                self._owner.handle(self._held.pop(action.worker))

    def _reply(self, worker: int, message: dict[str, object]) -> None:
        self._session.send(
            worker, json.dumps(message).encode(), f"an answer to {self._session.called(worker)}", ANSWERS
        )


def check_values(session: Session, worker: int, label: str, values: Mapping[str, Any]) -> None:
    """Raise ProtocolError unless values from another process have the fields and ranges of ``StepValues``."""
    check_fields(session, worker, label, values, {"groups": list, "scale": float, "skip": bool, "weight": float})
    if not 0 <= values["weight"] <= MOST_WEIGHT:
        raise nonsense(session, worker, label, f"its weight is {values['weight']!r:.100}")
    if (
        not 0 <= values["scale"] < MOST_WEIGHT and values["scale"] == values["scale"]
    ):  # NaN is allowed: a norm that is not finite gives it
        raise nonsense(session, worker, label, f"its scale is {values['scale']!r:.100}")
    if not all(isinstance(group, dict) for group in values["groups"]):
        raise nonsense(session, worker, label, "its groups are not valid groups")


def serve(
    session: Session,
    model: Model,
    build: Build,
    learnt: Sequence[Record],
    lay: Lay,
    *,
    apart: bool,
) -> None:
    """Own a part of a model's weights until the workers leave, beginning with the optimizer state ``learnt``.

    ``lay`` lays the model's memory out anew. ``apart`` as for ``Shard``.
    """
    traffic = traffic_of(session, model)
    holdings = traffic.holdings()
    if holdings is not None:
        relay, followed = Relay(model, lay) if session.strategy.sync_mode().merges else None, traffic.followed()
        shard = shard_of(session, holdings, build, learnt, apart=apart)
        follows = shard_of(session, followed, build, learnt, apart=apart) if followed else None
        server = Server(session, shard, traffic, relay, follows)
        session.serving = server.hold
        server.serve()


def serve_beside(
    session: Session, shard: Shard, traffic: Traffic, follows: Shard | None = None
) -> tuple[Work, Callable[[], HeldParts]]:
    """Serve in a thread beside this worker. The work ends when every worker has left, this one included.

    The call is ``Server.hold``, for a session that has failed: it waits for the thread.
    """
    engine = session.engine
    server = Server(session, shard, traffic, follows=follows)
    over = engine.promise("the others' last steps", tolerant=True)

    def run() -> None:
        try:
            with engine.uncounted():
                server.serve()
        except Exception as error:
            if engine.error is None:
                engine.fail(session.process.explain(error))
        finally:
            engine.fulfil(over)

    def hold() -> HeldParts:
        thread.join(_LAST_UPDATE_S)
        if thread.is_alive():
            raise PeerTimeout(
                f"an update of the weights has taken {_LAST_UPDATE_S:g} s since the run lost a process", rank=-1
            )
        return server.hold()

    thread = threading.Thread(target=run, name="syncline-owner", daemon=True)
    thread.start()
    return over, hold


class Summing:
    """Takes part in the exchanges of one model's gradients, for a server that holds no weights.

    ``lay`` divides the memory of the ``gradients`` anew.
    """

    def __init__(
        self,
        session: Session,
        layout: Layout,
        gradients: Sequence[Array],
        compression: Compression | None,
        lay: Callable[[Sequence[Bucket]], Sequence[Array]],
    ) -> None:
        self._session, self._layout, self._gradients, self._lay = session, layout, gradients, lay
        self._compression = compression
        self._program: Program = compiled(session.strategy.plan(session.group), session.index)
        self._posted: list[Work] = []
        self._exchanges = 0  # begun in this layout, including the posted one
        self._post()
        self._heard = session.everyone.listen(LABEL)

    def serve(self) -> None:
        """Serve until every worker has left; raises the run's fault if there is one."""
        engine, left = self._session.engine, self._session.process.workers_left
        while not engine.over(left):
            coming = [work for work in self._posted if not work.done][:1]
            if not coming and self._owns:
                self._post()
                continue
            engine.wait_any([*coming, self._heard.work], until=left)
            if self._heard.work.done:
                self._replace(self._heard)

    @property
    def _owns(self) -> bool:
        """False if nothing of the model comes to this server, by the plan or the codec: its exchanges end at once."""
        return bool(self._program.actions) if self._compression is None else self._compression.owns

    def _post(self) -> None:
        session, self._exchanges = self._session, self._exchanges + 1
        if self._compression is None:
            orders: Sequence[Order | CodedOrder] = planned_posts(self._program, self._gradients)
        else:
            orders = coded_posts(session, self._compression)
        self._posted = [session.engine.start(order) for order in orders]

    def _replace(self, heard: Heard) -> None:
        """Take part in a change of layout (``session.layout``)."""
        session, engine = self._session, self._session.engine
        layout, passed = hear_layout(session, self._layout.layers, heard)
        if passed.exchanges > self._exchanges and self._owns:
            raise ProtocolError(f"{LABEL}: {session.name(0)} tells of {passed.exchanges} exchanges", rank=0)
        if passed.exchanges == self._exchanges and self._owns:  # the workers have finished the posted exchange
            engine.wait(*self._posted)
            self._post()
        anew = passed.anew or not layout.travels_like(self._layout)
        compression = Recompressing(session, self._compression if anew else None)
        session.everyone.meet(REPLACING)
        if anew:
            engine.wait(*self._posted)
            self._gradients = self._lay(layout.buckets)
            self._compression = compression.on(layout.buckets, self._gradients, passed)
            self._exchanges = 0
            self._post()
        self._layout = layout
        self._heard = session.everyone.listen(LABEL)
