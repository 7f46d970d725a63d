"""The worker's side: a step asks the owners of the weights for the update, and waits for it.

During backward the gradients have been pushed bucket by bucket. ``Worker.step`` says so, with the optimizer's group
values (learning rate and so on); the owners of each slice apply the real update, and the new weights are pulled. How a
framework's parameters get them, and whether a script has changed what was pushed, is the framework's affair.

``Owners`` is how a worker talks to them: ``RemoteOwners`` by messages to whoever serves, ``LocalOwners`` when the
workers themselves own the slices and all come to each call together, where every owner takes all their messages.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..engine.work import Work
from ..errors import UsageError
from ..session.replacing import copy_weights
from ..session.session import Session
from ..session.tickets import COMMIT, NORM
from .messages import ANSWERS, read_message, receive_body, send_body
from .owner import REPLY_BYTES, REQUEST_BYTES, Owner, serve_beside
from .protocol import Kind, Request
from .records import Record, pack, unpack
from .relaying import Leaving
from .shard import Build, Groups, Shard
from .traffic import Model, Traffic
from .ways import traffic_of

NOTHING: Mapping[str, type] = {}


class Owners(Protocol):
    """The processes that hold and update the weights, as a worker sees them."""

    count: int
    """How many they are."""
    answers_one: bool
    """Whether one worker alone may ask for the state; otherwise all have to."""

    def squared_norm(self, clock: int) -> float:
        """The squared norm of all averaged gradients of step ``clock``."""
        ...

    def push(self, clock: int, groups: Groups, scale: float, changed: int = 0) -> None:
        """Have the update of step ``clock`` applied, whose gradients are under way; weights may be pulled after it.

        ``changed`` tells the changes of weights before it from others; it has to be the same on all workers.
        """
        ...

    def state(self) -> list[Record]:
        """The optimizer's state from all owners."""
        ...

    def kept(self) -> list[Record] | None:
        """The state of what this process owns itself, None when that is nothing; asks nobody."""
        ...

    def load(self, records: list[Record]) -> None:
        """Replace the optimizer's state at all owners."""
        ...

    def weights(self) -> list[Record]:
        """The weights of all owners, which under a codec know more than the workers'."""
        ...

    def replace(self, weights: list[Record]) -> None:
        """Let the owners have these weights, which the script has changed; rank 0's count, all workers call it."""
        ...

    def resume(self, step: int, weights: list[Record]) -> None:
        """Go on from that step with these weights, as far as there are any; all workers call it."""
        ...

    def move_out(self, keeps: bool) -> None:
        """The model's memory is about to be laid out anew: take what this process owns out of it.

        ``keeps``: the owners' weights may say more than those that all know.
        """
        ...

    def move_in(self, traffic: Traffic) -> None:
        """It has been, and this process owns other slices; all workers call it."""
        ...


class Worker:
    """One worker's dealings with the owners of the weights of a model, which come by ``traffic``."""

    def __init__(self, session: Session, owners: Owners, traffic: Traffic) -> None:
        self._session, self.owners, self._traffic = session, owners, traffic
        self.scale = 1.0
        """What the next update's gradients are multiplied by."""
        self.steps = 0
        """The clock of this session's protocol; a resumed run begins at 0 again."""
        self._unsaid = 0  # which changed weights the owners have taken while the workers have not compared them
        self._together = session.strategy.sync_mode().merges

    @property
    def keeps(self) -> bool:
        """True when the owners' weights may say more than the workers', which a checkpoint then needs."""
        return self._traffic.keeps

    def clip(self, max_norm: float) -> float:
        """Have the next update's gradients clipped to a norm of ``max_norm``; their norm."""
        norm: float = self.scale * self.owners.squared_norm(self.steps + 1) ** 0.5
        self.scale *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def change(self, weights: list[Record], number: int) -> None:
        """Give the owners weights that the script has changed; the next step tells by ``number`` which.

        Raises UsageError where workers do not come to a step together, so that no one could say whose weights count.
        """
        if not self._together:
            raise UsageError(
                f"the weights were changed on this worker, and under sync={self._session.strategy.sync.name} owners go"
                " on with theirs: change weights, or load them, before syncline.prepare()"
            )
        self.owners.replace(weights)
        self._unsaid = (self._unsaid + number) & 0xFFFFFFFF

    def step(self, groups: Groups) -> None:
        """Have the pushed gradients applied; returns when the owners let this worker pull."""
        scale, self.scale = self.scale, 1.0
        changed, self._unsaid = self._unsaid, 0
        self.steps += 1
        self.owners.push(self.steps, groups, scale, changed)

    def push(self, number: int, label: str, **options: Any) -> Work:
        """Start the push of a bucket whose gradients are complete; ``options`` are those of ``Engine.exchange``."""
        return self._traffic.push(number, label, **options)

    def pull(self, number: int) -> Work:
        """Start the pull of a bucket's new weights, after ``step``."""
        return self._traffic.pull(number)

    def weights(self) -> list[Record]:
        """The weights as the owners have them, with what the script has changed; all workers call it."""
        self._session.barrier()
        found = self.owners.weights()
        if not self._together:
            self._session.barrier()  # nobody goes on before all have asked
        return found

    def resume(self, step: int, weights: list[Record]) -> None:
        """Have the owners go on from that step with their own weights, where there are any; all workers call it."""
        self.owners.resume(step, weights)

    def move_out(self) -> None:
        """The model's memory is about to be laid out anew."""
        self.owners.move_out(self.keeps)

    def move_in(self, model: Model) -> None:
        """Go on with the model as it is laid out now, after ``move_out``; all workers call it."""
        copy_weights(self._session, model.weights)
        self._traffic = traffic_of(self._session, model)
        self.owners.move_in(self._traffic)


