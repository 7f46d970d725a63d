"""Laws of sync modes: answers depend only on their arguments, no worker waits forever, and promises are kept.

Building a strategy checks whether engines support a mode's answers. ``Play`` simulates workers and an owner of their
weights with arbitrary message order: it drives ``serving.protocol`` without messages, threads or clocks. The caller
chooses the next message. The laws read a log of all messages and answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import ge

import numpy as np

from ..nouns import Layer, Spec
from ..plans.check import check_mixing
from ..serving import protocol
from ..serving.protocol import ALL, Action, Ledger, Measure, Release, Request, Rule
from ..strategy.grammar import read_part
from ..strategy.words import build
from ..sync import Agrees, Averages, Mixes, SyncMode, backup_of, mixes_of, wrong_application
from .laws import Laws, require
from .schedules import SLICED, Worker, go_together

Choose = Callable[[Sequence[int]], int]
"""Chooses one of several numbers."""

Log = Sequence[Request | Action]


def values_of(worker: int, step: int, rule: Rule) -> dict[str, float]:
    """The values of a push: the same on all workers if it is merged, else the worker's own."""
    return {"lr": 1.0 / step} if rule.merges else {"lr": 1.0 / step, "of": worker}


@dataclass
class Played:
    """A worker's state in the protocol: the buckets of its step that are still to be pushed and to be returned.

    ``step`` is the number of the next step, ``made`` the number of finished steps. The worker meets the others after
    ``meets`` steps and leaves after ``leaves``, if these are set.
    """

    step: int = 1
    made: int = 0
    meets: int = -1
    leaves: int = -1
    to_push: set[int] = field(default_factory=set)
    to_come: set[int] = field(default_factory=set)
    to_ask: int = 0
    asking: bool = False
    meeting: bool = False
    gone: bool = False


