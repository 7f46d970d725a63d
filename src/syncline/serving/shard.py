"""The slices of a model's weights that a process owns, and the optimizer that updates them.

The plan that pushes gradients determines the slices (``planned``), or under a codec its blocks (``coded``); the owner's
weights are then separate from the workers'.

``Traffic`` and ``Exchanges`` are the interfaces by which workers and owners exchange the gradients and weights of a
model. ``merged`` implements them where the pushes of all workers are one, ``single`` where each push is an update.

A framework implements ``Optimizer``: the user's optimizer on flat slices instead of tensors. The framework has to find
out whether that gives the same update. State is exchanged as records, so only the framework knows its form.

An optimizer may be kept for every worker, with the momentum, moments and counts of that worker's own pushes. There is
still one set of weights, which each worker's pushes update with their own state. When saved, these states become one
(``gathered``), from which a run with a single optimizer can go on: the mean of all under every key, because the momenta
of N workers move weights, at a learning rate divided by N, as far as their mean does at the full rate. Each worker's
own state is saved beside it, under a key that names the worker and their number, for a run with the same number. A run
with a single optimizer carries such keys along unchanged. They are used only while their mean still equals the state
under the plain keys. Theory: Hakimi et al., "Taming momentum in a distributed asynchronous environment", arXiv
1907.11612.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, Protocol, TypedDict

import numpy as np

from ..compression.compression import Compression
from ..compression.updates import Updates
from ..engine.order import When, Work
from ..errors import UsageError
from ..nouns import Bucket, Slice, numpy_dtype
from ..plans.messages import chunk_edges
from ..session.layout import Layout
from .protocol import ALL
from .records import Array, Elements, Record, State, Value, states_of, write_into

WEIGHTS = "weights"
"""The key of records of weights."""

Groups = Sequence[Mapping[str, Any]]
"""The values of an optimizer's parameter groups that JSON can express."""


class StepValues(TypedDict):
    """A worker's values for an update.

    With ``skip`` there is no update, as after an overflow of gradients. ``weight`` is the weight of the gradients, 1 if
    workers have agreed on weights before.
    """

    groups: Groups
    scale: float
    skip: bool
    weight: float


@dataclass(frozen=True, eq=False)
class Holding:
    """A slice that this process owns: its weights, and the gradients that are pushed to it, both flat.

    ``bucket`` is the number of the bucket by which they travel. ``sent`` are the weights as workers are sent them, if
    these differ.
    """

    slice: Slice
    weights: Array
    gradient: Array
    bucket: int = 0
    sent: Array | None = None


class Optimizer(Protocol):
    """An optimizer on a list of holdings, whose weights it updates in place; all lists are in their order.

    One thread at a time calls it, not always the same one, and never while a push into these gradients or a pull of
    these weights is in progress.
    """

    def squared_norm(self) -> float:
        """The sum of squares of the gradients, in float64."""
        ...

    def apply(self, groups: Groups, scale: float) -> None:
        """Make one update with these values of the parameter groups, after multiplying gradients by ``scale``."""
        ...

    def advanced(self) -> Groups:
        """The current values, in the groups and outside them, that an update itself changes."""
        ...

    def state(self) -> list[State]:
        """The state of every slice. Elements are flat and may be the optimizer's own memory."""
        ...

    def load(self, states: Sequence[State]) -> None:
        """Replace the state; the optimizer may keep the memory of ``states``."""
        ...


Told = Literal["advanced", "state", "weights"]
"""The requests of workers to owners: values of groups that the optimizer has changed, its state, or the weights."""

Build = Callable[[Sequence[Holding]], Optimizer]
"""Makes a framework's optimizer for some holdings."""


