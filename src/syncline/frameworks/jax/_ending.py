"""The end of computations that a script has begun and does not wait for.

JAX hands a computation to threads of its own and goes on. To JAX, Syncline's calls in it have results, which the next
step needs, and no effects, by which it would know that it has to wait at the end: a computation with effects is begun
by Python, argument by argument, which takes most of a millisecond with eighty of them. So whoever ends the run, or the
process, waits here, else the other ranks would miss the last steps, and calls would come when there is no interpreter.
"""

from __future__ import annotations

from contextlib import suppress

import jax
import numpy as np


def wait_for_computations() -> None:
    """Return when all that this thread has begun has ended, and all whose results are still there, rightly or not.

    On a CPU what one thread begins goes one behind the other: results that nobody has kept are waited for by a small
    computation behind them.
    """
    for array in jax.live_arrays():
        with suppress(Exception):  # of which whoever uses it hears, and so does the end of the run
            array.block_until_ready()
    with suppress(Exception):
        jax.jit(jax.numpy.negative)(np.zeros(1, np.float32)).block_until_ready()