class Play:
    """Workers and an owner whose messages come in an arbitrary order. ``log`` records everything.

    ``buckets`` are pushed separately; ``norms`` is how often a worker asks for the norm in every step. With ``stops``
    each worker meets the others and leaves them after random numbers of its steps, if the rule allows it.
    """

    def __init__(
        self,
        workers: int,
        rule: Rule,
        choose: Choose,
        buckets: Sequence[int] = (ALL,),
        norms: int = 0,
        stops: int = 0,
    ) -> None:
        self.ledger, self.rule, self.buckets = Ledger(workers, rule, buckets), rule, buckets
        self.norms = 0 if backup_of(rule) else norms  # without a rule there is no one to meet
        self.choose, self.stops = choose, stops
        self.workers = [Played() for _ in range(workers)]
        self.log: list[Request | Action] = []
        for played in self.workers:
            if stops and not rule.merges:
                played.meets, played.leaves = (choose(range(-1, stops + 1)), choose(range(stops + 1)))
            self._begin(played)

    def _begin(self, played: Played) -> None:
        played.to_push, played.to_come, played.to_ask = set(self.buckets), set(self.buckets), self.norms

    def able(self, steps: int) -> list[int]:
        """The workers that can send. A worker that has pushed its whole step waits for all answers."""
        return [
            worker
            for worker, played in enumerate(self.workers)
            if (played.made < steps or played.leaves >= 0)
            and played.to_push
            and not (played.asking or played.meeting or played.gone)
        ]

    def next_of(self, worker: int) -> Request:
        """A worker's next message: an open question, else the push of a chosen bucket."""
        played = self.workers[worker]
        values = values_of(worker, played.step, self.rule)
        if len(played.to_push) == len(self.buckets) and played.to_ask == self.norms:
            if played.made == played.meets:
                return Request("meet", worker, played.step)
            if played.made == played.leaves:
                return Request("leave", worker, played.step)
        if played.to_ask:
            return Request("norm", worker, played.step, values)
        return Request("push", worker, played.step, values, self.choose(sorted(played.to_push)))

    def say(self, request: Request) -> None:
        """Deliver a worker's message to the owner, and the owner's answers to the workers."""
        played = self.workers[request.worker]
        if request.kind == "norm":
            played.asking = True
        elif request.kind == "push":
            played.to_push.discard(request.bucket)
        else:
            played.meeting, played.gone = request.kind == "meet", request.kind == "leave"
        self.log.append(request)
        for action in self.ledger.handle(request):
            self.log.append(action)
            if isinstance(action, Measure):
                for worker in action.workers:
                    require(self.workers[worker].asking, f"worker {worker} gets a norm that it did not request")
                    self.workers[worker].asking = False
                    self.workers[worker].to_ask -= 1
            elif isinstance(action, Release):
                for worker in action.workers:
                    self._come(worker, action.bucket)

    def _come(self, worker: int, bucket: int) -> None:
        played = self.workers[worker]
        require(not played.gone, f"worker {worker} is released after it has left")
        pushed = bucket not in played.to_push or played.meeting
        require(pushed, f"worker {worker} is released before it has pushed")
        require(bucket in played.to_come, f"worker {worker} is released twice")
        played.to_come.discard(bucket)
        if not played.to_come:
            played.made, played.step = played.made + (not played.meeting), self.ledger.clocks[worker] + 1
            if played.meeting:
                played.meeting, played.meets = False, -1
            self._begin(played)

    def run(self, steps: int) -> Log:
        """Run until all workers have made ``steps`` steps, with a random sender each time."""
        while able := self.able(steps):
            late = self.ledger.awaited
            if not self._anybody_waits():
                require(not late, f"no worker waits, but the owner waits for {late}")
            may_speak = self.able(max(played.made for played in self.workers) + 1)
            require(
                late.keys() <= set(may_speak), f"the owner waits for {sorted(late)}, but some of these wait themselves"
            )
            self.say(self.next_of(self.choose(able)))
        reached = [played.made for played in self.workers]
        wanted = [steps if played.leaves < 0 else played.leaves for played in self.workers]
        require(reached == wanted, f"all workers wait after {reached} of {wanted} steps: a deadlock")
        clocks = self.ledger.clocks
        right = all(map(ge, clocks, reached)) if self.stops else clocks == reached
        require(right, f"the clocks end at {clocks}")
        return self.log

    def _anybody_waits(self) -> bool:
        return any(
            played.asking or played.meeting or played.to_come - played.to_push
            for played in self.workers
            if not played.gone
        )


def versions_only_grow(log: Log, workers: int, rule: Rule, buckets: Sequence[int] = (ALL,)) -> None:
    """A bucket's version grows by one with every update."""
    if backup_of(rule):  # their number depends on which pushes are late
        workers = 0
    found: dict[int, list[int]] = defaultdict(list)
    pushes: dict[int, int] = defaultdict(int)
    for entry in log:
        if isinstance(entry, protocol.Apply):
            found[entry.bucket].append(entry.version)
        elif isinstance(entry, Request) and entry.kind == "push":
            pushes[entry.bucket] += 1
    for bucket in {*buckets, *found}:
        updates = len(found[bucket]) if not workers else pushes[bucket] // (workers if rule.merges else 1)
        wanted = list(range(1, updates + 1))
        require(found[bucket] == wanted, f"bucket {bucket} has the versions {found[bucket]} instead of {wanted}")


def clocks_only_grow(log: Log) -> None:
    """Each push of a bucket has a larger clock than the worker's previous push of it, also after a meeting."""
    clocks: dict[tuple[int, int], int] = defaultdict(int)
    for entry in log:
        if isinstance(entry, Request) and entry.kind == "push":
            at = entry.worker, entry.bucket
            require(entry.clock > clocks[at], f"{entry} is not after step {clocks[at]}")
            clocks[at] = entry.clock


