"""An owner's updates: merged or single pushes, how much each counts, and the memory that they arrive in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.engine.order import Work
from syncline.errors import UsageError
from syncline.nouns import Group, Slice
from syncline.serving.merged import Updating
from syncline.serving.owner import Owner, Shares, check_kept, looking_ahead, shared_rate
from syncline.serving.protocol import ALL, Request
from syncline.serving.shard import Holding, Shard, add_up
from syncline.serving.single import rooms
from syncline.strategy.grammar import Part
from syncline.sync import momentum_with
from syncline.sync.asp import Asp
from syncline.sync.bsp import Bsp
from syncline.sync.ssp import Ssp

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": False}


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=65))
def test_shares_of_a_round_add_up_once_all_are_known(weights: list[float]) -> None:
    shares = Shares(len(weights))
    for worker, weight in enumerate(weights):
        shares.of(worker, weight)
    found = [shares.of(worker, weight) for worker, weight in enumerate(weights)]
    assert sum(found) == pytest.approx(len(weights))
    assert found[0] * weights[-1] == pytest.approx(found[-1] * weights[0])


@pytest.mark.parametrize("weight", [1.0, 3.0, 256.0])
@pytest.mark.parametrize("workers", [1, 2, 3, 65])
def test_equal_workers_count_alike_from_the_first_push_on(workers: int, weight: float) -> None:
    shares = Shares(workers)
    assert [shares.of(worker, weight) for worker in range(workers)] == [1.0] * workers


def test_without_samples_a_push_counts_nothing() -> None:
    shares = Shares(2)
    assert shares.of(0, 0.0) == 0.0
    assert shares.of(1, 4.0) == 2.0


def test_an_optimizer_without_a_rate_is_named() -> None:
    with pytest.raises(UsageError, match=r"sync=asp .* group 1 has no number as 'lr': use asp\(rate=own\)"):
        shared_rate([{"lr": 1.0}, {}], 2, "asp")


@pytest.mark.parametrize("change", [{"momentum": 0.0}, {"dampening": 0.1}, {"nesterov": None}, {"momentum": None}])
def test_who_has_no_nesterov_cannot_look_ahead(change: dict[str, Any]) -> None:
    groups = [SGD, {key: value for key, value in (SGD | change).items() if value is not None}]
    with pytest.raises(
        UsageError, match=r"sync=asp\(momentum=dana\) looks ahead .* group 1 .* use asp\(momentum=own\)"
    ):
        looking_ahead(groups, "asp")
    assert looking_ahead([SGD], "asp") == [SGD | {"nesterov": True}]


@pytest.mark.parametrize("mode", [Asp(), Ssp(3)])
def test_only_sgd_with_momentum_looks_ahead_by_default(mode: Asp | Ssp) -> None:
    assert momentum_with(mode, [SGD, SGD | {"nesterov": True}]) == "dana"
    muon = {key: value for key, value in SGD.items() if key != "dampening"}  # orthogonal steps add up otherwise
    for other in ({"lr": 0.1}, SGD | {"momentum": 0}, SGD | {"dampening": 0.1}, muon):
        assert momentum_with(mode, [SGD, other]) == "shared"
    assert momentum_with(mode, []) == momentum_with(Bsp(), [SGD]) == "shared"
    assert momentum_with(replace(mode, momentum="own"), [SGD]) == "own"


def test_an_optimizer_that_keeps_nothing_has_nothing_for_each_worker() -> None:
    with pytest.raises(UsageError, match=r"sync=ssp\(momentum=own\) keeps .*, and Plain, as it is set, has no state"):
        check_kept("own", "ssp", "Plain", keeps=False)
    check_kept("shared", "ssp", "Plain", keeps=False)
    check_kept("own", "ssp", "Heavy", keeps=True)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from(["f2", "f4", "f8"])), min_size=1),
    st.integers(0, 5),
)
def test_parts_of_workers_lie_side_by_side(shapes: list[tuple[int, int, str]], workers: int) -> None:
    asked: list[int] = []

    def allocate(nbytes: int, dtype: Any) -> Any:
        asked.append(nbytes)
        return np.zeros(nbytes, dtype)

    session: Any = SimpleNamespace(engine=SimpleNamespace(allocate=allocate))
    arrays = [np.zeros(start + size + 3, dtype) for start, size, dtype in shapes]
    mine = [slice(start, start + size) for start, size, _ in shapes]
    found = rooms(session, arrays, mine, workers)
    for worker, room in enumerate(found):
        for number, (array, part) in enumerate(zip(room, mine, strict=True)):
            assert (array.shape, array.dtype) == (arrays[number].shape, arrays[number].dtype)
            array[part] = 1 + worker * len(arrays) + number
    for worker, room in enumerate(found):
        for number, (array, part) in enumerate(zip(room, mine, strict=True)):
            assert (array[part] == 1 + worker * len(arrays) + number).all()
    owned = sum(array[part].nbytes for array, part in zip(arrays, mine, strict=True))
    whole = sum(array.nbytes for array in arrays)
    assert sum(asked) <= 1 + whole + workers * owned + 64 * (workers + 1) * len(arrays)


class Turning:
    """The part of an engine that updates need, which does everything at once."""

    def __init__(self) -> None:
        self.left = 0  # works that are not done

    def promise(self, label: str, tolerant: bool = False) -> Work:
        self.left += 1
        return Work(label, tolerant)

    def fulfil(self, work: Work) -> None:
        assert not work.done
        self.left -= 1
        work.done = True
        work.call_back()

    def then(self, label: str, works: Sequence[Work], call: Callable[[], None], *, tolerant: bool) -> Work:
        assert tolerant  # a script may end between backward and step
        work, waiting = self.promise(label), list(works)

        def step() -> None:
            if waiting:
                waiting.pop().when_done(step)
            else:
                call()
                self.fulfil(work)

        step()
        return work


@given(data=st.data(), buckets=st.integers(1, 4), steps=st.integers(1, 4), apart=st.booleans())
def test_each_bucket_is_updated_once_a_step_when_it_may_be(
    data: st.DataObject, buckets: int, steps: int, apart: bool
) -> None:
    """Behind its push and the values of its step, in whatever order these come; nothing stays behind."""
    engine: Any = Turning()
    updating = Updating(engine, buckets, apart)
    pushes: dict[tuple[int, int], Work] = {}
    told = 0
    updated: list[tuple[int, int]] = []
    sent: list[tuple[int, int]] = []

    def update(step: int, bucket: int) -> None:
        for one in range(buckets) if bucket == ALL else (bucket,):
            assert step < told
            assert pushes[step, one].done
            assert (bucket == ALL) is not apart
            updated.append((step, one))

    def expect(step: int, bucket: int) -> None:
        """As an owner does it: the next push is posted when a bucket goes back."""
        push = pushes[step, bucket] = engine.promise("a push")

        def call() -> None:
            assert (step, bucket) in updated
            sent.append((step, bucket))
            if step + 1 < steps:
                expect(step + 1, bucket)

        updating.after(bucket, [push], call)

    for bucket in range(buckets):
        expect(0, bucket)
    while len(sent) < steps * buckets:
        coming = [place for place, push in pushes.items() if not push.done]
        free = told == 0 or sum(step == told - 1 for step, _ in sent) == buckets
        choices: list[Any] = [*coming, *(["values"] if told < steps and free else [])]
        chosen = data.draw(st.sampled_from(choices))
        if chosen == "values":
            opens = updating.say(lambda bucket, step=told: update(step, bucket))
            told += 1
            opens()
        else:
            engine.fulfil(pushes[chosen])
    assert sorted(updated) == sorted(sent) == [(step, bucket) for step in range(steps) for bucket in range(buckets)]
    assert engine.left == 0


@given(data=st.data(), buckets=st.integers(2, 5))
def test_no_bucket_waits_for_another(data: st.DataObject, buckets: int) -> None:
    """With the values known, each goes back when it has come."""
    engine: Any = Turning()
    updating = Updating(engine, buckets, apart=True)
    updated: list[int] = []
    updating.say(updated.append)()
    pushes = [engine.promise("a push") for _ in range(buckets)]
    works = [updating.after(bucket, [push]) for bucket, push in enumerate(pushes)]
    for count, bucket in enumerate(data.draw(st.permutations(range(buckets))), 1):
        engine.fulfil(pushes[bucket])
        assert works[bucket].done
        assert (len(updated), updated[-1]) == (count, bucket)


@given(buckets=st.integers(1, 4), apart=st.booleans(), told=st.integers(0, 2))
def test_nothing_stays_behind_what_is_closed(buckets: int, apart: bool, told: int) -> None:
    """Pushes have come for which no values will; nothing follows them."""
    engine: Any = Turning()
    updating = Updating(engine, buckets, apart)
    updated: list[int] = []
    went_on: list[int] = []
    for step in range(told + 1):
        pushes = [engine.promise("a push") for _ in range(buckets)]
        for bucket, push in enumerate(pushes):
            updating.after(bucket, [push], partial(went_on.append, bucket))
        if step < told:
            updating.say(updated.append)()
        for push in pushes:
            engine.fulfil(push)
    before = list(updated)
    updating.close()
    assert engine.left == 0
    assert updated == before
    assert len(went_on) == told * buckets


class Plain:
    """Gradient descent with a rate of 1."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._holdings = holdings

    def apply(self, groups: Any, scale: float) -> None:  # noqa: ARG002
        for held in self._holdings:
            held.weights[...] -= scale * held.gradient

    def state(self) -> list[dict[str, Any]]:
        return [{} for _ in self._holdings]

    def load(self, states: Any) -> None:
        assert not any(states)


