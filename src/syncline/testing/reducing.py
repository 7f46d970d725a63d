"""The ranks of a run without a transport, and laws of codecs among them: equal bits, nothing lost, foreseen traffic.

A loop delivers the messages of reducers and computes their sums. ``Ranks`` are the processes of a group, each with its
state for a model, which exchange step by step. All traffic is compared with its prediction (``as_predicted``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..codecs import Chooses, Codec, Decays, Floats, Sums, Wraps, codec_of
from ..codecs.feedback import Feedback
from ..compression.compression import Compression
from ..compression.reducers import (
    Bytes,
    Flows,
    HostCollective,
    Participant,
    Reducer,
    Round,
    Sum,
    Summed,
    Total,
    Traffic,
    levels,
    ways,
)
from ..compression.reducers.ways import parts_of
from ..kernels.cpu import add_in_order
from ..nouns import Bucket, Layer, Slice, Spec, numpy_dtype
from ..wire.scratch import Scratch
from .laws import Laws, require, same

SHAPES = ((3,), (40, 50), (7,), (1,), (64, 33), (5000,))
"""A model's tensors: matrices, vectors, and very small ones."""

Alter = Callable[[int, int, Bytes], Bytes]
"""A wire: computes the received data from source, destination and sent data."""


def untouched(src: int, dst: int, data: Bytes) -> Bytes:  # noqa: ARG001
    """A wire that changes nothing."""
    return data


def run(
    ranks: Sequence[Reducer],
    alter: Alter = untouched,
    summed: Callable[[int], None] = lambda _: None,
    hosts: Sequence[Sequence[int]] = (),
) -> int:
    """Run the reducers of all processes to their ends. Returns the bytes sent in messages.

    ``alter`` is the wire. ``summed`` is called with the bytes of every array that the workers sum. The ranks of each of
    ``hosts`` have the collectives of a message library.
    """
    asked: list[Round | Sum | HostCollective | None] = [next(reducer, None) for reducer in ranks]
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
        for here in hosts:
            calls = [one for rank in here if isinstance(one := asked[rank], HostCollective)]
            if len(calls) == len(here):
                _collect(calls)
                for rank in here:
                    asked[rank] = _go_on(ranks[rank], [])
                moved = True
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
            wanted = Counter([peer for total in one.totals for peer in total.peers])
            wanted.update(message.peer for message in one.receives)
            if all(len(under_way.get((peer, rank), ())) >= count for peer, count in wanted.items()):
                lengths = []
                for total in one.totals:
                    _add(total, [under_way[peer, rank].popleft() for peer in total.peers])
                for message in one.receives:
                    data = under_way[message.peer, rank].popleft()
                    require(data.nbytes <= message.data.nbytes, f"{data.nbytes} bytes for {message.data.nbytes}")
                    message.data[: data.nbytes] = data
                    lengths.append(data.nbytes)
                posted.discard(rank)
                asked[rank] = _go_on(ranks[rank], lengths)
                moved = True
        require(moved, "the ranks wait for each other")
    require(not any(under_way.values()), "no rank received one of the messages")
    return sent


def _add(total: Total, came: Sequence[Bytes]) -> None:
    require(
        all(data.nbytes == total.array.nbytes for data in came),
        f"arrays of sizes other than {total.array.nbytes} bytes",
    )
    arrays = [data.view(total.array.dtype) for data in came]
    first = len(total.before)
    add_in_order(total.array, arrays[:first], arrays[first:])


def _collect(calls: Sequence[HostCollective]) -> None:
    """Run a collective of a message library among the ranks of a host, in rank order."""
    require(len({call.goal for call in calls}) == 1, "the ranks of a host call different collectives")
    for owner, call in enumerate(calls):
        others = [one.parts[owner] for one in calls if one is not call]
        require(all(part.size == call.parts[owner].size for part in others), "parts of different sizes")
        if call.goal == "reduce_scatter":
            add_in_order(call.parts[owner], others[:owner], others[owner:])
            for part in others:
                part[:] = np.nan  # of no meaning from here on
        else:
            for part in others:
                part[:] = call.parts[owner]


def _go_on(reducer: Reducer, lengths: list[int]) -> Round | Sum | HostCollective | None:
    try:
        return reducer.send(lengths)
    except StopIteration:
        return None