def every_push_is_applied_once(log: Log, workers: int, rule: Rule) -> None:
    """Pushes are applied in order: a merged update after all its pushes, any other with the values of its push."""
    if backup_of(rule):
        return
    pushed, done = defaultdict[tuple[int, int], list[Request]](list), defaultdict[tuple[int, int], int](int)
    for entry in log:
        if isinstance(entry, Request) and entry.kind == "push":
            pushed[entry.worker, entry.bucket].append(entry)
        elif isinstance(entry, protocol.Apply):
            merged = entry.worker == ALL
            require(merged == rule.merges, f"{entry} where merges={rule.merges}")
            for worker in range(workers) if merged else [entry.worker]:
                at = worker, entry.bucket
                require(done[at] < len(pushed[at]), f"{entry} comes before the push of worker {worker}")
                push = pushed[at][done[at]]
                done[at] += 1
                require(push.values == entry.values, f"{entry} does not have the values of {push}")
                require(push.clock == entry.clock, f"{entry} does not have the step of {push}")
    wanted = {at: len(requests) for at, requests in pushed.items()}
    require(done == wanted, f"{dict(done)} of {wanted} pushes were applied, counted by worker and bucket")


def every_push_is_added_once(log: Log, workers: int, rule: Rule) -> None:
    """With backup workers, an owner adds a push at once, and an update contains at most one push of each worker.

    After a meeting all pushes are in the weights.
    """
    if not backup_of(rule):
        return
    waiting, sent = defaultdict[int, list[protocol.Add]](list), defaultdict[tuple[int, int], int](int)
    versions, moving = defaultdict[int, int](int), set(range(workers))
    pushed: Request | None = None
    for entry in log:
        if isinstance(entry, Request):
            require(pushed is None, f"{pushed} is not added at once")
            pushed = entry if entry.kind == "push" else None
            moving -= {entry.worker} if entry.kind in ("meet", "leave") else set()
        elif isinstance(entry, protocol.Add):
            wanted = None if pushed is None else (pushed.worker, pushed.bucket, pushed.clock, pushed.values)
            require(wanted == (entry.worker, entry.bucket, entry.clock, entry.values), f"{entry} is not {pushed}")
            twice = any(one.worker == entry.worker for one in waiting[entry.bucket])
            require(not twice, f"{entry} is added to an earlier push of the same worker")
            pushed = None
            waiting[entry.bucket].append(entry)
        elif isinstance(entry, protocol.Apply):
            require(bool(waiting[entry.bucket]), f"{entry} is of nothing")
            waiting[entry.bucket].clear()
            versions[entry.bucket] = entry.version
        elif isinstance(entry, Release):
            require(
                bool(moving) or not waiting[entry.bucket], f"the update of a meeting leaves out {waiting[entry.bucket]}"
            )
            sent |= {(worker, entry.bucket): versions[entry.bucket] for worker in entry.workers}
            if moving.isdisjoint(entry.workers):
                moving |= set(entry.workers)


def the_newest_values_count(log: Log) -> None:
    """An update uses the last values of the active worker with the most pushes, or of the latest push among equals."""
    pushed, left = defaultdict[int, list[Request]](list), set[int]()
    for entry in log:
        if isinstance(entry, Request) and entry.kind == "push":
            pushed[entry.bucket].append(entry)
        elif isinstance(entry, Request) and entry.kind == "leave":
            left.add(entry.worker)
        elif isinstance(entry, protocol.Apply) and entry.worker != ALL:
            mine = pushed[entry.bucket]
            made = {worker: [one for one in mine if one.worker == worker] for worker in {one.worker for one in mine}}
            most = max(len(several) for worker, several in made.items() if worker not in left)
            last = [several[-1] for worker, several in made.items() if len(several) == most and worker not in left]
            wanted = max(last, key=mine.index)
            require(entry.newest == wanted.values, f"{entry} does not have the values of {wanted}")


def the_lag_counts_the_updates_of_others(log: Log) -> None:
    """The lag of a push counts the updates between the worker's release and the application of the push."""
    versions, sent = defaultdict[int, int](int), defaultdict[tuple[int, int], int](int)
    for entry in log:
        if isinstance(entry, protocol.Apply | protocol.Add):
            lag = versions[entry.bucket] - sent[entry.worker, entry.bucket]
            require(entry.worker == ALL or entry.lag == lag, f"{entry} should have a lag of {lag}")
        if isinstance(entry, protocol.Apply):
            versions[entry.bucket] = entry.version
        elif isinstance(entry, Release):
            sent |= {(worker, entry.bucket): versions[entry.bucket] for worker in entry.workers}


