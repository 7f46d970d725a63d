"""What moves one worker's pushes and pulls: ``Plans`` as they are, ``Payloads`` under a codec.

Owns their keys, and the memory in which an owner receives and out of which it sends. What one worker pushes is encoded
as it is where all are summed, and decoded by itself. What it pulls under a codec are the updates that it has not, or
weights as they are (``compression.versions``).
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
from ..compression.versions import Hearing, Telling
from ..engine.order import CodedOrder, Order, When, Work
from ..errors import UsageError
from ..plans.messages import chunk_edges
from ..session.communicator import compiled
from ..session.session import MODEL_KEYS, Session
from ..session.tickets import WEIGHT_KEYS
from .records import Array
from .traffic import Model

_ALIGNED_BYTES = 64
"""Arrays of several types share a block of memory."""


class _Keys:
    """The keys of every worker's buckets of one model; raises UsageError for more of them than there are."""

    def __init__(self, model: Model, workers: int) -> None:
        self._first, self._buckets = model.first_key, len(model.layout.buckets)
        if workers * self._buckets >= MODEL_KEYS:
            raise UsageError(
                f"{self._buckets} buckets, pushed by each of {workers} workers by itself, are more than the"
                f" {MODEL_KEYS - 1} that a model can have: use larger ones, as with schedule=fixed(bucket=100MiB)"
            )

    def push(self, worker: int, number: int) -> int:
        """Of a worker's pushes of a bucket."""
        return self._first + worker * self._buckets + number

    def pull(self, worker: int, number: int) -> int:
        """Of its pulls."""
        return WEIGHT_KEYS + self.push(worker, number)


class Plans:
    """Gradients and weights as they are, by plans between one worker and the owners, each of which has a chunk."""

    encodes = False

    def __init__(self, session: Session, model: Model) -> None:
        self._session, self._model = session, model
        self._keys = _Keys(model, session.group.workers)
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
        self._expect: dict[int, list[Order]] = {}  # by worker
        self._send: dict[int, list[Order]] = {}
        self._held: Sequence[Array] = ()  # the owner's weights

    def _orders(
        self, worker: int, pushed: Sequence[Array], pulled: Sequence[Array], *, owner: bool = False
    ) -> tuple[list[Order], list[Order]]:
        """This process's part in what that worker pushes and pulls, by bucket; nothing where it is no worker."""
        if worker not in self._programs:
            return [], []
        (push, pull), keys = self._programs[worker], self._keys
        pushes, pulls = _labels(self._session, self._model, worker, owner)
        return (
            [Order(push, array, keys.push(worker, i), pushes[i], tolerant=owner) for i, array in enumerate(pushed)],
            [Order(pull, array, keys.pull(worker, i), pulls[i]) for i, array in enumerate(pulled)],
        )

    @property
    def mine(self) -> list[slice] | None:
        """One chunk of each."""
        if self._session.index not in self._places:
            return None
        chunk = self._places.index(self._session.index)
        edges = [chunk_edges(bucket.elements, len(self._places)) for bucket in self._model.layout.buckets]
        return [slice(one[chunk], one[chunk + 1]) for one in edges]

    def push(self, number: int, when: When) -> Work:
        """One exchange with the owners."""
        return self._session.engine.start(self._push[number], when)

    def pull(self, number: int, when: When) -> Work:
        """One exchange with the owners."""
        return self._session.engine.start(self._pull[number], when)

    def begin(self, workers: Sequence[int]) -> None:
        """One array for both: a worker pushes when it has pulled."""
        found = rooms(self._session, self._model.gradients, self.mine or (), len(workers))
        self._rooms = dict(zip(workers, found, strict=True))
        for worker, room in self._rooms.items():
            self._expect[worker], self._send[worker] = self._orders(worker, room, room, owner=True)

    def expect(self, worker: int, number: int, gate: Work | None) -> Work:
        """The other end of ``push``."""
        return self._session.engine.start(self._expect[worker][number], When(gate))

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

    def updated(self, number: int) -> None:
        """The next to be sent says all."""

    def renew(self) -> None:
        """The next to be sent says all."""

    def put(self, worker: int, number: int, part: slice) -> None:
        """A copy in the array, or in the own worker's weights."""
        self._rooms.get(worker, self._model.weights)[number][part] = self._held[number][part]