class Shard:
    """The slices of one process and their optimizer, which begins with the state in the records ``learnt``.

    ``apart`` says that tensors may be updated one by one: each bucket then has an optimizer of its own. With momentum
    per worker there is an optimizer for each of the ``workers``, all on the same weights and gradients.
    """

    def __init__(
        self,
        holdings: Sequence[Holding],
        build: Build,
        learnt: Iterable[Record],
        *,
        apart: bool = False,
        workers: int = 1,
    ) -> None:
        self.holdings, self.build, self.apart = tuple(holdings), build, apart
        self._clocks: dict[int, int] = {}  # the steps that updated parts contain
        self._before: dict[int, list[Record]] = {}  # what they were before their last update
        self.slices = tuple(held.slice for held in self.holdings)
        self._whole = build(self.holdings)
        self._parts: dict[int, tuple[Sequence[int], list[Optimizer]]] = {}
        for bucket in dict.fromkeys(held.bucket for held in self.holdings) if apart else ():
            mine = [index for index, held in enumerate(self.holdings) if held.bucket == bucket]
            self._parts[bucket] = mine, [build([self.holdings[index] for index in mine]) for _ in range(workers)]
        if not apart:
            others = [build(self.holdings) for _ in range(workers - 1)]
            self._parts[ALL] = range(len(self.holdings)), [self._whole, *others]
        self.load(learnt)

    def squared_norm(self) -> float:
        """The squared norm of all gradients here."""
        return self._whole.squared_norm()

    def apply(self, bucket: int, groups: Groups, scale: float, worker: int = ALL) -> None:
        """Update the slices of a bucket, or of ``ALL``, as ``Optimizer.apply`` does, by a push of ``worker``."""
        wanted = [self._parts.get(bucket)] if bucket != ALL else list(self._parts.values())
        for part in wanted:
            if part is not None:
                optimizers = part[1]
                optimizers[worker if len(optimizers) > 1 else 0].apply(groups, scale)

    def keep(self, bucket: int, clock: int) -> None:
        """Keep copies of the slices of a bucket, or of ``ALL``, and of their state: the update of ``clock`` follows."""
        for number in self._parts if bucket == ALL else [bucket]:
            if number in self._parts:
                self._before[number] = _copies(self._of(number), self._before.get(number, ()))
                self._clocks[number] = clock

    def after(self, clock: int, since: int) -> list[Record] | None:
        """Weights and state as they were after the step ``clock``, None if they are not known any more.

        Parts that ``keep`` has not seen are as they were after the step ``since``.
        """
        found: list[Record] = []
        for number in self._parts:
            now = self._clocks.get(number, since)
            if clock == now:
                found += _copies(self._of(number))
            elif clock == now - 1 and number in self._before:
                found += self._before[number]
            else:
                return None
        return found

    def detached(self) -> Shard:
        """A copy in memory of its own, which outlives the session's."""
        copies = [
            replace(held, weights=held.weights.copy(), gradient=held.gradient.copy(), sent=None)
            for held in self.holdings
        ]
        workers = max((len(optimizers) for _, optimizers in self._parts.values()), default=1)
        return Shard(copies, self.build, _copies(self.state()), apart=self.apart, workers=workers)

    def _of(self, number: int) -> list[Record]:
        """Weights and state of a part."""
        mine, (optimizer, *_) = self._parts[number]
        found = [Record(self.slices[index], WEIGHTS, Elements.of(self.holdings[index].weights)) for index in mine]
        for index, state in zip(mine, optimizer.state(), strict=True):
            found += [Record(self.slices[index], key, value) for key, value in state.items()]
        return found

    def told(self, what: Told) -> list[Record]:
        """The records that a worker asks for."""
        return {"advanced": self.advanced, "state": self.state, "weights": self.weights}[what]()

    def advanced(self) -> list[Record]:
        """The values of the groups that updates change, as records of no elements of tensor ``group``.

        Raises UsageError if the optimizers of different buckets have come to different values.
        """
        found: dict[tuple[int, str], Any] = {}
        for _, (optimizer, *_) in self._parts.values():
            for number, group in enumerate(optimizer.advanced()):
                for key, value in group.items():
                    if found.setdefault((number, key), value) != value:
                        raise UsageError(
                            f"the updates of different buckets have computed {found[number, key]} and {value} for"
                            f" {key!r} of the optimizer's group {number}: use ps(update=worker)"
                        )
        return [Record(Slice(number, 0, 0), key, value) for (number, key), value in found.items()]

    def state(self) -> list[Record]:
        """The optimizer's state, slice by slice."""
        states: dict[int, State] = {}
        for mine, optimizers in self._parts.values():
            each = [optimizer.state() for optimizer in optimizers]
            states |= zip(mine, each[0] if len(each) == 1 else map(gathered, zip(*each, strict=True)), strict=True)
        return [
            Record(part, key, value) for index, part in enumerate(self.slices) for key, value in states[index].items()
        ]

    def load(self, records: Iterable[Record]) -> None:
        """Replace the optimizer's state by records of whole tensors or of any slices that cover these."""
        states = states_of(records, self.slices)
        for mine, optimizers in self._parts.values():
            each = [parted(states[index], len(optimizers)) for index in mine]
            for worker, optimizer in enumerate(optimizers):
                optimizer.load([own[worker] for own in each])

    def weights(self) -> list[Record]:
        """The weights, slice by slice."""
        return [Record(held.slice, WEIGHTS, Elements.of(held.weights)) for held in self.holdings]

    def load_weights(self, records: Iterable[Record]) -> None:
        """Replace the weights by records of whole tensors or of any slices that cover these."""
        write_into(records, [(held.slice, held.weights) for held in self.holdings])