class _Standing:
    """The progress of the workers per bucket, reconstructed from a log."""

    def __init__(self, workers: int, buckets: Sequence[int]) -> None:
        self.clocks = {bucket: [0] * workers for bucket in buckets}
        self.waiting = {bucket: set[int]() for bucket in buckets}
        self.moving, self.meeting, self.pushes = set(range(workers)), set[int](), dict.fromkeys(buckets, 0)

    def hear(self, request: Request) -> None:
        """Process a worker's message."""
        if request.kind == "push":
            self.clocks[request.bucket][request.worker] = request.clock
            self.waiting[request.bucket].add(request.worker)
            self.pushes[request.bucket] += 1
        elif request.kind != "norm":
            self.moving.discard(request.worker)
            if request.kind == "meet":
                self.meeting.add(request.worker)

    def slowest(self, bucket: int, backup: int = 0) -> int:
        """The smallest clock of the active workers, without the ``backup`` slowest."""
        clocks = sorted(self.clocks[bucket][worker] for worker in self.moving)
        return clocks[min(backup, len(clocks) - 1)] if clocks else 0

    def part(self) -> None:
        """Process a meeting of all workers."""
        for clocks in self.clocks.values():
            for worker in self.meeting:
                clocks[worker] = max(max(every) for every in self.clocks.values())
        self.moving |= self.meeting
        self.meeting.clear()


def no_worker_proceeds_before_the_rule_allows(
    log: Log, workers: int, rule: Rule, buckets: Sequence[int] = (ALL,)
) -> None:
    """A worker proceeds as soon as the rule allows it and all possible updates are made, and not before.

    A release reports the worker's lead over the slowest worker.
    """
    stand, versions = _Standing(workers, buckets), dict.fromkeys(buckets, 0)
    for place, entry in enumerate(log):
        if isinstance(entry, Request):
            stand.hear(entry)
        elif isinstance(entry, protocol.Apply):
            versions[entry.bucket] = entry.version
        elif isinstance(entry, Release):
            met = not stand.moving
            if stand.meeting and (met or set(entry.workers) == stand.meeting):
                require(met, f"{entry} comes before all workers have met")
                stand.part()
            mine = stand.clocks[entry.bucket]
            possible = min(mine) if rule.merges else stand.pushes[entry.bucket]
            made = versions[entry.bucket] == possible or backup_of(rule) > 0
            require(made, f"{entry} comes before the update that was possible")
            slowest, waited_for = stand.slowest(entry.bucket), stand.slowest(entry.bucket, backup_of(rule))
            for worker, ahead in zip(entry.workers, entry.ahead, strict=True):
                stand.waiting[entry.bucket].discard(worker)
                allowed = rule.may_proceed(mine[worker], waited_for)
                require(allowed, f"{entry} at the clocks {mine}: worker {worker} must wait for the slowest")
                require(
                    ahead == mine[worker] - slowest, f"{entry} at the clocks {mine}: worker {worker} has another lead"
                )
        if place + 1 == len(log) or isinstance(log[place + 1], Request):
            for bucket in buckets:
                for worker in stand.waiting[bucket]:
                    slowest = stand.slowest(bucket, backup_of(rule))
                    held = not rule.may_proceed(stand.clocks[bucket][worker], slowest)
                    require(held, f"worker {worker} is held up at {stand.clocks[bucket]}")
            require(not stand.meeting or bool(stand.moving), "all workers have met, but still wait")


