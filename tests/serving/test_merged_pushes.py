"""An owner's updates, bucket by bucket, whatever comes first: no threads, messages or clocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from syncline.engine.order import Work
from syncline.serving.merged import Updating
from syncline.serving.protocol import ALL


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
