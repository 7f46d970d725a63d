"""The worker's side: how a worker talks to the processes that own and update the weights.

``RemoteOwners`` sends requests to servers, or to threads that serve beside workers. ``LocalOwners`` is for workers that
own the slices themselves and make every call together: each owner then handles the messages of all workers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..engine.order import Work
from ..errors import UsageError
from ..session.session import Session
from ..session.tickets import CALLS, COMMIT, NORM, Meeting
from .merged import Updating
from .messages import ANSWERS, nonsense, read_message, receive_body, send_body
from .owner import HeldParts, Owner
from .protocol import Kind, Release, Request
from .records import Record, pack, unpack
from .server import REPLY_BYTES, REQUEST_BYTES, check_values
from .shard import Shard, StepValues, Told, Traffic, Update
from .turns import SAMPLES

NOTHING: Mapping[str, type] = {}

_RELEASED = {"version": int, "clock": int, "ahead": int, "lag": int, "waited_s": float, "for": int, "met": str}
"""The fields of a server's answer that goes with weights."""


class Owners(Protocol):
    """The processes that own and update the weights, as a worker sees them."""

    count: int
    """The number of owners."""
    answers_one: bool
    """Whether a single worker may ask for the state; otherwise all must."""

    def squared_norm(self, clock: int) -> float:
        """The squared norm of all averaged gradients of step ``clock``."""
        ...

    def tell(self, clock: int, values: StepValues, changed: int = 0) -> None:
        """Request the update of step ``clock``; its gradients are being pushed or will be.

        ``values`` are this worker's values for the update. ``changed`` identifies the changes that the script made to
        weights before the step; it must be the same on all workers.
        """
        ...

    def told(self) -> None:
        """Wait until the owners have accepted the last step told to them; then this worker may go on."""
        ...

    def shadow(self, kind: int, clock: int, teller: int) -> bool:
        """Take part, without batches, in a call of the workers that have some; return whether to pull weights then.

        ``kind`` is the kind of their tickets, ``teller`` one of these workers.
        """
        ...

    def meet(self, clock: int, call: str) -> tuple[int, str]:
        """Wait, after step ``clock``, until all workers that have not left call this; return their common clock.

        Each worker gives the ``call`` that it is in. The result also names the call in which they met, which differs
        for a worker in ``join()``. Owners then send the weights of all buckets. Only for modes where each push is an
        update.
        """
        ...

    def updated(self, number: int, push: Work) -> Work:
        """A work that ends when this process has updated its part of a bucket after the push."""
        ...

    @property
    def shard(self) -> Shard | None:
        """This process's own shard, if the merged gradients arrive in its own gradients."""
        ...

    @property
    def hold(self) -> Callable[[], HeldParts]:
        """A call after a loss: it ends all updates of this process, and returns the parts that this has."""
        ...

    def ask(self, what: Told) -> list[Record]:
        """The records ``what`` of all owners. Under a codec, their weights are more precise than the workers'."""
        ...

    def load(self, records: list[Record]) -> None:
        """Replace the optimizer's state at all owners."""
        ...

    def replace(self, weights: list[Record]) -> None:
        """Give the owners weights that the script has changed. Rank 0's count; all workers call this."""
        ...

    def resume(self, step: int, weights: list[Record]) -> None:
        """Go on from ``step`` with these weights, which may be none; all workers call this."""
        ...

    def move_out(self, keeps: bool) -> None:
        """Save what this process owns before the model's memory is laid out anew.

        ``keeps``: the owners' weights may be more precise than those of the workers.
        """
        ...

    def move_in(self, traffic: Traffic, buckets: int) -> None:
        """Take over slices in the new layout with ``buckets`` buckets; all workers call this."""
        ...