def _sum(asked: list[Sum]) -> None:
    sizes = {one.array.size for one in asked}
    require(len(sizes) == 1, f"ranks sum arrays of different sizes: {sorted(sizes)} elements")
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
    the workers that are ``serving``, or all workers. ``hosts`` are the workers of each host, for two levels; with
    ``native`` a message library sums inside them.
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
        serving: Sequence[int] = (),
        native: bool = False,
    ) -> None:
        self.layers = [Layer(Spec(f"p{number}", shape, dtype)) for number, shape in enumerate(shapes)]
        whole = [Slice(number, 0, layer.spec.elements) for number, layer in enumerate(self.layers)]
        self.buckets = [Bucket(tuple(part), dtype) for part in (buckets or [whole])]
        owners = tuple(range(workers, workers + servers)) or tuple(serving or range(workers))
        self.rooms = [Counted() for _ in range(workers + servers)]
        self.arrays = [
            [np.zeros(bucket.elements, numpy_dtype(dtype)) for bucket in self.buckets] for _ in range(workers + servers)
        ]
        self.workers, self.codec, places = workers, codec, tuple(tuple(ranks) for ranks in hosts)
        self.library = [ranks for ranks in places if len(ranks) > 1] if native else []
        self.ranks = [
            Compression(
                codec,
                self.layers,
                self.buckets,
                arrays,
                Participant(index, workers, owners, room, hosts=places, native=native),
                served=bool(servers or serving),
                name=f"rank {index}",
            )
            for index, (arrays, room) in enumerate(zip(self.arrays, self.rooms, strict=True))
        ]

    def step(self, inputs: Sequence[Sequence[NDArray[np.generic]]], alter: Alter = untouched) -> int:
        """Exchange all buckets of ``inputs``, every worker's gradients by bucket. Returns the bytes sent."""
        sent = 0
        for worker, gradients in enumerate(inputs):
            for array, gradient in zip(self.arrays[worker], gradients, strict=True):
                array[:] = gradient
        for number in range(len(self.buckets)):
            todo = [rank.pieces(number) for rank in self.ranks]
            for made in zip(*todo, strict=True):
                sent += run([start() for start in made], alter, hosts=self.library)
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


def as_predicted(
    pieces: Sequence[Sequence[Callable[[], Reducer]]], traffic: Sequence[Traffic], hosts: Sequence[Sequence[int]] = ()
) -> None:
    """Run the reducers of all processes and compare every message and every sum with the prediction.

    ``hosts`` as in ``run``.
    """
    found = {len(one) for one in pieces}
    require(found == {len(traffic)}, f"there are {sorted(found)} reducers, but {len(traffic)} were predicted")
    for starts, steps in zip(zip(*pieces, strict=True), traffic, strict=True):
        moved: list[tuple[int, int, int]] = []
        sums: list[int] = []

        def wire(src: int, dst: int, data: Bytes, moved: list[tuple[int, int, int]] = moved) -> Bytes:
            moved.append((src, dst, data.nbytes))
            return data

        run([start() for start in starts], wire, sums.append, hosts)
        wanted = [step.nbytes for step in steps if isinstance(step, Summed)]
        require(sums == wanted, f"arrays of {sums} bytes are summed, but {wanted} were predicted")
        _compare(moved, [step for step in steps if isinstance(step, Flows)])


def _compare(moved: Sequence[tuple[int, int, int]], flows: Sequence[Flows]) -> None:
    """Compare messages (source, destination, bytes) with their prediction."""
    columns = [row for step in flows for row in zip(*(column.tolist() for column in step.columns), strict=True)]
    ends, foreseen_ends = Counter(one[:2] for one in moved), Counter(one[:2] for one in columns)
    require(ends == foreseen_ends, f"messages go between {dict(ends)}, but {dict(foreseen_ends)} were predicted")
    if all(nbytes == most for *_, nbytes, most in columns):
        beside = Counter(moved) - Counter(one[:3] for one in columns)
        require(not beside, f"messages (source, destination, bytes) without a prediction: {dict(beside)}")
        return
    most = {pair: sum(one[3] for one in columns if one[:2] == pair) for pair in foreseen_ends}
    for src, dst, nbytes in moved:
        require(
            nbytes <= most[src, dst], f"{nbytes} bytes from {src} to {dst}, but at most {most[src, dst]} were predicted"
        )
    found, foreseen = sum(one[2] for one in moved), sum(one[2] for one in columns)
    require(foreseen / 2 < found < foreseen * 2, f"{found} bytes were sent, but {foreseen} expected")


_EDGES = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)])


@dataclass(frozen=True)
class Exchanged:
    """A codec as a strategy applies it, with the exchanging workers, and servers if there are any.

    On two levels ``hosts`` are the workers of each host, which sum before compressing.
    """

    codec: Codec
    workers: int
    servers: int
    seed: int
    hosts: tuple[tuple[int, ...], ...] = ()

    def ranks(self, buckets: Sequence[Sequence[Slice]] | None = None) -> Ranks:
        """The processes before their first step."""
        return Ranks(self.codec, self.workers, buckets=buckets, servers=self.servers, hosts=self.hosts)

    def gradients(self, step: int) -> list[Floats]:
        """The gradients of every worker: all tensors, concatenated."""
        draw = np.random.default_rng([self.seed, step])
        return list(draw.standard_normal((self.workers, _EDGES[-1])).astype(np.float32))

    def __str__(self) -> str:
        on = f" on hosts {self.hosts}" if self.hosts else ""
        return f"{self.workers} workers{on} and {self.servers} servers (seed {self.seed})"


_HOSTS = ((0, 3), (1, 2, 4))
"""Two hosts of unequal size."""


