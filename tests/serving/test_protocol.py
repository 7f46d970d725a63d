"""The protocol of the owners of weights: laws that hold for every order of messages and every rule.

Workers without batches in the protocol of owners: they push zeros, and what others agree on is none of theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from syncline.errors import MismatchError
from syncline.serving.protocol import ALL, Action, Add, Apply, Ledger, Measure, Release, Request, Rule
from syncline.sync.asp import Asp
from syncline.sync.bsp import Bsp
from syncline.sync.ssp import Ssp
from syncline.testing.sync import Choose, Play, every_push_is_applied_once, played, values_of

VALUES = {"lr": 0.1, "scale": 1.0}


@dataclass(frozen=True)
class Ahead:
    """Workers run ahead by some steps at most, and what they push is merged: no engine does that."""

    staleness: int
    merges: bool = True

    def may_proceed(self, clock: int, slowest: int) -> bool:
        return clock <= slowest + self.staleness


bounds = st.integers(0, 3)
rules: st.SearchStrategy[Rule] = st.one_of(
    st.just(Bsp()), st.just(Asp()), st.builds(Ssp, bounds), st.builds(Ahead, st.integers(0, 9))
)
parts = st.sampled_from([(ALL,), (0,), (0, 1), (2, 0, 1)])


def chooser(data: st.DataObject) -> Choose:
    """Who speaks next, and which bucket, is whatever Hypothesis likes."""
    return lambda several: data.draw(st.sampled_from(several))


worlds = st.integers(1, 5)
lengths = st.integers(1, 4)


@given(st.data(), worlds, lengths, rules, parts, st.integers(0, 2), st.booleans())
def test_owners_keep_their_promises_under_every_rule(
    data: st.DataObject, workers: int, steps: int, rule: Rule, buckets: Sequence[int], norms: int, stops: bool
) -> None:
    """The laws of ``testing.sync``: versions grow, pushes are applied once, nobody waits in vain or for ever.

    Whoever meets the others, or leaves them, between two steps.
    """
    played(workers, steps, rule, chooser(data), buckets, norms, stops)


@given(st.data(), worlds, lengths, bounds, st.booleans(), parts)
def test_a_step_never_begins_further_ahead_than_the_bound(
    data: st.DataObject, workers: int, steps: int, staleness: int, merges: bool, buckets: Sequence[int]
) -> None:
    """Than the slowest is then."""
    rule: Rule = Ahead(staleness) if merges else Ssp(staleness)
    log = Play(workers, rule, chooser(data), buckets).run(steps)
    clocks, begun = {bucket: [0] * workers for bucket in buckets}, {bucket: [0] * workers for bucket in buckets}
    for entry in log:
        if isinstance(entry, Request):
            assert begun[entry.bucket][entry.worker] == entry.clock - 1
            assert entry.clock - 1 - min(clocks[entry.bucket]) <= staleness
            clocks[entry.bucket][entry.worker] = entry.clock
        elif isinstance(entry, Release):
            for worker, ahead in zip(entry.workers, entry.ahead, strict=True):
                begun[entry.bucket][worker] += 1
                assert begun[entry.bucket][worker] - min(clocks[entry.bucket]) == ahead <= staleness


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_fast_worker_comes_as_far_as_the_bound_and_no_further(staleness: int) -> None:
    ledger = Ledger(2, Ssp(staleness))
    for step in range(1, staleness + 2):
        assert ledger.awaited == {}
        *_, last = ledger.handle(Request("push", 0, step, VALUES))
        if step <= staleness:
            assert last == Release((0,), ALL, (step,), 0)
    assert ledger.awaited == {1: 1}
    *_, last = ledger.handle(Request("push", 1, 1, VALUES))
    assert last == Release((0, 1), ALL, (staleness, 0), 1)


@given(st.data(), st.integers(2, 5), lengths, st.one_of(st.just(Asp()), st.builds(Ssp, bounds)), parts)
def test_a_message_that_never_comes_stops_others_at_the_bound_and_nobody_else(
    data: st.DataObject, workers: int, steps: int, rule: Rule, buckets: Sequence[int]
) -> None:
    """Some worker says nothing any more, perhaps in the middle of a step: whom others wait for is it alone."""
    play, lost = Play(workers, rule, chooser(data), buckets), data.draw(st.integers(0, workers - 1))
    for _ in range(data.draw(st.integers(0, steps * workers * len(buckets)))):
        if able := play.able(steps):
            play.say(play.next_of(play.choose(able)))
    while able := [worker for worker in play.able(steps) if worker != lost]:
        play.say(play.next_of(play.choose(able)))
    made = [played.made for played in play.workers]
    bound = rule.staleness if isinstance(rule, Ssp) else steps
    others = [made[worker] for worker in range(workers) if worker != lost]
    late = play.ledger.awaited
    assert late.keys() <= {lost}
    assert all(min(steps, made[lost]) <= one <= steps for one in others)
    if not late:
        assert others == [steps] * (workers - 1)
    else:
        assert all(one - made[lost] <= bound + 1 for one in others)
    every_push_is_applied_once(play.log, workers, rule)


@given(st.data(), st.integers(1, 4), lengths)
def test_bulk_synchronous_owners_compute_what_one_worker_computes(
    data: st.DataObject, workers: int, steps: int
) -> None:
    """Whatever order messages come in: plain descent on sums of whole numbers, which have one value."""
    gradients = [[data.draw(st.integers(-8, 8)) for _ in range(steps)] for _ in range(workers)]
    weights, alone = 0, -sum(sum(each) for each in gradients)
    for entry in Play(workers, Bsp(), chooser(data)).run(steps):
        if isinstance(entry, Apply):
            weights -= sum(gradients[worker][entry.clock - 1] for worker in range(workers))
    assert weights == alone
    weights = 0
    for entry in Play(workers, Ssp(staleness=0), chooser(data)).run(steps):
        if isinstance(entry, Apply):
            weights -= gradients[entry.worker][entry.clock - 1]
    assert weights == alone


@given(st.data(), worlds, lengths, st.integers(0, 1))
def test_in_bulk_synchronous_mode_the_order_of_messages_does_not_matter(
    data: st.DataObject, workers: int, steps: int, norms: int
) -> None:
    everyone = tuple(range(workers))
    wanted: list[Action] = []
    for step in range(1, steps + 1):
        wanted += [Measure(ALL, step, everyone)] * norms
        values = values_of(0, step, Bsp())
        wanted += [Apply(ALL, step, step, ALL, values, values), Release(everyone, ALL, (0,) * workers, ALL)]
    log = Play(workers, Bsp(), chooser(data), norms=norms).run(steps)
    said = [entry for entry in log if not isinstance(entry, Request)]
    assert [replace(entry, by=ALL) if isinstance(entry, Release) else entry for entry in said] == wanted


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
    clock, kind = data.draw(st.integers(-1, 9)), data.draw(st.sampled_from(["push", "push", "norm", "meet", "leave"]))
    there = play.workers[worker] if 0 <= worker < workers else None
    assume(there is None or clock != there.step or (kind == "push" and bucket not in there.to_push))
    request: Any = Request(kind, worker, clock, values_of(worker, max(clock, 1), rule), bucket)
    with pytest.raises(MismatchError, match=f"rank {worker} sent a {kind}.* for step {clock}, but its next step is"):
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
    ledger = Ledger(1, Asp(), (0, 1))
    ledger.handle(Request("push", 0, 1, VALUES, 1))
    before = copy.deepcopy(vars(ledger))
    with pytest.raises(MismatchError, match="rank 0 sent a norm for step 1, but its next step is 1"):
        ledger.handle(Request("norm", 0, 1))
    assert vars(ledger) == before


def test_what_is_not_merged_need_not_agree() -> None:
    """One worker clips, the other does not, and their learning rates differ: that of the most advanced clock counts."""
    ledger, a, b, c, d = Ledger(2, Ssp(1)), {"lr": 0.2}, {"lr": 0.1}, {"lr": 0.3}, {"lr": 0.4}
    assert ledger.handle(Request("norm", 0, 1)) == [Measure(0, 1, (0,))]
    assert ledger.handle(Request("push", 1, 1, a)) == [Apply(1, 1, 1, ALL, a, a), Release((1,), ALL, (1,), 1)]
    assert ledger.handle(Request("push", 1, 2, b)) == [Apply(1, 2, 2, ALL, b, b)]
    assert ledger.awaited == {0: 1}
    assert ledger.handle(Request("push", 0, 1, c)) == [
        Apply(0, 1, 3, ALL, c, b, lag=2),
        Release((0, 1), ALL, (0, 1), 0),
    ]
    assert ledger.handle(Request("push", 0, 2, d)) == [Apply(0, 2, 4, ALL, d, d), Release((0,), ALL, (0,), 0)]


def test_who_leaves_is_the_slowest_no_more() -> None:
    ledger = Ledger(3, Ssp(staleness=0))
    ledger.handle(Request("push", 0, 1, VALUES))
    ledger.handle(Request("push", 2, 1, VALUES))
    assert ledger.awaited == {1: 1}
    assert ledger.handle(Request("leave", 1, 1)) == [Release((0, 2), ALL, (0, 0), 1)]
    assert ledger.awaited == {}
    with pytest.raises(MismatchError, match="rank 1 sent a push for step 1"):
        ledger.handle(Request("push", 1, 1, VALUES))
    with pytest.raises(MismatchError, match="rank 1 sent a leave for step 1"):
        ledger.handle(Request("leave", 1, 1))


def test_who_meets_holds_up_nobody_and_all_go_on_from_one_clock() -> None:
    ledger = Ledger(2, Ssp(staleness=1))
    ledger.handle(Request("push", 0, 1, VALUES))
    ledger.handle(Request("push", 0, 2, VALUES))
    assert ledger.awaited == {1: 1}
    assert ledger.handle(Request("meet", 1, 1)) == [Release((0,), ALL, (0,), 1)]
    assert ledger.awaited == {0: 3}
    assert ledger.handle(Request("meet", 0, 3)) == [Release((0, 1), ALL, (0, 0), 0)]
    assert ledger.clocks == [2, 2]
    assert ledger.awaited == {}
    with pytest.raises(MismatchError, match="rank 1 sent a push for step 1, but its next step is 3"):
        ledger.handle(Request("push", 1, 1, VALUES))
    ledger.handle(Request("push", 1, 3, VALUES))


def test_bsp_exchanges_gradients_in_every_step_and_holds_up_whoever_is_ahead() -> None:
    mode = Bsp()
    assert mode.merges
    assert all(mode.due(step) for step in range(5))
    assert mode.may_proceed(3, 3)
    assert not mode.may_proceed(4, 3)


def test_with_a_backup_worker_who_is_late_goes_on_at_once_and_counts_in_the_next_update() -> None:
    ledger = Ledger(3, Bsp(backup=1))

    def push(worker: int, clock: int) -> list[Action]:
        return ledger.handle(Request("push", worker, clock, VALUES))

    def add(worker: int, clock: int, lag: int = 0) -> Add:
        return Add(worker, clock, ALL, VALUES, lag)

    assert push(0, 1) == [add(0, 1)]
    assert ledger.awaited == {1: 1, 2: 1}
    for clock in (1, 2, 3):
        if clock > 1:
            assert push(0, clock) == [add(0, clock)]
        update = Apply(ALL, clock, clock, ALL, VALUES, VALUES)
        assert push(1, clock) == [add(1, clock), update, Release((0, 1), ALL, (clock, clock), 1)]
    # The others are doing something else: nobody else's push has to come for its own to count.
    assert push(2, 1) == [add(2, 1, lag=3), Release((2,), ALL, (0,), 2)]
    again = Apply(ALL, 3, 4, ALL, VALUES, VALUES)
    assert push(2, 2) == [again, add(2, 2, lag=1), Release((2,), ALL, (0,), 2)]
    assert ledger.awaited == {}


def test_what_is_added_to_others_has_no_norm_of_its_own() -> None:
    with pytest.raises(MismatchError, match="rank 0 asks for the norm of gradients that are added to others"):
        Ledger(3, Bsp(backup=1)).handle(Request("norm", 0, 1))


def test_a_rate_is_that_of_who_has_made_most_steps_after_a_meeting_too() -> None:
    """Workers go on from one clock then, and their schedules from where each has come; who leaves takes its own."""
    ledger = Ledger(3, Asp())

    def newest(worker: int, clock: int, lr: float) -> float:
        (update, *_) = ledger.handle(Request("push", worker, clock, {"lr": lr}))
        assert isinstance(update, Apply)
        return float(update.newest["lr"])

    assert [newest(0, clock, 1 / clock) for clock in (1, 2, 3)] == [1, 1 / 2, 1 / 3]
    assert newest(1, 1, 1.0) == 1 / 3
    for worker, clock in ((0, 4), (1, 2), (2, 1)):
        ledger.handle(Request("meet", worker, clock))
    assert newest(1, 4, 1 / 2) == 1 / 3
    assert newest(0, 4, 1 / 4) == 1 / 4
    ledger.handle(Request("leave", 0, 5))
    assert newest(1, 5, 1 / 3) == 1 / 3
    assert newest(2, 4, 1.0) == 1 / 3


def push(worker: int, clock: int, **values: Any) -> Request:
    return Request("push", worker, clock, values)


def shadow(worker: int, clock: int) -> Request:
    return Request("shadow", worker, clock)


def norm(worker: int, clock: int) -> Request:
    return Request("norm", worker, clock)


def together(workers: int, last: int, **values: Any) -> list[Action]:
    """The first step's one update, and that all go on, ``last`` being whom the others have waited for."""
    return [Apply(ALL, 1, 1, ALL, values, values), Release(tuple(range(workers)), ALL, (0,) * workers, last)]


