"""Searchers: which candidate to measure next, when there is time to measure only a few.

A space has a few axes (an architecture, a codec, a bucket size). A candidate is a choice on each axis that applies to
it. The caller asks a searcher for a candidate, measures it, tells it the seconds, and asks again. This file owns the
space and the rules for all searchers: no candidate twice, no invalid one, None when all were asked. A searcher is a
file of this folder and decides only the order. ``syncline_bench.tuner`` uses them.

    space = Space(axes, valid=can_be_built, predict=predicted_seconds)
    searcher = registry.get("searchers", "bayes").target(space, seed=0)
    while (candidate := searcher.ask()) is not None and there_is_time():
        searcher.tell(candidate, measure(candidate))
    searcher.best

Searchers are pure: no clock, no file, no global random numbers. Equal spaces, seeds and answers give equal questions in
every process. So a search is repeated or resumed by asking and telling the same again.

Searchers do not know what a candidate means, how it is measured, or how good the prediction is. Times are compared by
their ratio: 10 % of an iteration are 10 % on every network.

The chance of a candidate to run after some have failed follows a noisy-or model (Pearl, "Probabilistic Reasoning in
Intelligent Systems", 1988): a candidate fails if one of its choices does. Each choice has a probability of failure,
which expectation maximisation estimates from the successes and failures. After a first failure every choice of that
candidate gets a share of the blame. Each later success of one of them moves its share to the others, until the culprit
has all of it. Nothing is excluded: a candidate that shares many choices with failures only comes late.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UsageError

Indices = NDArray[np.intp]
Floats = NDArray[np.float64]

MOST_CANDIDATES = 200_000
"""The largest space that is listed: a searcher considers every candidate before every question."""

LIKELY = 0.6
"""A candidate waits while its chance to run is below this share of the best chance."""


@dataclass(frozen=True)
class Axis:
    """One thing to choose, with its possible choices, which must be hashable.

    ``ordered`` says that neighbours are similar, as sizes are; list them so that steps have about the same factor.
    ``when`` gives the choices on earlier axes for which this axis applies: ``{"schedule": ("priority", "split")}``.
    """

    name: str
    choices: tuple[Any, ...]
    ordered: bool = False
    when: Mapping[str, Collection[Any]] = field(default_factory=dict)

    def applies(self, chosen: Mapping[str, Any]) -> bool:
        """Whether the axis applies given these choices. A candidate has no choice on an axis that does not apply."""
        return all(name in chosen and chosen[name] in choices for name, choices in self.when.items())


@dataclass(frozen=True, eq=False)
class Candidate(Mapping[str, Any]):
    """A choice on every axis that applies, by the axis's name; equal to any mapping with the same choices."""

    choices: tuple[tuple[str, Any], ...]

    def __getitem__(self, name: str) -> Any:
        for known, choice in self.choices:
            if known == name:
                return choice
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.choices)

    def __len__(self) -> int:
        return len(self.choices)

    def __hash__(self) -> int:
        return hash(frozenset(self.choices))

    def __str__(self) -> str:
        return " ".join(f"{name}={choice}" for name, choice in self.choices)


