"""Pushes and pulls of one worker by itself, where every push is an update of its own.

A push is between one worker and the owners, and so is a pull; no two workers wait for each other in them. ``Plans``
moves them as they are, and ``Payloads`` under a codec: what one worker pushes is encoded as it is where all are summed,
and decoded by itself, and what it pulls are the updates that it has not, or weights as they are
(``compression.versions``). Every bucket of every worker has a key of its own, which its next step uses again: that
begins when the worker has all of the step before. A push is received whenever it comes, into memory that the owner
keeps for that worker, and copied to where the optimizer reads it when its turn has come. What a worker is released with
is copied too and then sent, so that the next update need not wait until the worker has it. An owner that is a worker
has weights beside those of its model, which stay as they were pulled until it pulls again; between the two, what it
owns itself is copied and not sent.

Memory at an owner: its part of the model once for every worker, and the model once, under a codec twice, with payloads
of no more bytes than its part.

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
from ..compression.versions import UpdateReceiver, UpdateSender
from ..engine.order import CodedOrder, Order, When, Work
from ..errors import UsageError
from ..plans.messages import chunk_edges
from ..session.communicator import compiled
from ..session.session import MODEL_KEYS, Session
from ..session.tickets import WEIGHT_KEYS
from .protocol import ALL
from .records import Array, Record
from .shard import Holding, held
from .traffic import Model, Update

_ALIGNED_BYTES = 64
"""Arrays of several types share a block of memory."""


class Single:
    """This process's part in the pushes and pulls of each worker: the worker's own, and those of an owner."""

    keeps = True

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self.buckets, coded = session, len(model.layout.buckets), model.compression
        self._carrier = Plans(session, model) if coded is None else Payloads(session, model, coded)
        mine = self._carrier.mine
        self._owned = None if mine is None else _Owned(session, model, self._carrier, mine)

    def push(self, number: int, when: When) -> Work:
        """As the carrier does."""
        work = self._carrier.push(number, when)
        if self._owned is not None:
            self._owned.produced(number, work if self._carrier.encodes else when.gate)
        return work

    def pull(self, number: int, when: When) -> Work:
        """As the carrier does, behind what this process sends itself."""
        given = None if self._owned is None else self._owned.take_given(number)
        if given is not None:
            gates = [given, *([] if when.gate is None else [when.gate])]
            when = when._replace(gate=self._session.engine.then(f"weights of bucket {number}", gates))
        return self._carrier.pull(number, when)

    def exchanges(self, apart: bool) -> _Owned:  # noqa: ARG002 - nothing waits here
        """One for each worker."""
        assert self._owned is not None
        self._owned.begin()
        return self._owned

    def holdings(self) -> list[Holding] | None:
        """With weights of the owner's, where it is a worker."""
        return None if self._owned is None else self._owned.holdings()

    def know(self, records: Sequence[Record]) -> None:
        """What is sent next says all."""

    def resume_at(self, step: int) -> None:  # noqa: ARG002 - each push says of which step it is, where that matters
        """With weights that the owners were given."""
        self._carrier.renew()


