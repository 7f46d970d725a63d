"""The end of computations that a script has begun and does not wait for.

JAX hands a computation to threads of its own and goes on. To JAX, Syncline's calls in it have results, which the next
step needs, and no effects, by which it would know that it has to wait at the end: a computation with effects is begun
by Python, argument by argument, which takes most of a millisecond with eighty of them. So whoever ends the run, or the
process, waits here, else the other ranks would miss the last steps, and calls would come when there is no interpreter.

What goes wrong in such a step is in results that perhaps nobody reads: until the end the script has not seen it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import jax
import numpy as np

from ...session.session import Session


def unseen(session: Session, function: Callable[..., None]) -> Callable[..., None]:
    """A call of a computation: what it raises reaches a thread of XLA's, and nobody else."""

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except BaseException:
            session.member.process.ending.reached_nobody()
            raise

    return call


def wait_for_steps(session: Session) -> None:
    """Before the end of a run: raises what went wrong in steps that the script has not waited for."""
    wait_for_computations()
    session.engine.check_error()


def wait_for_computations() -> None:
    """Return when what this thread has begun has ended, and all whose results are still there, rightly or not.

    What one thread begins on a CPU goes one behind the other on each device, and so does what it begins on several: a
    small computation behind them waits for results that nobody has kept.
    """
    with jax.transfer_guard("allow"), suppress(Exception):
        for array in jax.live_arrays("cpu"):
            with suppress(Exception):  # deleted, or of a step that failed
                array.block_until_ready()
        devices = jax.local_devices(backend="cpu")
        for some in {*((one,) for one in devices), tuple(devices)}:
            whole = jax.sharding.NamedSharding(
                jax.sharding.Mesh(np.array(some), "all"), jax.sharding.PartitionSpec("all")
            )
            with suppress(Exception):
                jax.jit(jax.numpy.negative)(jax.device_put(np.zeros(len(some), np.float32), whole)).block_until_ready()


@cache
def wait_at_exit() -> None:
    """From now on the end of the interpreter waits too, but for that of forked children, which have no such threads."""
    atexit.register(wait_for_computations)
    os.register_at_fork(after_in_child=lambda: atexit.unregister(wait_for_computations))
