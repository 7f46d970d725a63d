"""Workers and an owner of their weights whose messages come in any order: what a sync mode is held to as a rule.

It drives ``serving.protocol`` without messages, threads or clocks. Who speaks next is for the caller to choose; what
has been said, and answered, is a log that the laws are read off.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..serving import protocol
from ..serving.protocol import ALL, Action, Ledger, Measure, Release, Request, Rule
from .laws import require

Choose = Callable[[Sequence[int]], int]
"""Picks one of several numbers."""

Log = Sequence[Request | Action]


def values_of(worker: int, step: int, rule: Rule) -> dict[str, float]:
    """What is merged has to be the same on all workers; what is not is each one's own."""
    return {"lr": 1.0 / step} if rule.merges else {"lr": 1.0 / step, "of": worker}


@dataclass
class Played:
    """A worker as the protocol wants it: which buckets of its step are still to be pushed, and to come back."""

    step: int = 1
    to_push: set[int] = field(default_factory=set)
    to_come: set[int] = field(default_factory=set)
    to_ask: int = 0
    asking: bool = False


class Play:
    """Workers and an owner whose messages come in whatever order is chosen; ``log`` has all that was said.

    ``buckets`` are what is pushed by itself, ``norms`` how often a worker asks for the norm in every step.
    """

    def __init__(
        self, workers: int, rule: Rule, choose: Choose, buckets: Sequence[int] = (ALL,), norms: int = 0
    ) -> None:
        self.ledger, self.rule, self.buckets, self.norms = Ledger(workers, rule, buckets), rule, buckets, norms
        self.choose = choose
        self.workers = [Played() for _ in range(workers)]
        self.log: list[Request | Action] = []
        for played in self.workers:
            self._begin(played)

    def _begin(self, played: Played) -> None:
        played.to_push, played.to_come, played.to_ask = set(self.buckets), set(self.buckets), self.norms

    def able(self, steps: int) -> list[int]:
        """Those who have something to say; who has pushed all of a step waits until all of it has come back."""
        return [
            worker
            for worker, played in enumerate(self.workers)
            if played.step <= steps and played.to_push and not played.asking
        ]

    def next_of(self, worker: int) -> Request:
        """What a worker says next: a question that it has, else the push of a bucket that is chosen."""
        played = self.workers[worker]
        values = values_of(worker, played.step, self.rule)
        if played.to_ask:
            return Request("norm", worker, played.step, values)
        return Request("push", worker, played.step, values, self.choose(sorted(played.to_push)))

    def say(self, request: Request) -> None:
        """Let the owner have a worker's message, and the workers what it answers."""
        played = self.workers[request.worker]
        if request.kind == "norm":
            played.asking = True
        else:
            played.to_push.discard(request.bucket)
        self.log.append(request)
        for action in self.ledger.handle(request):
            self.log.append(action)
            if isinstance(action, Measure):
                for worker in action.workers:
                    require(self.workers[worker].asking, f"worker {worker} is told of a norm that it did not ask for")
                    self.workers[worker].asking = False
                    self.workers[worker].to_ask -= 1
            elif isinstance(action, Release):
                for worker in action.workers:
                    self._come(worker, action.bucket)

    def _come(self, worker: int, bucket: int) -> None:
        played = self.workers[worker]
        require(bucket not in played.to_push, f"worker {worker} is released before it has pushed")
        require(bucket in played.to_come, f"worker {worker} is released twice")
        played.to_come.discard(bucket)
        if not played.to_come:
            played.step += 1
            self._begin(played)

    def run(self, steps: int) -> Log:
        """Until all workers have made so many steps, who speaks next being anybody who may."""
        while able := self.able(steps):
            late = self.ledger.awaited
            if not self._anybody_waits():
                require(not late, f"nobody waits, and {late} are waited for")
            may_speak = self.able(max(played.step for played in self.workers) + 1)
            require(late.keys() <= set(may_speak), f"of {sorted(late)}, who are waited for, some wait themselves")
            self.say(self.next_of(self.choose(able)))
        reached = [played.step - 1 for played in self.workers]
        require(min(reached) >= steps, f"after the steps {reached} of {steps} everybody waits: a deadlock")
        require(self.ledger.clocks == [steps] * len(self.workers), f"the clocks end at {self.ledger.clocks}")
        return self.log

    def _anybody_waits(self) -> bool:
        return any(played.asking or played.to_come - played.to_push for played in self.workers)


def versions_only_grow(log: Log, workers: int, steps: int, rule: Rule, buckets: Sequence[int] = (ALL,)) -> None:
    """By one with every update of a bucket."""
    found: dict[int, list[int]] = defaultdict(list)
    for entry in log:
        if isinstance(entry, protocol.Apply):
            found[entry.bucket].append(entry.version)
    updates = steps if rule.merges else steps * workers
    for bucket in {*buckets, *found}:
        wanted = list(range(1, updates + 1))
        require(found[bucket] == wanted, f"bucket {bucket} has the versions {found[bucket]} in place of {wanted}")


def every_push_is_applied_once(log: Log, workers: int, steps: int, rule: Rule, buckets: Sequence[int] = (ALL,)) -> None:
    """In order, with its own values where it is an update by itself, and no sooner than all it is merged with."""
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
                require(push.values == entry.values, f"{entry} is not with the values of {push}")
    wanted = {(worker, bucket): steps for worker in range(workers) for bucket in buckets}
    require(done == wanted, f"by worker and bucket, {dict(done)} pushes were applied")


def nobody_goes_on_before_the_rule_allows(log: Log, workers: int, rule: Rule, buckets: Sequence[int] = (ALL,)) -> None:
    """Nor waits longer, nor for an update that was possible."""
    clocks = {bucket: [0] * workers for bucket in buckets}
    versions, released = dict.fromkeys(buckets, 0), {bucket: [0] * workers for bucket in buckets}
    for place, entry in enumerate(log):
        if isinstance(entry, Request):
            if entry.kind == "push":
                clocks[entry.bucket][entry.worker] = entry.clock
        elif isinstance(entry, protocol.Apply):
            versions[entry.bucket] = entry.version
        elif isinstance(entry, Release):
            mine = clocks[entry.bucket]
            possible = min(mine) if rule.merges else sum(mine)
            require(versions[entry.bucket] == possible, f"{entry} comes before the update that was possible")
            for worker in entry.workers:
                released[entry.bucket][worker] += 1
                require(released[entry.bucket][worker] == mine[worker], f"{entry} is not for the step of {worker}")
                allowed = rule.may_proceed(mine[worker], min(mine))
                require(allowed, f"{entry} at the clocks {mine}: worker {worker} has to wait for the slowest")
        if place + 1 == len(log) or isinstance(log[place + 1], Request):
            for bucket in buckets:
                _nobody_waits_in_vain(clocks[bucket], released[bucket], rule)


def _nobody_waits_in_vain(clocks: Sequence[int], released: Sequence[int], rule: Rule) -> None:
    for worker, clock in enumerate(clocks):
        held = released[worker] != clock
        require(not (held and rule.may_proceed(clock, min(clocks))), f"worker {worker} is held up at {list(clocks)}")


def played(workers: int, steps: int, rule: Rule, choose: Choose, buckets: Sequence[int], norms: int) -> None:
    """Run a play, and hold it to all of these laws."""
    log = Play(workers, rule, choose, buckets, norms).run(steps)
    versions_only_grow(log, workers, steps, rule, buckets)
    every_push_is_applied_once(log, workers, steps, rule, buckets)
    nobody_goes_on_before_the_rule_allows(log, workers, rule, buckets)
