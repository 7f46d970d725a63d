"""What asynchronous modes have in common: every worker's push is an update by itself, of which each step has one.

Owners apply a push to whatever weights they have come to, which are newer than those on which it was computed by as
many updates as others have pushed meanwhile, its version lag. With N workers that is N - 1 on the average.

``rate`` says with which learning rate. Under ``shared`` it is that of the optimizer divided by N, so that N pushes move
the weights as far as one synchronous step does, whatever the optimizer; under ``own`` it is the optimizer's, as if
every worker trained alone, and has to be set for N times as many updates. Updates that are late act like momentum: with
plain descent N workers have one of about 1 - 1/N without asking for any (Mitliagkas et al., "Asynchrony begets
momentum", Allerton 2016), and an optimizer's own comes on top. That one counts updates, not steps: the same factor
forgets N times as fast, in 1 / (N (1 - factor)) steps of every worker. Where both together are too much, lower the
factor.

``momentum`` says whose pushes it is of. Under ``shared`` the optimizer has one state, of all pushes as they come. Under
``own`` it has one for every worker, by which that worker's pushes go: momentum, moments and counts are then those of
its own steps, and forget as fast as in a synchronous run. If all wait for the slowest, the sum of what N pushes do is
what momentum does on one worker. ``dana`` adds Nesterov's look-ahead, in which a worker is sent the weights that the
momenta of all workers will carry them to: where they will be, roughly, when its push comes (Hakimi, Barkai, Gabel and
Schuster, "Taming momentum in a distributed asynchronous environment", arXiv 1907.11612). That is ``own`` with
``nesterov=True`` in the optimizer (the paper's DANA-Slim), so no message is larger. Owners keep the state of each
worker.

``compensate`` is the lambda of delay compensation (Zheng et al., "Asynchronous stochastic gradient descent with delay
compensation", ICML 2017): a gradient g that was computed on the weights w becomes g + lambda g g (w' - w) on those that
there are now, w', which is what the first two terms of a Taylor series say of the gradient there, with g g in place of
the Hessian's diagonal. 0 leaves it alone. Owners then keep what they own once more for every worker.
"""

from __future__ import annotations

import math
from typing import ClassVar

from ..errors import UsageError


class Apart:
    """Mixed into the modes."""

    merges: ClassVar[bool] = False
    compensate: float

    def __post_init__(self) -> None:
        """Raise UsageError for a lambda that is none."""
        if not (math.isfinite(self.compensate) and self.compensate >= 0):
            raise UsageError(
                f"compensate={self.compensate}: it is the lambda of delay compensation, 0 (none) or more; the paper"
                " begins with 0.04"
            )

    def due(self, step: int) -> bool:  # noqa: ARG002
        """Every step pushes."""
        return True
