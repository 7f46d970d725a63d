"""Repeats the steps of a log with a model of PyTorch (``_repeating``).

The gradients of all but the last part are taken away after ``backward``, so that ``optimizer.step()`` finds none and
changes nothing. Values of groups, shared objects and buffers are put back before each further part.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import GradientError, NotBuiltError
from ...nouns import Bucket
from ...session.session import Session
from .._repeating import Sums
from .options import Fixed, Options, Samples, Selection
from .prepare import GroupValues
from .storage import Storage, layers_of

Array = NDArray[Any]


class Repeating:
    """The passes of a model whose session repeats a log. Raises NotBuiltError for what it cannot repeat."""

    def __init__(self, session: Session, model: torch.nn.Module, optimizer: Any, options: Options) -> None:
        self.model, self._groups = model, GroupValues(optimizer) if optimizer is not None else None
        self._named = Selection(model, options).trained()
        if optimizer is None or options.unused != "error" or session.prepared:
            raise NotBuiltError('syncline repeat works with one model, its optimizer, and unused="error"')
        if any(item.is_cuda for _, item in self._named):
            raise NotBuiltError("syncline repeat works with float32 and float64 on the CPU")
        self._sums = Sums(session, layers_of(self._named), self._lay_out)
        weight = options.weight
        self._counting = Fixed(weight) if isinstance(weight, (int, float)) else Samples(weight, lambda: None)
        self._came: set[int] = set()  # the parameters with a gradient in this part
        for index, (_, item) in enumerate(self._named):
            item.register_post_accumulate_grad_hook(partial(self._produced, index))  # type: ignore[no-untyped-call]
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave)
        session.prepared[0] = self  # one model

    def _lay_out(self, buckets: Sequence[Bucket]) -> Sequence[Array]:
        self._storage = Storage(self._named, buckets, lambda nbytes, dtype: np.zeros(nbytes // dtype.itemsize, dtype))
        return self._storage.arrays

    def _enter(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A forward pass begins. The first one of a further part puts back what the parts before have changed."""
        if not (self.model.training and torch.is_grad_enabled()):
            return
        if self._sums.begin_part(self._groups) == 1:  # all workers get the buffers of rank 0
            self._buffers = [buffer.clone() for buffer in self.model.buffers()]
        if isinstance(self._counting, Samples):
            self._counting.before_forward(arguments, keywords)

    def _leave(self, _: Any, __: Any, output: Any) -> None:
        if self.model.training and torch.is_grad_enabled() and isinstance(self._counting, Samples):
            self._counting.after_forward(output)

    def _produced(self, index: int, parameter: torch.Tensor) -> None:
        """A gradient is complete."""
        if not self._came:
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
            self._sums.begin_gradients()
        if index in self._came:
            raise GradientError("syncline repeat works with one backward pass per step, without accumulation")
        assert parameter.grad is not None
        self._came.add(index)
        share = torch.tensor(self._sums.share, dtype=parameter.dtype)
        torch.mul(parameter.grad, share, out=self._storage.fresh(index))

    def _ended(self) -> None:
        """A backward pass has ended."""
        missing = [name for index, (name, _) in enumerate(self._named) if index not in self._came]
        if missing:
            raise GradientError(f"syncline repeat: {missing[0]!r} got no gradient in this backward pass")
        self._came.clear()
        weight = self._counting.weight
        self._counting.reset()
        parts = self._sums.sampler.part + 1
        whole = self._sums.add(1.0 if weight is None else weight)
        if whole and parts > 1:
            with torch.no_grad():
                for buffer, kept in zip(self.model.buffers(), self._buffers, strict=True):
                    buffer.copy_(kept)
        for (_, parameter), view in zip(self._named, self._storage.views, strict=True):
            parameter.grad = view.clone() if whole else None