def attach(session: Session, model: Model, build: Build, learnt: list[Record]) -> Worker:
    """A worker of that model, which owns a part of the weights where the strategy says so.

    ``learnt`` is what the optimizer knows already; of owners that are no workers, rank 0 tells them. All workers call
    it.
    """
    traffic = traffic_of(session, model)
    together = session.strategy.sync_mode().merges
    if session.group.servers:
        remote = RemoteOwners(session)
        if learnt and session.rank == 0:  # as the weights, also where a server's script has not loaded it, or another
            remote.load(learnt)
        if not together:
            session.barrier()  # before it has, nothing may be applied
        return Worker(session, remote, traffic)
    holdings = traffic.holdings()
    shard = None if holdings is None else Shard(holdings, build, learnt)
    if together:
        return Worker(session, LocalOwners(session, shard), traffic)
    remote = RemoteOwners(session)
    over = None if shard is None else serve_beside(session, shard, traffic)
    session.member.before_end.append(partial(remote.leave, over))
    return Worker(session, remote, traffic)


class LocalOwners:
    """The workers own the slices: every call is collective, ``shard`` is this rank's (None when it owns nothing)."""

    answers_one = False

    def __init__(self, session: Session, shard: Shard | None) -> None:
        self._session, self._shard = session, shard
        self._owner = None if shard is None else Owner(session, shard, self)
        self._squared = 0.0
        self._leaving: Leaving | None = None
        roles = session.strategy.roles
        assert roles is not None
        self.count = roles.owners

    def squared_norm(self, clock: int) -> float:
        """Summed in rank order, so that all ranks get the same bits."""
        self._session.agree(NORM, clock)
        self._take("norm", clock, {})
        return sum(float(part) for part in self._session.gather(repr(self._squared).encode()))

    def push(self, clock: int, groups: Groups, scale: float, changed: int = 0) -> None:
        """All ranks must bring the same values; owners then update their slices."""
        self._session.agree(COMMIT, zlib.crc32(json.dumps([clock, groups, scale, changed], sort_keys=True).encode()))
        self._take("push", clock, {"groups": groups, "scale": scale})

    def _take(self, kind: Kind, clock: int, values: Mapping[str, Any]) -> None:
        """All workers have come, with the same: what each would tell a server."""
        if self._owner is not None:
            for worker in range(self._session.world_size):
                self._owner.handle(Request(kind, worker, clock, values))

    # As ``Moves``: what all have come for is there, and each worker goes on and pulls by itself.

    def settle(self, worker: int) -> None:
        """Backward has waited for the pushes, the last step for the pulls."""

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:  # noqa: ARG002
        """To be gathered."""
        self._squared = squared

    def take_next(self, worker: int) -> None:
        """Backward posts it."""

    def release(self, workers: Sequence[int]) -> None:
        """Nobody is told."""

    def state(self) -> list[Record]:
        """Collective."""
        return self._gathered([] if self._shard is None else self._shard.state())

    def kept(self) -> list[Record] | None:
        """This rank's shard's."""
        return None if self._shard is None else self._shard.state()

    def load(self, records: list[Record]) -> None:
        """Collective in effect: every owner keeps what it owns."""
        if self._shard is not None:
            self._shard.load(records)

    def weights(self) -> list[Record]:
        """Collective."""
        return self._gathered([] if self._shard is None else self._shard.weights())

    def replace(self, weights: list[Record]) -> None:
        """Every owner keeps what it owns."""
        if self._shard is not None:
            self._shard.load_weights(weights)

    def resume(self, step: int, weights: list[Record]) -> None:  # noqa: ARG002 - the workers know the step themselves
        """Every owner keeps what it owns."""
        self.replace(weights)

    def move_out(self, keeps: bool) -> None:
        """Its slices are on their way from now on."""
        self._leaving = None if self._shard is None else Leaving(self._session, self._shard, keeps)

    def move_in(self, traffic: Traffic) -> None:
        """From the other owners."""
        if self._leaving is not None and self._owner is not None:
            self._shard = self._owner.shard = self._leaving.arrive(traffic.holdings() or [])
            self._leaving = None

    def _gathered(self, records: list[Record]) -> list[Record]:
        parts = self._session.gather(pack(records))
        return [record for rank, part in enumerate(parts) for record in unpack(part, self._session.name(rank), rank)]


