"""Collectives alone: what may be asked, and what is answered by plans and by formulas."""

from __future__ import annotations

import pytest

from syncline.errors import UsageError
from syncline_bench.predict.collectives import answered_by, asked_of, predict_collectives
from syncline_bench.predict.formulas import Size, closed_s
from syncline_bench.predict.networks import load_network

TAIHULIGHT, TEN = load_network("taihulight"), load_network("10gbe_k80")


def test_rows_are_in_the_order_of_workers_sizes_and_algorithms():
    result = predict_collectives(["tree", "ring"], [1000, 10], [4, 2], TEN)
    assert [(row.workers, row.bytes, row.algorithm) for row in result.rows] == [
        (workers, size, name) for workers in (4, 2) for size in (1000, 10) for name in ("tree", "ring")
    ]


def test_taihulight_as_it_was_reported():
    """Recursive doubling over ring at 512 nodes, by plans: 2.2 to 4.1 times."""
    sizes = [6_998_552, 25_557_032, 60_965_224]
    rows = predict_collectives(["ring", "recursive_doubling"], sizes, [512], TAIHULIGHT).rows
    assert {row.model for row in rows} == {"plan"}
    by_size = {size: [row.comm_s for row in rows if row.bytes == size] for size in sizes}
    ratios = [doubling_s / ring_s for ring_s, doubling_s in by_size.values()]
    assert ratios[0] >= 2.2
    assert ratios == sorted(ratios)
    assert ratios[-1] <= 4.1


def test_the_interval_is_that_of_the_constants():
    (row,) = predict_collectives(["ring"], [10**6], [8], TEN).rows
    assert row.low_s < row.comm_s < row.high_s
    assert row.low_s == pytest.approx(closed_s("ring", 10**6, Size(8), TEN.at("low")))
    (exact,) = predict_collectives(["ring"], [10**6], [8], load_network("alpha=45us,beta=1ns")).rows
    assert exact.low_s == exact.comm_s == exact.high_s


def test_what_is_assumed_is_said():
    assert predict_collectives(["ring"], [1], [2], TAIHULIGHT).assumed == ["between.alpha", "between.beta", "gamma"]
    assert predict_collectives(["ring"], [1], [2], TEN).assumed == []


def test_what_the_answer_cannot_depend_on_is_said():
    result = predict_collectives(["ring"], [1], [8], TEN, per_node=4)
    assert any("has no links inside hosts" in note for note in result.notes)
    inside = load_network("alpha=1us,beta=1ns,gamma=1ns,inside.alpha=1us,inside.beta=1ns,per_host=4,topology=ring")
    assert any("topology ring has no effect" in note for note in predict_collectives(["ring"], [1], [4], inside).notes)


@pytest.mark.parametrize(
    ("text", "workers", "network", "model"),
    [
        ("ring", 512, "10gbe", "plan"),
        ("ring", 100_000, "10gbe", "formula"),
        ("recursive-doubling", 1024, "10gbe", "plan"),
        ("hierarchical", 4096, "ib56", "formula"),
        ("ps(servers=2)", 64, "10gbe", "plan"),
        ("ps(servers=64, on=workers)", 64, "10gbe", "plan"),
        ("double_tree(pieces=4)", 512, "10gbe", "plan"),
        ("ps_tree", 256, "taihulight", "formula"),
        ("ring", 1024, "alpha=1us,beta=1ns,topology=ring", "plan"),
    ],
)
def test_a_plan_answers_or_where_it_is_large_a_formula(text, workers, network, model):
    cluster = load_network(network)
    assert answered_by(asked_of(text, workers, cluster), cluster) == model


@pytest.mark.parametrize("workers", [2, 8, 33])
@pytest.mark.parametrize("text", ["ring", "tree", "ps(servers=1)", "direct"])
def test_both_say_the_same(text, workers):
    free = load_network("alpha=45us,beta=1ns")
    asked = asked_of(text, workers, free)
    (row,) = predict_collectives([text], [10**6], [workers], free).rows
    assert row.model == "plan"
    assert row.comm_s == pytest.approx(closed_s(asked.formula, 10**6, asked.size, free), rel=1e-2)


def test_a_hundred_thousand_workers_are_answered_by_formulas():
    rows = predict_collectives(["ring", "tree", "recursive_doubling", "direct"], [10**8], [100_000], TEN).rows
    assert all(row.comm_s > 0 for row in rows)


@pytest.mark.parametrize(
    ("texts", "sizes", "workers", "says"),
    [
        (["rign"], [1], [2], "did you mean 'ring'"),
        (
            ["native"],
            [1],
            [2],
            "unknown algorithm 'native'. Algorithms are .* the collectives of other libraries cannot",
        ),
        (["ring(4)"], [1], [2], "arguments have names"),
        (["ring", "ring"], [1], [2], "--collective has a duplicate: ring"),
        ([], [1], [2], "--collective is missing"),
        (["ring"], [], [2], "--bytes is missing"),
        (["ring"], [1], [0], "--workers has to be 1 or more"),
        (["ps(servers=3, on=workers)"], [1], [2], "use servers=2"),
        (["double_tree"], [1], [100_000], "too large to simulate"),
        (["ring"], [1], [100_000], "too large to simulate.*for ring"),
    ],
)
def test_what_cannot_be_answered_is_refused(texts, sizes, workers, says):
    cluster = load_network("alpha=1us,beta=1ns,topology=ring") if "for ring" in says else TEN
    with pytest.raises(UsageError, match=says):
        predict_collectives(texts, sizes, workers, cluster)