class Space:
    """All valid candidates of some axes, each once, with their predicted seconds.

    ``valid`` is called once for every combination. ``predict`` is called once for every valid candidate when a searcher
    first needs it, and returns seconds, or None without a prediction. Raises UsageError for inconsistent axes, for a
    space without candidates, and for one that is too large to list.
    """

    def __init__(
        self,
        axes: Collection[Axis],
        valid: Callable[[Candidate], bool] = lambda _: True,
        predict: Callable[[Candidate], float | None] = lambda _: None,
    ) -> None:
        self.axes = tuple(axes)
        _check_axes(self.axes)
        self.candidates = tuple(self._valid(valid))
        if not self.candidates:
            names = ", ".join(axis.name for axis in self.axes)
            raise UsageError(f"no candidate is valid: every combination of the axes {names} was refused")
        self._places = {candidate: index for index, candidate in enumerate(self.candidates)}
        self._predict = predict
        self._predicted_s: Floats | None = None
        self.columns = self._columns()

    def candidate(self, choices: Mapping[str, Any]) -> Candidate:
        """The candidate with these choices; choices on axes that do not apply are left out.

        Raises UsageError for an axis that is unknown or missing, and for a choice that an axis does not have.
        """
        unknown = choices.keys() - {axis.name for axis in self.axes}
        if unknown:
            raise UsageError(f"the space has no axis {min(unknown)!r}: choose from {_names(self.axes)}")
        chosen: dict[str, Any] = {}
        for axis in self.axes:
            if not axis.applies(chosen):
                continue
            if axis.name not in choices:
                raise UsageError(f"the choice of {axis.name} is missing: give one of {_list(axis.choices)}")
            if choices[axis.name] not in axis.choices:
                raise UsageError(f"{axis.name}={choices[axis.name]} is not a choice: choose from {_list(axis.choices)}")
            chosen[axis.name] = choices[axis.name]
        return Candidate(tuple(chosen.items()))

    def index(self, candidate: Mapping[str, Any]) -> int:
        """The index of a candidate in ``candidates``; raises UsageError if it is not there."""
        found = self._places.get(candidate if isinstance(candidate, Candidate) else self.candidate(candidate))
        if found is None:
            raise UsageError(f"{candidate} is not a valid candidate of the space")
        return found

    @property
    def predicted_s(self) -> Floats:
        """The predicted seconds of every candidate, NaN without a prediction."""
        if self._predicted_s is None:
            self._predicted_s = np.array([self._prediction(candidate) for candidate in self.candidates])
        return self._predicted_s

    def _prediction(self, candidate: Candidate) -> float:
        seconds = self._predict(candidate)
        if seconds is None:
            return math.nan
        return _checked(seconds, f"the prediction for {candidate}")

    def _valid(self, valid: Callable[[Candidate], bool]) -> Iterator[Candidate]:
        found = 0
        for chosen in self._combinations({}, 0):
            candidate = Candidate(tuple(chosen.items()))
            if not valid(candidate):
                continue
            found += 1
            if found > MOST_CANDIDATES:
                raise UsageError(
                    f"more than {MOST_CANDIDATES:,} candidates are too many to search: offer fewer choices of"
                    f" {_names(self.axes)}"
                )
            yield candidate

    def _combinations(self, chosen: dict[str, Any], place: int) -> Iterator[dict[str, Any]]:
        if place == len(self.axes):
            yield chosen
            return
        axis = self.axes[place]
        if not axis.applies(chosen):
            yield from self._combinations(chosen, place + 1)
            return
        for choice in axis.choices:
            yield from self._combinations({**chosen, axis.name: choice}, place + 1)

    def _columns(self) -> Indices:
        """The index of each candidate's choice on each axis, -1 if the axis does not apply; (candidates, axes)."""
        places = [{choice: place for place, choice in enumerate(axis.choices)} for axis in self.axes]
        return np.array(
            [
                [
                    known[each[axis.name]] if axis.name in each else -1
                    for axis, known in zip(self.axes, places, strict=True)
                ]
                for each in self.candidates
            ],
            dtype=np.intp,
        ).reshape(len(self.candidates), len(self.axes))


