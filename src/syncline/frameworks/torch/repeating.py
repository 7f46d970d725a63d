"""Repeats the steps of a log alone: the gradients of a step's workers, one after another, and their sum.

``global_batches.RepeatedBatches`` yields the parts of a step's workers. Each part goes through the script's loop. The
gradients of all but the last part are taken away after ``backward``, so that ``optimizer.step()`` finds none and
changes nothing. After the last part the gradients are added as the plan of these workers adds them, chunk by chunk, and
``optimizer.step()`` gets their mean. Values of groups, shared objects and buffers are put back before each further
part.

The sums are equal bit for bit to those of a run by plans of Syncline, of float32 and float64, whose buckets were not
replaced by measuring.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.exchange import SEGMENT_BYTES, SHARED_SEGMENT_BYTES
from ...errors import GradientError, NotBuiltError
from ...kernels import cpu
from ...nouns import Group
from ...plans.messages import chunk_edges
from ...plans.plan import REDUCE, Plan
from ...session.communicator import planned
from ...session.session import Session
from ...strategy.choice import Choice
from ...strategy.strategy import Strategy
from .options import Fixed, Options, Samples, Selection
from .storage import Storage, layers_of

Array = NDArray[Any]


class Repeating:
    """The passes of a model whose session repeats a log. Raises NotBuiltError for what it cannot repeat."""

    def __init__(self, session: Session, model: torch.nn.Module, optimizer: Any, options: Options) -> None:
        self._session, self.model, self._optimizer = session, model, optimizer
        self._named = Selection(model, options).trained()
        if optimizer is None or options.unused != "error" or session.prepared:
            raise NotBuiltError('syncline repeat works with one model, its optimizer, and unused="error"')
        if any(item.dtype not in (torch.float32, torch.float64) or item.is_cuda for _, item in self._named):
            raise NotBuiltError("syncline repeat works with float32 and float64 on the CPU")
        weight = options.weight
        self._counting = Fixed(weight) if isinstance(weight, (int, float)) else Samples(weight, lambda: None)
        self._parts: list[tuple[float, list[Array]]] = []  # each worker's weight and buckets
        self._how: tuple[object, ...] = ()
        self._came: set[int] = set()  # the parameters with a gradient in this part
        self._at: tuple[int, ...] = ()  # the epoch, step and part of the last forward pass
        for index, (_, item) in enumerate(self._named):
            item.register_post_accumulate_grad_hook(partial(self._produced, index))  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)
        session.prepared[0] = self  # one model

    @property
    def _sampler(self) -> Any:
        if not self._session.global_batches:
            raise NotBuiltError("syncline repeat works with syncline.sampler(global_batch=)")
        return self._session.global_batches[0]

    def _enter(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pass begins. The first one of a further part puts back what the parts before have changed."""
        if not (self.model.training and torch.is_grad_enabled()):
            return
        sampler = self._sampler
        at, self._at = self._at, (sampler.epoch, sampler.step, sampler.part)
        if at != self._at:
            self._begin_part(sampler.part, sampler.shared)
        if isinstance(self._counting, Samples):
            self._counting.before_forward(arguments, keywords)

    def _begin_part(self, part: int, shared: Sequence[Any]) -> None:
        groups = self._optimizer.param_groups
        if part == 0:
            plain = [{name: group[name] for name in group if name != "params"} for group in groups]
            self._before = deepcopy([plain, [one.state_dict() for one in shared]])
            return
        if part == 1:  # all workers get the buffers of rank 0
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]
        values, states = deepcopy(self._before)
        for group, before in zip(groups, values, strict=True):
            group.update(before)
        for one, state in zip(shared, states, strict=True):
            one.load_state_dict(state)

    def _leave(self, _: Any, __: Any, output: Any) -> None:
        if self.model.training and torch.is_grad_enabled() and isinstance(self._counting, Samples):
            self._counting.after_forward(output)

    def _produced(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient is complete."""
        line = self._sampler.line
        if not self._came:
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
            how = line["strategy"], tuple(map(tuple, line["algorithms"])), len(line["members"])
            if how != self._how:
                self._adopt(*how)
        if index in self._came or len(self._parts) != self._sampler.part:
            raise GradientError("syncline repeat works with one backward pass per step, without accumulation")
        assert parameter.grad is not None
        self._came.add(index)
        share = torch.tensor(1 / len(line["members"]), dtype=parameter.dtype)
        torch.mul(parameter.grad, share, out=self._storage.fresh(index))

    def _adopt(self, strategy: str, algorithms: tuple[tuple[int, str], ...], workers: int) -> None:
        """Lay out the buckets, and make the plans, of steps that were exchanged so."""
        self._how = strategy, algorithms, workers
        found, group = Strategy.parse(strategy), Group(workers)
        if found.sync.name != "bsp" or found.server_holds_weights or found.codec.name != "none":
            raise NotBuiltError(f"syncline repeat works with sync=bsp and without codecs, not with {strategy}")
        buckets = found.schedule_object().buckets(layers_of(self._named))
        self._storage = Storage(self._named, buckets, lambda nbytes, dtype: np.zeros(nbytes // dtype.itemsize, dtype))
        self._segment_bytes = SHARED_SEGMENT_BYTES if found.transport.name in ("auto", "shm") else SEGMENT_BYTES
        choice = Choice(algorithms) if algorithms else None
        self._plans = [
            None if workers == 1 else found.plan(group) if choice is None else planned(choice.at(array.nbytes), group)
            for array in self._storage.arrays
        ]

    def _ended(self) -> None:
        """A backward pass has ended."""
        missing = [name for index, (name, _) in enumerate(self._named) if index not in self._came]
        if missing:
            raise GradientError(f"syncline repeat: {missing[0]!r} got no gradient in this backward pass")
        self._came.clear()
        weight = self._counting.weight
        self._counting.reset()
        self._parts.append((1.0 if weight is None else weight, [array.copy() for array in self._storage.arrays]))
        whole = len(self._parts) == len(self._sampler.line["members"])
        if whole:
            self._add_up()
        for (_, parameter), view in zip(self._named, self._storage.views, strict=True):
            parameter.grad = view.clone() if whole else None

    def _add_up(self) -> None:
        """Replace the gradients by the mean of all parts."""
        parts, self._parts = self._parts, []
        total = sum([weight for weight, _ in parts])
        for weight, arrays in parts:
            for array in arrays:
                cpu.weigh(array, weight * len(parts) / total if total > 0 else 1.0)
        for number, (plan, array) in enumerate(zip(self._plans, self._storage.arrays, strict=True)):
            each = [arrays[number] for _, arrays in parts]
            per = max(1, self._segment_bytes // array.itemsize)
            for start in range(0, array.size if plan is not None else 0, per):
                assert plan is not None
                run_plan(plan, [one[start : start + per] for one in each])
            array[...] = each[0]
        if len(parts) > 1:
            with torch.no_grad():
                for buffer, kept in zip(self.model.buffers(), self._buffers, strict=True):
                    buffer.copy_(kept)


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
