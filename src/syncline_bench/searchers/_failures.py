"""The chance of a candidate to run after some have failed: which of its choices are to blame.

A candidate fails if one of its choices does: a noisy-or model (Pearl, "Probabilistic Reasoning in Intelligent Systems",
1988). Each choice has a probability of failure, which expectation maximisation estimates from the successes and
failures. After a first failure every choice of that candidate gets a share of the blame. Each later success of one of
them moves its share to the others, until the culprit has all of it. Nothing is excluded: a candidate that shares many
choices with failures only comes late.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUSPECTED = 0.05
"""The prior probability of failure of a choice, with the weight of one trial."""

ROUNDS = 30


def chances(columns: NDArray[np.intp], tried: NDArray[np.intp], failed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The chance to run of all candidates, whose choices are ``columns`` (candidates, axes), -1 for none.

    ``tried`` are the indices of tried candidates; ``failed`` says which of these failed.
    """
    if not failed.any():
        return np.ones(len(columns))
    made = flags(columns)
    shown, trials = made[tried], made[tried].sum(axis=0)
    blame = np.full(made.shape[1], SUSPECTED)
    for _ in range(ROUNDS):
        runs = np.exp(shown @ np.log1p(-blame))
        # By Bayes' rule: the probability that a choice failed, given that its candidate did.
        share = shown[failed] * blame / (1 - runs[failed, np.newaxis])
        blame = (SUSPECTED + share.sum(axis=0)) / (1 + trials)
    return np.asarray(np.exp(made @ np.log1p(-blame)), dtype=np.float64)


def flags(columns: NDArray[np.intp]) -> NDArray[np.float64]:
    """1 where a candidate makes a choice, with a column for each choice of each axis."""
    return np.concatenate(
        [column[:, np.newaxis] == np.arange(column.max(initial=0) + 1) for column in columns.T], axis=1
    ).astype(np.float64)