class Searcher(ABC):
    """Asks for candidates and is told their seconds. A searcher implements ``choose``, and ``learn`` if needed.

    ``told`` has the answers by the index of the candidate: seconds, or None for a failure.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.told: dict[int, float | None] = {}
        self._left = np.ones(len(space.candidates), dtype=bool)

    @final
    def ask(self) -> Candidate | None:
        """The next candidate to measure: valid, and never asked or told before. None if none is left.

        May be called again before the answer is told.
        """
        left = np.flatnonzero(self._left)
        if not len(left):
            return None
        chances = self.chances(left)
        left = left[chances >= LIKELY * chances.max()]
        index = int(left[0]) if len(left) == 1 else int(self.choose(left))
        self._left[index] = False
        return self.space.candidates[index]

    @final
    def tell(self, candidate: Mapping[str, Any], seconds: float | None) -> None:
        """Record a measurement: seconds, or None if it failed or was refused, so that similar candidates come late.

        Any valid candidate may be told, asked or not, such as the strategy that already runs; for a repeated candidate
        the last answer counts. An interrupted measurement is told with the seconds until then. Raises UsageError for a
        candidate outside the space, and for seconds that are not a positive number.
        """
        index = self.space.index(candidate)
        if seconds is not None:
            seconds = _checked(seconds, f"the time of {self.space.candidates[index]}")
        self._left[index] = False
        self.told[index] = seconds
        self.learn(index, seconds)

    @final
    @property
    def best(self) -> Candidate | None:
        """The fastest candidate told; None before the first measurement."""
        measured = {index: seconds for index, seconds in self.told.items() if seconds is not None}
        return self.space.candidates[min(measured, key=measured.__getitem__)] if measured else None

    @abstractmethod
    def choose(self, left: Indices) -> int:
        """One of ``left``: indices of at least two candidates, likely to run, neither asked nor told before."""
        ...

    def learn(self, index: int, seconds: float | None) -> None:  # noqa: B027 - most need nothing besides ``told``
        """Called after every answer, for a searcher that keeps more than ``told`` has."""

    def chances(self, left: Indices) -> Floats:
        """The chance of each of ``left`` to run, given the failures so far; 1 while there are none."""
        tried = np.fromiter(self.told, dtype=np.intp, count=len(self.told))
        failed = np.array([self.told[index] is None for index in self.told], dtype=bool)
        return chances_to_run(self.space.columns, tried, failed)[left]

    def expected_s(self, left: Indices) -> Floats:
        """The predicted seconds of ``left``, divided by their chance to run; infinite without a prediction."""
        return np.nan_to_num(self.space.predicted_s[left], nan=np.inf) / self.chances(left)


def _check_axes(axes: tuple[Axis, ...]) -> None:
    known: dict[str, Axis] = {}
    for axis in axes:
        if axis.name in known:
            raise UsageError(f"two axes have the name {axis.name!r}: give each its own")
        if not axis.choices or len(set(axis.choices)) != len(axis.choices):
            raise UsageError(f"{axis.name} needs at least one choice, and each only once: got {_list(axis.choices)}")
        for name, choices in axis.when.items():
            if name not in known:
                raise UsageError(f"{axis.name} depends on {name!r}: list that axis before it")
            strange = [choice for choice in choices if choice not in known[name].choices]
            if strange:
                raise UsageError(f"{axis.name} depends on {name}={strange[0]}, but {name} has no such choice")
        known[axis.name] = axis
    if not known:
        raise UsageError("a space needs at least one axis: give one")


def _checked(seconds: float, what: str) -> float:
    """The seconds as a float; raises UsageError unless they are a positive, finite number."""
    number = float(seconds)
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{what} is {number} s: a positive number is needed, or None")
    return number


def _names(axes: Collection[Axis]) -> str:
    return ", ".join(axis.name for axis in axes)


def _list(choices: Collection[Any]) -> str:
    return ", ".join(str(choice) for choice in choices) or "nothing"


SUSPECTED = 0.05
"""The prior probability of failure of a choice, with the weight of one trial."""

ROUNDS = 30


def chances_to_run(columns: Indices, tried: Indices, failed: NDArray[np.bool_]) -> Floats:
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


def flags(columns: Indices) -> Floats:
    """1 where a candidate makes a choice, with a column for each choice of each axis."""
    return np.concatenate(
        [column[:, np.newaxis] == np.arange(column.max(initial=0) + 1) for column in columns.T], axis=1
    ).astype(np.float64)