class Payloads:
    """Gradients and updates as a codec's payloads; owners have whole blocks of the codec."""

    encodes = True

    def __init__(self, session: Session, model: Model, compression: Compression) -> None:
        self._session, self._model, self._compression = session, model, compression
        self._keys = _Keys(model, session.group.workers)
        self._owners = compression.participant.owners
        self._edges = [self._edges_of(number) for number in range(len(model.layout.buckets))]
        self._pushed: dict[int, list[Array]] = {}
        buckets, me = range(len(model.layout.buckets)), session.index
        pushes, pulls = _labels(session, model, me, owner=False)
        self._push = [session.coded_order(compression, i, self._keys.push(me, i), pushes[i]) for i in buckets]
        self._pull = [
            session.reducers_order(partial(self._receiving, i), self._keys.pull(me, i), pulls[i]) for i in buckets
        ]
        self._expect: dict[int, list[CodedOrder]] = {}  # by worker
        self._send_labels: dict[int, list[str]] = {}
        self._known: list[Array] = []  # of an owner, as the workers of the newest version have them
        self._telling: dict[int, Telling] = {}  # of an owner, by bucket
        self._has: dict[tuple[int, int], int] = defaultdict(int)  # the version that a worker has of a bucket
        self._messages: dict[tuple[int, int], Array] = {}  # what it is sent next
        self._hearing: dict[int, dict[int, Hearing]] = {}  # of a worker, by bucket and owner

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

    def push(self, number: int, when: When) -> Work:
        """The worker's half of a reduction to owners."""
        return self._session.engine.start(self._push[number], when)

    def pull(self, number: int, when: When) -> Work:
        """A message from each owner."""
        if number not in self._hearing:
            shares, room = self._shares_of(number, self._model.weights[number]), self._compression.participant.room
            places = zip(self._owners, shares, strict=True)
            self._hearing[number] = {
                place: Hearing(share, room) for place, share in places if share and place != self._session.index
            }
        return self._session.engine.start(self._pull[number], when)

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
                self._telling[number] = Telling(share, held)
        return self._known

    def updated(self, number: int) -> None:
        """How they have changed is encoded, once for all workers."""
        if number in self._telling:
            self._telling[number].update()

    def renew(self) -> None:
        """All are sent them as they are."""
        for telling in self._telling.values():
            telling.renew()

    def put(self, worker: int, number: int, part: slice) -> None:
        """The message of what the worker has not; the own one's weights are copied."""
        telling = self._telling.get(number)
        if worker == self._session.index:
            self._model.weights[number][part] = self._known[number][part]
        elif telling is not None:
            self._messages[worker, number] = telling.since(self._has[worker, number])
            self._has[worker, number] = telling.version

    def begin(self, workers: Sequence[int]) -> None:
        """Codecs decode to float32."""
        for worker in workers:
            self._pushed[worker] = [np.zeros(array.size, np.float32) for array in self._model.weights]
            pushes, self._send_labels[worker] = _labels(self._session, self._model, worker, owner=True)
            self._expect[worker] = [
                self._session.reducers_order(
                    self._taking(worker, number, array), self._keys.push(worker, number), pushes[number], tolerant=True
                )
                for number, array in enumerate(self._pushed[worker])
            ]

    def _taking(self, worker: int, number: int, array: Array) -> Callable[[], list[Callable[[], Reducer]]]:
        parts = self._compression.parts_of(worker, number, array)
        taken = taking(parts, self._compression.participant, worker)
        return lambda: taken

    def expect(self, worker: int, number: int, gate: Work | None) -> Work:
        """The owner's half of a reduction of one worker's payloads."""
        return self._session.engine.start(self._expect[worker][number], When(gate))

    def pushed(self, worker: int, number: int) -> Array:
        """The array, or the own worker's gradients, which are what its payload says."""
        return self._pushed.get(worker, self._model.gradients)[number]

    def send(self, worker: int, number: int, gate: Work | None) -> Work:
        """That message."""
        said = self._messages.pop((worker, number), None)
        sends = [] if said is None else [Message(worker, said)]
        key, label = self._keys.pull(worker, number), self._send_labels[worker][number]
        order = self._session.reducers_order(lambda: [partial(_sending, sends)], key, label)
        return self._session.engine.start(order, When(gate))

    def _receiving(self, number: int) -> list[Callable[[], Reducer]]:
        return [partial(self._receive, number)]

    def _receive(self, number: int) -> Reducer:
        """What the owners tell of a bucket's weights."""
        room, hearing = self._compression.participant.room, self._hearing[number]
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


def _labels(session: Session, model: Model, worker: int, owner: bool) -> tuple[list[str], list[str]]:
    """How messages call the pushes and pulls of each bucket, to a worker itself or to an ``owner``."""
    numbers = range(len(model.layout.buckets))
    if not owner:
        return list(model.layout.labels), [f"weights of bucket {number}" for number in numbers]
    who = session.called(worker)
    pushes = [f"bucket {number} of {who}" for number in numbers]
    return pushes, [f"weights of bucket {number} to {who}" for number in numbers]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