def test_the_values_are_those_of_who_has_batches() -> None:
    ledger = Ledger(3, Bsp())
    assert ledger.handle(shadow(0, 1)) == []
    assert ledger.handle(push(2, 1, lr=0.1)) == []
    assert ledger.handle(shadow(1, 1)) == together(3, 1, lr=0.1)


@pytest.mark.parametrize("first", [True, False])
def test_a_norm_does_not_wait_for_who_has_no_batches(first: bool) -> None:
    """Whether its push comes before the question or behind it; it is not told the answer."""
    ledger = Ledger(3, Bsp())
    messages = [norm(0, 1), norm(2, 1)]
    messages.insert(0 if first else 2, shadow(1, 1))
    answers = [ledger.handle(message) for message in messages]
    assert answers == [[], [], [Measure(ALL, 1, (0, 2))]]
    assert ledger.awaited == {0: 1, 2: 1}
    assert ledger.handle(push(0, 1)) == []
    assert ledger.handle(push(2, 1)) == together(3, 2)


def test_the_last_with_batches_is_awaited_and_nobody_else() -> None:
    ledger = Ledger(3, Bsp())
    ledger.handle(shadow(1, 1))
    ledger.handle(norm(0, 1))
    assert ledger.awaited == {0: 1, 2: 1}