class _Owned:
    """What an owner has of every bucket, and what each worker pushes to it and pulls from it."""

    def __init__(self, session: Session, model: Model, carrier: Carrier, mine: Sequence[slice]) -> None:
        self._session, self._model, self._carrier, self._mine = session, model, carrier, mine
        self._workers = [worker for worker in range(session.group.workers) if worker != session.index]
        self._gradients, self._weights = list(model.gradients), list(model.weights)
        if session.is_worker:  # these are the worker's own
            self._gradients = [np.zeros(array.size, array.dtype) for array in model.gradients]
            self._weights = [np.zeros(array.size, array.dtype) for array in model.weights]
            for own, array, part in zip(self._weights, model.weights, mine, strict=True):
                own[part] = array[part]
        self._sent = carrier.hold(self._weights)
        self._pushes: dict[int, list[Work]] = {}  # the next ones of each worker
        self._sends: dict[tuple[int, int], Work] = {}  # the last one of a bucket to each worker
        self._given: dict[int, Work] = {}  # bucket -> done when this process's worker has what its owner updates of it
        self._owing: dict[int, Work] = {}  # the same, while that is not so
        self._added: set[int] = set()  # buckets in whose gradients the sum of some pushes lies

    def holdings(self) -> list[Holding]:
        """What is owned, tensor by tensor."""
        found = []
        for number, (bucket, part) in enumerate(zip(self._model.layout.buckets, self._mine, strict=True)):
            arrays = self._gradients[number], self._weights[number], self._sent[number]
            found += held(number, bucket, arrays[0], arrays[1], part.start, part.stop, arrays[2])
        return found

    def begin(self) -> None:
        """Post this owner's part in the first push of every worker."""
        self._carrier.begin(self._workers)
        for worker in self._workers:
            self._pushes[worker] = [self._expect(worker, number, None) for number in range(len(self._mine))]
        if self._session.is_worker:
            self._pushes[self._session.index] = [self._promise(number) for number in range(len(self._mine))]

    def produced(self, number: int, gate: Work | None) -> None:
        """The worker of this process has a bucket's gradients behind ``gate``; called in the thread that trains."""
        engine = self._session.engine
        self._given[number] = self._owing[number] = engine.promise(f"weights of bucket {number}", tolerant=True)
        if gate is None:
            engine.fulfil(self._pushes[self._session.index][number])
        else:
            push = self._pushes[self._session.index][number]
            engine.then(push.label, [gate], partial(engine.fulfil, push), tolerant=True)

    def take_given(self, number: int) -> Work | None:
        """What a pull of this process's worker goes behind, the first one after a push."""
        return self._given.pop(number, None)

    # As ``Exchanges``.

    def coming(self, worker: int) -> Sequence[Work]:
        """All of its push."""
        return self._pushes.get(worker, ())

    def settle(self, worker: int, bucket: int = ALL) -> None:
        """Copy what has come to where the optimizer reads it."""
        for number in self._numbers(bucket):
            part, came = self._mine[number], self._carrier.pushed(worker, number)
            np.copyto(self._gradients[number][part], came[part], casting="same_kind")

    def add(self, worker: int, bucket: int, scale: float) -> None:
        """In the order in which pushes come."""
        for number in self._numbers(bucket):
            part = self._mine[number]
            total, came = self._gradients[number][part], self._carrier.pushed(worker, number)[part]
            scaled = came if scale == 1.0 else came * came.dtype.type(scale)
            if number in self._added:
                np.add(total, scaled, out=total, casting="same_kind")
            else:
                np.copyto(total, scaled, casting="same_kind")
        self._added.update(self._numbers(bucket))

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """At once; the worker's next push comes when it has the weights."""
        if worker != ALL:
            self.settle(worker, bucket)
        elif self._added.isdisjoint(self._numbers(bucket)):  # nothing of it was finite
            return
        self._added.difference_update(self._numbers(bucket))
        update(bucket)
        for number in self._numbers(bucket):
            self._carrier.updated(number)

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """Copy the weights as they are now, and start to send them; what is pushed next comes behind that."""
        for worker in workers:
            for number in self._numbers(bucket):
                self._carrier.put(worker, number, self._mine[number])
                if worker != self._session.index:
                    self._pushes[worker][number] = self._give(worker, number)
                else:
                    self._give_own(number)

    def _numbers(self, bucket: int) -> Sequence[int]:
        return range(len(self._mine)) if bucket == ALL else (bucket,)

    def rest(self) -> None:
        """What is sent are copies."""

    def close(self) -> None:
        """Nothing takes the place of these."""

    def _give(self, worker: int, number: int) -> Work:
        """Send a bucket; its next push, behind that, unless one is expected already, the last pull being none's.

        A worker that meets the others, or has just met them, has all that was sent before; this process may not have
        seen that yet, and goes on with the key when it has.
        """
        sent = self._carrier.send(worker, number, self._sends.get((worker, number)))
        self._sends[worker, number] = sent
        expected = self._pushes[worker][number]
        return self._expect(worker, number, sent) if expected.done else expected

    def _give_own(self, number: int) -> None:
        """The worker of this process has a bucket, if it has not only met the others; it may push the next."""
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
    """What moves one worker's pushes and pulls, and of an owner its part in those of each.

    Owns their keys, and the memory in which an owner receives and out of which it sends. Raises UsageError for more
    keys than there are.
    """

    encodes = False
    """True where a push replaces what its own process owns of it by what its payload says."""
    _push: Sequence[Order | CodedOrder]
    _pull: Sequence[Order | CodedOrder]

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self._model, self._buckets = session, model, len(model.layout.buckets)
        self._expect: dict[int, Sequence[Order | CodedOrder]] = {}  # by worker
        workers = session.group.workers
        if workers * self._buckets >= MODEL_KEYS:
            raise UsageError(
                f"{self._buckets} buckets, pushed by each of {workers} workers by itself, are more than the"
                f" {MODEL_KEYS - 1} that a model can have: use larger ones, as with schedule=fixed(bucket=100MiB)"
            )

    def _push_key(self, worker: int, number: int) -> int:
        return self._model.first_key + worker * self._buckets + number

    def _pull_key(self, worker: int, number: int) -> int:
        return WEIGHT_KEYS + self._push_key(worker, number)

    def _labels(self, worker: int, owner: bool) -> tuple[list[str], list[str]]:
        """How messages call the pushes and pulls of each bucket, to a worker itself or to an ``owner``."""
        numbers = range(self._buckets)
        if not owner:
            return list(self._model.layout.labels), [f"weights of bucket {number}" for number in numbers]
        who = self._session.called(worker)
        pushes = [f"bucket {number} of {who}" for number in numbers]
        return pushes, [f"weights of bucket {number} to {who}" for number in numbers]

    @property
    def mine(self) -> Sequence[slice] | None:
        """The elements that this process owns of every bucket, None where it is no owner."""
        raise NotImplementedError

    def push(self, number: int, when: When) -> Work:
        """Start this worker's push of a bucket."""
        return self._session.engine.start(self._push[number], when)

    def pull(self, number: int, when: When) -> Work:
        """Start this worker's pull of a bucket."""
        return self._session.engine.start(self._pull[number], when)

    def begin(self, workers: Sequence[int]) -> None:
        """Make room at this owner for what these workers push and pull."""
        raise NotImplementedError

    def expect(self, worker: int, number: int, gate: Work | None) -> Work:
        """Post this owner's part in a worker's next push, behind ``gate``; it never ends when the worker leaves."""
        return self._session.engine.start(self._expect[worker][number], When(gate))

    def pushed(self, worker: int, number: int) -> Array:
        """Where the owner finds that push, an array of the bucket's size; also that of its own worker."""
        raise NotImplementedError

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """Send a worker, behind ``gate``, what ``put`` has made ready."""
        raise NotImplementedError

    def hold(self, weights: Sequence[Array]) -> Sequence[Array]:
        """These are this owner's weights, by bucket; those that workers are sent, which may say less, in return."""
        raise NotImplementedError

    def put(self, worker: int, number: int, part: slice) -> None:
        """Have ready what a worker shall have, ``part`` being what is owned; its own worker then has it."""
        raise NotImplementedError

    def updated(self, number: int) -> None:
        """This owner's weights of a bucket have been updated."""

    def renew(self) -> None:
        """This owner's weights are others, which no updates have made."""


