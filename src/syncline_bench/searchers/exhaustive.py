"""``exhaustive``: every candidate, in the order of the prediction.

This is the reference for other searches: when told everything, it has found the best. When stopped early, it has
trusted the prediction entirely; it learns only from failures. Without a prediction it follows the order of the space.
"""

from __future__ import annotations

from typing import final

import numpy as np

from syncline.registry import register

from . import Indices, Searcher, Space


@register("searchers", "exhaustive")
@final
class Exhaustive(Searcher):
    """All candidates, with those predicted to be fastest first."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space)

    def choose(self, left: Indices) -> int:
        expected_s = self.expected_s(left)
        if np.isinf(expected_s).all():
            return int(left[np.argmax(self.chances(left))])
        return int(left[np.argmin(expected_s)])