def test_somebody_has_batches() -> None:
    ledger = Ledger(2, Bsp())
    ledger.handle(shadow(0, 1))
    with pytest.raises(MismatchError, match="rank 1 takes part in step 1 without batches, and so do all"):
        ledger.handle(shadow(1, 1))
    assert ledger.handle(push(1, 1)) == together(2, 1)  # nothing has changed


def test_a_shadow_keeps_its_turn() -> None:
    ledger = Ledger(2, Bsp())
    for wrong in (shadow(0, 2), shadow(0, 0), shadow(2, 1)):
        with pytest.raises(MismatchError, match="its next step is"):
            ledger.handle(wrong)
    ledger.handle(shadow(0, 1))
    with pytest.raises(MismatchError, match="its next step is 2"):
        ledger.handle(shadow(0, 1))


@given(st.data(), st.integers(2, 5), st.integers(1, 6))
def test_every_step_is_one_update_whoever_has_run_out(data: st.DataObject, workers: int, steps: int) -> None:
    """In any order of messages; the values are never those of a worker without batches."""
    batches = [data.draw(st.integers(0, steps)) for _ in range(workers)]
    last = data.draw(st.integers(0, workers - 1))
    batches[last] = steps
    ledger, clocks, waiting, versions = Ledger(workers, Bsp()), [0] * workers, set[int](), 0
    while min(clocks) < steps:
        ready = [one for one in range(workers) if one not in waiting and clocks[one] < steps]
        worker = data.draw(st.sampled_from(ready))
        clocks[worker] += 1
        step = clocks[worker]
        waiting.add(worker)
        for action in ledger.handle(push(worker, step, step=step) if step <= batches[worker] else shadow(worker, step)):
            if isinstance(action, Apply):
                versions += 1
                assert (action.worker, action.version, action.values) == (ALL, versions, {"step": versions})
            if isinstance(action, Release):
                waiting.difference_update(action.workers)
    assert versions == steps
    assert ledger.awaited == {}
