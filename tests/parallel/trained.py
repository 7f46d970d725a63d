"""What processes that trained together have to agree on: with one worker on its own, and with each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from rank_bodies import steps

BOUNDS = {"float64": 1e-9, "float32": 1e-3}


@cache
def alone(optimizer: str, kind: str) -> dict[str, np.ndarray]:
    """The weights of one worker with the whole batch."""
    found = steps(optimizer, kind)
    assert found is not None
    return found


def check_trained_as_one(results: Sequence[Any], cases: Sequence[Sequence[str]]) -> None:
    """``results``: per worker its weights after each case. They are one worker's; of the last two cases, which are the
    same one twice, all workers have the same bits both times.
    """
    for number, (optimizer, kind) in enumerate(cases):
        for states in results:
            for name, tensor in alone(optimizer, kind).items():
                apart = np.linalg.norm(states[number][name] - tensor)
                assert apart <= BOUNDS[kind] * np.linalg.norm(tensor), (optimizer, name)
    one, *others = [state for states in results for state in states[-2:]]
    for other in others:
        for name, tensor in one.items():
            assert tensor.tobytes() == other[name].tobytes(), name
