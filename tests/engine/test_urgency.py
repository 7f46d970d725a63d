"""Urgent runs in mapped memory and in lanes: what goes next, the same bits whatever ranks think urgent, no deadlock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from exchanging import Case, Copying, cases, chooser, drive
from hypothesis import given, settings
from hypothesis import strategies as st
from mapped import anyone, machine, plan_of, run_of, turn

from recorded import Recorder
from syncline import registry
from syncline.engine.exchange import Exchange, Run
from syncline.engine.memory import OneSided
from syncline.engine.order import Lane, Work
from syncline.nouns import Group
from syncline.plans.messages import compile_program
from syncline.transports import Transport
from syncline.transports.inproc import Hub

PRIORITIES = [0.0, 0.0, 1.0, 3.0, -2.0]


def recorder() -> Recorder:
    ticks = count()
    return Recorder(lambda: float(next(ticks)))


def calls(one: Recorder) -> list[tuple[str, int]]:
    """Calls of compiled code in their order: of which run, and how many passes over memory they made."""
    return [
        (span.label, sum(inner.within is span for inner in one.spans("reduce", "copy")))
        for span in one.spans("advance")
    ]


def shared_race(priorities: tuple[float, float]) -> tuple[list[Recorder], list[list[str]]]:
    """A run of 8 segments is under way on two ranks when another one as large is handed over; who ends first."""
    plan, size, per = plan_of("ring", 2), 800, 800
    recorders, ended = [recorder(), recorder()], [list[str](), list[str]()]
    with machine(2) as ends:
        exchanges = [Exchange(end, per, observer=one) for end, one in zip(ends, recorders, strict=True)]
        runs: list[Run] = []
        for key in range(2):
            for rank, exchange in enumerate(exchanges):
                done = partial(ended[rank].append, f"bucket {key}")
                runs.append(run_of(plan, rank, np.full(size, 1.0 + rank), key, priority=priorities[key], on_done=done))
                exchange.start(runs[-1])
            for _ in range(3):
                for exchange in exchanges:
                    exchange.progress(0.0)
        assert not any(ended)
        turn(exchanges, runs, anyone())
        assert all((run.array == 3.0).all() for run in runs)
    return recorders, ended


def test_an_urgent_run_overtakes_one_under_way_in_mapped_memory() -> None:
    recorders, ended = shared_race((5.0, 2.0))
    assert ended == [["bucket 1", "bucket 0"]] * 2
    for one in recorders:
        made = calls(one)
        first = [label for label, _ in made].index("bucket 1")
        last = len(made) - 1 - [label for label, _ in made][::-1].index("bucket 1")
        late = [index for index in range(first, last) if made[index][0] == "bucket 0"]
        assert all(made[index - 1][0] == "bucket 1" for index in late)  # nothing was to be done for the urgent one
        assert all(passes <= 1 for label, passes in made[first:last] if label == "bucket 0")


@pytest.mark.parametrize("priority", [0.0, 4.0])
def test_equal_runs_in_mapped_memory_keep_their_order(priority: float) -> None:
    _, ended = shared_race((priority, priority))
    assert ended == [["bucket 0", "bucket 1"]] * 2


def test_between_two_segments_it_is_seen_whether_something_was_handed_over() -> None:
    """The other rank has done its part of a broadcast already, so nothing else would end the call."""
    waits = [True, False]
    plan = registry.get("algorithms", "broadcast").target(Group(2), root=0)
    with machine(2) as ends:
        one = recorder()
        exchanges = [
            Exchange(ends[0], 80, observer=one, handed_over=lambda: waits[0]),
            Exchange(ends[1], 80, handed_over=lambda: False),
        ]
        arrays = [np.arange(100.0), np.zeros(100)]
        runs = [run_of(plan, rank, array) for rank, array in enumerate(arrays)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        turn(exchanges, runs, anyone())
        assert np.array_equal(*arrays)
        here = exchanges[0].shared
        assert isinstance(here, OneSided)
        operations = len(next(iter(here._scripts._known.values())).script.operations)
    starts = [(span.segment * operations + span.step) for span in one.spans("advance")]
    assert all(after - before <= operations for before, after in pairwise(starts))


@settings(deadline=None, max_examples=30)
@given(st.data(), cases(), st.integers(2, 4), st.sampled_from(["lent", "copied", "mapped"]))
def test_ranks_may_differ_in_what_they_think_urgent(data: st.DataObject, case: Case, runs: int, way: str) -> None:
    """Every rank has its own priorities and starts its runs in its own order: the same bits as one after the other."""
    case = replace(case, size=min(case.size, 30), segment_bytes=max(case.segment_bytes, 64))
    choose = chooser(data)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    inputs = [case.inputs(seed) for seed in range(runs)]
    wanted = [[array.copy() for array in mine] for mine in inputs]
    for mine in wanted:
        drive(case, [[array] for array in mine], choose)
    arrays = [[array.copy() for array in mine] for mine in inputs]
    plans = [
        [(int(key), arrays[key][rank], float(draw.choice(PRIORITIES))) for key in draw.permutation(runs)]
        for rank in range(case.plan.world)
    ]
    carry_out(case, plans, choose, way)
    assert all(
        array.tobytes() == right.tobytes()
        for mine, theirs in zip(arrays, wanted, strict=True)
        for array, right in zip(mine, theirs, strict=True)
    )


def carry_out(case: Case, works: list[list[tuple[int, Any, float]]], choose: Callable[[int], int], way: str) -> None:
    """Start runs (key, array, priority) on every rank, some of them while others are under way, and end all."""
    if way == "mapped":
        with machine(case.plan.world) as ends:
            run_all(case, [*ends], works, choose)
    else:
        hub = Hub(case.plan.world)
        make = hub.transport if way == "lent" else partial(Copying, hub)
        run_all(case, [make(rank) for rank in range(case.plan.world)], works, choose)


def run_all(case: Case, ends: list[Transport], works: list[list[tuple[int, Any, float]]], choose: Any) -> None:
    exchanges = [Exchange(end, case.segment_bytes, case.window) for end in ends]
    todo = [
        (rank, run_of(case.plan, rank, array, key, priority=priority))
        for rank, mine in enumerate(works)
        for key, array, priority in mine
    ]
    runs = [run for _, run in todo]
    for rank, run in todo:
        exchanges[rank].start(run)
        exchanges[choose(len(exchanges))].progress(0.0)
    turn(exchanges, runs, choose)


# Lanes ----------------------------------------------------------------------------------------------------------------


def test_in_a_lane_urgent_works_wait_for_no_others_and_equal_ones_keep_their_order() -> None:
    lane, started = Lane(2), list[str]()
    for name in "abcd":
        lane.enter(None, partial(started.append, f"late {name}"), 5.0)
    for name in "abcd":
        lane.enter(None, partial(started.append, f"urgent {name}"), 1.0)
    assert started == ["late a", "late b", "urgent a", "urgent b"]
    assert lane.active == 4
    lane.leave(1.0)
    lane.leave(5.0)
    assert started[4:] == ["urgent c", "late c"]
    for priority in (1.0, 1.0, 1.0, 5.0, 5.0, 5.0):
        lane.leave(priority)
    assert lane.active == 0
    assert sorted(started) == sorted(f"{kind} {name}" for kind in ("late", "urgent") for name in "abcd")


def test_works_behind_one_gate_start_in_the_order_of_urgency() -> None:
    lane, gate, other, started = Lane(1), Work("a gate"), Work("another gate"), list[float]()
    lane.enter(other, partial(started.append, 0.5), 0.5)
    for priority in (3.0, 1.0, 2.0, 1.0):
        lane.enter(gate, partial(started.append, priority), priority)
    gate.done = True
    gate.call_back()
    assert started == [1.0, 2.0, 3.0]
    lane.leave(1.0)
    assert started == [1.0, 2.0, 3.0, 1.0]


@settings(deadline=None, max_examples=40)
@given(st.data(), st.integers(2, 3), st.integers(1, 3), st.integers(1, 10), st.sampled_from(["lent", "mapped"]))
def test_lanes_never_wait_for_each_other(data: st.DataObject, world: int, in_flight: int, works: int, way: str) -> None:
    """Works are handed over in one order; their gates open in any, and every rank has priorities of its own."""
    choose = chooser(data)
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    plan, hub = plan_of("direct", world), Hub(world)
    near = contextlib.nullcontext([hub.transport(rank) for rank in range(world)])
    with machine(world) if way == "mapped" else near as ends:
        exchanges = [Exchange(end) for end in ends]
        arrays = [[np.full(5, 1.0 + rank) for _ in range(works)] for rank in range(world)]
        runs: list[Run] = []
        gates: list[Work] = []
        for rank, exchange in enumerate(exchanges):
            lane = Lane(in_flight)
            for key in range(works):
                priority = float(draw.choice(PRIORITIES))
                run = run_of(plan, rank, arrays[rank][key], key, priority=priority)
                run.on_done, run.left = partial(lane.leave, priority), 1  # not done before it has started
                gate = Work("a gate") if draw.integers(2) else None
                gates += [gate] if gate is not None else []
                lane.enter(gate, partial(exchange.start, run), priority)
                runs.append(run)
        for index in draw.permutation(len(gates)):
            gates[index].done = True
            gates[index].call_back()
            exchanges[choose(world)].progress(0.0)
        turn(exchanges, runs, choose)
    assert all((array == world * (world + 1) / 2).all() for mine in arrays for array in mine)


def test_of_what_has_come_the_most_urgent_is_acted_upon_first() -> None:
    """Both runs' messages lie there; the run that was handed over last is the first to be added."""
    hub, one = Hub(2), recorder()
    exchanges = [Exchange(hub.transport(0), observer=one), Exchange(hub.transport(1))]
    plan = registry.get("algorithms", "ring").target(Group(2))
    runs = [
        Run(compile_program(plan, rank), np.ones(4), key, f"bucket {key}", priority)
        for rank in range(2)
        for key, priority in enumerate((5.0, 5.0, 1.0))
    ]
    for run in runs:
        exchanges[run.program.rank].start(run)
    exchanges[0].progress(0.0)
    assert [span.label for span in one.spans("reduce")] == ["bucket 2"]
    exchanges[0].progress(0.0)
    assert [span.label for span in one.spans("reduce")] == ["bucket 2", "bucket 0", "bucket 1"]
    turn(exchanges, runs, anyone())
