"""The ranks of a run without a transport: a loop that delivers the messages of reducers and computes their sums.

``Ranks`` are the processes of a group, each with its state for a model, which exchange step by step. All traffic is
compared with its prediction (``as_predicted``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..codecs import Codec
from ..compression.compression import Compression
from ..compression.reducers import Bytes, Flows, Participant, Reducer, Round, Sum, Summed, Total, Traffic
from ..kernels.cpu import add_in_order
from ..nouns import Bucket, Layer, Slice, Spec, numpy_dtype
from ..wire.scratch import Scratch
from .laws import require

SHAPES = ((3,), (40, 50), (7,), (1,), (64, 33), (5000,))
"""A model's tensors: matrices, vectors, and very small ones."""

Alter = Callable[[int, int, Bytes], Bytes]
"""A wire: computes the received data from source, destination and sent data."""


def untouched(src: int, dst: int, data: Bytes) -> Bytes:  # noqa: ARG001
    """A wire that changes nothing."""
    return data


def run(ranks: Sequence[Reducer], alter: Alter = untouched, summed: Callable[[int], None] = lambda _: None) -> int:
    """Run the reducers of all processes to their ends. Returns the bytes sent in messages.

    ``alter`` is the wire. ``summed`` is called with the bytes of every array that the workers sum.
    """
    asked: list[Round | Sum | None] = [next(reducer, None) for reducer in ranks]
    under_way: dict[tuple[int, int], deque[Bytes]] = {}
    sent = 0
    posted: set[int] = set()
    while any(one is not None for one in asked):
        moved = False
        if all(one is None or isinstance(one, Sum) for one in asked):
            together = [one for one in asked if isinstance(one, Sum)]
            summed(together[0].array.nbytes)
            _sum(together)
            for rank, one in enumerate(asked):
                if one is not None:
                    asked[rank] = _go_on(ranks[rank], [])
            continue
        for rank, one in enumerate(asked):
            if not isinstance(one, Round):
                continue
            if rank not in posted:
                for message in one.sends:
                    data = alter(rank, message.peer, message.data.copy())
                    under_way.setdefault((rank, message.peer), deque()).append(data)
                    sent += data.nbytes
                posted.add(rank)
                moved = True
            adds = () if one.total is None else one.total.peers
            if all(under_way.get((peer, rank)) for peer in (*adds, *(message.peer for message in one.receives))):
                lengths = []
                if one.total is not None:
                    _add(one.total, [under_way[peer, rank].popleft() for peer in adds])
                for message in one.receives:
                    data = under_way[message.peer, rank].popleft()
                    require(data.nbytes <= message.data.nbytes, f"{data.nbytes} bytes for {message.data.nbytes}")
                    message.data[: data.nbytes] = data
                    lengths.append(data.nbytes)
                posted.discard(rank)
                asked[rank] = _go_on(ranks[rank], lengths)
                moved = True
        require(moved, "the ranks wait for each other")
    require(not any(under_way.values()), "a message was sent that nobody received")
    return sent


def _add(total: Total, came: Sequence[Bytes]) -> None:
    require(
        all(data.nbytes == total.array.nbytes for data in came), f"arrays of others than {total.array.nbytes} bytes"
    )
    arrays = [data.view(total.array.dtype) for data in came]
    first = len(total.before)
    add_in_order(total.array, arrays[:first], arrays[first:])


def _go_on(reducer: Reducer, lengths: list[int]) -> Round | Sum | None:
    try:
        return reducer.send(lengths)
    except StopIteration:
        return None


def _sum(asked: list[Sum]) -> None:
    sizes = {one.array.size for one in asked}
    require(len(sizes) == 1, f"ranks sum arrays of {sorted(sizes)} elements with each other")
    total = asked[0].array.copy()
    for one in asked[1:]:
        total = total + one.array
    for one in asked:
        one.array[:] = total


class Counted(Scratch):
    """A pool that counts buffers in use."""

    def __init__(self) -> None:
        super().__init__()
        self.out = 0

    def take(self, nbytes: int) -> Bytes:
        """A buffer, counted as missing until it is returned."""
        self.out += 1
        return super().take(nbytes)

    def give(self, buffer: Bytes) -> None:
        """Return a buffer."""
        self.out -= 1
        super().give(buffer)


