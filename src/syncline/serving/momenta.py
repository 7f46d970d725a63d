"""What an optimizer keeps where it keeps it for every worker: momentum, moments and counts of that worker's own pushes.

The owners' weights are one; each worker's pushes update them by a state of their own. Saved, such states are one again,
as an optimizer without workers can go on from it: the mean of all under every key, since the sum of what N workers'
momenta do to weights at a learning rate divided by N is what their mean does at the whole rate. Each worker's own is
beside it, under a key that says whose it is and of how many, for a run with as many. An optimizer that knows of no
workers carries such keys along unchanged while it trains: they count only where their mean is still what is under every
key.

Theory: Hakimi et al., "Taming momentum in a distributed asynchronous environment", arXiv 1907.11612.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence

import numpy as np

from ..nouns import numpy_dtype
from .records import Elements, State, Value

_OWN = re.compile(r"(.+) of rank (\d+) of (\d+)", re.DOTALL)
_NUMBERS = ("float16", "bfloat16", "float32", "float64")


def gathered(states: Sequence[State]) -> State:
    """What is kept of one slice for each worker, as one state."""
    found = _common(states)
    for worker, state in enumerate(states):
        found |= {f"{key} of rank {worker} of {len(states)}": value for key, value in state.items()}
    return found


def parted(state: State, workers: int) -> list[State]:
    """The other way round, for so many workers; all begin with the same where it is not of as many, or newer."""
    common: State = {}
    own: list[State] = [{} for _ in range(workers)]
    for key, value in state.items():
        match = _OWN.fullmatch(key)
        if match is None:
            common[key] = value
        elif int(match[3]) == workers and int(match[2]) < workers:
            own[int(match[2])][match[1]] = value
    if any(own) and _compared(_common(own)) == _compared(common):
        return own
    return [common, *(copy.deepcopy(common) for _ in range(workers - 1))]


def _common(states: Sequence[State]) -> State:
    """What is one of all; the same bits however slices are cut."""
    keys = dict.fromkeys(key for state in states for key in state)
    return {key: _mean([state[key] for state in states if key in state]) for key in keys}


def _compared(state: State) -> dict[str, object]:
    """In what can be compared; counts are numbers, of whatever type an optimizer keeps them in."""
    return {key: _value(value) for key, value in state.items()}


def _value(value: Value) -> object:
    if not isinstance(value, Elements):
        return value
    if value.shape == () and value.dtype in _NUMBERS:
        return float(value.data.view(numpy_dtype(value.dtype))[0])
    return value.dtype, value.shape, value.data.tobytes()


def _mean(values: Sequence[Value]) -> Value:
    """Of numbers for each element; of all else the first, which one worker has counted."""
    arrays = [value for value in values if isinstance(value, Elements) and value.shape != ()]
    if len(arrays) < len(values) or len({(one.dtype, one.shape) for one in arrays}) > 1:
        return values[0]
    first = arrays[0]
    if first.dtype not in _NUMBERS:
        return first
    dtype = numpy_dtype(first.dtype)
    total = np.zeros(first.shape, np.result_type(np.float32, dtype))
    for one in arrays:
        total += one.data.view(dtype).reshape(one.shape)
    return Elements(first.dtype, first.shape, (total / len(arrays)).astype(dtype).reshape(-1).view(np.uint8))
