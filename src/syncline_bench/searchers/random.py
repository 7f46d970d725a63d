"""``random``: candidates drawn with equal probability, whatever was predicted or measured.

This is the baseline that a search has to beat (Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization",
JMLR 2012). It learns only from failures: candidates that share choices with them are drawn less often.
"""

from __future__ import annotations

from typing import final

import numpy as np

from syncline.registry import register

from . import Indices, Searcher, Space


@register("searchers", "random")
@final
class Random(Searcher):
    """Candidates drawn at random without replacement."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space)
        self._drawn = np.random.default_rng(seed)

    def choose(self, left: Indices) -> int:
        weights = self.chances(left)
        return int(self._drawn.choice(left, p=weights / weights.sum()))
