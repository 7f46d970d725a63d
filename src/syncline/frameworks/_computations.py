"""What JAX and TensorFlow share: a step is a computation of theirs, whose calls of Python drive the steps of ``_flat``.

Knows what each call is given, how the weights of one are read and written, and how threads of a framework's own call
Python cheaply. Does not know how a computation calls.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from ..errors import MismatchError
from ..session.layout import Layout
from ..session.session import Session
from ._flat import Kind
from ._weights import Array

KINDS: tuple[Kind, ...] = ("exchanged", "own", "averaged")
"""By the numbers by which computations branch."""
RATE = "lr"
"""The value of an optimizer's group that owners of weights are told."""
TYPES = ("float16", "float32", "float64")
"""The element types that are trained."""

AnyError = TypeVar("AnyError", bound=Exception)
_kept = threading.local()


def keep_state() -> None:
    """Let the thread that calls keep its state of the interpreter, some kilobytes, as long as the process lasts.

    A thread that Python has not made is given one when it calls, and loses it, with all that is its own, when the call
    ends: making it takes longer than most calls. CPython counts how often a thread has come (``PyGILState_Ensure``), so
    once more lets it keep its state; it gives the interpreter lock back as before.
    """
    if not hasattr(_kept, "state"):
        _kept.state = ctypes.pythonapi.PyGILState_Ensure()


def tensors_of_calls(layout: Layout) -> list[list[int]]:
    """The tensors of each call of a step: those of a bucket that no earlier call was given."""
    found: list[list[int]] = []
    gone: set[int] = set()
    for bucket in layout.buckets:
        tensors = [one for one in dict.fromkeys(part.tensor for part in bucket.slices) if one not in gone]
        gone.update(tensors)
        if tensors:
            found.append(tensors)
    return found


class WeightsOfCall:
    """The weights of a model during a call: those that it was given, and then those that it hands back."""

    def __init__(self) -> None:
        self.now: Sequence[Array] = []
        self.after: Sequence[Array] = []
        """What the present step makes of them, where the worker has made it by itself."""

    def forget(self) -> None:
        """Let go of the arrays: the call has ended."""
        self.now = self.after = []

    def read(self, into: Sequence[Array]) -> None:
        """Element by element."""
        for array, flat in zip(self.now, into, strict=True):
            np.copyto(flat.reshape(array.shape), array)

    def write(self, values: Sequence[Array]) -> None:
        """Keep what the call will hand back."""
        self.now = values

    def update(self, gradients: Sequence[Array]) -> None:  # noqa: ARG002 - the computation has updated them, or will
        """Take the weights after a worker's own step; other updates happen in the computation."""
        if self.after:
            self.now, self.after = self.after, []


def ends_run(session: Session, error: AnyError) -> AnyError:
    """Tell all processes of the error, which ends the run, and return it."""
    session.fail(error)
    return error


def check_like_root(session: Session, what: str, named: Iterable[tuple[str, Array]], root: int) -> None:
    """Raise MismatchError, on all, where a worker has other names, types or shapes of arrays than ``root``."""
    mine = [[name, str(array.dtype), list(array.shape)] for name, array in named]
    theirs = json.loads(session.gather(json.dumps(mine).encode())[root])
    if mine != theirs:
        pairs = zip_longest(mine, theirs, fillvalue="nothing")
        here, there = next(pair for pair in pairs if pair[0] != pair[1])
        me = session.name(session.index)
        raise ends_run(session, MismatchError(f"{me} broadcasts {what} than rank {root}: {here}, not {there}"))


def broadcast_into(session: Session, arrays: Iterable[Array], root: int = 0) -> None:
    """Let contiguous arrays of any type have worker ``root``'s elements; all workers call it with as many."""
    for array in arrays:
        session.broadcast(array.reshape(-1).view(np.uint8), root)
