"""The end of computations that a script has begun and does not wait for.

JAX hands a computation to threads of its own and goes on. What Syncline's calls in it do is a value that the next step
needs, and no effect by which JAX would know that it has to wait: with effects it begins every computation by Python,
which takes as long as forty buckets. So whoever ends the run, or the process, waits here, else the other ranks would
miss the last steps, and calls would come when there is no interpreter any more.
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