def _copies(records: Sequence[Record], old: Sequence[Record] = ()) -> list[Record]:
    """Copies of records, in the memory of ``old`` copies where these are alike: fresh memory costs page faults."""
    found = []
    for number, record in enumerate(records):
        value = record.value
        if isinstance(value, Elements):
            before = old[number].value if number < len(old) else None
            if isinstance(before, Elements) and before.data.size == value.data.size:
                np.copyto(before.data, value.data)
                value = Elements(value.dtype, value.shape, before.data)
            else:
                value = Elements(value.dtype, value.shape, value.data.copy())
        found.append(Record(record.slice, record.key, value))
    return found


def planned(
    buckets: Sequence[Bucket],
    gradients: Sequence[Array],
    weights: Sequence[Array],
    owners: Sequence[int],
    index: int,
) -> list[Holding]:
    """The holdings of process ``index``, tensor by tensor; the workers' weights are its own.

    ``owners`` are those of the chunks of a push plan.
    """
    found = []
    for number, (bucket, gradient, weight) in enumerate(zip(buckets, gradients, weights, strict=True)):
        edges, first = chunk_edges(bucket.elements, len(owners)), 0
        for owner, chunks in groupby(owners):  # the neighbouring chunks of an owner are one part
            last = first + len(list(chunks))
            if owner == index:
                found += held(number, bucket, gradient, weight, edges[first], edges[last])
            first = last
    return found


def held(
    number: int, bucket: Bucket, gradient: Array, weight: Array, start: int, stop: int, sent: Array | None = None
) -> list[Holding]:
    """The holdings for elements ``start`` to ``stop`` of bucket ``number``, tensor by tensor."""
    found = []
    for at, part in placed(bucket):
        low, high = max(start, at), min(stop, at + part.elements)
        if low < high:
            mine = Slice(part.tensor, part.start + low - at, part.start + high - at)
            told = None if sent is None else sent[low:high]
            found.append(Holding(mine, weight[low:high], gradient[low:high], number, told))
    return found


def coded(buckets: Sequence[Bucket], gradients: Sequence[Array], updates: Updates) -> list[Holding]:
    """This process's holdings under a codec, which keeps blocks whole, with separate weights."""
    found = []
    for one in updates.owned:
        number, at = next(
            (number, at + one.start - part.start)
            for number, bucket in enumerate(buckets)
            for at, part in placed(bucket)
            if part.tensor == one.tensor and part.start <= one.start and one.stop <= part.stop
        )
        mine = Slice(one.tensor, one.start, one.stop)
        found.append(Holding(mine, one.weights, gradients[number][at : at + mine.elements], number))
    return found


def placed(bucket: Bucket) -> list[tuple[int, Slice]]:
    """The slices of a bucket, each with the position of its first element."""
    at, found = 0, []
    for part in bucket.slices:
        found.append((at, part))
        at += part.elements
    return found


# State of every worker.

_OWN = re.compile(r"(.+) of rank (\d+) of (\d+)", re.DOTALL)
_NUMBERS = ("float16", "bfloat16", "float32", "float64")


def gathered(states: Sequence[State]) -> State:
    """Combine the states that workers have for one slice into one."""
    found = _common(states)
    for worker, state in enumerate(states):
        found |= {f"{key} of rank {worker} of {len(states)}": value for key, value in state.items()}
    return found


def parted(state: State, workers: int) -> list[State]:
    """Split a state into those of ``workers``.

    All begin with the common state if the saved ones are of another number of workers, or if it has changed since.
    """
    common: State = {}
    own: list[State] = [{} for _ in range(workers)]
    for key, value in state.items():
        match = _OWN.fullmatch(key)
        if match is None:
            common[key] = value
        elif int(match[3]) == workers and int(match[2]) < workers:
            own[int(match[2])][match[1]] = value
    if any(own) and _compared(_common(own)) == _compared(common):
        return own
    return [common, *(copy.deepcopy(common) for _ in range(workers - 1))]


def _common(states: Sequence[State]) -> State:
    """The mean state; its bits do not depend on how slices are cut."""
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: _mean([state[key] for state in states if key in state]) for key in keys}


