"""The toy problem in NumPy: gradients one by one in memory that is used again, the last one with the step."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from matrix import RULES, Arrays, Run, rate, start

from syncline.frameworks._supported import SILENT
from syncline.frameworks.numpy import adapt
from syncline.session.session import Session


class Trainer:
    def __init__(self, session: Session, rule: str, weights: Arrays, optimizer: Any) -> None:
        self.rank, self._session, self._rule = session.rank, session, rule
        self._weights, self._optimizer = weights, optimizer

    def step(self, number: int, pushed: Arrays, pull: float) -> None:
        self._optimizer.lr = rate(self._rule, number)
        assert self._optimizer.lr == self._optimizer._optimizer.lr
        *rest, first = reversed([(name, pushed[name] + pull * array) for name, array in self._weights.items()])
        for name, gradient in rest if self.rank else rest[::-1]:
            scratch = np.array(gradient)
            self._optimizer.produced(name, scratch)
            scratch[...] = np.nan
        self._optimizer.step(dict([first]))

    def weights(self) -> Arrays:
        return {name: array.copy() for name, array in self._weights.items()}

    def consolidate(self) -> None:
        for call in self._session.consolidates.values():
            call()

    def state(self) -> bytes:
        state = self._optimizer.state_dict()
        assert "torch" not in str({type(value) for value in state.values()})
        return pickle.dumps(state)

    def load(self, states: Sequence[bytes]) -> None:
        self._optimizer.load_state_dict(pickle.loads(states[0]))

    def close(self) -> None:
        """A session forgets it by itself."""


def begin(session: Session, run: Run) -> Trainer | None:
    """From weights that are rank 0's, whatever this one's were; the first are not contiguous."""
    arrays = {name: array.astype(run.dtype) for name, array in start(session.index).items()}
    arrays["first"] = np.asfortranarray(arrays["first"])
    handed = adapt(session, arrays, RULES[run.rule], SILENT)
    return None if handed is None else Trainer(session, run.rule, *handed.result)