class LocalOwners:
    """Owners that are the workers themselves: every call is collective.

    ``shard`` belongs to this rank, and is None if it neither owns nor follows. ``follows`` is the shard that it
    follows.
    """

    answers_one = False

    def __init__(self, session: Session, shard: Shard | None, buckets: int, follows: Shard | None = None) -> None:
        self._session = session
        self._owner = None if shard is None else Owner(session, shard, self, self, follows=follows)
        self._updating = self._updating_of(buckets)
        self._pushes: dict[int, Work] = {}  # the last push of each bucket
        self._open: Callable[[], None] = _nothing  # lets the updates of the last step told begin
        self._known: Sequence[Work] = ()  # done when all workers are known to tell the same
        self._telling: tuple[Meeting, StepValues] | None = None  # the values to tell, until all are known to agree
        self._squared = 0.0
        roles = session.strategy.roles
        assert roles is not None
        self.count = roles.owners

    def squared_norm(self, clock: int) -> float:
        """Summed in rank order, so that all ranks get the same bits."""
        self._session.agree(NORM, clock)
        return self._norm(clock)

    def _norm(self, clock: int) -> float:
        self._take("norm", clock, {})
        return sum(float(part) for part in self._session.gather(repr(self._squared).encode()))

    def tell(self, clock: int, values: StepValues, changed: int = 0) -> None:
        """Ranks compare tickets first and raise MismatchError for unequal values."""
        said = json.dumps([clock, values, changed], sort_keys=True)
        meeting = self._session.meet(COMMIT, zlib.crc32(said.encode()))
        self._take("push", clock, values)
        opens, self._open = self._open, _nothing
        works = [] if meeting.work is None else [meeting.work]
        self._known = [self._session.engine.then(CALLS[COMMIT], works, partial(_agreed, meeting, opens))]
        self._telling = meeting, values

    def told(self) -> None:
        """Also tells the values of the step to workers without batches."""
        self._session.engine.wait(*self._known)
        if self._telling is not None:
            (meeting, values), self._telling = self._telling, None
            tellers = [rank for rank, ticket in enumerate(meeting.tickets()) if ticket.kind == COMMIT]
            if len(tellers) < self._session.world_size:
                self._session.tell_all(json.dumps(values).encode(), tellers[0])

    def shadow(self, kind: int, clock: int, teller: int) -> bool:
        """Weights arrive with the optimizer's step."""
        if kind == NORM:
            self._norm(clock)
        if kind != COMMIT:
            return False
        label = "the values of a step"
        values = read_message(self._session, teller, label, self._session.tell_all(b"", teller), {})
        check_values(self._session, teller, label, values)
        self._take("push", clock, values)
        opens, self._open = self._open, _nothing
        opens()
        return True

    def updated(self, number: int, push: Work) -> Work:
        """Called in the thread that drives."""
        self._pushes[number] = push
        return push if self._updating is None else self._updating.after(number, [push])

    def _take(self, kind: Kind, clock: int, values: Mapping[str, Any]) -> None:
        """Handle the message that each worker would send to a server; all are the same."""
        if self._owner is not None:
            for worker in range(self._session.world_size):
                self._owner.handle(Request(kind, worker, clock, values))

    def _updating_of(self, buckets: int) -> Updating | None:
        return None if self.shard is None else Updating(self._session.engine, buckets, self.shard.apart)

    # As ``Pushes`` and ``Answers``: all ranks are in the same call, and each pulls by itself.

    def settle(self, worker: int) -> None:  # noqa: ARG002
        """Wait for the last pushes; the last step has already waited for its pulls."""
        self._session.engine.wait(*self._pushes.values())

    def add(self, worker: int, bucket: int, scale: float, anew: bool) -> None:
        """Never called: the plan sums the pushes."""
        raise NotImplementedError

    def update(self, worker: int, bucket: int, update: Update) -> None:  # noqa: ARG002
        """Let the update begin once the workers are known to agree."""
        assert self._updating is not None
        self._open = self._updating.say(update)

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:  # noqa: ARG002
        """Keep this owner's part; ``_norm`` gathers the parts."""
        self._squared = squared

    def release(self, released: Release) -> None:
        """Do nothing: each worker pulls by itself."""

    def meet(self, clock: int, call: str) -> tuple[int, str]:
        """Return at once: these workers go in step."""
        return clock, call

    @property
    def shard(self) -> Shard | None:
        """The shard of this rank."""
        return None if self._owner is None else self._owner.shard

    def ask(self, what: Told) -> list[Record]:
        """Collective: gathers the records of all ranks."""
        parts = self._session.gather(pack([] if self.shard is None else self.shard.told(what)))
        name, number = self._session.name, self._session.member.number
        return [record for rank, part in enumerate(parts) for record in unpack(part, name(rank), number(rank))]

    def load(self, records: list[Record]) -> None:
        """Collective in effect: every owner keeps its own slices."""
        for shard in self._shards:
            shard.load(records)

    def replace(self, weights: list[Record]) -> None:
        """Every owner keeps its own slices."""
        for shard in self._shards:
            shard.load_weights(weights)

    @property
    def _shards(self) -> list[Shard]:
        return [] if self._owner is None else self._owner.shards

    def hold(self) -> HeldParts:
        """End all updates. Returns the parts that this rank owns or follows after the last steps."""
        return HeldParts() if self._owner is None else HeldParts.of(self._session, self._owner)

    def resume(self, step: int, weights: list[Record]) -> None:  # noqa: ARG002 - the workers know the step themselves
        """Every owner keeps its own slices."""
        self.replace(weights)

    def move_out(self, keeps: bool) -> None:
        """The slices travel to their new owners in ``move_in``."""
        if self._owner is not None:
            self._owner.move_out(keeps)

    def move_in(self, traffic: Traffic, buckets: int) -> None:
        """Collective: the owners share their slices."""
        if self._owner is not None:
            self._owner.move_in(traffic.holdings() or [], traffic.followed())
        self._updating, self._pushes = self._updating_of(buckets), {}


