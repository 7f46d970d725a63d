"""How a worker talks to the processes that hold and update the weights.

``RemoteOwners`` asks by messages whoever serves, ``LocalOwners`` is for workers that own the slices themselves and all
come to each call together, where every owner takes all their messages.
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
from .owner import Owner
from .protocol import Kind, Release, Request
from .records import Record, pack, unpack
from .server import REPLY_BYTES, REQUEST_BYTES, check_values
from .shard import Shard, StepValues, Told
from .traffic import Traffic, Update

NOTHING: Mapping[str, type] = {}

_RELEASED = {"version": int, "clock": int, "ahead": int, "lag": int, "waited_s": float, "for": int, "met": str}
"""What servers say when they send weights."""


class Owners(Protocol):
    """The processes that hold and update the weights, as a worker sees them."""

    count: int
    """How many they are."""
    answers_one: bool
    """Whether one worker alone may ask for the state; otherwise all have to."""

    def squared_norm(self, clock: int) -> float:
        """The squared norm of all averaged gradients of step ``clock``."""
        ...

    def tell(self, clock: int, values: StepValues, changed: int = 0) -> None:
        """Have the update of step ``clock`` applied, whose gradients are under way, or will be.

        ``values`` are what it needs of a worker. ``changed`` tells the changes of weights before it from others; it has
        to be the same on all workers.
        """
        ...

    def told(self) -> None:
        """Return when the owners have taken what they were told last: this worker may go on."""
        ...

    def shadow(self, kind: int, clock: int, teller: int) -> bool:
        """Take part in what workers with batches do, who show tickets of ``kind``; whether to pull weights then.

        ``teller`` is one of them.
        """
        ...

    def meet(self, clock: int, call: str) -> tuple[int, str]:
        """Have the owners wait, after step ``clock``, until all workers that have not left do so; the clock of all.

        Each says at which ``call`` it is, and is told at which all have met: another one than that of who joins. Owners
        then send the weights of all buckets. Only where every push is an update by itself.
        """
        ...

    def updated(self, number: int, push: Work) -> Work:
        """What is done when this process has updated what it owns of a bucket, behind its push."""
        ...

    @property
    def shard(self) -> Shard | None:
        """What this process owns itself, where the gradients of all are summed in its own."""
        ...

    def ask(self, what: Told) -> list[Record]:
        """What ``Shard.told`` says, from all owners; under a codec their weights know more than the workers'."""
        ...

    def load(self, records: list[Record]) -> None:
        """Replace the optimizer's state at all owners."""
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

    def move_in(self, traffic: Traffic, buckets: int) -> None:
        """It has been, in so many buckets, and this process owns other slices; all workers call it."""
        ...


