"""``rl``: reinforcement learning of a policy over the choices, by REINFORCE.

The policy is a softmax over the valid candidates (Williams, "Simple Statistical Gradient-Following Algorithms for
Connectionist Reinforcement Learning", 1992). A candidate's logit is -log(predicted seconds) / TEMPERATURE plus a weight
for each of its choices. Without conditions between axes, the weights form a softmax for each axis; with them, choices
that do not apply are masked. All weights begin at zero, so the first policy follows the prediction.

The reward of a candidate is how far its residual, log(measured / predicted), is below the mean of all so far, which is
the baseline. A penalty for the Kullback-Leibler divergence from the first policy keeps the policy broad. So a right
prediction teaches nothing, and the best policy is the softmax of the true times. Measurements are few and gradients are
cheap. So after each answer the updates repeat over all answers, without importance weights for the policy at the time
of asking. Candidates are drawn from the policy among those that are left.
"""

from __future__ import annotations

from functools import cached_property
from typing import final

import numpy as np

from syncline.registry import register

from . import Floats, Indices, Searcher, Space, flags

TEMPERATURE = 0.05
"""A candidate that is slower by this share has 1/e of the odds."""

GREEDY = 3
"""The first questions are the policy's most probable candidates instead of draws."""

RATE, PASSES = 0.5, 30
"""The step size of an update, divided by the number of axes, and the updates after an answer."""

DECAY = 0.02
"""The share of a weight that each update removes: rarely seen choices stay near the prediction."""


@register("searchers", "rl")
@final
class Reinforce(Searcher):
    """A policy with a weight for each choice that begins with the prediction and learns by REINFORCE."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space)
        self._drawn = np.random.default_rng(seed)
        self._flags = flags(space.columns)
        self._weights = np.zeros(self._flags.shape[1])

    def choose(self, left: Indices) -> int:
        odds = self._odds(left) * self.chances(left)
        if len(self.told) < GREEDY:
            return int(left[np.argmax(odds)])
        return int(self._drawn.choice(left, p=odds / odds.sum()))

    def learn(self, index: int, seconds: float | None) -> None:
        which = np.array([index for index, seconds in self.told.items() if seconds is not None], dtype=np.intp)
        if len(which) < 2:
            return
        seconds_s = np.array([seconds for seconds in self.told.values() if seconds is not None])
        residual = np.log(seconds_s) - self._log_s[which]
        made = self._flags[which]
        step = RATE / len(self.space.axes)
        for _ in range(PASSES):
            # The penalty log(policy / first policy) is ``made @ weights`` plus a constant, which the baseline removes.
            reward = -residual / TEMPERATURE - made @ self._weights
            # The gradient of log(policy) is ``made`` minus its mean, and that mean cancels: advantages sum to zero.
            gradient = (reward - reward.mean()) @ made / len(which)
            self._weights += step * (gradient - DECAY * self._weights)

    @cached_property
    def _log_s(self) -> Floats:
        """The logarithm of the predicted seconds, or the median of all where there is no prediction."""
        found = np.log(self.space.predicted_s)
        known = ~np.isnan(found)
        return np.where(known, found, np.median(found[known]) if known.any() else 0.0)

    def _odds(self, among: Indices) -> Floats:
        """The odds of these candidates, scaled so that the greatest is 1."""
        logits = self._flags[among] @ self._weights - self._log_s[among] / TEMPERATURE
        return np.asarray(np.exp(logits - logits.max()))