class Ranks:
    """The processes of a group that exchange a model's gradients, with states that persist over steps.

    ``shapes`` are the model's tensors, ``buckets`` slices of them, by default all in one. Owners are the ``servers``,
    or the workers if there are none. ``hosts`` are the workers of each host, for two levels.
    """

    def __init__(
        self,
        codec: Codec,
        workers: int,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        buckets: Sequence[Sequence[Slice]] | None = None,
        servers: int = 0,
        dtype: str = "float32",
        hosts: Sequence[Sequence[int]] = (),
    ) -> None:
        self.layers = [Layer(Spec(f"p{number}", shape, dtype)) for number, shape in enumerate(shapes)]
        whole = [Slice(number, 0, layer.spec.elements) for number, layer in enumerate(self.layers)]
        self.buckets = [Bucket(tuple(part), dtype) for part in (buckets or [whole])]
        owners = tuple(range(workers, workers + servers)) or tuple(range(workers))
        self.rooms = [Counted() for _ in range(workers + servers)]
        self.arrays = [
            [np.zeros(bucket.elements, numpy_dtype(dtype)) for bucket in self.buckets] for _ in range(workers + servers)
        ]
        self.workers, self.codec, places = workers, codec, tuple(tuple(ranks) for ranks in hosts)
        self.ranks = [
            Compression(
                codec,
                self.layers,
                self.buckets,
                arrays,
                Participant(index, workers, owners, room, hosts=places),
                served=bool(servers),
                name=f"rank {index}",
            )
            for index, (arrays, room) in enumerate(zip(self.arrays, self.rooms, strict=True))
        ]

    def step(self, inputs: Sequence[Sequence[NDArray[np.generic]]], alter: Alter = untouched) -> int:
        """Exchange all buckets once. ``inputs`` are the gradients of every worker, by bucket. Returns the bytes
        sent.
        """
        sent = 0
        for worker, gradients in enumerate(inputs):
            for array, gradient in zip(self.arrays[worker], gradients, strict=True):
                array[:] = gradient
        for number in range(len(self.buckets)):
            todo = [rank.pieces(number) for rank in self.ranks]
            for made in zip(*todo, strict=True):
                sent += run([start() for start in made], alter)
            for rank in self.ranks:
                rank.finish(number)
        self.given_back = all(room.out == 0 for room in self.rooms)
        return sent

    @property
    def results(self) -> list[NDArray[np.generic]]:
        """The result of every worker after a step."""
        return [np.concatenate(arrays) for arrays in self.arrays[: self.workers]]

    def residuals(self) -> NDArray[np.float64]:
        """The sum of the residuals of all ranks and owners, by element of the tensors."""
        saved = [rank.saved() for rank in self.ranks]
        parts = []
        for layer in self.layers:
            total = np.zeros(layer.spec.elements)
            own = f"own/{layer.spec.name}/residual"
            for one in saved:
                total += one.get(own, 0.0)
                for key, piece in one.items():
                    if key.startswith((f"again/{layer.spec.name}/", f"{own}/")):
                        start = int(key.rpartition("/")[2])
                        total[start : start + piece.size] += piece
            parts.append(total)
        return np.concatenate(parts)


def as_predicted(pieces: Sequence[Sequence[Callable[[], Reducer]]], traffic: Sequence[Traffic]) -> None:
    """Run the reducers of all processes and compare every message and every sum with the prediction."""
    found = {len(one) for one in pieces}
    require(found == {len(traffic)}, f"there are {sorted(found)} reducers, and {len(traffic)} were foreseen")
    for starts, steps in zip(zip(*pieces, strict=True), traffic, strict=True):
        moved: list[tuple[int, int, int]] = []
        sums: list[int] = []

        def wire(src: int, dst: int, data: Bytes, moved: list[tuple[int, int, int]] = moved) -> Bytes:
            moved.append((src, dst, data.nbytes))
            return data

        run([start() for start in starts], wire, sums.append)
        wanted = [step.nbytes for step in steps if isinstance(step, Summed)]
        require(sums == wanted, f"arrays of {sums} bytes are summed, and {wanted} were foreseen")
        _compare(moved, [step for step in steps if isinstance(step, Flows)])


def _compare(moved: Sequence[tuple[int, int, int]], flows: Sequence[Flows]) -> None:
    """Compare messages (source, destination, bytes) with their prediction."""
    columns = [row for step in flows for row in zip(*(column.tolist() for column in step.columns), strict=True)]
    ends, foreseen_ends = Counter(one[:2] for one in moved), Counter(one[:2] for one in columns)
    require(ends == foreseen_ends, f"messages go between {dict(ends)}, and {dict(foreseen_ends)} were foreseen")
    if all(nbytes == most for *_, nbytes, most in columns):
        beside = Counter(moved) - Counter(one[:3] for one in columns)
        require(not beside, f"messages (source, destination, bytes) that were not foreseen: {dict(beside)}")
        return
    most = {pair: sum(one[3] for one in columns if one[:2] == pair) for pair in foreseen_ends}
    for src, dst, nbytes in moved:
        require(nbytes <= most[src, dst], f"{nbytes} bytes from {src} to {dst}, at most {most[src, dst]} were foreseen")
    found, foreseen = sum(one[2] for one in moved), sum(one[2] for one in columns)
    require(foreseen / 2 < found < foreseen * 2, f"{found} bytes were sent, and {foreseen} expected")