class LocalOwners:
    """The workers own the slices: every call is collective, ``shard`` is this rank's (None when it owns nothing)."""

    answers_one = False

    def __init__(self, session: Session, shard: Shard | None, buckets: int) -> None:
        self._session = session
        self._owner = None if shard is None else Owner(session, shard, self, self)
        self._updating = self._updating_of(buckets)
        self._pushes: dict[int, Work] = {}  # the last ones
        self._open: Callable[[], None] = _nothing  # lets the updates of the step begin that has been told
        self._known: Sequence[Work] = ()  # done when it is known that all tell the same
        self._telling: tuple[Meeting, StepValues] | None = None  # what they tell, while that is not known
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
        """All ranks must bring the same values; owners then update their slices."""
        said = json.dumps([clock, values, changed], sort_keys=True)
        meeting = self._session.meet(COMMIT, zlib.crc32(said.encode()))
        self._take("push", clock, values)
        opens, self._open = self._open, _nothing
        works = [] if meeting.work is None else [meeting.work]
        self._known = [self._session.engine.then(CALLS[COMMIT], works, partial(_agreed, meeting, opens))]
        self._telling = meeting, values

    def told(self) -> None:
        """All have come, with the same; who has no batches is told what that is."""
        self._session.engine.wait(*self._known)
        if self._telling is not None:
            (meeting, values), self._telling = self._telling, None
            tellers = [rank for rank, ticket in enumerate(meeting.tickets()) if ticket.kind == COMMIT]
            if len(tellers) < self._session.world_size:
                self._session.tell_all(json.dumps(values).encode(), tellers[0])

    def shadow(self, kind: int, clock: int, teller: int) -> bool:
        """What is done together; weights come with the optimizer's step."""
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
        """In the thread that drives."""
        self._pushes[number] = push
        return push if self._updating is None else self._updating.after(number, [push])

    def _take(self, kind: Kind, clock: int, values: Mapping[str, Any]) -> None:
        """What each worker would tell a server, which is the same of all."""
        if self._owner is not None:
            for worker in range(self._session.world_size):
                self._owner.handle(Request(kind, worker, clock, values))

    def _updating_of(self, buckets: int) -> Updating | None:
        return None if self.shard is None else Updating(self._session.engine, buckets, self.shard.apart)

    # As ``Pushes`` and ``Answers``: what all have come for is there, and each worker goes on and pulls by itself.

    def settle(self, worker: int) -> None:  # noqa: ARG002
        """The last step has waited for its pulls."""
        self._session.engine.wait(*self._pushes.values())

    def add(self, worker: int, bucket: int, scale: float) -> None:
        """Pushes are summed by their plan."""
        raise NotImplementedError

    def update(self, worker: int, bucket: int, update: Update) -> None:  # noqa: ARG002
        """When the workers are known to agree."""
        assert self._updating is not None
        self._open = self._updating.say(update)

    def tell_norm(self, workers: Sequence[int], squared: float) -> None:  # noqa: ARG002
        """To be gathered."""
        self._squared = squared

    def release(self, released: Release) -> None:
        """Nobody is told."""

    def meet(self, clock: int, call: str) -> tuple[int, str]:
        """They go in step."""
        return clock, call

    @property
    def shard(self) -> Shard | None:
        """This rank's."""
        return None if self._owner is None else self._owner.shard

    def ask(self, what: Told) -> list[Record]:
        """Collective."""
        parts = self._session.gather(pack([] if self.shard is None else self.shard.told(what)))
        name, number = self._session.name, self._session.member.number
        return [record for rank, part in enumerate(parts) for record in unpack(part, name(rank), number(rank))]

    def load(self, records: list[Record]) -> None:
        """Collective in effect: every owner keeps what it owns."""
        if self.shard is not None:
            self.shard.load(records)

    def replace(self, weights: list[Record]) -> None:
        """Every owner keeps what it owns."""
        if self.shard is not None:
            self.shard.load_weights(weights)

    def resume(self, step: int, weights: list[Record]) -> None:  # noqa: ARG002 - the workers know the step themselves
        """Every owner keeps what it owns."""
        self.replace(weights)

    def move_out(self, keeps: bool) -> None:
        """Its slices are on their way from now on."""
        if self._owner is not None:
            self._owner.move_out(keeps)

    def move_in(self, traffic: Traffic, buckets: int) -> None:
        """From the other owners."""
        if self._owner is not None:
            self._owner.move_in(traffic.holdings() or [])
        self._updating, self._pushes = self._updating_of(buckets), {}


