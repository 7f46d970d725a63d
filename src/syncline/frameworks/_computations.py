"""The common part of JAX and TensorFlow: a step is one of their computations, which calls Python functions.

It divides the tensors of a step among the calls, holds the weights during a call, and lets a framework's own threads
call Python cheaply. How a computation makes a call is up to each adapter.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np

from ..errors import MismatchError
from ..session.layout import Layout
from ..session.session import Session
from ._flat import Array, Kind

KINDS: tuple[Kind, ...] = ("exchanged", "own", "averaged")
"""The kinds of steps, indexed by the numbers on which computations branch."""
RATE = "lr"
"""The key of the learning rate in the group values for owners of weights."""
TYPES = ("float16", "float32", "float64")
"""The element types of trainable tensors."""

_kept = threading.local()


def keep_state() -> None:
    """Keep the calling thread's Python thread state, some kilobytes, until the process ends.

    Otherwise a thread that Python did not create gets a new thread state for each call and loses it, with all
    thread-local data, at the end. Creating it takes longer than most calls. CPython counts the nested calls of a thread
    (``PyGILState_Ensure``), and one unmatched call keeps the state. The interpreter lock is still released at the end.
    """
    if not hasattr(_kept, "state"):
        _kept.state = ctypes.pythonapi.PyGILState_Ensure()


def tensors_of_calls(layout: Layout) -> list[list[int]]:
    """The tensors of each call of a step: a bucket's tensors that no earlier call contains."""
    found: list[list[int]] = []
    gone: set[int] = set()
    for bucket in layout.buckets:
        tensors = [one for one in dict.fromkeys(part.tensor for part in bucket.slices) if one not in gone]
        gone.update(tensors)
        if tensors:
            found.append(tensors)
    return found


class WeightsOfCall:
    """The weights of a model during a call: first those that the call received, later those that it returns."""

    def __init__(self) -> None:
        self.now: Sequence[Array] = []
        self.after: Sequence[Array] = []
        """The weights after the present step, if the worker makes that step alone."""

    def forget(self) -> None:
        """Drop the references to the arrays, because the call has ended."""
        self.now = self.after = []

    def read(self, into: Sequence[Array]) -> None:
        """Copy the present weights into flat arrays."""
        for array, flat in zip(self.now, into, strict=True):
            np.copyto(flat.reshape(array.shape), array)

    def write(self, values: Sequence[Array]) -> None:
        """Keep these values, which the call will return."""
        self.now = values

    def update(self, gradients: Sequence[Array]) -> None:  # noqa: ARG002 - the computation has updated them, or will
        """Use the weights of a step that the worker has made alone. Other updates happen in the computation."""
        if self.after:
            self.now, self.after = self.after, []


def check_like_root(session: Session, what: str, named: Iterable[tuple[str, Array]], root: int) -> None:
    """Raise MismatchError, on all workers, if one has other names, types or shapes of arrays than ``root``."""
    mine = [[name, str(array.dtype), list(array.shape)] for name, array in named]
    theirs = json.loads(session.gather(json.dumps(mine).encode())[root])
    if mine != theirs:
        pairs = zip_longest(mine, theirs, fillvalue="nothing")
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        me = session.name(session.index)
        raise session.fail(MismatchError(f"{me} broadcasts {what} than rank {root}: {here} instead of {there}"))


def broadcast_into(session: Session, arrays: Iterable[Array], root: int = 0) -> None:
    """Copy worker ``root``'s elements into contiguous arrays of any type; all workers call it with as many."""
    for array in arrays:
        session.broadcast(array.reshape(-1).view(np.uint8), root)
