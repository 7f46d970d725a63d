"""``descent``: coordinate descent from the predicted best, one axis at a time.

AutoCCL tunes the parameters of a collective in this way (Xu et al., "AutoCCL: Automated Collective Communication Tuning
for Accelerating Distributed and Parallel DNN Training", NSDI 2025). From the fastest candidate so far the search tries
other choices on one axis; on an ordered axis it tries the next smaller and larger. It moves to a faster one, and takes
the next axis if there is none. If no axis has a faster neighbour, it restarts at the predicted best of the rest, and
descends from there even if that is slower.

If another choice makes another axis apply (another schedule with its own size), it tries the predicted best there.
"""

from __future__ import annotations

from typing import final

import numpy as np

from syncline.registry import register

from . import Indices, Searcher, Space


@register("searchers", "descent")
@final
class Descent(Searcher):
    """Tries the neighbours of the best so far, along one axis after the other."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space)
        self._here: int | None = None
        self._axis, self._in_vain = 0, 0
        """The axis being searched, and how many axes in a row had no faster neighbour."""

    def choose(self, left: Indices) -> int:
        ahead = np.zeros(len(self.space.candidates), dtype=bool)
        ahead[left] = True
        while self._here is not None and self._in_vain < len(self.space.axes):
            near = self._neighbours(self._here, self._axis)
            near = near[ahead[near]]
            if len(near):
                return self._likeliest(near)
            self._axis = (self._axis + 1) % len(self.space.axes)
            self._in_vain += 1
        self._here, self._in_vain = None, 0
        return self._likeliest(left)

    def learn(self, index: int, seconds: float | None) -> None:
        if seconds is None:
            return
        here_s = None if self._here is None else self.told[self._here]
        if here_s is None or seconds < here_s:
            self._here, self._in_vain = index, 0

    def _likeliest(self, among: Indices) -> int:
        """The candidate predicted to be fastest, weighted by its chance to run; the first without a prediction."""
        expected_s = self.expected_s(among)
        return int(among[np.argmin(expected_s) if np.isfinite(expected_s).any() else np.argmax(self.chances(among))])

    def _neighbours(self, here: int, axis: int) -> Indices:
        """The candidates that differ on this axis, and otherwise only on axes that apply to just one of the two."""
        columns = self.space.columns
        mine = columns[here]
        same = (columns == mine) | (columns < 0) | (mine < 0)
        same[:, axis] = (columns[:, axis] != mine[axis]) & (columns[:, axis] >= 0) & (mine[axis] >= 0)
        near = np.flatnonzero(same.all(axis=1))
        if not self.space.axes[axis].ordered or not len(near):
            return near
        steps = columns[near, axis] - mine[axis]
        up, down = steps[steps > 0], steps[steps < 0]
        nearest = (steps == up.min(initial=len(columns))) | (steps == down.max(initial=-len(columns)))
        return np.asarray(near[nearest])