class RemoteOwners:
    """Whoever owns slices is asked by messages: server processes, or threads beside workers, of this one too."""

    answers_one = True

    def __init__(self, session: Session) -> None:
        self._session = session
        roles = session.strategy.roles
        assert roles is not None
        self._servers = roles.places(session.group.workers)
        self.count = len(self._servers)
        self._versions = [0] * self.count  # of the weights that each sent last

    def squared_norm(self, clock: int) -> float:
        """Summed in server order."""
        return sum(float(reply["squared"]) for reply in self._ask({"kind": "norm", "clock": clock}, {"squared": float}))

    def push(self, clock: int, groups: Groups, scale: float, changed: int = 0) -> None:
        """Every server answers once it has applied the update."""
        values = {"groups": groups, "scale": scale, "changed weights": changed}
        request = {"kind": "push", "clock": clock, "values": values}
        replies = self._ask(request, {"version": int}, [{"version": version} for version in self._versions])
        self._versions = [reply["version"] for reply in replies]

    def state(self) -> list[Record]:
        """Any worker may ask, alone."""
        return self._fetch("state")

    def kept(self) -> None:
        """Nothing."""
        return

    def load(self, records: list[Record]) -> None:
        """Any worker may load, alone; the last one counts."""
        self._put({"kind": "load"}, records)

    def weights(self) -> list[Record]:
        """Any worker may ask, alone."""
        return self._fetch("weights")

    def replace(self, weights: list[Record]) -> None:
        """Rank 0 tells the servers; nothing is applied before it has, and the others have, pushed."""
        if self._session.rank == 0:
            self._put({"kind": "replace"}, weights)

    def resume(self, step: int, weights: list[Record]) -> None:
        """Rank 0 tells the servers, and nobody goes on before they know."""
        if self._session.rank == 0:
            self._put({"kind": "resume", "step": step}, weights)
        self._session.barrier()

    def move_out(self, keeps: bool) -> None:
        """Nothing is here."""

    def move_in(self, traffic: Traffic) -> None:
        """The servers know."""

    def _fetch(self, kind: str) -> list[Record]:
        found: list[Record] = []
        for server, reply in zip(self._servers, self._ask({"kind": kind}, {"size": int}), strict=True):
            body = receive_body(self._session, server, reply["size"], f"the owner's {kind}", ANSWERS)
            found += unpack(body, self._session.name(server), server)
        return found

    def leave(self, over: Work | None) -> None:
        """Tell all owners that this worker asks no more; one that serves itself goes on until no worker does."""
        for server in self._servers:
            self._send(server, {"kind": "leave"})
        if over is not None:
            engine = self._session.engine
            engine.wait(engine.then("the others' last steps", [over]))  # by the limit of progress

    def _put(self, request: Mapping[str, Any], records: list[Record]) -> None:
        body, label = pack(records), f"the body of a {request['kind']}"
        for server in self._servers:
            self._send(server, {**request, "size": len(body)})
            send_body(self._session, server, body, label)
        for server in self._servers:
            self._session.engine.wait(self._listen(server, f"the answer to a {request['kind']}"))

    def _ask(
        self,
        request: Mapping[str, Any],
        fields: Mapping[str, type] = NOTHING,
        each: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[dict[str, Any]]:
        """Ask all servers, with something for ``each`` beside; their answers, which have these fields."""
        label = f"the answer to a {request['kind']}"
        replies = [self._listen(server, label) for server in self._servers]
        for server, more in zip(self._servers, each or [{}] * self.count, strict=True):
            self._send(server, {**request, **more})
        self._session.engine.wait(*replies)
        return [
            read_message(self._session, server, label, reply.result, fields)
            for server, reply in zip(self._servers, replies, strict=True)
        ]

    def _listen(self, server: int, label: str) -> Work:
        return self._session.recv(server, label, REPLY_BYTES, topic=ANSWERS)

    def _send(self, server: int, request: Mapping[str, Any]) -> None:
        data = json.dumps(request).encode()
        if len(data) > REQUEST_BYTES:
            raise UsageError(
                f"the values of the optimizer's parameter groups take {len(data)} bytes, a parameter server takes up to"
                f" {REQUEST_BYTES}: use fewer groups, ps(update=worker) or an allreduce"
            )
        self._session.send(server, data, f"a {request['kind']}")
