"""The protocol of the owners of weights: laws that hold for every order of messages and every rule."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import MismatchError
from syncline.serving.protocol import ALL, Action, Apply, Ledger, Measure, Release, Request, Rule
from syncline.sync.bsp import Bsp

VALUES = {"lr": 0.1, "scale": 1.0}


@dataclass(frozen=True)
class Bounded:
    """Workers run ahead by some steps at most; alone, it is the stale synchronous parallel mode."""

    staleness: int
    merges: bool = False

    def may_proceed(self, clock: int, slowest: int) -> bool:
        return clock <= slowest + self.staleness


@dataclass(frozen=True)
class Unbounded:
    """Nobody ever waits; alone, it is the asynchronous mode."""

    merges: bool = False

    def may_proceed(self, clock: int, slowest: int) -> bool:  # noqa: ARG002
        return True


rules = st.one_of(
    st.just(Bsp()),
    st.builds(Bounded, st.integers(0, 3), st.booleans()),
    st.builds(Unbounded, st.booleans()),
)
parts = st.sampled_from([(ALL,), (0,), (0, 1), (2, 0, 1)])


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
    """Workers and an owner whose messages come in whatever order Hypothesis likes; ``log`` has all that was said."""

    def __init__(self, workers: int, rule: Rule, buckets: Sequence[int] = (ALL,), norms: int = 0) -> None:
        self.ledger, self.rule, self.buckets, self.norms = Ledger(workers, rule, buckets), rule, buckets, norms
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

    def next_of(self, worker: int, data: st.DataObject) -> Request:
        played = self.workers[worker]
        values = values_of(worker, played.step, self.rule)
        if played.to_ask:
            return Request("norm", worker, played.step, values)
        bucket = data.draw(st.sampled_from(sorted(played.to_push)))
        return Request("push", worker, played.step, values, bucket)

    def say(self, request: Request) -> None:
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
                    assert self.workers[worker].asking
                    self.workers[worker].asking = False
                    self.workers[worker].to_ask -= 1
            elif isinstance(action, Release):
                for worker in action.workers:
                    self._come(self.workers[worker], action.bucket)

    def _come(self, played: Played, bucket: int) -> None:
        assert bucket not in played.to_push, "released before it had pushed"
        assert bucket in played.to_come, "released twice"
        played.to_come.discard(bucket)
        if not played.to_come:
            played.step += 1
            self._begin(played)

    def run(self, data: st.DataObject, steps: int) -> list[Request | Action]:
        """Until all workers have made so many steps, who speaks next being anybody who may."""
        while able := self.able(steps):
            if not self._anybody_waits():
                assert not self.ledger.awaited
            else:
                late = self.ledger.awaited
                assert late.keys() <= set(self.able(max(step.step for step in self.workers) + 1)), "who waits is blamed"
            self.say(self.next_of(data.draw(st.sampled_from(able)), data))
        assert all(played.step > steps for played in self.workers), "somebody waits for nobody: a deadlock"
        assert self.ledger.clocks == [steps] * len(self.workers)
        return self.log

    def _anybody_waits(self) -> bool:
        return any(played.asking or played.to_come - played.to_push for played in self.workers)


def applied(log: Sequence[Request | Action]) -> dict[int, list[Apply]]:
    """The updates of every bucket, in order."""
    found: dict[int, list[Apply]] = defaultdict(list)
    for entry in log:
        if isinstance(entry, Apply):
            found[entry.bucket].append(entry)
    return found


worlds = st.integers(1, 5)
lengths = st.integers(1, 4)


@given(st.data(), worlds, lengths, rules, parts, st.integers(0, 2))
def test_versions_only_grow(
    data: st.DataObject, workers: int, steps: int, rule: Rule, buckets: Sequence[int], norms: int
) -> None:
    """By one with every update of a bucket; nobody waits for ever, however the messages come."""
    log = Play(workers, rule, buckets, norms).run(data, steps)
    updates = steps if rule.merges else steps * workers
    found = applied(log)
    assert found.keys() == set(buckets)
    for made in found.values():
        assert [entry.version for entry in made] == list(range(1, updates + 1))


@given(st.data(), worlds, lengths, rules, parts, st.integers(0, 1))
def test_every_push_is_applied_once_and_in_order(
    data: st.DataObject, workers: int, steps: int, rule: Rule, buckets: Sequence[int], norms: int
) -> None:
    """With its own values where it is an update by itself, and no sooner than it, and all it is merged with, came."""
    log = Play(workers, rule, buckets, norms).run(data, steps)
    pushed, done = defaultdict[tuple[int, int], list[Request]](list), defaultdict[tuple[int, int], int](int)
    for entry in log:
        if isinstance(entry, Request) and entry.kind == "push":
            pushed[entry.worker, entry.bucket].append(entry)
        elif isinstance(entry, Apply):
            merged = entry.worker == ALL
            assert merged == rule.merges
            for worker in range(workers) if merged else [entry.worker]:
                at = worker, entry.bucket
                push = pushed[at][done[at]]
                done[at] += 1
                assert push.values == entry.values
    assert done == {(worker, bucket): steps for worker in range(workers) for bucket in buckets}


@given(st.data(), worlds, lengths, rules, parts)
def test_nobody_goes_on_before_the_rule_allows(
    data: st.DataObject, workers: int, steps: int, rule: Rule, buckets: Sequence[int]
) -> None:
    """Nor waits longer, nor for an update that was possible; a worker is never further ahead than the bound."""
    log = Play(workers, rule, buckets).run(data, steps)
    clocks = {bucket: [0] * workers for bucket in buckets}
    versions, released = dict.fromkeys(buckets, 0), {bucket: [0] * workers for bucket in buckets}
    for place, entry in enumerate(log):
        if isinstance(entry, Request):
            clocks[entry.bucket][entry.worker] = entry.clock
        elif isinstance(entry, Apply):
            versions[entry.bucket] = entry.version
        elif isinstance(entry, Release):
            mine = clocks[entry.bucket]
            assert versions[entry.bucket] == (min(mine) if rule.merges else sum(mine)), "released before the update"
            for worker in entry.workers:
                released[entry.bucket][worker] += 1
                assert released[entry.bucket][worker] == mine[worker]
                assert rule.may_proceed(mine[worker], min(mine))
                if isinstance(rule, Bounded):
                    assert released[entry.bucket][worker] <= min(mine) + rule.staleness
        if place + 1 == len(log) or isinstance(log[place + 1], Request):
            for bucket in buckets:
                for worker, clock in enumerate(clocks[bucket]):
                    assert released[bucket][worker] == clock or not rule.may_proceed(clock, min(clocks[bucket]))


@given(st.data(), worlds, lengths, st.integers(0, 1))
def test_in_bulk_synchronous_mode_the_order_of_messages_does_not_matter(
    data: st.DataObject, workers: int, steps: int, norms: int
) -> None:
    everyone = tuple(range(workers))
    wanted: list[Action] = []
    for step in range(1, steps + 1):
        wanted += [Measure(ALL, step, everyone)] * norms
        wanted += [Apply(ALL, step, ALL, values_of(0, step, Bsp())), Release(everyone, ALL)]
    log = Play(workers, Bsp(), norms=norms).run(data, steps)
    assert [entry for entry in log if not isinstance(entry, Request)] == wanted


@given(st.data(), st.integers(2, 4), st.integers(0, 12), rules, parts, st.integers(0, 1))
def test_a_wrong_message_raises_and_changes_nothing(
    data: st.DataObject, workers: int, correct: int, rule: Rule, buckets: Sequence[int], norms: int
) -> None:
    play = Play(workers, rule, buckets, norms)
    for _ in range(correct):
        if able := play.able(8):
            play.say(play.next_of(data.draw(st.sampled_from(able)), data))
    before = copy.deepcopy(vars(play.ledger))
    worker, bucket = data.draw(st.integers(-1, workers)), data.draw(st.sampled_from([*buckets, 7]))
    clock, kind = data.draw(st.integers(-1, 9)), data.draw(st.sampled_from(["push", "push", "norm"]))
    there = play.workers[worker] if 0 <= worker < workers else None
    assume(there is None or clock != there.step or (kind == "push" and bucket not in there.to_push))
    request: Any = Request(kind, worker, clock, values_of(worker, max(clock, 1), rule), bucket)
    with pytest.raises(MismatchError, match=f"rank {worker} sent a {kind}.* for step {clock}, its next one is step"):
        play.ledger.handle(request)
    assert vars(play.ledger) == before


@pytest.mark.parametrize("kind", ["norm", "push"])
def test_values_that_differ_name_both_ranks_the_step_and_the_keys(kind: Any) -> None:
    ledger = Ledger(3, Bsp())
    ledger.handle(Request(kind, 2, 1, VALUES))
    before = copy.deepcopy(vars(ledger))
    with pytest.raises(MismatchError, match=r"rank 0 and rank 2 disagree .* step 1 \(lr\)"):
        ledger.handle(Request(kind, 0, 1, {**VALUES, "lr": 0.2}))
    assert vars(ledger) == before
    ledger.handle(Request(kind, 0, 1, VALUES))


@pytest.mark.parametrize("first", ["norm", "push"])
def test_a_worker_that_clips_while_another_does_not_is_an_error_and_no_deadlock(first: Any) -> None:
    ledger = Ledger(2, Bsp())
    ledger.handle(Request(first, 0, 1, VALUES))
    before = copy.deepcopy(vars(ledger))
    second: Any = "push" if first == "norm" else "norm"
    with pytest.raises(MismatchError, match=r"rank 1 sent a .* out of turn with rank 0.*clip_grad_norm_"):
        ledger.handle(Request(second, 1, 1, VALUES))
    assert vars(ledger) == before


def test_the_norm_is_asked_for_before_the_step_is_pushed() -> None:
    ledger = Ledger(1, Unbounded(), (0, 1))
    ledger.handle(Request("push", 0, 1, VALUES, 1))
    before = copy.deepcopy(vars(ledger))
    with pytest.raises(MismatchError, match="rank 0 sent a norm for step 1, its next one is step 1"):
        ledger.handle(Request("norm", 0, 1))
    assert vars(ledger) == before


def test_what_is_not_merged_need_not_agree() -> None:
    """One worker clips, the other does not, and their learning rates differ."""
    ledger = Ledger(2, Bounded(1))
    assert ledger.handle(Request("norm", 0, 1)) == [Measure(0, 1, (0,))]
    assert ledger.handle(Request("push", 1, 1, {"lr": 0.2})) == [Apply(1, 1, ALL, {"lr": 0.2}), Release((1,), ALL)]
    assert ledger.handle(Request("push", 1, 2, {"lr": 0.1})) == [Apply(1, 2, ALL, {"lr": 0.1})]
    assert ledger.awaited == {0: 1}
    assert ledger.handle(Request("push", 0, 1, {"lr": 0.3})) == [Apply(0, 3, ALL, {"lr": 0.3}), Release((0, 1), ALL)]


def test_bsp_exchanges_gradients_in_every_step_and_holds_up_whoever_is_ahead() -> None:
    mode = Bsp()
    assert mode.exchanges == "gradients"
    assert mode.merges
    assert all(mode.due(step) for step in range(5))
    assert mode.may_proceed(3, 3)
    assert not mode.may_proceed(4, 3)
