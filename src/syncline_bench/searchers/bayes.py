"""``bayes``: Bayesian optimisation of the error of the prediction.

A Gaussian process models the logarithm of measured over predicted seconds, the residual. The next candidate has the
greatest expected improvement of the seconds themselves, which are the prediction times the exponential of the residual
(Mockus 1975; Jones, Schonlau and Welch, "Efficient Global Optimization", 1998). So the first question is the predicted
best. A prediction that is wrong by the same factor everywhere leads to the same questions as a right one. One that is
wrong about a codec is corrected for all candidates with that codec after a measurement or two.

The residual is a sum over the axes (Duvenaud, Nickisch and Rasmussen, "Additive Gaussian Processes", 2011). On a
categorical axis each choice has its own effect; on an ordered axis each step has one, so that neighbours are similar.
Pairs of choices add effects, and so does each candidate by itself. A handful of measurements is too few to fit the
sizes of these effects. So the answer averages over models drawn from a prior, each weighted by its likelihood (Snoek,
Larochelle and Adams, "Practical Bayesian Optimization of Machine Learning Algorithms", 2012).

Why no library does this. Optuna's GPSampler and similar samplers choose by the values that they are told. Told
residuals, they would look for the least residual, not the least time; told seconds, they cannot use the prediction.
Their building blocks are private. scikit-learn's GaussianProcessRegressor fits one model without a prior, and silencing
its warnings changes state that all threads of a process share. The remaining work is a Cholesky decomposition with a
row for each measurement, which NumPy has. So nothing has to be installed, and the thread count and random state of a
training run in the same process stay untouched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

import numpy as np

from syncline.registry import register

from . import Axis, Floats, Indices, Searcher, Space

MODELS = 128
"""Models drawn from the prior. The average is over the ``AVERAGED`` most probable ones at most."""
AVERAGED = 12

WEIGHED = 48
"""The likelihood of models uses only this many first measurements: more change little and cost cubic time."""

RESIDUAL = 0.15, 0.8
"""The prior of the residuals' standard deviation: its median, and the standard deviation of its logarithm.

The three priors below have the same form.
"""
UNEVEN = 1.0, 0.7
"""The contribution of an axis relative to other axes."""
PAIRS = 0.5, 0.7
"""The contribution of pairs of choices relative to single choices."""
OWN = 0.02, 0.7
"""The contribution of each candidate by itself, including the noise of its measurement."""

CONSTANT = 1.0
"""The standard deviation of what all candidates share, besides the mean that is subtracted."""
UNPREDICTED = 1.0
"""The standard deviation of what all candidates without a prediction share."""


@register("searchers", "bayes")
@final
class Bayes(Searcher):
    """Chooses by expected improvement under a Gaussian process fitted to the ratio of measured to predicted seconds."""

    def __init__(self, space: Space, *, seed: int = 0) -> None:
        super().__init__(space)
        self._models = _drawn_models(np.random.default_rng(seed), len(space.axes))
        features = [_features(axis, column) for axis, column in zip(space.axes, space.columns.T, strict=True)]
        self._features = np.concatenate(features, axis=1)
        self._axis_of = np.repeat(np.arange(len(features)), [each.shape[1] for each in features])

    def choose(self, left: Indices) -> int:
        measured = np.array([index for index, seconds in self.told.items() if seconds is not None], dtype=np.intp)
        chances = self.chances(left)
        if not len(measured):
            return int(left[np.argmin(self._mean[left] - np.log(chances))])
        seconds = np.log([seconds for seconds in self.told.values() if seconds is not None])
        residual = seconds - self._mean[measured]
        shift = float(residual.mean())
        gain, expected = np.zeros(len(left)), np.zeros(len(left))
        for model, weight in self._weighed(measured, residual - shift):
            mean, deviation = self._posterior(model, measured, residual - shift, left)
            mean += self._mean[left] + shift
            gain += weight * _improvement(float(seconds.min()), mean, deviation)
            expected += weight * mean
        if gain.max() <= 0:  # none is expected to be faster: take the nearest
            return int(left[np.argmin(expected - np.log(chances))])
        return int(left[np.argmax(gain * chances)])

    @cached_property
    def _predicted(self) -> Floats:
        """1 where seconds are predicted, else 0."""
        return (~np.isnan(self.space.predicted_s)).astype(np.float64)

    @cached_property
    def _mean(self) -> Floats:
        """The logarithm of the predicted seconds, or the median of all where there is no prediction."""
        found = np.log(self.space.predicted_s)
        middle = float(np.median(found[self._predicted > 0])) if self._predicted.any() else 0.0
        return np.where(self._predicted > 0, found, middle)

    def _covariance(self, model: _Model, one: Indices, other: Indices) -> Floats:
        """The covariance of candidates' residuals, shape (one, other), without each candidate's independent part."""
        weights = model.axes[self._axis_of] ** 2
        sums = _product(self._features[one] * weights, self._features[other].T)
        unpredicted = np.outer(1 - self._predicted[one], 1 - self._predicted[other])
        return np.asarray(
            sums + model.pairs**2 * (sums / np.sum(model.axes**2)) ** 2 + CONSTANT**2 + UNPREDICTED**2 * unpredicted
        )

    def _variance(self, model: _Model, which: Indices) -> Floats:
        """The diagonal of the covariance."""
        sums = self._features[which] ** 2 @ (model.axes[self._axis_of] ** 2)
        shared = CONSTANT**2 + UNPREDICTED**2 * (1 - self._predicted[which])
        return np.asarray(sums + model.pairs**2 * (sums / np.sum(model.axes**2)) ** 2 + shared)

    def _decomposed(self, model: _Model, measured: Indices, residual: Floats) -> tuple[Floats, Floats]:
        """The Cholesky factor of the measurements' covariance, and the residuals whitened by it."""
        lower = np.linalg.cholesky(self._covariance(model, measured, measured) + model.own**2 * np.eye(len(measured)))
        return np.asarray(lower), np.asarray(np.linalg.solve(lower, residual))

    def _weighed(self, measured: Indices, residual: Floats) -> list[tuple[_Model, float]]:
        """The most probable models given the measurements, with their probabilities."""
        measured, residual = measured[:WEIGHED], residual[:WEIGHED]
        scores = np.empty(len(self._models))
        for place, model in enumerate(self._models):
            lower, white = self._decomposed(model, measured, residual)
            scores[place] = -0.5 * white @ white - np.log(np.diagonal(lower)).sum()
        best = np.argsort(-scores, kind="stable")[:AVERAGED]
        weights = np.exp(scores[best] - scores[best[0]])
        return [(self._models[place], weight) for place, weight in zip(best, weights / weights.sum(), strict=True)]

    def _posterior(self, model: _Model, measured: Indices, residual: Floats, left: Indices) -> tuple[Floats, Floats]:
        """The mean and standard deviation of the residuals of ``left``."""
        lower, white = self._decomposed(model, measured, residual)
        across = _product(np.asarray(np.linalg.inv(lower)), self._covariance(model, measured, left))
        variance = self._variance(model, left) - (across**2).sum(axis=0)
        return across.T @ white, np.sqrt(np.maximum(variance, 0) + model.own**2)