class RemoteOwners:
    """Whoever owns slices is asked by messages: server processes, or threads beside workers, of this one too."""

    answers_one = True
    shard = None  # what others push does not lie in the gradients of this worker

    def __init__(self, session: Session) -> None:
        self._session = session
        roles = session.strategy.roles
        assert roles is not None
        self._servers = roles.places(session.group)
        self.count = len(self._servers)
        self._merges = session.strategy.sync_mode().merges
        self._versions = [0] * self.count  # of the weights that each sent last
        self._replies: list[Work] = []  # to what they were told last
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
        """Every server answers once it knows what all workers tell, or where each is an update by itself, has made it.

        It may be asked for something else behind that.
        """
        self.told()
        if not self._merges:
            self._session.coordination.begun(self._ahead)
        told = {**values, "changed weights": changed}
        self._replies = self._begin({"kind": "push", "clock": clock, "values": told}, self._each())

    def told(self) -> None:
        """It has all answers."""
        if self._replies:
            answers, self._replies = self._released("push", self._replies), []
            if not self._merges:
                waited_s, held_by = max((answer["waited_s"], answer["for"]) for answer in answers)
                self._session.coordination.pushed(max(answer["lag"] for answer in answers), waited_s, held_by)

    def meet(self, clock: int, call: str) -> tuple[int, str]:
        """Every server answers when all have come."""
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
        """Of a step's backward pass alone the workers tell each other."""
        self.told()
        self._replies = self._begin({"kind": "shadow", "clock": clock}, self._each())
        self.told()
        return True

    def updated(self, number: int, push: Work) -> Work:  # noqa: ARG002
        """Nothing is here."""
        return push

    def _each(self) -> list[dict[str, int]]:
        return [{"version": version} for version in self._versions]

    def ask(self, what: Told) -> list[Record]:
        """Any worker may, alone."""
        found: list[Record] = []
        for server, reply in zip(self._servers, self._ask({"kind": what}, {"size": int}), strict=True):
            body = receive_body(self._session, server, reply["size"], f"the owner's {what}", ANSWERS)
            found += unpack(body, self._session.name(server), self._session.member.number(server))
        return found

    def load(self, records: list[Record]) -> None:
        """Any worker may load, alone; the last one counts."""
        self._put({"kind": "load"}, records)

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

    def move_in(self, traffic: Traffic, buckets: int) -> None:
        """The servers know."""

    def leave(self, over: Work | None) -> None:
        """Tell all owners that this worker asks no more; one that serves itself goes on until no worker does."""
        self.told()  # who is held by the bound leaves behind its release
        for server in self._servers:
            self._send(server, {"kind": "leave"})
        if over is not None:
            engine = self._session.engine
            engine.wait(engine.then("the others' last steps", [over]))  # by the limit of progress

    def _put(self, request: Mapping[str, Any], records: list[Record]) -> None:
        self.told()
        body, label = pack(records), f"the body of a {request['kind']}"
        for server in self._servers:
            self._send(server, {**request, "size": len(body)})
            send_body(self._session, server, body, label)
        for server in self._servers:
            self._session.engine.wait(self._listen(server, f"the answer to a {request['kind']}"))

    def _ask(self, request: Mapping[str, Any], fields: Mapping[str, type] = NOTHING) -> list[dict[str, Any]]:
        """Ask all servers; their answers, which have these fields."""
        self.told()
        return self._finish(request["kind"], self._begin(request), fields)

    def _begin(self, request: Mapping[str, Any], each: Sequence[Mapping[str, Any]] | None = None) -> list[Work]:
        """Ask all servers, with something for ``each`` beside."""
        replies = [self._listen(server, f"the answer to a {request['kind']}") for server in self._servers]
        for server, more in zip(self._servers, each or [{}] * self.count, strict=True):
            self._send(server, {**request, **more})
        return replies

    def _finish(self, kind: str, replies: Sequence[Work], fields: Mapping[str, type]) -> list[dict[str, Any]]:
        """Their answers, which have these fields."""
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
                f"the values of the optimizer's parameter groups take {len(data)} bytes, a parameter server takes up to"
                f" {REQUEST_BYTES}: use fewer groups, ps(update=worker) or an allreduce"
            )
        self._session.send(server, data, f"a {request['kind']}")


def _agreed(meeting: Meeting, then: Callable[[], None]) -> None:
    """All workers have come; raises MismatchError unless with the same."""
    meeting.tickets()
    then()


def _nothing() -> None:
    """Where this process owns nothing."""
