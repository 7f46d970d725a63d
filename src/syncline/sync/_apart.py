"""The common base of asynchronous modes: every worker's push is an update of its own, one per step.

Owners apply a push to the current weights. These are newer than the weights on which the gradient was computed, by the
number of updates that others have pushed meanwhile: the version lag, N - 1 on average with N workers.

``rate`` selects the learning rate. With ``shared`` it is the optimizer's divided by N, so that N pushes move the
weights as far as one synchronous step, whatever the optimizer. With ``own`` it is the optimizer's, as if every worker
trained alone, and must be tuned for N times as many updates. Delayed updates act like momentum: with plain descent N
workers have an implicit momentum of about 1 - 1/N (Mitliagkas et al., "Asynchrony begets momentum", Allerton 2016), in
addition to the optimizer's own. The latter counts updates, not steps, so the same factor forgets N times as fast, in 1
/ (N (1 - factor)) steps of every worker. If both together are too much, lower the factor.

``momentum`` selects the pushes that the optimizer's state accumulates. ``auto`` is ``dana`` for SGD with momentum, by
the measurements of docs/coordination.md, and ``shared`` for other optimizers. With ``shared`` the optimizer has one
state for all pushes in order of arrival. With ``own`` it has one state per worker: momentum, moments and counts are
then those of the worker's own steps and forget as fast as in a synchronous run. If all wait for the slowest, the sum of
N pushes acts like momentum on one worker. ``dana`` adds Nesterov's look-ahead: a worker gets the weights that the
momenta of all workers will lead to, roughly where they will be when its push arrives (Hakimi, Barkai, Gabel and
Schuster, "Taming momentum in a distributed asynchronous environment", arXiv 1907.11612). This is ``own`` with
``nesterov=True`` in the optimizer (the paper's DANA-Slim), so messages are no larger. Owners keep each worker's state.

``compensate`` is the lambda of delay compensation (Zheng et al., "Asynchronous stochastic gradient descent with delay
compensation", ICML 2017). A gradient g computed on the weights w becomes g + lambda g g (w' - w) on the current weights
w': the first two terms of a Taylor expansion, with g g for the diagonal of the Hessian. 0 turns it off. Otherwise
owners keep one more copy of their weights per worker.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ..errors import UsageError


class Apart:
    """Base class of the asynchronous modes."""

    merges: ClassVar[bool] = False
    compensate: float

    def __post_init__(self) -> None:
        """Raise UsageError for an invalid lambda."""
        if not (math.isfinite(self.compensate) and self.compensate >= 0):
            raise UsageError(
                f"compensate={self.compensate}: the lambda of delay compensation must be 0 (none) or more; the paper"
                " starts with 0.04"
            )

    def due(self, step: int) -> bool:  # noqa: ARG002
        return True
