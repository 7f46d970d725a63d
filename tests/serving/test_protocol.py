"""The protocol of the owners of weights: laws that hold for every order of messages and every rule."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import MismatchError
from syncline.serving.protocol import ALL, Action, Apply, Ledger, Measure, Release, Request, Rule
from syncline.sync.bsp import Bsp
from syncline.testing.serving import Choose, Play, played, values_of

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


def chooser(data: st.DataObject) -> Choose:
    """Who speaks next, and which bucket, is whatever Hypothesis likes."""
    return lambda several: data.draw(st.sampled_from(several))


worlds = st.integers(1, 5)
lengths = st.integers(1, 4)


@given(st.data(), worlds, lengths, rules, parts, st.integers(0, 2))
def test_owners_keep_their_promises_under_every_rule(
    data: st.DataObject, workers: int, steps: int, rule: Rule, buckets: Sequence[int], norms: int
) -> None:
    """The laws of ``testing.serving``: versions grow, pushes are applied once, nobody waits in vain or for ever."""
    played(workers, steps, rule, chooser(data), buckets, norms)


@given(st.data(), worlds, lengths, st.integers(0, 3), st.booleans(), parts)
def test_a_worker_is_never_further_ahead_than_the_bound(
    data: st.DataObject, workers: int, steps: int, staleness: int, merges: bool, buckets: Sequence[int]
) -> None:
    log = Play(workers, Bounded(staleness, merges), chooser(data), buckets).run(steps)
    clocks, released = {bucket: [0] * workers for bucket in buckets}, {bucket: [0] * workers for bucket in buckets}
    for entry in log:
        if isinstance(entry, Request):
            clocks[entry.bucket][entry.worker] = entry.clock
        elif isinstance(entry, Release):
            for worker in entry.workers:
                released[entry.bucket][worker] += 1
                assert released[entry.bucket][worker] <= min(clocks[entry.bucket]) + staleness


@given(st.data(), worlds, lengths, st.integers(0, 1))
def test_in_bulk_synchronous_mode_the_order_of_messages_does_not_matter(
    data: st.DataObject, workers: int, steps: int, norms: int
) -> None:
    everyone = tuple(range(workers))
    wanted: list[Action] = []
    for step in range(1, steps + 1):
        wanted += [Measure(ALL, step, everyone)] * norms
        wanted += [Apply(ALL, step, ALL, values_of(0, step, Bsp())), Release(everyone, ALL)]
    log = Play(workers, Bsp(), chooser(data), norms=norms).run(steps)
    assert [entry for entry in log if not isinstance(entry, Request)] == wanted


@given(st.data(), st.integers(2, 4), st.integers(0, 12), rules, parts, st.integers(0, 1))
def test_a_wrong_message_raises_and_changes_nothing(
    data: st.DataObject, workers: int, correct: int, rule: Rule, buckets: Sequence[int], norms: int
) -> None:
    play = Play(workers, rule, chooser(data), buckets, norms)
    for _ in range(correct):
        if able := play.able(8):
            play.say(play.next_of(play.choose(able)))
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
