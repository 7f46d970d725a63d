"""Pushes and pulls of one worker at a time, where every push is an update by itself.

A push or pull is between one worker and the owners, so no two workers wait for each other in it. ``Plans`` moves
arrays, ``Payloads`` a codec's payloads: a push is encoded as under an allreduce and decoded by itself, and a pull
brings the updates that the worker does not have, or whole weights (``compression.updates``). Every bucket of every
worker has its own key. The next step uses the key again, and begins when the worker has everything of the step before.

An owner receives a push whenever it arrives, into memory kept for that worker, and copies it to the optimizer's
gradients when its turn comes. The weights for a released worker are copied too before they are sent, so the next update
need not wait until the worker has them. An owner that is also a worker has weights in addition to its model's, which
stay as they were pulled until the next pull; between the two, its own slices are copied instead of sent.

Memory at an owner: its part of the model once for every worker, and the model once, or twice under a codec, with
payloads of at most the bytes of its part. With ``replicas=1`` its part reaches to the one that it follows: at the first
owner, which follows the last, over the whole model.

Theory: Dean et al., "Large Scale Distributed Deep Networks" (DistBelief), NeurIPS 2012.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from ..compression.compression import Compression
from ..compression.reducers import Held, Message, Operand, Reducer, Round
from ..compression.reducers.owners import share_out, taking
from ..compression.updates import UpdateReceiver, UpdateSender
from ..engine.order import CodedOrder, Order, When, Work
from ..errors import UsageError
from ..plans.messages import chunk_edges
from ..session.communicator import compiled
from ..session.session import MODEL_KEYS, Session
from ..session.tickets import WEIGHT_KEYS
from .protocol import ALL
from .records import Array, Record
from .shard import Holding, Model, Update, add_up, held

_ALIGNED_BYTES = 64
"""The alignment of arrays, since arrays of several types share a block of memory."""


class Single:
    """This process's part in the pushes and pulls of each worker: its own as a worker, and those of an owner."""

    keeps = True

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self.buckets, coded = session, len(model.layout.buckets), model.compression
        self._carrier = Plans(session, model) if coded is None else Payloads(session, model, coded)
        serves = self._carrier.mine is not None or self._carrier.followed is not None
        self._owned = _Owned(session, model, self._carrier) if serves else None

    def push(self, number: int, when: When) -> Work:
        """Start the carrier's push, and tell this process's owner."""
        work = self._carrier.push(number, when)
        if self._owned is not None:
            self._owned.produced(number, work if self._carrier.encodes else when.gate)
        return work

    def pull(self, number: int, when: When) -> Work:
        """Start the carrier's pull, after this process's owner has released its own slices."""
        given = None if self._owned is None else self._owned.take_given(number)
        if given is not None:
            gates = [given, *([] if when.gate is None else [when.gate])]
            when = when._replace(gate=self._session.engine.then(f"weights of bucket {number}", gates))
        return self._carrier.pull(number, when)

    def exchanges(self, apart: bool) -> _Owned:  # noqa: ARG002 - nothing waits here
        """The owner's exchanges. They never wait, so ``apart`` does not matter."""
        assert self._owned is not None
        self._owned.begin()
        return self._owned

    def holdings(self) -> list[Holding] | None:
        """With separate weights if the owner is also a worker."""
        return None if self._owned is None or self._carrier.mine is None else self._owned.holdings(self._carrier.mine)

    def followed(self) -> list[Holding]:
        """Beside those."""
        followed = self._carrier.followed
        return [] if self._owned is None or followed is None else self._owned.holdings(followed)

    def know(self, records: Sequence[Record]) -> None:
        """Do nothing: the next pull sends whole weights, or updates of weights that the owner knows."""

    def resume_at(self, step: int) -> None:  # noqa: ARG002 - a push carries its step where that matters
        """Send whole weights next, since the owners were given others. (Each push carries its own step.)"""
        self._carrier.renew()


