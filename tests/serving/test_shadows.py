"""Workers without batches in the protocol of owners: they push zeros, and what others agree on is none of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import MismatchError
from syncline.serving.protocol import ALL, Action, Apply, Ledger, Measure, Release, Request
from syncline.sync.bsp import Bsp


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
        with pytest.raises(MismatchError, match="its next one is step"):
            ledger.handle(wrong)
    ledger.handle(shadow(0, 1))
    with pytest.raises(MismatchError, match="its next one is step 2"):
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
