"""What a plan is made of, which faults the checker finds in it, and how it splits in halves.

The order in which plans add: plans of one order give the same bits, wherever an element lies.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline import registry
from syncline.errors import PlanError
from syncline.nouns import Group
from syncline.plans.check import check, order_of_additions, phases
from syncline.plans.plan import COPY, REDUCE, Plan, Transfer

PAIR = [(0, 1, 0, 0, 1, REDUCE), (1, 0, 1, 0, 1, COPY)]
"""The smallest allreduce: rank 1 gives its array to rank 0, and gets the sum back."""


def test_a_plan_is_a_sequence_of_transfers():
    plan = Plan.of("pair", 2, 1, PAIR)
    assert len(plan) == 2
    assert plan[0] == Transfer(0, 1, 0, 0, 1, "reduce")
    assert [str(transfer) for transfer in plan] == ["1 -> 0 reduce chunk 0", "0 -> 1 copy chunk 0"]
    assert str(Transfer(0, 3, 0, 2, 2, "copy")) == "3 -> 0 copy chunks 2-3"
    assert plan.members == (0, 1)
    assert plan.steps == 2
    check(plan)


def test_columns_cannot_be_changed():
    rows = np.array(PAIR, dtype=np.int64)
    plan = Plan.of("pair", 2, 1, rows)
    rows[:] = 7
    assert plan.src.dtype == np.int32
    assert plan[0].src == 1
    with pytest.raises(ValueError, match="read-only"):
        plan.src[0] = 5


@given(st.lists(st.integers(0, 3), max_size=8))
def test_rows_are_sorted_by_step_and_keep_their_order_otherwise(steps):
    rows = [(step, 0, 1, place, 1, REDUCE) for place, step in enumerate(steps)]
    plan = Plan.of("any", 2, 8, rows)
    assert [(item.step, item.chunk) for item in plan] == sorted((step, place) for place, step in enumerate(steps))
    assert plan.steps == len(set(steps))


@given(st.integers(1, 5), st.integers(1, 7), st.data())
def test_bytes_are_exact_shares_and_what_is_sent_is_received(world, chunks, data):
    counts = data.draw(st.lists(st.integers(1, chunks), max_size=6)) if world > 1 else []
    rows = [(0, i % world, (i + 1) % world, 0, count, COPY) for i, count in enumerate(counts)]
    plan = Plan.of("any", world, chunks, rows)
    sent, received = plan.bytes_sent(1000.0), plan.bytes_received(1000.0)
    assert sent.dtype == received.dtype == np.float64
    assert sent.shape == received.shape == (world,)
    assert sent.sum() == pytest.approx(1000 * sum(counts) / chunks)
    assert received.sum() == pytest.approx(sent.sum())


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ((0, 1, 1, 0, 1, REDUCE), "does not send to itself"),
        ((0, -1, 1, 0, 1, REDUCE), "ranks are 0 to 3"),
        ((0, 0, 4, 0, 1, REDUCE), "ranks are below 4"),
        ((0, 0, 1, -1, 1, REDUCE), "chunks are 0 to 2"),
        ((0, 0, 1, 2, 2, REDUCE), "chunks are 0 to 2"),
        ((0, 0, 1, 0, 0, REDUCE), "at least one chunk"),
        ((-1, 0, 1, 0, 1, REDUCE), "steps are not negative"),
        ((0, 0, 1, 0, 1, 2), "an op is"),
        ((0, 0, 1, 0, 1), "six whole numbers"),
        ((0.5, 0, 1, 0, 1, 0), "six whole numbers"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row, reason):
    with pytest.raises(PlanError, match=f"odd: .*{reason}"):
        Plan.of("odd", 4, 3, [row])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"goal": "reduce"}, "unknown goal"),
        ({"members": ()}, "at least one member"),
        ({"members": (0, 0)}, "twice"),
        ({"members": (0, 2)}, "name rank 2"),
        ({"goal": "reduce_scatter"}, "2 owners"),
        ({"goal": "all_gather", "owners": (0,)}, "2 owners"),
        ({"owners": (0, 1)}, "0 owners"),
        ({"goal": "broadcast"}, "has a root"),
        ({"root": 0}, "has a root"),
        ({"goal": "broadcast", "root": 2}, "name rank 2"),
        ({"members": (0,), "native": [(0, 1)]}, "different members"),
        ({"native": [(0, 1), (1,)]}, "different members"),
    ],
)
def test_heads_that_make_no_sense_are_refused(arguments, reason):
    with pytest.raises(PlanError, match=reason):
        Plan.of("odd", 2, 2, [], **arguments)


def test_columns_given_directly_must_be_sorted_and_equally_long():
    plan = Plan.of("pair", 2, 1, PAIR)
    columns = (plan.step[::-1], plan.src, plan.dst, plan.chunk, plan.count, plan.op)
    with pytest.raises(PlanError, match="order of their steps"):
        Plan("odd", 2, 1, (0, 1), "allreduce", *columns)
    with pytest.raises(PlanError, match="equally long"):
        Plan("odd", 2, 1, (0, 1), "allreduce", plan.step[:1], *columns[1:])


# The checker ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "rows", "fault"),
    [
        (
            3,
            [(0, 1, 0, 0, 1, REDUCE), (1, 1, 0, 0, 1, REDUCE)],
            "step 1, 1 -> 0 reduce chunk 0: the contribution of rank 1 added twice to chunk 0 of rank 0",
        ),
        (
            3,
            [(0, 1, 0, 0, 1, REDUCE), (0, 2, 1, 0, 1, REDUCE), (1, 1, 0, 0, 1, REDUCE)],
            "step 1, 1 -> 0 reduce chunk 0: the contribution of rank 1 added twice",
        ),
        (
            2,
            [*PAIR, (2, 0, 1, 0, 1, COPY)],
            "step 2, 0 -> 1 copy chunk 0: brings nothing new: chunk 0 of rank 1 already holds the contributions",
        ),
        (2, [(0, 0, 1, 0, 1, COPY)], "step 0, 0 -> 1 copy chunk 0: destroys the contribution of rank 1"),
        (2, PAIR[:1], "rank 1 does not hold the result of chunk 0: the contribution of rank 0 missing"),
        (2, PAIR[:1] * 2, "step 0, 1 -> 0 reduce chunk 0: the contribution of rank 1 added twice"),
        (2, [*PAIR, PAIR[1]], "chunk 0 of rank 1 is written by a copy and by another transfer in the same step"),
        (
            3,
            [(0, 1, 0, 0, 1, REDUCE), (1, 0, 1, 0, 1, COPY), (1, 2, 1, 0, 1, REDUCE)],
            "step 1, 2 -> 1 reduce chunk 0: chunk 0 of rank 1 is written by a copy and by another",
        ),
        (5, [], "rank 0 does not hold the result of chunk 0: the contributions of ranks 1-4 missing"),
    ],
)
def test_faults_are_named_with_step_transfer_and_ranks(world, rows, fault):
    with pytest.raises(PlanError) as caught:
        check(Plan.of("odd", world, 1, rows))
    assert fault in str(caught.value)


def test_servers_start_empty_and_the_first_reduce_into_them_is_a_copy():
    group = Group(2, servers=1)
    push = [(0, 0, 2, 0, 1, REDUCE), (0, 1, 2, 0, 1, REDUCE)]
    pull = [(1, 2, 0, 0, 1, COPY), (1, 2, 1, 0, 1, COPY)]
    check(Plan.of("ps", group, 1, push + pull))
    with pytest.raises(PlanError, match=r"step 0, 2 -> 0 copy chunk 0: chunk 0 of rank 2 is empty"):
        check(Plan.of("ps", group, 1, [(0, *row[1:]) for row in push + pull]))
    with pytest.raises(PlanError, match="some of these chunks are empty at rank 2 and others are not"):
        check(Plan.of("ps", group, 2, [(0, 0, 2, 0, 1, REDUCE), (1, 1, 2, 0, 2, REDUCE)]))


def test_transfers_of_one_step_read_the_values_from_before_it():
    both = [(0, 0, 1, 0, 1, REDUCE), (0, 1, 0, 0, 1, REDUCE)]
    check(Plan.of("exchange", 2, 1, both))
    with pytest.raises(PlanError, match="contribution of rank 0 added twice"):
        check(Plan.of("one after the other", 2, 1, [both[0], (1, *both[1][1:])]))


@pytest.mark.parametrize(("owners", "right"), [((0, 0, 1, 1), True), ((0, 1, 0, 1), False)])
def test_a_library_gives_each_rank_one_part(owners, right):
    """A plan that is right by messages is refused if a rank owns chunks apart, or one part in two transfers."""
    sums = [(0, 1 - owner, owner, chunk, 1, REDUCE) for chunk, owner in enumerate(owners)]
    copies = [(1, dst, src, chunk, 1, COPY) for _, src, dst, chunk, *_ in sums]
    check(Plan.of("parts", 2, 4, sums + copies))
    with pytest.raises(PlanError, match="they are not a reduce-scatter"):
        check(Plan.of("parts", 2, 4, sums + copies, native=[(0, 1)]))
    if right:
        halves = [(*row[:4], 2, row[5]) for row in sums[::2] + copies[::2]]
        check(Plan.of("parts", 2, 4, halves, native=[(0, 1)]))


def test_reduce_scatter_is_right_when_the_owners_hold_their_chunks():
    rows = [(0, 0, 1, 1, 1, REDUCE), (0, 1, 0, 0, 1, REDUCE)]
    check(Plan.of("halves", 2, 2, rows, goal="reduce_scatter", owners=(0, 1)))
    with pytest.raises(PlanError, match="rank 1 does not hold the result of chunk 0"):
        check(Plan.of("halves", 2, 2, rows, goal="reduce_scatter", owners=(1, 0)))


@pytest.mark.parametrize("head", [{"goal": "all_gather", "owners": (0,)}, {"goal": "broadcast", "root": 0}])
def test_gathers_and_broadcasts_only_copy_what_exists(head):
    check(Plan.of("copy", 2, 1, [(0, 0, 1, 0, 1, COPY)], **head))
    with pytest.raises(PlanError, match="only copies"):
        check(Plan.of("copy", 2, 1, [(0, 0, 1, 0, 1, REDUCE)], **head))
    with pytest.raises(PlanError, match="chunk 0 of rank 1 is empty"):
        check(Plan.of("copy", 2, 1, [(0, 1, 0, 0, 1, COPY)], **head))
    with pytest.raises(PlanError, match="rank 1 does not hold the result of chunk 0: the contribution of rank 0"):
        check(Plan.of("copy", 2, 1, [], **head))


def test_one_rank_has_nothing_to_do():
    check(Plan.of("alone", 1, 3, []))


# Halves --------------------------------------------------------------------------------------------------------------


def test_an_allreduce_with_one_owner_per_chunk_splits():
    reduce_half, gather_half = phases(Plan.of("pair", 2, 1, PAIR))
    assert (reduce_half.goal, gather_half.goal) == ("reduce_scatter", "all_gather")
    assert reduce_half.owners == gather_half.owners == (0,)
    assert reduce_half.rows.tolist() == [[0, 1, 0, 0, 1, REDUCE]]
    assert gather_half.rows.tolist() == [[0, 0, 1, 0, 1, COPY]]


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (Plan.of("exchange", 2, 1, [(0, 0, 1, 0, 1, REDUCE), (0, 1, 0, 0, 1, REDUCE)]), "at ranks 0-1 together"),
        (Plan.of("partial", 3, 1, PAIR), "complete at no rank"),
        (Plan.of("copy", 2, 1, PAIR[1:], goal="broadcast", root=0), "only an allreduce"),
        (
            Plan.of("mixed", 3, 1, [*PAIR, (2, 2, 0, 0, 1, REDUCE), (3, 0, 1, 0, 1, COPY), (3, 0, 2, 0, 1, COPY)]),
            "step 1, 0 -> 1 copy chunk 0, copies chunk 0 that is still reduced in step 2",
        ),
    ],
)
def test_plans_without_halves_say_why(plan, reason):
    with pytest.raises(PlanError, match=reason):
        phases(plan)


def test_what_comes_first_to_a_rank_that_contributes_nothing_is_no_addition() -> None:
    rows = [(0, 0, 2, 0, 1, REDUCE), (0, 1, 2, 0, 1, REDUCE), (0, 1, 2, 1, 1, REDUCE), (1, 2, 0, 0, 2, COPY)]
    plan = Plan.of("to a server", Group(2, 1), 2, [*rows, (1, 2, 1, 0, 2, COPY)])
    assert plan.additions.tolist() == [False, True, False, False, False]
    ring = Plan.of("both", 2, 1, [(0, 0, 1, 0, 1, REDUCE), (1, 1, 0, 0, 1, COPY)])
    assert ring.additions.tolist() == [True, False]


GROUPS = (2, 3, 4, 5, 6, 7, 8, 12)
NAMES = [
    entry.name
    for entry in registry.entries("algorithms")
    if entry.capabilities.get("goal") == "allreduce" and "roles" not in entry.capabilities and entry.own
]


def sums(plan: Plan, arrays: np.ndarray) -> np.ndarray:
    """What each rank has in the end, chunk by chunk; values of a step are those from before it."""
    held = np.repeat(arrays[:, None], plan.chunks, axis=1)
    for step in np.unique(plan.step):
        before = held.copy()
        for place in np.flatnonzero(plan.step == step):
            move = plan[int(place)]
            chunks = slice(move.chunk, move.chunk + move.count)
            if plan.op[place] == REDUCE:
                held[move.dst, chunks] += before[move.src, chunks]
            else:
                held[move.dst, chunks] = before[move.src, chunks]
    return held


@pytest.mark.parametrize("workers", GROUPS)
@pytest.mark.parametrize("name", NAMES)
def test_a_plan_with_an_order_gives_the_same_bits_in_every_chunk(name: str, workers: int) -> None:
    """Every chunk holds the same numbers here, so that chunks differ in bits where they are added in other orders."""
    plan = registry.get("algorithms", name).target(Group(workers))
    draw = np.random.default_rng(workers)
    found = sums(plan, draw.standard_normal((workers, 200)).astype(np.float32))
    alike = bool((found == found[0, 0]).all())
    assert alike == (order_of_additions(plan) is not None)


@pytest.mark.parametrize("workers", GROUPS)
def test_plans_of_one_order_give_the_same_bits(workers: int) -> None:
    arrays = np.random.default_rng(workers).standard_normal((workers, 200)).astype(np.float32)
    by_order: dict[str, list[bytes]] = {}
    for name in NAMES:
        plan = registry.get("algorithms", name).target(Group(workers))
        if (order := order_of_additions(plan)) is not None:
            by_order.setdefault(order, []).append(sums(plan, arrays)[0, 0].tobytes())
    assert by_order
    for found in by_order.values():
        assert len(set(found)) == 1
    assert len({found[0] for found in by_order.values()}) == len(by_order)


@pytest.mark.parametrize("workers", range(2, 65))
def test_halving_doubling_has_an_order_for_every_number_of_workers(workers: int) -> None:
    """So that it can run where buckets are tried on the live run."""
    assert order_of_additions(registry.get("algorithms", "halving_doubling").target(Group(workers))) is not None


def test_a_plan_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = registry.get("algorithms", "ring").target(Group(5))
    found = order_of_additions(plan)
    monkeypatch.setattr(Plan, "__getitem__", None)  # by which it is followed
    assert order_of_additions(plan) == found