class _Owned:
    """An owner's buckets, with each worker's pushes and pulls. A follower gets the pushes too, and sends no weights."""

    def __init__(self, session: Session, model: Model, carrier: Carrier) -> None:
        self._session, self._model, self._carrier, self._mine = session, model, carrier, carrier.mine
        both = [parts for parts in (carrier.mine, carrier.followed) if parts is not None]
        self._touched = list(zip(*both, strict=True))  # by bucket: the owned part, and the followed one
        self._workers = [worker for worker in range(session.group.workers) if worker != session.index]
        self._gradients, self._weights = list(model.gradients), list(model.weights)
        if session.is_worker:  # the model's arrays belong to the worker, so the owner needs its own
            self._gradients = [np.zeros(array.size, array.dtype) for array in model.gradients]
            self._weights = [np.zeros(array.size, array.dtype) for array in model.weights]
            for own, array, parts in zip(self._weights, model.weights, self._touched, strict=True):
                for part in parts:
                    own[part] = array[part]
        self._sent = carrier.hold(self._weights)
        self._pushes: dict[int, list[Work]] = {}  # the next pushes of each worker, by bucket
        self._sends: dict[tuple[int, int], Work] = {}  # the last send of each bucket to each worker
        self._given: dict[int, Work] = {}  # bucket -> done when this process's worker has the weights
        self._owing: dict[int, Work] = {}  # the same, until the weights are given

    def holdings(self, parts: Sequence[slice]) -> list[Holding]:
        """The slices of these parts of the buckets, tensor by tensor."""
        found = []
        for number, (bucket, part) in enumerate(zip(self._model.layout.buckets, parts, strict=True)):
            arrays = self._gradients[number], self._weights[number], self._sent[number]
            found += held(number, bucket, arrays[0], arrays[1], part.start, part.stop, arrays[2])
        return found

    def begin(self) -> None:
        """Post this owner's part in the first push of every worker."""
        self._carrier.begin(self._workers)
        for worker in self._workers:
            self._pushes[worker] = [self._expect(worker, number, None) for number in self._numbers(ALL)]
        if self._session.is_worker:
            self._pushes[self._session.index] = [self._promise(number) for number in self._numbers(ALL)]

    def produced(self, number: int, gate: Work | None) -> None:
        """Announce that this process's worker has a bucket's gradients once ``gate`` is done.

        The training thread calls this.
        """
        engine = self._session.engine
        self._given[number] = self._owing[number] = engine.promise(f"weights of bucket {number}", tolerant=True)
        if gate is None:
            engine.fulfil(self._pushes[self._session.index][number])
        else:
            push = self._pushes[self._session.index][number]
            engine.then(push.label, [gate], partial(engine.fulfil, push), tolerant=True)

    def take_given(self, number: int) -> Work | None:
        """The work that the next pull of this process's worker has to wait for; None on a second pull."""
        return self._given.pop(number, None)

    # As ``Exchanges``.

    def coming(self, worker: int) -> Sequence[Work]:
        """All buckets of the worker's push."""
        return self._pushes.get(worker, ())

    def settle(self, worker: int, bucket: int = ALL) -> None:
        """Copy the push into the optimizer's gradients."""
        for number in self._numbers(bucket):
            came = self._carrier.pushed(worker, number)
            for part in self._touched[number]:
                np.copyto(self._gradients[number][part], came[part], casting="same_kind")

    def add(self, worker: int, bucket: int, scale: float, anew: bool) -> None:
        """Adds in the order in which pushes arrive."""
        for number in self._numbers(bucket):
            came = self._carrier.pushed(worker, number)
            for part in self._touched[number]:
                add_up(self._gradients[number][part], came[part], scale, anew)

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """Update at once. The worker's next push cannot arrive before it has the weights."""
        if worker != ALL:
            self.settle(worker, bucket)
        update(bucket)
        for number in self._numbers(bucket):
            self._carrier.updated(number)

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """Copy the current weights and start sending them; then expect the next push."""
        for worker in workers:
            for number in self._numbers(bucket):
                if self._mine is not None:
                    self._carrier.put(worker, number, self._mine[number])
                if worker != self._session.index:
                    self._pushes[worker][number] = self._give(worker, number)
                else:
                    self._give_own(number)

    def _numbers(self, bucket: int) -> Sequence[int]:
        return range(len(self._touched)) if bucket == ALL else (bucket,)

    made: Work | None = None

    def rest(self) -> None:
        """Do nothing: sends use copies."""

    def close(self) -> None:
        """Do nothing: without merging the layout never changes."""

    def _give(self, worker: int, number: int) -> Work:
        """Send a bucket and expect its next push afterwards, unless a push is expected already.

        A push is expected already where the last pull belonged to a meeting. A worker in a meeting has received all
        that was sent before; this process may not know that yet, and reuses the key once it does.
        """
        sent = self._carrier.send(worker, number, self._sends.get((worker, number)))
        self._sends[worker, number] = sent
        expected = self._pushes[worker][number]
        return self._expect(worker, number, sent) if expected.done else expected

    def _give_own(self, number: int) -> None:
        """Let this process's worker have a bucket; after a push, expect its next one."""
        pushes, engine = self._pushes[self._session.index], self._session.engine
        if pushes[number].done:
            pushes[number] = self._promise(number)
        if (owing := self._owing.pop(number, None)) is not None:
            engine.fulfil(owing)

    def _promise(self, number: int) -> Work:
        label = f"bucket {number} of {self._session.called(self._session.index)}"
        return self._session.engine.promise(label, tolerant=True)

    def _expect(self, worker: int, number: int, gate: Work | None) -> Work:
        return self._carrier.expect(worker, number, gate)


