"""How likely a candidate is to run, when some have failed: which of its choices are to blame.

A candidate fails if one of its choices does: a noisy-or model (Pearl, "Probabilistic Reasoning in Intelligent
Systems", 1988). Each choice has a probability to fail, which expectation maximisation finds from what ran and what
failed. Of a first failure every choice of that candidate gets a share of the blame; each later success of one of them
moves its share to the others, until the culprit has it all. Nothing is excluded: a candidate that shares much with
failures only comes late.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUSPECTED = 0.05
"""The failures per trial of a choice that nothing is known of, as if one trial had shown it."""

ROUNDS = 30


def chances(columns: NDArray[np.intp], tried: NDArray[np.intp], failed: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The probability to run of all candidates, whose choices are ``columns`` (candidates, axes), -1 for none.

    ``tried`` are the candidates that were, ``failed`` says which of these have failed.
    """
    if not failed.any():
        return np.ones(len(columns))
    made = flags(columns)
    shown, trials = made[tried], made[tried].sum(axis=0)
    blame = np.full(made.shape[1], SUSPECTED)
    for _ in range(ROUNDS):
        runs = np.exp(shown @ np.log1p(-blame))
        # Of a failure, the probability that a choice was among what failed, by Bayes' rule.
        share = shown[failed] * blame / (1 - runs[failed, np.newaxis])
        blame = (SUSPECTED + share.sum(axis=0)) / (1 + trials)
    return np.asarray(np.exp(made @ np.log1p(-blame)), dtype=np.float64)


def flags(columns: NDArray[np.intp]) -> NDArray[np.float64]:
    """1 where a candidate makes a choice, one column for each choice of each axis."""
    return np.concatenate(
        [column[:, np.newaxis] == np.arange(column.max(initial=0) + 1) for column in columns.T], axis=1
    ).astype(np.float64)