class Plans(Carrier):
    """Gradients and weights as they are, by plans between one worker and the owners, each of which has a chunk."""

    def __init__(self, session: Session, model: Model) -> None:
        super().__init__(session, model)
        roles = session.strategy.roles
        assert roles is not None
        self._places = roles.places(session.group)
        wanted = range(session.group.workers) if session.index in self._places else [session.index]
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
        """This process's part in what that worker pushes and pulls, by bucket; nothing where it is no worker."""
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
        """One chunk of each."""
        if self._session.index not in self._places:
            return None
        chunk = self._places.index(self._session.index)
        edges = [chunk_edges(bucket.elements, len(self._places)) for bucket in self._model.layout.buckets]
        return [slice(one[chunk], one[chunk + 1]) for one in edges]

    def begin(self, workers: Sequence[int]) -> None:
        """One array for both: a worker pushes when it has pulled."""
        found = rooms(self._session, self._model.gradients, self.mine or (), len(workers))
        self._rooms = dict(zip(workers, found, strict=True))
        for worker, room in self._rooms.items():
            self._expect[worker], self._send[worker] = self._orders(worker, room, room, owner=True)

    def pushed(self, worker: int, number: int) -> Array:
        """The array, or the own worker's gradients."""
        return self._rooms.get(worker, self._model.gradients)[number]

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """The other end of ``pull``."""
        return self._session.engine.start(self._send[worker][number], When(gate))

    def hold(self, weights: Sequence[Array]) -> Sequence[Array]:
        """They are sent as they are."""
        self._held = weights
        return weights

    def put(self, worker: int, number: int, part: slice) -> None:
        """A copy in the array, or in the own worker's weights."""
        self._rooms.get(worker, self._model.weights)[number][part] = self._held[number][part]