def played(
    workers: int, steps: int, rule: Rule, choose: Choose, buckets: Sequence[int], norms: int, stops: bool = False
) -> None:
    """Run a simulation and check all of these laws."""
    log = Play(workers, rule, choose, buckets, norms, steps if stops else 0).run(steps)
    versions_only_grow(log, workers, rule, buckets)
    clocks_only_grow(log)
    every_push_is_applied_once(log, workers, rule)
    every_push_is_added_once(log, workers, rule)
    the_newest_values_count(log)
    the_lag_counts_the_updates_of_others(log)
    no_worker_proceeds_before_the_rule_allows(log, workers, rule, buckets)


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
def its_answers_are_known(case: Case) -> None:
    """Questions are answered by True or False, and exchanged weights are combined in exactly one way."""
    mode = case.mode
    answers = {"merges": mode.merges, "due": mode.due(0), "may_proceed": mode.may_proceed(1, 0)}
    if isinstance(mode, Averages):
        answers["averages"] = mode.averages(0)
        ways = isinstance(mode, Agrees), isinstance(mode, Mixes)
        require(
            sum(ways) == 1, f"a mode that exchanges weights needs exactly one of agree() and mix(), not {sum(ways)}"
        )
    for name, answer in answers.items():
        require(isinstance(answer, bool), f"{name} returns {answer!r}, not True or False")
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
        require(again == due[step], f"due() or averages() of step {step} returns another value when called again")
    for place in draw.permutation(len(clocks)):
        clock, slowest = clocks[place]
        allowed = case.mode.may_proceed(clock, slowest)
        require(
            allowed == may[clock, slowest], f"may_proceed({clock}, {slowest}) returns another value when called again"
        )


@LAWS.law(runs)
def the_slowest_may_always_go_on(case: Case) -> None:
    """No run deadlocks. A worker that may proceed may still proceed when the slowest worker has caught up."""
    for clock in range(20 * case.steps):
        require(case.mode.may_proceed(clock, clock), f"may_proceed({clock}, {clock}) is False: the slowest would wait")
        may = [case.mode.may_proceed(clock, slowest) for slowest in range(clock + 1)]
        require(
            may == sorted(may), f"at clock {clock} a worker may proceed, but not after the slowest worker has caught up"
        )


@LAWS.law(runs)
def workers_exchange_in_some_steps(case: Case) -> None:
    """Workers exchange gradients or weights in some steps, and never both in the same step."""
    some, mode = False, case.mode
    averaging = mode if isinstance(mode, Averages) else None  # a while, because finding out takes long
    for step in range(_HORIZON):
        due, averages = mode.due(step), averaging is not None and averaging.averages(step)
        require(not (due and averages), f"step {step} is due and also averages weights")
        some = some or due or averages
    require(some, f"none of the first {_HORIZON} steps exchanges anything")


@LAWS.law(runs)
def all_workers_compute_the_same_agreed_weights(case: Case) -> None:
    """The same numbers give the same bits, element by element. Equal weights stay unchanged."""
    mode, draw = case.mode, case.draw()
    if not isinstance(mode, Agrees):
        return
    pull = mode.pull(case.workers)
    require(0 < pull <= 1, f"pull({case.workers}) is {pull}: it must be a share above 0 and up to 1")
    agreed, mean = draw.standard_normal(9).astype(np.float32), draw.standard_normal(9).astype(np.float32)
    whole, memory = agreed.copy(), np.zeros_like(agreed) if mode.remembers else None
    still = agreed.copy()
    mode.agree(still, np.zeros_like(mean), None if memory is None else memory.copy())
    require(np.array_equal(still, agreed), "the agreed weights change although the workers do not differ")
    apart = agreed.copy(), None if memory is None else memory.copy()
    for _ in range(case.steps):
        mode.agree(whole, mean.copy(), memory)
        for place in range(mean.size):
            part = slice(place, place + 1)
            mode.agree(apart[0][part], mean[part].copy(), None if apart[1] is None else apart[1][part])
    require(np.array_equal(apart[0], whole), "an agreed element depends on other elements")
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
        require(
            again == [plan.digest for plan in plans], f"for {workers} workers, the plans differ when requested again"
        )
        whole = {plan.members == tuple(range(workers)) == tuple(range(plan.world)) for plan in plans}
        require(whole == {True}, f"a plan for {workers} workers has other members")


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