def _compared(state: State) -> dict[str, object]:
    """The state in comparable form. Counts become numbers, whatever type an optimizer keeps them in."""
    return {key: _value(value) for key, value in state.items()}


def _value(value: Value) -> object:
    if not isinstance(value, Elements):
        return value
    if value.shape == () and value.dtype in _NUMBERS:
        return float(value.data.view(numpy_dtype(value.dtype))[0])
    return value.dtype, value.shape, value.data.tobytes()


def _mean(values: Sequence[Value]) -> Value:
    """The mean of values with elements. Of other values, such as a count, the first worker's."""
    arrays = [value for value in values if isinstance(value, Elements) and value.shape != ()]
    if len(arrays) < len(values) or len({(one.dtype, one.shape) for one in arrays}) > 1:
        return values[0]
    first = arrays[0]
    if first.dtype not in _NUMBERS:
        return first
    dtype = numpy_dtype(first.dtype)
    total = np.zeros(first.shape, np.result_type(np.float32, dtype))
    for one in arrays:
        total += one.data.view(dtype).reshape(one.shape)
    return Elements(first.dtype, first.shape, (total / len(arrays)).astype(dtype).reshape(-1).view(np.uint8))


Update = Callable[[int], None]
"""Updates a bucket, or ``ALL``, with the values of one step."""


@dataclass(frozen=True, eq=False)
class Model:
    """A prepared model's arrays, by bucket; ``weights`` are the weights that all workers have.

    ``first_key`` is the first of the keys that belong to its exchanges.
    """

    layout: Layout
    gradients: Sequence[Array]
    weights: Sequence[Array]
    compression: Compression | None
    first_key: int = 0


def add_up(total: Array, came: Array, scale: float, anew: bool) -> None:
    """Add a push times ``scale`` to a sum, or begin the sum ``anew`` with it."""
    scaled = came if scale == 1.0 else came * came.dtype.type(scale)
    if anew:
        np.copyto(total, scaled, casting="same_kind")
    else:
        np.add(total, scaled, out=total, casting="same_kind")


class Pushes(Protocol):
    """The pushes to an owner. ``worker`` is ``ALL`` where the pushes of all workers are one."""

    def settle(self, worker: int) -> None:
        """Wait until a worker's push is in the gradients and nothing in progress reads the weights."""
        ...

    def add(self, worker: int, bucket: int, scale: float, anew: bool) -> None:
        """Add a worker's push of a bucket, or of ``ALL``, times ``scale``, to the next update.

        The first one begins the sum ``anew``.
        """
        ...

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """Call ``update`` for a bucket, or for ``ALL``, now or as soon as the worker's push has arrived."""
        ...


class Exchanges(Pushes, Protocol):
    """An owner's part in pushes and pulls."""

    made: Work | None
    """Ends with the last updates that were begun; None where each push is an update."""

    def coming(self, worker: int) -> Sequence[Work]:
        """The works that precede the handling of a worker's message about its gradients, by bucket."""
        ...

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """Start sending these workers the weights of a bucket, or of ``ALL``."""
        ...

    def rest(self) -> None:
        """Wait until nothing in progress reads the weights."""
        ...

    def close(self) -> None:
        """End after the last update: another object takes over."""
        ...


class Traffic(Protocol):
    """This process's part in the pushes and pulls of one model with ``buckets`` buckets."""

    @property
    def buckets(self) -> int:
        """The number of buckets."""
        ...

    def push(self, number: int, when: When) -> Work:
        """Start this worker's part in the push of a bucket."""
        ...

    def pull(self, number: int, when: When) -> Work:
        """Start this worker's part in the pull of a bucket's weights."""
        ...

    def exchanges(self, apart: bool) -> Exchanges:
        """An owner's part in all exchanges, beginning with the first push. It never ends if the workers leave.

        ``apart`` says whether buckets may be updated one after the other.
        """
        ...

    def holdings(self) -> list[Holding] | None:
        """The slices that this process owns, None if it is no owner."""
        ...

    def followed(self) -> list[Holding]:
        """The slices of another owner whose updates this process makes too."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether the owners' weights may be more precise than the workers', so that a checkpoint needs them."""
        ...

    def know(self, records: Sequence[Record]) -> None:
        """Note that the workers now have these weights instead of the weights that they were sent."""
        ...

    def resume_at(self, step: int) -> None:
        """Have an owner go on from this step, counted from 0."""
        ...
