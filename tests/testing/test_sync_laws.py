"""Every law of sync modes can be broken: a mode that does so is caught, by the name of the law."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, cycle
from typing import Any

import pytest

from syncline.serving.protocol import Action, Apply, Ledger, Release, Request
from syncline.testing import BrokenLaw, check_sync, schedules, sync
from syncline.testing.sync import LAWS

turn = count()


@dataclass(frozen=True)
class Mode:
    """Workers run ahead by so many steps at most, but for what is replaced."""

    staleness: float = 0
    merges: Any = True
    dues: Callable[[int], Any] = lambda step: step % 2 == 0
    may: Callable[[int, int], Any] | None = None

    def due(self, step: int) -> Any:
        return self.dues(step)

    def may_proceed(self, clock: int, slowest: int) -> Any:
        return clock <= slowest + self.staleness if self.may is None else self.may(clock, slowest)


@dataclass(frozen=True)
class Trained(Mode):
    """Weights are exchanged after every second step, but for what is replaced."""

    dues: Callable[[int], Any] = lambda step: False  # noqa: ARG005
    averaged: Callable[[int], Any] = lambda step: step % 2 == 1
    share: float = 1.0
    makes: Callable[[Any, Any], Any] = lambda agreed, mean: agreed + mean
    remembers: bool = False

    def averages(self, step: int) -> Any:
        return self.averaged(step)

    def pull(self, workers: int) -> float:  # noqa: ARG002
        return self.share

    def agree(self, agreed: Any, mean: Any, memory: Any) -> None:  # noqa: ARG002
        agreed[:] = self.makes(agreed, mean)


class Both(Trained):
    """It does not know what becomes of weights."""

    def period(self, workers: int) -> int:
        raise NotImplementedError

    def mix(self, workers: int, step: int) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Applied(Mode):
    """Every push is an update by itself, and the mode says how it is applied."""

    merges: Any = False
    rate: Any = "own"
    compensate: Any = 0.5
    momentum: Any = "own"


def test_modes_that_exchange_weights_keep_all_laws() -> None:
    assert check_sync(Trained(), examples=10) == LAWS.names


@pytest.mark.parametrize(("staleness", "merges"), [*zip([0, 2, float("inf")], cycle([False, True]))])
def test_modes_with_and_without_a_bound_keep_all_laws(staleness: float, merges: bool) -> None:
    assert check_sync(Mode(staleness, merges=merges), examples=10) == LAWS.names
    assert check_sync(Applied(staleness), examples=2) == LAWS.names


@pytest.mark.parametrize(
    ("law", "mode"),
    [
        ("its answers are known", Mode(merges=None)),
        ("its answers are known", Mode(dues=lambda step: step + 1)),
        ("the same question gets the same answer", Mode(dues=lambda step: next(turn) % 3 == 0)),  # noqa: ARG005
        (
            "the same question gets the same answer",
            Mode(may=lambda clock, slowest: clock <= slowest or next(turn) % 3 == 0),
        ),
        ("the slowest may always go on", Mode(may=lambda clock, slowest: clock < slowest)),
        ("the slowest may always go on", Mode(may=lambda clock, slowest: clock == slowest or slowest % 3 == 0)),
        ("workers exchange in some steps", Mode(dues=lambda step: False)),  # noqa: ARG005
        ("its answers are known", Trained(averaged=lambda step: step)),
        ("its answers are known", Both()),
        ("its answers are known", Applied(rate="half")),
        ("its answers are known", Applied(compensate=-1)),
        ("its answers are known", Applied(compensate="much")),
        ("its answers are known", Applied(momentum=0.9)),
        ("the same question gets the same answer", Trained(averaged=lambda step: next(turn) % 3 == 0)),  # noqa: ARG005
        ("workers exchange in some steps", Trained(averaged=lambda step: False)),  # noqa: ARG005
        ("workers exchange in some steps", Trained(dues=lambda step: True)),  # noqa: ARG005
        ("all workers compute the same agreed weights", Trained(share=0.0)),
        ("all workers compute the same agreed weights", Trained(share=1.5)),
        ("all workers compute the same agreed weights", Trained(makes=lambda agreed, mean: agreed.mean() + mean)),
        ("all workers compute the same agreed weights", Trained(makes=lambda agreed, mean: 2 * agreed + mean)),
    ],
)
def test_a_broken_mode_is_caught_by_the_law(law: str, mode: Mode) -> None:
    with pytest.raises(BrokenLaw) as caught:
        check_sync(mode)
    assert caught.value.law == law


# What owners and training make of a mode is their part as well: what they must not do, they do here.


def ledger(change: Callable[[list[Action]], list[Action]]) -> Callable[..., Any]:
    """Owners whose answers are changed."""

    class Broken(Ledger):
        def handle(self, request: Request) -> list[Action]:
            return change(super().handle(request))

    return Broken


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda actions: [one for one in actions if not isinstance(one, Release)], "a deadlock"),
        (lambda actions: [one for one in actions if not isinstance(one, Apply)], "has the versions"),
        (lambda actions: actions[::-1], "comes before the update that was possible"),
        (lambda actions: actions + [one for one in actions if isinstance(one, Release)], "is released"),
    ],
)
def test_owners_that_break_a_promise_are_found(
    change: Callable[[list[Action]], list[Action]], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "Ledger", ledger(change))
    with pytest.raises(BrokenLaw, match=fault) as caught:
        check_sync(Mode())
    assert caught.value.law == "owners keep their promises"


@pytest.mark.parametrize(
    ("kind", "change", "fault"),
    [
        (Apply, {"lag": 77}, "should have a lag of"),
        (Apply, {"newest": {}}, "does not have the values of"),
        (Apply, {"clock": 77}, "does not have the step of"),
        (Release, {"ahead": (77, 77, 77, 77, 77)}, "is shorter|is longer|has another lead"),
    ],
)
def test_owners_that_say_what_is_not_so_are_found(
    kind: Any, change: dict[str, Any], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = ledger(lambda actions: [replace(one, **change) if isinstance(one, kind) else one for one in actions])
    monkeypatch.setattr(sync, "Ledger", changed)
    with pytest.raises(BrokenLaw, match=fault) as caught:
        check_sync(Applied(1))
    assert caught.value.law == "owners keep their promises"


def test_training_that_exchanges_when_nothing_is_due_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Eager(schedules.Steps):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments[:-1], Mode(dues=lambda step: True))  # noqa: ARG005

    monkeypatch.setattr(schedules, "Steps", Eager)
    with pytest.raises(BrokenLaw, match="is submitted in a step that is not due") as caught:
        check_sync(Mode())
    assert caught.value.law == "training keeps its promises"


def test_training_that_agrees_on_pushes_that_are_not_merged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Meeting(schedules.Steps):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments[:-1], Mode())

    monkeypatch.setattr(schedules, "Steps", Meeting)
    with pytest.raises(BrokenLaw, match=r"are agreed on instead of \[\]") as caught:
        check_sync(Mode(merges=False))
    assert caught.value.law == "training keeps its promises"