def among(
    *sizes: tuple[int, int],
    feedback: bool | None = None,
    hosts: tuple[tuple[int, ...], ...] = (),
) -> Callable[[Codec, int, int], Iterator[Exchanged]]:
    """Groups of workers and servers, with error feedback where a strategy would use it or could.

    With ``hosts``, also their workers on two levels, without servers and with two.
    """

    def cases(codec: Codec, seed: int, count: int) -> Iterator[Exchanged]:  # noqa: ARG001
        wanted = codec.contraction and (codec.biased or bool(feedback))
        whole: Codec = Feedback(codec) if wanted and not isinstance(codec, Chooses | Wraps) else codec
        for workers, servers in sizes:
            if not servers or ways.way_of(whole).servable:
                yield Exchanged(whole, workers, servers, seed)
        if hosts:
            yield Exchanged(whole, sum(map(len, hosts)), 0, seed, hosts)
        if hosts and ways.way_of(whole).servable:
            yield Exchanged(whole, sum(map(len, hosts)), 2, seed, hosts)

    return cases


LAWS: Laws[Codec, Exchanged] = Laws()


@LAWS.law(among((1, 1), (2, 0), (2, 2), (3, 0), (3, 1), (5, 0), (5, 2), hosts=_HOSTS))
def all_workers_get_the_same_bits(case: Exchanged) -> None:
    """This holds for any owners, and all buffers are returned to the pool."""
    ranks = case.ranks()
    for step in range(3):
        ranks.step([[gradients] for gradients in case.gradients(step)])
        require(ranks.given_back, "memory for messages was not returned")
        first, *others = ranks.results
        require(bool(np.isfinite(first.astype(np.float32)).all()), "finite gradients give a result that is not finite")
        for worker, other in enumerate(others, 1):
            same(other.view(np.uint32), first.view(np.uint32), f"the bits of worker {worker} and worker 0")


@LAWS.law(among((1, 1), (3, 2), (5, 0), hosts=_HOSTS))
def the_traffic_is_predicted(case: Exchanged) -> None:
    """The bytes between processes follow from ``wire_bytes`` or ``rounds``, without any gradients."""
    ranks = case.ranks()
    at = tuple(range(case.workers, case.workers + case.servers)) or tuple(range(case.workers))
    for step in (0, 2):  # some codecs warm up
        for rank in ranks.ranks:
            rank.resume_at(step)
        for arrays, gradients in zip(ranks.arrays, case.gradients(step), strict=False):
            arrays[0][:] = gradients
        parts = parts_of(case.codec, ranks.layers, ranks.buckets[0], step)
        between = partial(ways.traffic, served=bool(case.servers))
        if case.hosts:
            foreseen = levels.traffic(parts, case.hosts, between, servers=at if case.servers else ())
        else:
            foreseen = between(parts, case.workers, at)
        as_predicted([rank.pieces(0) for rank in ranks.ranks], foreseen)
        for rank in ranks.ranks:
            rank.finish(0)


@LAWS.law(among((3, 0), hosts=_HOSTS))
def the_result_does_not_depend_on_the_buckets(case: Exchanged) -> None:
    """One bucket or one per tensor gives the same bits, also in later steps, which start with residuals."""
    whole = case.ranks()
    single = case.ranks([[Slice(number, 0, layer.spec.elements)] for number, layer in enumerate(whole.layers)])
    for step in range(3):
        inputs = case.gradients(step)
        whole.step([[gradients] for gradients in inputs])
        single.step([[gradients[start:stop] for start, stop in pairwise(_EDGES)] for gradients in inputs])
        found, wanted = single.results[0], whole.results[0]
        same(found.view(np.uint32), wanted.view(np.uint32), "the bits with a bucket per tensor and with one bucket")


def keeps_all(case: Exchanged) -> bool:
    """Whether there may be error feedback whose residuals keep everything that was not sent."""
    inner = case.codec.codec if isinstance(case.codec, Wraps) else case.codec
    return case.codec.contraction and not (isinstance(inner, Decays) and inner.decay != 1)


@LAWS.law(among((1, 0), (2, 0), (4, 0), feedback=True, hosts=_HOSTS), keeps_all)
def with_feedback_nothing_is_lost_among_ranks(case: Exchanged) -> None:
    """Over all steps, the inputs equal the results plus the residuals."""
    ranks = case.ranks()
    given, got = np.zeros(_EDGES[-1]), np.zeros(_EDGES[-1])
    for step in range(4):
        inputs = case.gradients(step)
        given += np.sum(inputs, axis=0, dtype=np.float64)
        ranks.step([[gradients] for gradients in inputs])
        got += ranks.results[0]
    apart = np.abs(got + ranks.residuals() - given)
    for layer, (start, stop) in zip(ranks.layers, pairwise(_EDGES), strict=True):
        inner, feedback, _ = codec_of(case.codec, layer.spec)
        # No residual sees the rounding of sums of 16-bit numbers and of products of matrices.
        coarse = isinstance(inner, Sums) and inner.number in ("float16", "bfloat16")
        bound = 0.2 if coarse else 1e-2 if inner.combine == "rounds" else 1e-4
        if feedback or inner.combine == "sum":
            lost = apart[start:stop].max()
            require(lost < bound, f"{lost:.3g} of an element of a tensor of {layer.spec.shape} is lost in four steps")
