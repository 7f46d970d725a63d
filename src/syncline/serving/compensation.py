"""Gradients that are late, moved to the weights that there are now.

A worker's gradient g is one on the weights w that it was sent; meanwhile others have made w' of them. The gradient
there is g + H (w' - w) to the first order, and the elements of g g stand in for the Hessian H: Zheng et al.,
"Asynchronous stochastic gradient descent with delay compensation", ICML 2017.

Cost: a copy of what is owned for every worker, and one pass over gradients and both weights, in blocks that stay in the
cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..kernels.cpu import BLOCK_BYTES
from .protocol import ALL
from .records import Array
from .shard import Holding


class Compensation:
    """What an owner has sent to each of so many workers; ``factor`` is the lambda of the paper."""

    def __init__(self, holdings: Sequence[Holding], workers: int, factor: float) -> None:
        self._holdings, self._factor = holdings, factor
        self._sent = [[_told(held).copy() for held in holdings] for _ in range(workers)]

    def note(self, workers: Iterable[int], bucket: int) -> None:
        """These are sent the weights of a bucket, or of ``ALL``, as they are now."""
        for worker in workers:
            for sent, held in self._of(worker, bucket):
                np.copyto(sent, _told(held))

    def correct(self, worker: int, bucket: int, scale: float) -> None:
        """Compensate a worker's gradients, which lie in the holdings and will be multiplied by ``scale``."""
        for sent, held in self._of(worker, bucket):
            compensate(held.gradient, held.weights, sent, self._factor * scale)

    def _of(self, worker: int, bucket: int) -> Iterator[tuple[Array, Holding]]:
        for sent, held in zip(self._sent[worker], self._holdings, strict=True):
            if bucket in (ALL, held.bucket):
                yield sent, held


def _told(held: Holding) -> Array:
    return held.weights if held.sent is None else held.sent


def compensate(gradient: Array, now: Array, then: Array, factor: float) -> None:
    """``gradient += factor * gradient**2 * (now - then)``, all of one type and size; in place."""
    step = max(1, BLOCK_BYTES // gradient.itemsize)
    room = np.empty(min(step, gradient.size), gradient.dtype)
    times = gradient.dtype.type(factor)
    for start in range(0, gradient.size, step):
        block = gradient[start : start + step]
        change = room[: block.size]
        np.subtract(now[start : start + step], then[start : start + step], out=change)
        change *= block
        change *= block
        change *= times
        block += change