@dataclass(frozen=True, eq=False)
class _Model:
    """The standard deviations of the parts of a residual: for each axis, for pairs, for each candidate."""

    axes: Floats
    pairs: float
    own: float


def _drawn_models(drawn: np.random.Generator, axes: int) -> list[_Model]:
    def positive(prior: tuple[float, float], size: tuple[int, ...]) -> Floats:
        return prior[0] * np.exp(drawn.normal(0, prior[1], size))

    totals, uneven = positive(RESIDUAL, (MODELS,)), positive(UNEVEN, (MODELS, axes)) / np.sqrt(axes)
    pairs, own = positive(PAIRS, (MODELS,)), positive(OWN, (MODELS,))
    return [
        _Model(axes=total * shares, pairs=float(total * pair), own=float(alone))
        for total, shares, pair, alone in zip(totals, uneven, pairs, own, strict=True)
    ]


def _product(one: Floats, other: Floats) -> Floats:
    """The matrix product, computed in this thread: a BLAS would spin on cores that a training run may need.

    Decompositions stay in this thread while they are small, up to some 60 measurements.
    """
    return np.asarray(np.einsum("ij,jk->ik", one, other))


def _features(axis: Axis, column: Indices) -> Floats:
    """Features of choices on an axis: a flag for each choice, or for each step of sizes below the choice.

    Inner products of steps are the covariance of a random walk. (candidates, choices)
    """
    if axis.ordered:
        steps = np.arange(1, len(axis.choices))
        return np.asarray((column[:, np.newaxis] >= steps) / np.sqrt(max(len(steps), 1)))
    return np.asarray(column[:, np.newaxis] == np.arange(len(axis.choices)), dtype=np.float64)


def _improvement(best: float, mean: Floats, deviation: Floats) -> Floats:
    """The expected gain over the best, as a share of its seconds; all arguments are normal logarithms."""
    distance = (best - mean) / deviation
    found = _normal(distance) - np.exp(mean - best + deviation**2 / 2) * _normal(distance - deviation)
    return np.asarray(np.maximum(found, 0))


def _normal(values: Floats) -> Floats:
    """The distribution function of the normal distribution, within 1e-7 (Abramowitz and Stegun, 26.2.17)."""
    size = np.abs(values)
    part = 1 / (1 + 0.2316419 * size)
    series = part * (
        0.319381530 + part * (-0.356563782 + part * (1.781477937 + part * (-1.821255978 + part * 1.330274429)))
    )
    above = np.exp(-(size**2) / 2) / np.sqrt(2 * np.pi) * series
    return np.asarray(np.where(values > 0, 1 - above, above))
