"""Predicts candidates by simulation, and explains why the best one is fast.

Owns the prediction of an iteration from the measured network of each transport and the layers' times, and the text of
the explanation: the gain of each word against the default, and the link speed up to which it gains. Measures nothing.
After its deadline it simulates no further candidate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from syncline.costs.cluster import Cluster
from syncline.errors import UsageError
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import AUTO, WORDS, kind_of, write

from ..predict import settings
from ..predict.asked import Settled, asked_of, settled
from ..predict.iterations import simulate
from ..predict.settings import Setting
from ..predict.vary import with_links_of
from ..report import units

_FASTEST, _BISECTIONS = 1e12, 9
_NOTICED = 0.005
"""The share of an iteration below which a gain counts as none."""


class Foresight:
    """Predictions for one model and number of workers. ``clusters`` are by transport; ``auto`` is the default."""

    def __init__(
        self,
        model: settings.Model | None,
        clusters: Mapping[str, Cluster],
        workers: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._clusters, self._workers, self._clock = model, clusters, workers, clock
        self._known: dict[str, float | None] = {}
        self.deadline = math.inf

    def seconds(self, text: str) -> float | None:
        """The predicted seconds of an iteration; None if it cannot be predicted, or after the deadline."""
        if text not in self._known:
            if self._model is None or not self._clusters or self._clock() > self.deadline:
                return None
            self._known[text] = self._simulated(text)
        return self._known[text]

    def _simulated(self, text: str) -> float | None:
        try:
            return self._settled(text).iteration.iteration_s
        except UsageError:
            return None

    def _settled(self, text: str) -> Settled:
        assert self._model is not None
        strategy = Strategy.parse(text)
        cluster = self._clusters.get(strategy.transport.name, self._clusters["auto"])
        # The cluster contains the transport already, and was measured between ranks as hosts.
        asked = asked_of(str(replace(strategy, transport=AUTO)))
        return settled(asked, cluster, self._workers, None, self._model)

    def explained(self, best: str, default: str) -> str:
        """A text on the gain of each word of ``best`` against ``default``; empty if nothing can be predicted."""
        try:
            if self._model is None or not self._clusters:
                return ""
            found, usual = self._settled(best), self._settled(default)
            return "; ".join(filter(None, (self._word(word, found, usual) for word in WORDS if word != "transport")))
        except UsageError:
            return ""

    def _word(self, word: str, found: Settled, usual: Settled) -> str:
        here, there = getattr(found.setting.strategy, word), getattr(usual.setting.strategy, word)
        if here == there:
            return ""
        name = write(kind_of(word, here.name), here)
        try:
            without = replace(found.setting, strategy=replace(found.setting.strategy, **{word: there}))
            gain = 1 - found.iteration.iteration_s / self._iteration_s(without, None)
        except UsageError:
            return f"{word} {name} cannot be judged by itself: the default does not fit the other words"
        usual_name = write(kind_of(word, there.name), there)
        if gain < _NOTICED:
            return f"{name} instead of {usual_name} is predicted to gain nothing by itself"
        until = self._until(found, without)
        where = "at any link speed" if until is None else f"the link is the bottleneck up to {until}"
        return f"{name} gains {units.percent(gain)}: {where}"

    def _until(self, found: Settled, without: Setting) -> str | None:
        """The link speed above which a word gains nothing, as text; None if there is none."""
        beta = found.setting.cluster.constants["between.beta"].value
        low, high = 8 / beta if beta else _FASTEST, _FASTEST

        def pays(bit_per_s: float) -> bool:
            gain = 1 - self._iteration_s(found.setting, bit_per_s) / self._iteration_s(without, bit_per_s)
            return gain >= _NOTICED

        if low >= high or pays(high):
            return None
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if pays(middle) else (low, middle)
        return units.link_rate(float(f"{math.sqrt(low * high):.1g}"))

    def _iteration_s(self, setting: Setting, bit_per_s: float | None) -> float:
        assert self._model is not None
        if bit_per_s is not None:
            setting = replace(setting, cluster=with_links_of(setting.cluster, bit_per_s))
        return simulate(setting, self._model).iteration_s
