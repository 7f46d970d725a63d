"""Every law of schedules can be broken: a schedule that does so is caught, by the name of the law."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from syncline.engine.step import Action, BucketPhase, Steps, Submit
from syncline.nouns import Bucket, Layer, Slice
from syncline.schedules import Cost
from syncline.testing import BrokenLaw, check_schedule, schedules
from syncline.testing.schedules import Sliced

Buckets = list[Bucket]


def parts(buckets: Buckets, number: int, change: Callable[[Slice], Slice]) -> Buckets:
    """The buckets with other slices in one of them."""
    if not -len(buckets) <= number < len(buckets):
        return buckets
    changed = replace(buckets[number], slices=tuple(change(part) for part in buckets[number].slices))
    return [changed if bucket is buckets[number] else bucket for bucket in buckets]


def mixed(buckets: Buckets) -> Buckets:
    if len({bucket.dtype for bucket in buckets}) < 2:
        return buckets
    return [Bucket(tuple(part for bucket in buckets for part in bucket.slices), buckets[0].dtype)]


turn = count()


@dataclass(frozen=True)
class Broken:
    """One bucket per tensor, but for what is changed."""

    change: Callable[[Buckets], Buckets] = lambda buckets: buckets
    urgency: Callable[[], float] = lambda: 0.0
    release: Any = "ready"
    phases: Any = "whole"
    apply: Any = "step"
    in_flight: int = 1
    measures: int = 0

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> Buckets:  # noqa: ARG002
        specs = list(enumerate(layer.spec for layer in layers))[::-1]
        return self.change([Bucket((Slice(index, 0, spec.elements),), spec.dtype) for index, spec in specs])

    def priority(self, bucket: Bucket) -> float:  # noqa: ARG002
        return self.urgency()


@dataclass(frozen=True)
class Ahead(Broken):
    """Says something of steps of workers' own."""

    local: Any = True


@pytest.mark.parametrize(
    ("law", "schedule"),
    [
        ("engines support its declarations", Broken(release="soon")),
        ("engines support its declarations", Broken(phases="thirds")),
        ("engines support its declarations", Broken(apply="never")),
        ("engines support its declarations", Broken(in_flight=0)),
        ("engines support its declarations", Ahead(apply="layer")),
        ("engines support its declarations", Ahead(apply="next_step", local="now and then")),
        ("engines support its declarations", Broken(urgency=lambda: float("nan"))),
        ("every element is in one bucket of its type", Broken(lambda buckets: buckets[1:])),
        ("every element is in one bucket of its type", Broken(lambda buckets: buckets[:1] + buckets)),
        ("every element is in one bucket of its type", Broken(mixed)),
        ("every element is in one bucket of its type", Broken(lambda buckets: [*buckets, Bucket((), "float32")])),
        (
            "every element is in one bucket of its type",
            Broken(lambda buckets: parts(buckets, 1, lambda part: replace(part, stop=part.stop // 2))),
        ),
        (
            "every element is in one bucket of its type",
            Broken(lambda buckets: parts(buckets, 1, lambda part: replace(part, tensor=99))),
        ),
        ("buckets are listed as backward completes them", Broken(lambda buckets: buckets[::-1])),
        ("all ranks make the same buckets", Broken(lambda buckets: merged(buckets) if next(turn) % 3 else buckets)),
        ("all ranks make the same buckets", Broken(urgency=lambda: float(next(turn)))),
    ],
)
def test_a_broken_schedule_is_caught_by_the_law(law: str, schedule: Broken) -> None:
    with pytest.raises(BrokenLaw) as caught:
        check_schedule(schedule)
    assert caught.value.law == law


def test_the_schedule_that_they_break_is_sound() -> None:
    check_schedule(Broken())


def merged(buckets: Buckets) -> Buckets:
    """The last two in one, where that can be."""
    if len(buckets) < 2 or buckets[-1].dtype != buckets[-2].dtype:
        return buckets
    return [*buckets[:-2], Bucket((*buckets[-2].slices, *buckets[-1].slices), buckets[-1].dtype)]


# Training is the engine's part as well: what it must not do, it does here.


class Hasty(Steps):
    """Submits all buckets at the first gradient."""

    def _submit_complete(self, step: Any, actions: list[Action]) -> None:
        step.left = [0] * len(step.left)
        super()._submit_complete(step, actions)


class Lame(Steps):
    """Waits for nothing."""

    def _wait(self, *_: Any) -> None:
        return


class AsItCompletes(Steps):
    """Submits buckets in the order in which backward completes them."""

    def _submit_complete(self, step: Any, actions: list[Action]) -> None:
        for number in range(len(step.left)):
            if step.left[number] == 0 and BucketPhase(step.number, number, "allreduce") not in step.submitted:
                self._submit(step, number, ("allreduce",), actions)


class Lazy(Steps):
    """Forgets what the last bucket has to do."""

    def _submit(self, step: Any, number: int, *rest: Any) -> None:
        if number < len(self._slices) - 1:
            super()._submit(step, number, *rest)


class Equal(Steps):
    """Knows no priorities."""

    def _submit(self, step: Any, number: int, phase: Any, actions: list[Action]) -> None:
        super()._submit(step, number, phase, actions)
        assert isinstance(actions[-1], Submit)
        actions[-1] = actions[-1]._replace(priority=-1.0)


@pytest.mark.parametrize(
    ("steps", "fault"),
    [
        (Hasty, "before its gradients are complete"),
        (Lame, "before it has arrived"),
        (Lazy, "before it has arrived"),
        (Equal, "has the priority -1.0 instead of 0.0"),
    ],
)
def test_training_finds_what_breaks_a_promise(steps: type[Steps], fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "Steps", steps)
    with pytest.raises(BrokenLaw, match=fault) as caught:
        check_schedule(Sliced())
    assert caught.value.law == "training keeps its promises"


def test_training_finds_workers_that_submit_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedules, "Steps", AsItCompletes)
    with pytest.raises(BrokenLaw, match="submit buckets in different orders") as caught:
        check_schedule(Broken())
    assert caught.value.law == "workers submit in the same order whatever backward does"