class RemoteOwners:
    """Owners that answer requests: server processes, or threads beside workers, including this one."""

    answers_one = True
    shard = None  # pushes do not arrive in this worker's gradients

    def __init__(self, session: Session) -> None:
        self._session = session
        roles = session.strategy.roles
        assert roles is not None
        self._servers = sorted({*roles.places(session.group), *roles.followers(session.group)})
        self.count = len(self._servers)
        self.hold: Callable[[], HeldParts] = HeldParts  # of the owner beside this worker, if there is one
        self._merges = session.strategy.sync_mode().merges
        self._versions = [0] * self.count  # the version of the weights that each server sent last
        self._replies: list[Work] = []  # answers to the last step told
        self._ahead = 0  # how many clocks ahead of the slowest worker this one may begin its next step

    def squared_norm(self, clock: int) -> float:
        """Summed in server order."""
        found = 0.0
        replies = self._ask({"kind": "norm", "clock": clock}, {"squared": float})
        for server, reply in zip(self._servers, replies, strict=True):
            if reply["squared"] < 0:
                label = "the answer to a norm"
                raise nonsense(self._session, server, label, f"a sum of squares is {reply['squared']!r:.100}")
            found += float(reply["squared"])
        return found

    def tell(self, clock: int, values: StepValues, changed: int = 0) -> None:
        """A server answers once all workers have told the step or, where each push is an update, has made it.

        The worker may send other requests before that answer.
        """
        self.told()
        if not self._merges:
            self._session.coordination.begun(self._ahead)
        told: dict[str, Any] = {**values, "changed weights": changed}
        if self._session.next_samples is not None:
            told[SAMPLES] = self._session.next_samples()
        self._replies = self._begin({"kind": "push", "clock": clock, "values": told}, self._each())

    def told(self) -> None:
        """Waits for the answers of all servers."""
        if self._replies:
            answers, self._replies = self._released("push", self._replies), []
            if not self._merges:
                waited_s, held_by = max((answer["waited_s"], answer["for"]) for answer in answers)
                self._session.coordination.pushed(max(answer["lag"] for answer in answers), waited_s, held_by)

    def meet(self, clock: int, call: str) -> tuple[int, str]:
        """Every server answers once all workers have come."""
        self.told()
        replies = self._begin({"kind": "meet", "clock": clock + 1, "call": call})
        answers = self._released("meet", replies)
        return max(answer["clock"] for answer in answers), str(answers[0]["met"])

    def _released(self, kind: str, replies: Sequence[Work]) -> list[dict[str, Any]]:
        """The answers of servers that send weights."""
        answers = self._finish(kind, replies, _RELEASED)
        self._versions = [answer["version"] for answer in answers]
        self._ahead = max(answer["ahead"] for answer in answers)
        return answers

    def shadow(self, kind: int, clock: int, teller: int) -> bool:  # noqa: ARG002
        """Announce a push without values and wait until the servers release this worker."""
        self.told()
        self._replies = self._begin({"kind": "shadow", "clock": clock}, self._each())
        self.told()
        return True

    def updated(self, number: int, push: Work) -> Work:  # noqa: ARG002
        """Return the push: this process updates nothing."""
        return push

    def _each(self) -> list[dict[str, int]]:
        return [{"version": version} for version in self._versions]

    def ask(self, what: Told) -> list[Record]:
        """Any worker may ask, alone."""
        found: list[Record] = []
        for server, reply in zip(self._servers, self._ask({"kind": what}, {"size": int}), strict=True):
            body = receive_body(self._session, server, reply["size"], f"the owner's {what}", ANSWERS)
            found += unpack(body, self._session.name(server), self._session.member.number(server))
        return found

    def load(self, records: list[Record]) -> None:
        """Any worker may load, alone. The last load counts."""
        self._put({"kind": "load"}, records)

    def replace(self, weights: list[Record]) -> None:
        """Rank 0 tells the servers, before any worker's next push can be applied."""
        if self._session.rank == 0:
            self._put({"kind": "replace"}, weights)

    def resume(self, step: int, weights: list[Record]) -> None:
        """Rank 0 tells the servers; a barrier keeps the others from going on before that."""
        if self._session.rank == 0:
            self._put({"kind": "resume", "step": step}, weights)
        self._session.barrier()

    def move_out(self, keeps: bool) -> None:
        """Do nothing: this process owns nothing."""

    def move_in(self, traffic: Traffic, buckets: int) -> None:
        """Do nothing: the servers know the new layout."""

    def leave(self, over: Work | None) -> None:
        """Tell all owners that this worker sends no more requests.

        A worker that serves, with ``over`` as the end of its service, waits until no worker needs it.
        """
        self.told()  # a worker held by the staleness bound leaves after its release
        for server in self._servers:
            self._send(server, {"kind": "leave"})
        if over is not None:
            engine = self._session.engine
            engine.wait(engine.then("the others' last steps", [over]))  # the engine's progress limit bounds this

    def _put(self, request: Mapping[str, Any], records: list[Record]) -> None:
        self.told()
        body, label = pack(records), f"the body of a {request['kind']}"
        for server in self._servers:
            self._send(server, {**request, "size": len(body)})
            send_body(self._session, server, body, label)
        for server in self._servers:
            self._session.engine.wait(self._listen(server, f"the answer to a {request['kind']}"))

    def _ask(self, request: Mapping[str, Any], fields: Mapping[str, type] = NOTHING) -> list[dict[str, Any]]:
        """Send a request to all servers; return their answers, which have these fields."""
        self.told()
        return self._finish(request["kind"], self._begin(request), fields)

    def _begin(self, request: Mapping[str, Any], each: Sequence[Mapping[str, Any]] | None = None) -> list[Work]:
        """Send a request to all servers, with additional fields for ``each``."""
        replies = [self._listen(server, f"the answer to a {request['kind']}") for server in self._servers]
        for server, more in zip(self._servers, each or [{}] * self.count, strict=True):
            self._send(server, {**request, **more})
        return replies

    def _finish(self, kind: str, replies: Sequence[Work], fields: Mapping[str, type]) -> list[dict[str, Any]]:
        """Wait for the answers of all servers, which have these fields."""
        self._session.engine.wait(*replies)
        return [
            read_message(self._session, server, f"the answer to a {kind}", reply.result, fields)
            for server, reply in zip(self._servers, replies, strict=True)
        ]

    def _listen(self, server: int, label: str) -> Work:
        return self._session.recv(server, label, REPLY_BYTES, topic=ANSWERS)

    def _send(self, server: int, request: Mapping[str, Any]) -> None:
        data = json.dumps(request).encode()
        if len(data) > REQUEST_BYTES:
            raise UsageError(
                f"the values of the optimizer's parameter groups take {len(data)} bytes, but a parameter server"
                f" accepts up to {REQUEST_BYTES}: use fewer groups, ps(update=worker) or an allreduce"
            )
        self._session.send(server, data, f"a {request['kind']}")


def _agreed(meeting: Meeting, then: Callable[[], None]) -> None:
    """Call ``then`` after all workers have come; raises MismatchError if their tickets differ."""
    meeting.tickets()
    then()


def _nothing() -> None:
    """Open nothing: this process owns nothing, or the step is open already."""
