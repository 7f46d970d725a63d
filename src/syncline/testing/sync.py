"""Laws of sync modes: answers that depend on the question alone, nobody who waits for ever, promises that are kept.

Whether an engine does what a mode asks for is another question, which building a strategy answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from ..nouns import Layer, Spec
from ..serving.protocol import ALL
from ..strategy.grammar import read_part
from ..strategy.parts import build
from ..sync import SyncMode
from .laws import Laws, require
from .serving import played
from .training import SLICED, Worker

_HORIZON = 10_000
"""In so many steps workers have exchanged at least once."""


def check_sync(mode: str | SyncMode, *, seed: int = 0, examples: int = 30) -> tuple[str, ...]:
    """Hold a sync mode, or the registered one of a text such as ``"ssp(staleness=2)"``, to all laws.

    Returns the names of the laws. Raises BrokenLaw, an AssertionError with the law, the sync mode and the example that
    it fails for. So many ``examples`` are drawn for every law, from the ``seed``.
    """
    built: SyncMode = build("sync", read_part(mode)) if isinstance(mode, str) else mode
    return LAWS.hold(built, f"sync mode {mode}", seed, examples)


@dataclass(frozen=True)
class Case:
    """A sync mode, some workers, the steps that they make, and the seed of the order in which they do."""

    mode: SyncMode
    workers: int
    steps: int
    seed: int

    def draw(self) -> np.random.Generator:
        """For what a law chooses."""
        return np.random.default_rng([self.seed, 1])

    def __str__(self) -> str:
        return f"{self.workers} workers and {self.steps} steps (seed {self.seed})"


LAWS: Laws[SyncMode, Case] = Laws()


def runs(mode: SyncMode, seed: int, count: int) -> Iterator[Case]:
    """Groups of up to five workers that make a few steps."""
    draw = np.random.default_rng(seed)
    drawn = [(int(draw.integers(1, 6)), int(draw.integers(1, 6)), int(draw.integers(0, 2**32))) for _ in range(count)]
    return (Case(mode, *case) for case in sorted(drawn))


@LAWS.law(runs)
def what_it_asks_for_is_known(case: Case) -> None:
    """``exchanges`` names something that can travel; questions are answered by yes or no."""
    mode = case.mode
    known = "gradients", "parameters"
    require(mode.exchanges in known, f"exchanges is {mode.exchanges!r}, and can be one of {', '.join(known)}")
    for name, answer in (("merges", mode.merges), ("due", mode.due(0)), ("may_proceed", mode.may_proceed(1, 0))):
        require(isinstance(answer, bool), f"{name} answers {answer!r}, not True or False")


@LAWS.law(runs)
def the_same_question_gets_the_same_answer(case: Case) -> None:
    """Whatever was asked before: every worker and every owner asks for itself, at another time."""
    clocks = [(clock, slowest) for clock in range(case.steps + 1) for slowest in range(clock + 1)]
    due = {step: case.mode.due(step) for step in range(case.steps)}
    may = {(clock, slowest): case.mode.may_proceed(clock, slowest) for clock, slowest in clocks}
    draw = case.draw()
    for step in draw.permutation(case.steps):
        require(case.mode.due(int(step)) == due[step], f"due({step}) is answered differently when asked again")
    for place in draw.permutation(len(clocks)):
        clock, slowest = clocks[place]
        again = case.mode.may_proceed(clock, slowest)
        require(
            again == may[clock, slowest], f"may_proceed({clock}, {slowest}) is answered differently when asked again"
        )


@LAWS.law(runs)
def the_slowest_may_always_go_on(case: Case) -> None:
    """Or all would wait for ever; and whoever may go on still may when the slowest is less far behind."""
    for clock in range(20 * case.steps):
        require(case.mode.may_proceed(clock, clock), f"may_proceed({clock}, {clock}) is False: the slowest would wait")
        may = [case.mode.may_proceed(clock, slowest) for slowest in range(clock + 1)]
        require(may == sorted(may), f"at clock {clock} a worker that may go on may not when the slowest has caught up")


@LAWS.law(runs)
def workers_exchange_at_last(case: Case) -> None:
    """Some steps are due, or nobody would ever hear of the others."""
    some = any(case.mode.due(step) for step in range(_HORIZON))
    require(some, f"none of the first {_HORIZON} steps is due")


@LAWS.law(runs)
def owners_keep_their_promises(case: Case) -> None:
    """In any order of messages every push is applied once and in order, and nobody waits longer than the rule says.

    Whoever leaves the others, or meets them, between two steps.
    """
    draw = case.draw()
    for buckets, norms, stops in product(((ALL,), (2, 0, 1)), (0, 1), (False, True)):
        played(case.workers, case.steps, case.mode, lambda several: int(draw.choice(several)), buckets, norms, stops)


@LAWS.law(runs)
def training_keeps_its_promises(case: Case) -> None:
    """With whatever a schedule may ask for: what is due is agreed on and exchanged once, and every step is applied."""
    draw = case.draw()
    layers = [
        Layer(Spec(f"w{index}", (int(draw.integers(1, 9)),)), *map(float, draw.integers(0, 6, 2)))
        for index in range(case.workers)
    ]
    for schedule in SLICED:
        Worker(layers, schedule, case.mode).train([int(index) for index in draw.permutation(len(layers))])
