"""Repeats the steps of a log alone: the gradients of a step's workers, one after another, and their sum.

``global_batches.RepeatedBatches`` yields the parts of a step's workers. Each part goes through the script's loop, in
which an adapter keeps its gradients and updates nothing. After the last part the gradients are added as the plan of
these workers adds them, chunk by chunk, and the optimizer gets their mean. Before each further part, objects that the
script changes in a step are put back.

The sums are equal bit for bit to those of a run by plans of Syncline, of float32 and float64, whose buckets were not
replaced by measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..engine.exchange import SEGMENT_BYTES, SHARED_SEGMENT_BYTES, segment_bytes_of
from ..errors import GradientError, NotBuiltError
from ..kernels import cpu
from ..nouns import Bucket, Group, Layer, Spec
from ..plans.messages import chunk_edges
from ..plans.plan import REDUCE, Plan
from ..session.communicator import planned
from ..session.session import Session
from ..strategy.choice import Choice
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO
from ..training.memory import Blocks
from ..transports.tcp import Tcp
from ._flat import GradientPlace

Array = NDArray[Any]


class Sums:
    """Adds the gradients of a step's workers. ``lay_out`` makes the memory of buckets and returns it, by bucket.

    Raises NotBuiltError for what cannot be repeated.
    """

    def __init__(
        self, session: Session, layers: Sequence[Layer], lay_out: Callable[[Sequence[Bucket]], Sequence[Array]]
    ) -> None:
        if any(layer.spec.dtype not in ("float32", "float64") for layer in layers):
            raise NotBuiltError("syncline repeat works with float32 and float64 on the CPU")
        self._session, self._layers, self._lay_out = session, layers, lay_out
        self._parts: list[tuple[float, list[Array]]] = []  # each worker's weight and buckets
        self._how: tuple[object, ...] = ()
        self._arrays: Sequence[Array] = []
        self._before: Any = None
        self._at: tuple[int, ...] = ()  # the epoch, step and part that have begun

    @property
    def sampler(self) -> Any:
        """The sampler that reads the log."""
        if not self._session.global_batches:
            raise NotBuiltError("syncline repeat works with syncline.sampler(global_batch=)")
        return self._session.global_batches[0]

    @property
    def share(self) -> float:
        """The factor of a gradient in its bucket, as of each of the present step's workers."""
        return float(1 / len(self.sampler.line["members"]))

    def begin_part(self, *shared: Any) -> int | None:
        """Begin a part if it has not begun; returns its number then. A further one puts the state of objects back.

        ``shared`` have a state, as the objects that the script has given to ``syncline.elastic``.
        """
        sampler = self.sampler
        at, self._at = self._at, (sampler.epoch, sampler.step, sampler.part)
        if at == self._at:
            return None
        each = [*shared, *sampler.shared]
        if sampler.part == 0:
            self._before = deepcopy([one.state_dict() for one in each])
        else:
            for one, state in zip(each, deepcopy(self._before), strict=True):
                one.load_state_dict(state)
        return int(sampler.part)

    def begin_gradients(self) -> None:
        """Make the buckets and plans of the present step's workers, before the first gradient of a part."""
        line = self.sampler.line
        how = line["strategy"], tuple(map(tuple, line["algorithms"])), len(line["members"]), tuple(line["nodes"])
        if how != self._how:
            self._adopt(*how)
        if len(self._parts) != self.sampler.part:
            raise GradientError("syncline repeat works with one backward pass per step, without accumulation")

    def _adopt(
        self, strategy: str, algorithms: tuple[tuple[int, str], ...], workers: int, nodes: tuple[int, ...]
    ) -> None:
        self._how = strategy, algorithms, workers, nodes
        found = Strategy.parse(strategy)
        group = Group(workers, servers=found.servers, nodes=nodes)
        if found.sync.name != "bsp" or not found.sync_mode().merges or found.codec.name != "none":
            raise NotBuiltError(f"syncline repeat works with sync=bsp and without codecs, not with {strategy}")
        self._arrays = self._lay_out(found.schedule_object().buckets(self._layers))
        self._most_bytes = SHARED_SEGMENT_BYTES if found.transport.name == "shm" else SEGMENT_BYTES
        # ``auto`` stays where some processes share a host and others do not: chunks are those of TCP.
        name = Tcp.name if found.transport.name == AUTO.name else found.transport.name
        self._chunk_bytes = getattr(registry.get("transports", name).target, "chunk_bytes", None)
        choice = Choice(algorithms) if algorithms else None
        self._servers = found.servers
        self._plans: list[tuple[Plan, ...]] = [
            ()
            if workers == 1
            else found.halves(group)
            if found.server_holds_weights
            else (found.plan(group) if choice is None else planned(choice.at(array.nbytes), group),)
            for array in self._arrays
        ]

    def add(self, weight: float) -> bool:
        """Note the gradients in the buckets as a part of this weight. After the last part the buckets have the mean,
        and the answer is True."""
        self._parts.append((weight, [array.copy() for array in self._arrays]))
        if len(self._parts) < len(self.sampler.line["members"]):
            return False
        parts, self._parts = self._parts, []
        total = sum([weight for weight, _ in parts])
        for weight, arrays in parts:
            for array in arrays:
                cpu.weigh(array, weight * len(parts) / total if total > 0 else 1.0)
        for number, (plans, array) in enumerate(zip(self._plans, self._arrays, strict=True)):
            each = [arrays[number] for _, arrays in parts]
            each += [np.zeros_like(array) for _ in range(self._servers)]
            for plan in plans:
                per = max(1, segment_bytes_of(plan, self._most_bytes, self._chunk_bytes) // array.itemsize)
                for start in range(0, array.size, per):
                    run_plan(plan, [one[start : start + per] for one in each])
            array[...] = each[0]
        return True


class FlatSums:
    """The sums of a model whose gradients arrive as host arrays. ``weighs``: the sizes of parts count in the mean."""

    def __init__(self, session: Session, specs: Sequence[Spec], weighs: bool) -> None:
        self._specs, self._weighs = specs, weighs
        self._layers = [Layer(spec) for spec in specs]
        self.sums = Sums(session, self._layers, self._lay_out)
        self.mean: Sequence[Array] = []
        """The mean of a step's gradients, flat, after ``add`` has returned True."""

    def _lay_out(self, buckets: Sequence[Bucket]) -> Sequence[Array]:
        blocks = Blocks(self._layers, buckets, lambda nbytes, dtype: np.zeros(nbytes // dtype.itemsize, dtype))
        self._places = [
            GradientPlace(flat.reshape(spec.shape)) for flat, spec in zip(blocks.tensors, self._specs, strict=True)
        ]
        self.mean = blocks.tensors
        return blocks.arrays

    def add(self, gradients: Sequence[Array]) -> bool:
        """Note the gradients of a part. Whether it was the last of its step, so that the mean is there."""
        self.sums.begin_gradients()
        for place, gradient in zip(self._places, gradients, strict=True):
            place.put(gradient, self.sums.share)
        return self.sums.add(self.sums.sampler.weigh() if self._weighs else 1.0)


def run_plan(plan: Plan, arrays: Sequence[Array]) -> None:
    """Carry out a plan on the arrays of all ranks: transfers of a step read the values from before it."""
    edges = chunk_edges(arrays[0].size, plan.chunks)
    for step in np.unique(plan.step):
        moves = [
            (arrays[dst][place], arrays[src][place].copy(), op)
            for src, dst, chunk, count, op in plan.rows[plan.step == step][:, 1:].tolist()
            for place in [slice(edges[chunk], edges[chunk + count])]
        ]
        for target, come, op in moves:
            target[...] = target + come if op == REDUCE else come