class Payloads(Carrier):
    """Gradients and updates as a codec's payloads; owners have whole blocks of the codec."""

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
        self._known: list[Array] = []  # of an owner, as the workers of the newest version have them
        self._senders: dict[int, UpdateSender] = {}  # of an owner, by bucket
        self._has: dict[tuple[int, int], int] = defaultdict(int)  # the version that a worker has of a bucket
        self._messages: dict[tuple[int, int], Array] = {}  # what it is sent next
        self._receivers: dict[int, dict[int, UpdateReceiver]] = {}  # of a worker, by bucket and owner

    def _shares_of(self, number: int, array: Array) -> list[list[Operand]]:
        """What each owner has of a bucket."""
        return share_out(self._compression.parts(number, array), len(self._owners))

    def _edges_of(self, number: int) -> list[int]:
        """Where the parts of a bucket's owners begin and end: they are consecutive."""
        shares = self._shares_of(number, self._model.weights[number])
        return [0, *accumulate(sum(part.array.size for part in share) for share in shares)]

    @property
    def mine(self) -> list[slice] | None:
        """What goes to this owner when a bucket is reduced to owners."""
        owner = self._compression.participant.owner
        return None if owner < 0 else [slice(edges[owner], edges[owner + 1]) for edges in self._edges]

    def pull(self, number: int, when: When) -> Work:
        """A message from each owner."""
        if number not in self._receivers:
            shares, room = self._shares_of(number, self._model.weights[number]), self._compression.participant.room
            places = zip(self._owners, shares, strict=True)
            self._receivers[number] = {
                place: UpdateReceiver(share, room) for place, share in places if share and place != self._session.index
            }
        return super().pull(number, when)

    def hold(self, weights: Sequence[Array]) -> Sequence[Array]:
        """The workers have others than these, the owner's own."""
        me, names = self._compression.participant.owner, self._compression.names
        self._known = [np.zeros_like(array) for array in weights]  # of which only what is owned is ever touched
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
        """How they have changed is encoded, once for all workers."""
        if number in self._senders:
            self._senders[number].update()

    def renew(self) -> None:
        """All are sent them as they are."""
        for telling in self._senders.values():
            telling.renew()

    def put(self, worker: int, number: int, part: slice) -> None:
        """The message of what the worker has not; the own one's weights are copied."""
        telling = self._senders.get(number)
        if worker == self._session.index:
            self._model.weights[number][part] = self._known[number][part]
        elif telling is not None:
            self._messages[worker, number] = telling.since(self._has[worker, number])
            self._has[worker, number] = telling.version

    def begin(self, workers: Sequence[int]) -> None:
        """Codecs decode to float32."""
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
        """The array, or the own worker's gradients, which are what its payload says."""
        return self._pushed.get(worker, self._model.gradients)[number]

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """That message."""
        said = self._messages.pop((worker, number), None)
        sends = [] if said is None else [Message(worker, said)]
        key, label = self._pull_key(worker, number), self._send_labels[worker][number]
        order = self._session.reducers_order(lambda: [partial(_sending, sends)], key, label)
        return self._session.engine.start(order, When(gate))

    def _receiving(self, number: int) -> list[Callable[[], Reducer]]:
        return [partial(self._receive, number)]

    def _receive(self, number: int) -> Reducer:
        """What the owners tell of a bucket's weights."""
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
    """So many times arrays like these, in one block of the transport's memory, which may commit all of it.

    Nobody touches more of them than ``mine``, so they lie over each other, and only these parts side by side.
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