class Carrier:
    """Moves one worker's pushes and pulls, and an owner's part in those of each worker.

    Owns their keys, and the memory in which an owner receives and from which it sends. Raises UsageError if the buckets
    need more keys than there are.
    """

    encodes = False
    """Whether a push replaces this process's own slices of the gradients by the decoded payload."""
    _push: Sequence[Order | CodedOrder]
    _pull: Sequence[Order | CodedOrder]

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self._model, self._buckets = session, model, len(model.layout.buckets)
        self._expect: dict[int, Sequence[Order | CodedOrder]] = {}  # by worker
        workers = session.group.workers
        if workers * self._buckets >= MODEL_KEYS:
            raise UsageError(
                f"{self._buckets} buckets, pushed by each of {workers} workers by itself, are more than the"
                f" {MODEL_KEYS - 1} that a model can have: use larger buckets, such as schedule=fixed(bucket=100MiB)"
            )

    def _push_key(self, worker: int, number: int) -> int:
        return self._model.first_key + worker * self._buckets + number

    def _pull_key(self, worker: int, number: int) -> int:
        return WEIGHT_KEYS + self._push_key(worker, number)

    def _labels(self, worker: int, owner: bool) -> tuple[list[str], list[str]]:
        """The labels of each bucket's pushes and pulls, for the worker itself or for an ``owner``."""
        numbers = range(self._buckets)
        if not owner:
            return list(self._model.layout.labels), [f"weights of bucket {number}" for number in numbers]
        who = self._session.called(worker)
        pushes = [f"bucket {number} of {who}" for number in numbers]
        return pushes, [f"weights of bucket {number} to {who}" for number in numbers]

    @property
    def mine(self) -> Sequence[slice] | None:
        """The elements that this process owns of every bucket, None if it is no owner."""
        raise NotImplementedError

    followed: Sequence[slice] | None = None
    """The elements of which it makes the updates of another owner, None if it follows nobody."""

    def push(self, number: int, when: When) -> Work:
        """Start this worker's push of a bucket."""
        return self._session.engine.start(self._push[number], when)

    def pull(self, number: int, when: When) -> Work:
        """Start this worker's pull of a bucket."""
        return self._session.engine.start(self._pull[number], when)

    def begin(self, workers: Sequence[int]) -> None:
        """Allocate the memory of this owner for the pushes and pulls of these workers."""
        raise NotImplementedError

    def expect(self, worker: int, number: int, gate: Work | None) -> Work:
        """Post this owner's part in a worker's next push, after ``gate``. It never ends if the worker leaves."""
        return self._session.engine.start(self._expect[worker][number], When(gate))

    def pushed(self, worker: int, number: int) -> Array:
        """Where the owner finds a worker's push, its own worker's too: an array of the bucket's size."""
        raise NotImplementedError

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """Send a worker, after ``gate``, what ``put`` has prepared."""
        raise NotImplementedError

    def hold(self, weights: Sequence[Array]) -> Sequence[Array]:
        """Set this owner's weights, by bucket; return the weights as workers get them, which may be less precise."""
        raise NotImplementedError

    def put(self, worker: int, number: int, part: slice) -> None:
        """Prepare the weights for a worker; ``part`` is the owned part. This process's own worker gets them at once."""
        raise NotImplementedError

    def updated(self, number: int) -> None:
        """Note that this owner's weights of a bucket have been updated."""

    def renew(self) -> None:
        """Note that this owner's weights were replaced without an update."""


