"""What a process owns of a model's weights: slices of every bucket, and what updates them.

Which slices these are follows from the plan by which gradients are pushed (``planned``), or, where a codec carries
gradients and updates, from its blocks (``coded``): the owner's weights are then others than those of the workers.

``Optimizer`` is all that a framework implements: the user's optimizer on flat slices in place of tensors. Whether that
is the same update is for the framework to find out; state leaves and enters as records, so that nobody else knows how
it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..compression.updates import Updates
from ..engine.runs import chunk_edges
from ..nouns import Bucket, Slice
from ..plans.plan import Plan
from .records import Array, Elements, Record, State, states_of, write_into

WEIGHTS = "weights"
"""The key of records of weights."""

Groups = Sequence[Mapping[str, Any]]
"""The values of an optimizer's parameter groups, as JSON can say them."""


@dataclass(frozen=True, eq=False)
class Holding:
    """A slice that this process owns: where its weights lie, and the gradients that are pushed to it, flat."""

    slice: Slice
    weights: Array
    gradient: Array


class Optimizer(Protocol):
    """An optimizer on a list of holdings, whose weights it updates in place; all lists are in their order.

    Called by one thread at a time, and never while a push into these gradients, or a pull of these weights, is under
    way.
    """

    def squared_norm(self) -> float:
        """The sum of squares of the gradients, in float64."""
        ...

    def apply(self, groups: Groups, scale: float) -> None:
        """One update with these values of the user's parameter groups; gradients are multiplied by ``scale`` first."""
        ...

    def state(self) -> list[State]:
        """What it has learnt of every slice; elements are flat and may be its own memory."""
        ...

    def load(self, states: Sequence[State]) -> None:
        """Replace that; what is given is its own from now on."""
        ...


Build = Callable[[Sequence[Holding]], Optimizer]
"""What a framework is asked for."""


class Shard:
    """The slices of one process with their optimizer, which begins with what ``learnt`` says of them."""

    def __init__(self, holdings: Sequence[Holding], build: Build, learnt: Iterable[Record]) -> None:
        self.slices = tuple(held.slice for held in holdings)
        self._holdings, self.build = tuple(holdings), build
        self.optimizer = build(self._holdings)
        self.load(learnt)

    def state(self) -> list[Record]:
        """The optimizer's state, slice by slice."""
        return [
            Record(part, key, value)
            for part, state in zip(self.slices, self.optimizer.state(), strict=True)
            for key, value in state.items()
        ]

    def load(self, records: Iterable[Record]) -> None:
        """Replace the optimizer's state by records of whole tensors or of any slices that cover these."""
        self.optimizer.load(states_of(records, self.slices))

    def weights(self) -> list[Record]:
        """The weights, slice by slice."""
        return [Record(held.slice, WEIGHTS, Elements.of(held.weights)) for held in self._holdings]

    def load_weights(self, records: Iterable[Record]) -> None:
        """Replace the weights by records of whole tensors or of any slices that cover these."""
        write_into(records, [(held.slice, held.weights) for held in self._holdings])


def planned(
    buckets: Sequence[Bucket], gradients: Sequence[Array], weights: Sequence[Array], push: Plan, index: int
) -> list[Holding]:
    """What ``index`` owns of each bucket under a push plan, tensor by tensor; the workers' weights are its own."""
    found = []
    for bucket, gradient, weight in zip(buckets, gradients, weights, strict=True):
        edges = chunk_edges(bucket.elements, push.chunks)
        for chunk, owner in enumerate(push.owners):
            if owner == index:
                found += held(bucket, gradient, weight, edges[chunk], edges[chunk + 1])
    return found


def held(bucket: Bucket, gradient: Array, weight: Array, start: int, stop: int) -> list[Holding]:
    """Elements ``start`` to ``stop`` of a bucket, tensor by tensor."""
    found = []
    for at, part in placed(bucket):
        low, high = max(start, at), min(stop, at + part.elements)
        if low < high:
            mine = Slice(part.tensor, part.start + low - at, part.start + high - at)
            found.append(Holding(mine, weight[low:high], gradient[low:high]))
    return found


def coded(buckets: Sequence[Bucket], gradients: Sequence[Array], updates: Updates) -> list[Holding]:
    """What this process owns of each bucket where a codec's blocks stay together, with weights of its own."""
    found = []
    for one in updates.owned:
        number, at = next(
            (number, at + one.start - part.start)
            for number, bucket in enumerate(buckets)
            for at, part in placed(bucket)
            if part.tensor == one.tensor and part.start <= one.start and one.stop <= part.stop
        )
        mine = Slice(one.tensor, one.start, one.stop)
        found.append(Holding(mine, one.weights, gradients[number][at : at + mine.elements]))
    return found


def placed(bucket: Bucket) -> list[tuple[int, Slice]]:
    """The slices of a bucket, each with the place of its first element."""
    at, found = 0, []
    for part in bucket.slices:
        found.append((at, part))
        at += part.elements
    return found
