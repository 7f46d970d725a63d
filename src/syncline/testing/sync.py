"""Laws of sync modes: answers depend only on their arguments, no worker waits forever, and promises are kept.

Building a strategy checks whether engines support a mode's answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from ..nouns import Layer, Spec
from ..plans.check import check_mixing
from ..serving.protocol import ALL
from ..strategy.grammar import read_part
from ..strategy.parts import build
from ..sync import Agrees, Averages, Mixes, SyncMode, mixes_of, wrong_application
from .laws import Laws, require
from .serving import played
from .training import SLICED, Worker, go_together

_HORIZON = 10_000
"""The number of steps within which workers must exchange at least once."""


def check_sync(mode: str | SyncMode, *, seed: int = 0, examples: int = 30) -> tuple[str, ...]:
    """Check a sync mode, or the registered one of a text such as ``"ssp(staleness=2)"``, against all laws.

    Returns the names of the laws. Raises BrokenLaw, an AssertionError with the law, the sync mode and the failing
    example. ``examples`` are drawn for every law, from ``seed``.
    """
    built: SyncMode = build("sync", read_part(mode)) if isinstance(mode, str) else mode
    return LAWS.hold(built, f"sync mode {mode}", seed, examples)


@dataclass(frozen=True)
class Case:
    """A sync mode, some workers, their number of steps, and the seed of their order."""

    mode: SyncMode
    workers: int
    steps: int
    seed: int

    def draw(self) -> np.random.Generator:
        """A random generator for choices of a law."""
        return np.random.default_rng([self.seed, 1])

    def __str__(self) -> str:
        return f"{self.workers} workers and {self.steps} steps (seed {self.seed})"


LAWS: Laws[SyncMode, Case] = Laws()


def runs(mode: SyncMode, seed: int, count: int) -> Iterator[Case]:
    """Groups of up to five workers with a few steps."""
    draw = np.random.default_rng(seed)
    drawn = [(int(draw.integers(1, 6)), int(draw.integers(1, 6)), int(draw.integers(0, 2**32))) for _ in range(count)]
    return (Case(mode, *case) for case in sorted(drawn))


@LAWS.law(runs)
def what_it_asks_for_is_known(case: Case) -> None:
    """Questions are answered by True or False, and exchanged weights are combined in exactly one way."""
    mode = case.mode
    answers = {"merges": mode.merges, "due": mode.due(0), "may_proceed": mode.may_proceed(1, 0)}
    if isinstance(mode, Averages):
        answers["averages"] = mode.averages(0)
        ways = isinstance(mode, Agrees), isinstance(mode, Mixes)
        require(sum(ways) == 1, f"weights are exchanged, and {sum(ways)} of agree() and mix() say what becomes of them")
    for name, answer in answers.items():
        require(isinstance(answer, bool), f"{name} answers {answer!r}, not True or False")
    require(not (why := wrong_application(mode)), f"it {why}")


@LAWS.law(runs)
def the_same_question_gets_the_same_answer(case: Case) -> None:
    """Answers do not depend on earlier calls, because each worker and each owner asks at different times."""
    clocks = [(clock, slowest) for clock in range(case.steps + 1) for slowest in range(clock + 1)]
    averages = case.mode.averages if isinstance(case.mode, Averages) else lambda _: False
    due = {step: (case.mode.due(step), averages(step)) for step in range(case.steps)}
    may = {(clock, slowest): case.mode.may_proceed(clock, slowest) for clock, slowest in clocks}
    draw = case.draw()
    for step in draw.permutation(case.steps):
        again = case.mode.due(int(step)), averages(int(step))
        require(again == due[step], f"what step {step} exchanges is answered differently when asked again")
    for place in draw.permutation(len(clocks)):
        clock, slowest = clocks[place]
        allowed = case.mode.may_proceed(clock, slowest)
        require(
            allowed == may[clock, slowest], f"may_proceed({clock}, {slowest}) is answered differently when asked again"
        )


@LAWS.law(runs)
def the_slowest_may_always_go_on(case: Case) -> None:
    """No run deadlocks. A worker that may proceed may still proceed when the slowest worker has caught up."""
    for clock in range(20 * case.steps):
        require(case.mode.may_proceed(clock, clock), f"may_proceed({clock}, {clock}) is False: the slowest would wait")
        may = [case.mode.may_proceed(clock, slowest) for slowest in range(clock + 1)]
        require(may == sorted(may), f"at clock {clock} a worker that may go on may not when the slowest has caught up")


@LAWS.law(runs)
def workers_exchange_at_last(case: Case) -> None:
    """Workers exchange gradients or weights in some steps, and never both in the same step."""
    some, mode = False, case.mode
    averaging = mode if isinstance(mode, Averages) else None  # a while, because finding out takes long
    for step in range(_HORIZON):
        due, averages = mode.due(step), averaging is not None and averaging.averages(step)
        require(not (due and averages), f"step {step} is due, and weights are averaged after it")
        some = some or due or averages
    require(some, f"in none of the first {_HORIZON} steps anything is exchanged")


@LAWS.law(runs)
def agreed_weights_are_found_alike_by_all(case: Case) -> None:
    """The same numbers give the same bits, element by element. Equal weights stay unchanged."""
    mode, draw = case.mode, case.draw()
    if not isinstance(mode, Agrees):
        return
    pull = mode.pull(case.workers)
    require(0 < pull <= 1, f"pull({case.workers}) is {pull}: a share above 0 and up to 1")
    agreed, mean = draw.standard_normal(9).astype(np.float32), draw.standard_normal(9).astype(np.float32)
    whole, memory = agreed.copy(), np.zeros_like(agreed) if mode.remembers else None
    still = agreed.copy()
    mode.agree(still, np.zeros_like(mean), None if memory is None else memory.copy())
    require(np.array_equal(still, agreed), "workers that do not differ change what they agree on")
    apart = agreed.copy(), None if memory is None else memory.copy()
    for _ in range(case.steps):
        mode.agree(whole, mean.copy(), memory)
        for place in range(mean.size):
            part = slice(place, place + 1)
            mode.agree(apart[0][part], mean[part].copy(), None if apart[1] is None else apart[1][part])
    require(np.array_equal(apart[0], whole), "an element's agreement depends on other elements")
    require(whole.dtype == np.float32, f"weights of float32 become {whole.dtype}")


@LAWS.law(runs)
def mixing_keeps_the_mean_and_reaches_everybody(case: Case) -> None:
    """Every plan is proved; matrices are doubly stochastic, connected over a period, and reproducible."""
    if not isinstance(case.mode, Mixes):
        return
    for workers in {1, 2, case.workers, int(case.draw().integers(1, 65))}:
        plans = mixes_of(case.mode, workers)
        require(bool(plans), f"a period of {workers} workers has no exchange")
        check_mixing(plans)
        again = [plan.digest for plan in mixes_of(case.mode, workers)]
        require(again == [plan.digest for plan in plans], f"of {workers} workers, plans are others when asked again")
        whole = {plan.members == tuple(range(workers)) == tuple(range(plan.world)) for plan in plans}
        require(whole == {True}, f"a plan of {workers} workers is between others")


@LAWS.law(runs)
def owners_keep_their_promises(case: Case) -> None:
    """In any order of messages every push is applied once and in order, and no worker waits longer than the rule says.

    Workers may leave or meet between two steps.
    """
    draw = case.draw()
    for buckets, norms, stops in product(((ALL,), (2, 0, 1)), (0, 1), (False, True)):
        played(case.workers, case.steps, case.mode, lambda several: int(draw.choice(several)), buckets, norms, stops)


@LAWS.law(runs)
def training_keeps_its_promises(case: Case) -> None:
    """With every kind of schedule, due exchanges are agreed on and made once, and every step is applied."""
    draw = case.draw()
    layers = [
        Layer(Spec(f"w{index}", (int(draw.integers(1, 9)),)), *map(float, draw.integers(0, 6, 2)))
        for index in range(case.workers)
    ]
    for schedule in SLICED:
        if go_together(schedule, case.mode):
            Worker(layers, schedule, case.mode).train([int(index) for index in draw.permutation(len(layers))])