class Plans(Carrier):
    """Moves arrays by plans between one worker and the owners, each of which owns a chunk."""

    def __init__(self, session: Session, model: Model) -> None:
        super().__init__(session, model)
        roles = session.strategy.roles
        assert roles is not None
        self._places, followers = roles.places(session.group), roles.followers(session.group)
        self.followed = self._chunks_of(followers)
        serves = session.index in {*self._places, *followers}
        wanted = range(session.group.workers) if serves else [session.index]
        plans = {worker: roles.halves_of(session.group, worker) for worker in wanted}
        self._programs = {
            worker: tuple(compiled(half, session.index) for half in halves) for worker, halves in plans.items()
        }
        self._push, self._pull = self._orders(session.index, model.gradients, model.weights)
        self._rooms: dict[int, list[Array]] = {}
        self._send: dict[int, list[Order]] = {}
        self._held: Sequence[Array] = ()  # the owner's weights

    def _orders(
        self, worker: int, pushed: Sequence[Array], pulled: Sequence[Array], *, owner: bool = False
    ) -> tuple[list[Order], list[Order]]:
        """This process's part in the pushes and pulls of ``worker``, by bucket; empty if it has none."""
        if worker not in self._programs:
            return [], []
        push, pull = self._programs[worker]
        pushes, pulls = self._labels(worker, owner)
        return (
            [
                Order(push, array, self._push_key(worker, i), pushes[i], tolerant=owner)
                for i, array in enumerate(pushed)
            ],
            [Order(pull, array, self._pull_key(worker, i), pulls[i]) for i, array in enumerate(pulled)],
        )

    @property
    def mine(self) -> list[slice] | None:
        """One chunk of each bucket."""
        return self._chunks_of(self._places)

    def _chunks_of(self, processes: Sequence[int]) -> list[slice] | None:
        """The chunks at this process's place among these."""
        if self._session.index not in processes:
            return None
        chunk = processes.index(self._session.index)
        edges = [chunk_edges(bucket.elements, len(self._places)) for bucket in self._model.layout.buckets]
        return [slice(one[chunk], one[chunk + 1]) for one in edges]

    def begin(self, workers: Sequence[int]) -> None:
        """Allocates one array for both directions: a worker pushes only after it has pulled."""
        both = zip(*(parts for parts in (self.mine, self.followed) if parts is not None), strict=True)
        spans = [slice(min(one.start for one in parts), max(one.stop for one in parts)) for parts in both]
        found = rooms(self._session, self._model.gradients, spans, len(workers))
        self._rooms = dict(zip(workers, found, strict=True))
        for worker, room in self._rooms.items():
            self._expect[worker], self._send[worker] = self._orders(worker, room, room, owner=True)

    def pushed(self, worker: int, number: int) -> Array:
        """The array of that worker, or this process's own gradients."""
        return self._rooms.get(worker, self._model.gradients)[number]

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """The counterpart of ``pull``."""
        return self._session.engine.start(self._send[worker][number], When(gate))

    def hold(self, weights: Sequence[Array]) -> Sequence[Array]:
        """Workers get these weights unchanged."""
        self._held = weights
        return weights

    def put(self, worker: int, number: int, part: slice) -> None:
        """Copies into the worker's array, or into this process's own weights."""
        self._rooms.get(worker, self._model.weights)[number][part] = self._held[number][part]