class Arrived:
    """Pushes of numbers: worker w pushes 2^(3 s + w) in its step s."""

    def __init__(self, gradient: Any) -> None:
        self._gradient, self.step = gradient, [0, 0, 0]

    def settle(self, worker: int) -> None:
        self._gradient[...] = 2.0 ** (3 * self.step[worker] + worker)

    def add(self, worker: int, bucket: int, scale: float, anew: bool) -> None:  # noqa: ARG002
        add_up(self._gradient, np.full(1, 2.0 ** (3 * self.step[worker] + worker)), scale, anew)
        self.step[worker] += 1

    def update(self, worker: int, bucket: int, update: Any) -> None:  # noqa: ARG002
        update(bucket)


def test_an_owner_that_is_behind_goes_on_with_the_sum_that_it_had_begun() -> None:
    """With a backup worker, whose push is in that sum: another owner was two turns ahead when the session ended."""
    strategy = SimpleNamespace(sync_mode=lambda: Bsp(1), sync=Part("bsp"), roles=None)
    session: Any = SimpleNamespace(
        strategy=strategy, group=Group(3), called=str, counted=(), momentum="shared", observer=None
    )
    answers: Any = SimpleNamespace(release=lambda _: None)
    values = {"groups": [], "scale": 1.0, "skip": False, "weight": 1.0}
    turns = [Request("push", worker, clock, values) for worker, clock in ((0, 1), (1, 1), (2, 1), (0, 2), (1, 2))]

    def made() -> tuple[Any, Owner]:
        weights, gradient = np.zeros(1), np.zeros(1)
        build: Any = Plain
        shard = Shard([Holding(Slice(0, 0, 1), weights, gradient)], build, [])
        return weights, Owner(session, shard, Arrived(gradient), answers)

    weights, ahead = made()
    for turn in turns:
        ahead.handle(turn)
    assert weights == -(1 + 2 + 4 + 8 + 16)
    _, behind = made()
    for turn in turns[:3]:
        behind.handle(turn)
    behind.outlive([0, 1])
    for turn in turns[3:]:
        behind.catch_up(turn)
    (held,) = behind.holdings
    assert held.weights == weights
