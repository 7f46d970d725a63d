"""The patterns of messages that are timed, and a course of measurements between threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from syncline.engine.exchange import SEGMENT_BYTES
from syncline.plans.check import check
from syncline.plans.messages import compile_program
from syncline_bench.calibration.links import SIZES, TINY, Cell, Timed, cells_of, fit_link, measure

WORLD, MEMBERS = 6, (1, 2, 4, 5)
CELLS = [cell for nbytes in SIZES for cell in cells_of(nbytes, SEGMENT_BYTES)]


@pytest.mark.parametrize("cell", [*CELLS, TINY], ids=lambda cell: cell.text)
def test_a_message_is_whole_and_nobody_else_takes_part(cell: Cell) -> None:
    """One transfer is one message of the size that is asked for: the array fits a segment, and chunks are equal."""
    plan = cell.plan(WORLD, MEMBERS)
    assert cell.array_bytes <= SEGMENT_BYTES
    assert set(plan.count) == {1}
    busy = cell.taking_part(MEMBERS)
    assert set(plan.src) == set(plan.dst) == set(busy)
    for rank in busy:
        assert len(compile_program(plan, rank).actions) == cell.moved
    sizes = plan.bytes_sent(cell.array_bytes)
    assert sizes.sum() == pytest.approx(cell.nbytes * len(plan))


@pytest.mark.parametrize("pattern", ["lone", "turns"])
def test_a_message_waits_for_the_one_before(pattern: str) -> None:
    (cell,) = (cell for cell in CELLS if (cell.pattern, cell.nbytes) == (pattern, 4096))
    plan = cell.plan(WORLD, MEMBERS)
    for rank in cell.taking_part(MEMBERS):
        program = compile_program(plan, rank)
        sends = [place for place, action in enumerate(program.actions) if action.kind == "send"]
        assert all(program.waits[place] for place in sends if program.actions[place].step)
        assert not any(action.swaps for action in program.actions)


def test_messages_of_a_stream_wait_for_nothing() -> None:
    (cell,) = (cell for cell in CELLS if (cell.pattern, cell.nbytes) == ("stream", 4096))
    for rank in MEMBERS:
        assert set(compile_program(cell.plan(WORLD, MEMBERS), rank).waits) == {0}


def test_sizes_that_do_not_fit_a_segment_are_left_out() -> None:
    assert not cells_of(SEGMENT_BYTES, SEGMENT_BYTES)
    assert {cell.pattern for cell in cells_of(SEGMENT_BYTES // 2, SEGMENT_BYTES)} == {"lone", "turns", "stream"}


def test_all_ranks_get_the_same_and_rank_0_decides(group: Callable[..., list[Any]]) -> None:
    """Of three ranks two take part; the third only meets the others."""
    told: list[str] = []

    def body(session: Any) -> list[Timed]:
        return measure(session, (0, 1), 0.05, lambda _, doing: told.append(doing) if session.rank == 0 else None)

    first, *others = group("ring", 3, body)
    assert all(other == first for other in others)
    assert {one.cell.pattern for one in first} == {"lone", "turns", "stream"}
    assert all(len(one.times_s.every) == len(one.cpu_s.every) >= 3 for one in first)
    assert "messages of up to 64 B" in told
    link = fit_link(first)
    assert link.beta[0].value >= 0
    assert set(link.off) == {one.cell.nbytes for one in first}


def test_a_library_is_timed_among_all_ranks_of_a_host() -> None:
    """A reduce-scatter and an all-gather of the whole array; ranks of other hosts only meet the others."""
    cell, members = cells_of(1 << 20, SEGMENT_BYTES, native=True)[0], (1, 2, 4)
    plan = cell.plan(WORLD, members)
    check(plan)
    assert plan.native == (members,)
    assert plan.natively.all()
    for rank in range(WORLD):
        program = compile_program(plan, rank)
        assert not program.actions
        assert (program.native is not None) == (rank in members)


def test_messages_grow_no_more_when_the_budget_is_long_spent(group: Callable[..., list[Any]]) -> None:
    first, *others = group("ring", 2, lambda session: measure(session, (0, 1), 1e-9, lambda *_: None))
    assert all(other == first for other in others)
    assert {one.cell.nbytes for one in first} == {TINY.nbytes, *SIZES[:5]}