class Payloads(Carrier):
    """Moves gradients and updates as a codec's payloads; owners own whole blocks of the codec."""

    encodes = True

    def __init__(self, session: Session, model: Model, compression: Compression) -> None:
        super().__init__(session, model)
        self._compression, self._owners = compression, compression.participant.owners
        self._edges = [self._edges_of(number) for number in range(self._buckets)]
        self._pushed: dict[int, list[Array]] = {}
        buckets, me = range(self._buckets), session.index
        pushes, pulls = self._labels(me, owner=False)
        self._push = [session.coded_order(compression, i, self._push_key(me, i), pushes[i]) for i in buckets]
        self._pull = [
            session.reducers_order(partial(self._receiving, i), self._pull_key(me, i), pulls[i]) for i in buckets
        ]
        self._send_labels: dict[int, list[str]] = {}
        self._known: list[Array] = []  # of an owner: the weights that workers of the newest version have
        self._senders: dict[int, UpdateSender] = {}  # of an owner: by bucket
        self._has: dict[tuple[int, int], int] = defaultdict(int)  # the version that a worker has of a bucket
        self._messages: dict[tuple[int, int], Array] = {}  # what it is sent next
        self._receivers: dict[int, dict[int, UpdateReceiver]] = {}  # of a worker: by bucket and owner

    def _shares_of(self, number: int, array: Array) -> list[list[Operand]]:
        """Each owner's part of a bucket."""
        return share_out(self._compression.parts(number, array), len(self._owners))

    def _edges_of(self, number: int) -> list[int]:
        """The boundaries of the owners' parts of a bucket, which are consecutive."""
        shares = self._shares_of(number, self._model.weights[number])
        return [0, *accumulate(sum(part.elements for part in share) for share in shares)]

    @property
    def mine(self) -> list[slice] | None:
        """The part that this owner gets when a bucket is reduced to owners."""
        owner = self._compression.participant.owner
        return None if owner < 0 else [slice(edges[owner], edges[owner + 1]) for edges in self._edges]

    def pull(self, number: int, when: When) -> Work:
        """Receives a message from each owner."""
        if number not in self._receivers:
            places = zip(self._owners, self._shares_of(number, self._model.weights[number]), strict=True)
            self._receivers[number] = {
                place: UpdateReceiver(share) for place, share in places if share and place != self._session.index
            }
        return super().pull(number, when)

    def hold(self, weights: Sequence[Array]) -> Sequence[Array]:
        """Workers get decoded weights, which are kept beside the owner's own."""
        me, names = self._compression.participant.owner, self._compression.names
        self._known = [np.zeros_like(array) for array in weights]  # only the owned parts are ever touched
        for number, (own, known, edges) in enumerate(zip(weights, self._known, self._edges, strict=True)):
            known[edges[me] : edges[me + 1]] = own[edges[me] : edges[me + 1]]
            share = self._shares_of(number, known)[me]
            if share:
                keeps = [self._compression.keeps_rest(names.index(part.name)) for part in share]
                held = [
                    Held(part.array, keep) for part, keep in zip(self._shares_of(number, own)[me], keeps, strict=True)
                ]
                self._senders[number] = UpdateSender(share, held)
        return self._known

    def updated(self, number: int) -> None:
        """Encodes the change once for all workers."""
        if number in self._senders:
            self._senders[number].update()

    def renew(self) -> None:
        """Sends whole weights to all workers next."""
        for telling in self._senders.values():
            telling.renew()

    def put(self, worker: int, number: int, part: slice) -> None:
        """Prepares a message with the updates that the worker does not have; copies this process's own weights."""
        telling = self._senders.get(number)
        if worker == self._session.index:
            self._model.weights[number][part] = self._known[number][part]
        elif telling is not None:
            self._messages[worker, number] = telling.since(self._has[worker, number])
            self._has[worker, number] = telling.version

    def begin(self, workers: Sequence[int]) -> None:
        """Allocates float32 arrays, to which codecs decode."""
        for worker in workers:
            self._pushed[worker] = [np.zeros(array.size, np.float32) for array in self._model.weights]
            pushes, self._send_labels[worker] = self._labels(worker, owner=True)
            self._expect[worker] = [
                self._session.reducers_order(
                    self._taking(worker, number, array), self._push_key(worker, number), pushes[number], tolerant=True
                )
                for number, array in enumerate(self._pushed[worker])
            ]

    def _taking(self, worker: int, number: int, array: Array) -> Callable[[], list[Callable[[], Reducer]]]:
        parts = self._compression.parts_of(worker, number, array)
        taken = taking(parts, self._compression.participant, worker)
        return lambda: taken

    def pushed(self, worker: int, number: int) -> Array:
        """The decoded push, or this process's own gradients, which its payload has already replaced."""
        return self._pushed.get(worker, self._model.gradients)[number]

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """Sends the message that ``put`` has prepared, if any."""
        said = self._messages.pop((worker, number), None)
        sends = [] if said is None else [Message(worker, said)]
        key, label = self._pull_key(worker, number), self._send_labels[worker][number]
        order = self._session.reducers_order(lambda: [partial(_sending, sends)], key, label)
        return self._session.engine.start(order, When(gate))

    def _receiving(self, number: int) -> list[Callable[[], Reducer]]:
        return [partial(self._receive, number)]

    def _receive(self, number: int) -> Reducer:
        """Receive and apply the owners' messages about a bucket's weights."""
        room, hearing = self._compression.participant.room, self._receivers[number]
        buffers = {place: room.take(one.greatest_bytes) for place, one in hearing.items()}
        wanted = [Message(place, buffers[place][: one.greatest_bytes]) for place, one in hearing.items()]
        lengths = yield Round([], wanted)
        for (place, one), length in zip(hearing.items(), lengths, strict=True):
            one.take(buffers[place][:length], self._session.name(place))
            room.give(buffers[place])


def _sending(sends: Sequence[Message]) -> Reducer:
    yield Round(sends, [])


def rooms(session: Session, like: Sequence[Array], mine: Sequence[slice], count: int) -> list[list[Array]]:
    """``count`` times arrays like these, in one block of the transport's memory, which may commit all of it.

    Only the parts ``mine`` are ever touched. So the arrays overlap, and just these parts lie side by side.
    """
    strides = [_aligned(array[part].nbytes) for array, part in zip(like, mine, strict=True)]
    sizes = [_aligned(array.nbytes) + count * stride for array, stride in zip(like, strides, strict=True)]
    block = session.engine.allocate(max(1, sum(sizes)), np.dtype(np.uint8))
    starts = [0, *accumulate(sizes)]
    return [
        [
            block[start + turn * stride : start + turn * stride + array.nbytes].view(array.dtype)
            for array, start, stride in zip(like, starts, strides, strict=False)
        ]
        for turn in range(count)
    ]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
