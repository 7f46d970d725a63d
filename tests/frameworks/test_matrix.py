"""The laws of training together, each once, for every framework and strategy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from cells import Cell, over
from matrix import RULES, STEPS, Mode, Run, by_hand, flat, start

from syncline import registry
from syncline.errors import StrategyError
from syncline.strategy.strategy import Strategy

REDUCED = ["ring", "direct schedule=wait_free", "tree schedule=fifo", "ps(servers=2, update=worker)"]
REDUCED += ["ring schedule=priority(slice=64B)", "direct schedule=split(slice=64B)"]
ALGORITHMS = ["recursive_doubling", "halving_doubling", "double_tree", "hierarchical"]
SERVED = ["ps(servers=1)", "ps(servers=2) schedule=wait_free", "ps(servers=2) schedule=priority(slice=64B)"]
SERVED += ["ps(servers=2, on=workers)", "ps(servers=2) schedule=fifo"]
CODED = ["ring codec=topk(ratio=0.3)", "ring codec=int8 schedule=priority(slice=64B)", "ps(servers=2) codec=int8"]
CODED += ["ps(servers=1, on=workers) codec=int8", "ring codec=bf16", "ps(servers=2, local=on) codec=int8"]
SUMMED = "ps(servers=1, update=worker) codec=int8"
STAGED = ["ring schedule=wait_free", "ps(servers=1)", "ps(servers=2, on=workers)"]
FORKED = ["ring", "direct schedule=wait_free", "ring schedule=fixed(bucket=64B)", "ring schedule=priority(slice=64B)"]
FORKED += ["ps(servers=2, on=workers, update=worker)"]
FORKED += ["ps(servers=1, on=workers) schedule=wait_free transport=tcp", "ps(servers=1)"]


def near(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance / 1e3)


def are_equal(results: Sequence[Any]) -> bool:
    """Bit for bit."""
    return all(np.array_equal(one, results[0]) for one in results)


# Steps that all make together.


def ruled(strategies: Sequence[str]) -> list[tuple[str, str]]:
    """Every strategy with a rule, the first and the last with all."""
    some = [(text, list(RULES)[number % 3]) for number, text in enumerate(strategies)]
    return sorted({*some, *product([strategies[0], strategies[-1]], RULES)})


THREADED = [
    (text, list(RULES)[(number + workers) % 3], workers)
    for number, text in enumerate(REDUCED + ALGORITHMS + SERVED)
    for workers in (2 + number % 3,)
] + [("ring", rule, 1) for rule in RULES]


@pytest.mark.every(2)
@over(
    lambda usual, text, rule, workers=0: [Run(text, rule, workers or usual)],
    numpy=THREADED,
    torch=[*THREADED[1::4], *product(["ps(servers=1)"], RULES)],
    staged=[*zip(STAGED, RULES, strict=True)],
    jax=ruled(FORKED[::2]),  # the two frameworks, whose core is one, take turns
    tensorflow=ruled(FORKED[1::2]),
)
def test_workers_train_as_one_that_has_the_mean(cell: Cell) -> None:
    """Of their gradients, from rank 0's weights, at a learning rate that changes; all have the same bits."""
    (run,), (found,) = cell.runs, cell.results()
    near(found[0].weights, by_hand(run)[0][0])
    assert len(found) == run.workers
    assert are_equal([one.weights for one in found])
    assert are_equal([one.together for one in found] + [found[0].weights])


@pytest.mark.every(2)
@over(
    lambda workers, text: [Run(text, "adam", workers, dtype="float32", again=again) for again in range(2)],
    numpy=["ring", *SERVED[-2:]],
    torch=[*REDUCED[3:5], *SERVED[1:4]],
    jax=["ring"],
    tensorflow=["ring"],
)
def test_runs_in_single_precision_are_equal_bit_for_bit(cell: Cell) -> None:
    one, other = cell.results()
    assert one[0].weights.dtype == np.float32
    assert are_equal([found.weights for found in one + other])


# Codecs.

TEXTS = [text for entry in registry.entries("codecs") for text in entry.capabilities.get("examples", (entry.name,))]
FIRST = [entry.capabilities.get("examples", (entry.name,))[0] for entry in registry.entries("codecs")]
FEEDBACK = "feedback(onebit, warmup=2)"
PLACES = ["ring", "ps(servers=2, update=worker)", "ps(servers=2)", "ps(servers=1, on=workers) schedule=wait_free"]


def accepted(strategy: str) -> bool:
    """Servers make no rounds, and what warms up is not for all of them."""
    try:
        Strategy.parse(strategy)
    except StrategyError:
        return False
    return True


def coded(codecs: Sequence[str], places: Sequence[str]) -> list[str]:
    return [text for text in (f"{place} codec={codec}" for place in places for codec in codecs) if accepted(text)]


@pytest.mark.every(2)
@over(
    lambda workers, text, times=1: [Run(text, "momentum", workers, dtype="float32", again=n) for n in range(times)],
    numpy=[
        *((text, 2) for text in coded(FIRST, PLACES[:1])),
        *coded([text for text in TEXTS if text not in FIRST], PLACES[:1]),
        *(text for number, codec in enumerate(FIRST) for text in coded([codec], [PLACES[1 + number % 3]])),
    ],
    torch=[*coded(["int8", "powersgd(rank=2)"], PLACES[::2]), *coded(["topk(ratio=0.3)", FEEDBACK], PLACES[1::2])],
    staged=["ring codec=int8", "ps(servers=1) codec=int8"],
)
def test_codecs_leave_all_workers_and_runs_equal(cell: Cell) -> None:
    assert are_equal([found.weights for results in cell.results() for found in results])


@pytest.mark.every(2)
@over(
    lambda workers, text: [Run(text, "sgd", workers)],
    numpy=[*CODED, SUMMED],
    torch=[*CODED, SUMMED],
    jax=["ring codec=int8", "ps(servers=1) codec=int8"],
    tensorflow=["ring codec=int8", "ps(servers=1) codec=int8"],
)
def test_codecs_train_nearly_as_without(cell: Cell) -> None:
    (run,), (found,) = cell.runs, cell.results()
    wanted, begun = by_hand(run)[0][0], flat(start())
    assert are_equal([one.weights for one in found])
    part = 0.3 if "topk" in cell.case[0] else 0.01
    assert 0 < np.linalg.norm(found[0].weights - wanted) < part * np.linalg.norm(begun - wanted)


# Workers that train by themselves and exchange weights.


def mean(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:  # noqa: ARG001
    return np.tile(rows.mean(axis=0), (len(rows), 1)), rows.mean(axis=0)


def springs(rows: Any, centre: Any, memory: dict[str, Any]) -> Any:  # noqa: ARG001
    return rows - 0.6 / len(rows) * (rows - centre), centre + 0.6 * (rows.mean(axis=0) - centre)


def outer(lr: float, part: float, nesterov: bool) -> Any:
    """SGD with momentum by the mean difference."""

    def agree(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:
        pseudo = agreed - rows.mean(axis=0)
        memory["momentum"] = part * memory.get("momentum", 0.0) + pseudo
        moved = agreed - lr * (pseudo + part * memory["momentum"] if nesterov else memory["momentum"])
        return np.tile(moved, (len(rows), 1)), moved

    return agree


def beside(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:  # noqa: ARG001
    """The mean with the neighbours on both sides, who may be the same."""
    away = {1, len(rows) - 1}
    return sum((np.roll(rows, distance, axis=0) for distance in away), rows) / (1 + len(away)), agreed


def doubling(rows: Any, agreed: Any, memory: dict[str, Any]) -> Any:
    """The mean with one other, at distances that double."""
    turn = memory["turn"] = memory.get("turn", -1) + 1
    distance = 1 << turn % max(1, (len(rows) - 1).bit_length())
    return (rows + np.roll(rows, distance, axis=0)) / 2, agreed


MODES = {
    "local(steps=2)": Mode(0, mean, 2),
    "post_local(after=2, steps=2)": Mode(2, mean, 2),
    "easgd(steps=2, beta=0.6)": Mode(0, springs, 2),
    "diloco(steps=2)": Mode(0, outer(0.7, 0.9, True), 2),
    "diloco(steps=2, lr=0.5, momentum=0.8, nesterov=off)": Mode(0, outer(0.5, 0.8, False), 2),
    "diloco(steps=2, lr=1.0, momentum=0.0)": Mode(0, outer(1.0, 0.0, False), 2),
    "gossip(graph=ring)": Mode(0, beside, 1),
    "gossip(graph=ring, steps=2)": Mode(0, beside, 2),
    "gossip": Mode(0, doubling, 1),
}
"""The formula of each mode. All but elastic averaging and gossip leave all workers equal."""
CARRIERS = ["direct schedule=wait_free", "ps(servers=2, update=worker)", "tree schedule=fifo"]
CARRIED = [("ring", sync, workers) for sync in MODES for workers in ((3, 4, 5) if "gossip" in sync else (3,))]
CARRIED += [(place, sync, 3, (7,)) for place in CARRIERS for sync in ("local(steps=2)", "easgd(steps=2, beta=0.6)")]
CARRIED += [
    ("ps(servers=1, update=worker)", "post_local(after=2, steps=2)"),
    (CARRIERS[0], "gossip", 5),
]


def keeps_apart(sync: str) -> bool:
    return sync.startswith(("easgd", "gossip"))


MIDDLE = [
    ("ring", sync, 0, (STEPS + 1,))
    for sync in MODES
    if sync not in ("gossip(graph=ring)", "diloco(steps=2, lr=1.0, momentum=0.0)")
]


@pytest.mark.every(2)
@over(
    lambda usual, text, sync, workers=0, lasts=(STEPS, STEPS + 1): [
        Run(f"{text} sync={sync}", "adam", workers or usual, last=last) for last in lasts
    ],
    numpy=CARRIED,
    torch=CARRIED[::3],
    staged=MIDDLE[::2],
    jax=MIDDLE[::2],
    tensorflow=MIDDLE[1::2],
)
def test_workers_that_train_by_themselves_meet_as_the_formulas_have_it(cell: Cell) -> None:
    """When a period has ended, in the middle of the next one, and after ``consolidate``: the mean, or the centre."""
    mode = MODES[cell.case[1]]
    for run, found in zip(cell.runs, cell.results(), strict=True):
        rows, agreed = by_hand(run, mode)
        near([one.weights for one in found], rows)
        for one in found:
            near(one.together, agreed if mode.agree is springs else rows.mean(axis=0))
        assert are_equal([one.together for one in found])
        if (run.last - mode.together) % mode.period == 0 and not keeps_apart(cell.case[1]):
            assert are_equal([one.weights for one in found])


COMPRESSED = ["int8", "onebit", "topk(ratio=0.1)", "powersgd(rank=2)", "fp16"]
PERIODS = ["local(steps=2)", "diloco(steps=2)", "easgd(steps=2)", "post_local(after=2, steps=2)"]


def plain(sync: str, codec: str) -> str:
    """Elastic averaging does not go with codecs that rely on feedback."""
    return " feedback=off" if sync.startswith("easgd") and codec in ("topk(ratio=0.1)", "powersgd(rank=2)") else ""


@pytest.mark.every(2)
@over(
    lambda workers, text: [Run(text, "sgd", workers, dtype="float32")],
    numpy=[
        f"ring sync={sync} codec={codec}{plain(sync, codec)}"
        for row, sync in enumerate(PERIODS)
        for column, codec in enumerate(COMPRESSED)
        if (row + column) % 2 == 0
    ],
    torch=[f"ring sync={sync} codec=topk(ratio=0.1){plain(sync, 'topk(ratio=0.1)')}" for sync in PERIODS],
    staged=[f"ring sync={sync} codec=int8" for sync in PERIODS],
)
def test_codecs_leave_agreed_weights_equal(cell: Cell) -> None:
    (found,) = cell.results()
    assert are_equal([one.together for one in found])
    if "easgd" not in cell.case[0]:
        assert are_equal([one.weights for one in found])


# Runs that are resumed.

PERIODIC = ["ring sync=local(steps=3)", "ring sync=diloco(steps=3) codec=int8", "ring sync=easgd(steps=3)"]
PERIODIC += ["tree sync=post_local(after=3, steps=3)", "ring sync=gossip(steps=3)"]
MORE = ["ring codec=randomk(ratio=0.3)", "ring sync=local(steps=2) codec=topk(ratio=0.3)"]
MORE += ["ring sync=post_local(after=3, steps=2) codec=int8", "ring sync=diloco(steps=3)"]
KEEPING = ["ring codec=topk(ratio=0.3)", "ring sync=local(steps=3)", "ps(servers=1) codec=int8"]


@pytest.mark.every(2)
@over(
    lambda workers, text, at=4: [
        whole := Run(text, "adam", workers, last=9, saved=at),
        Run(text, "adam", workers, last=9, after=whole),
    ],
    numpy=[*REDUCED[::2], *SERVED[1::2], *CODED, *PERIODIC, *MORE[1::2]],
    torch=[*SERVED[::2], *CODED[::2], *MORE[::2], *((text, 3) for text in PERIODIC[1::2])],
    staged=["ps(servers=1)", "ring sync=easgd(steps=3)", "ring sync=local(steps=2) codec=topk(ratio=0.3)"],
    jax=[*KEEPING, "ps(servers=2, on=workers)"],
    tensorflow=KEEPING,
)
def test_a_run_that_is_resumed_goes_on_with_the_same_bits(cell: Cell) -> None:
    """Also in the middle of a period, and with what codecs keep back."""
    for wanted, found in zip(*cell.results(), strict=True):
        assert np.array_equal(found.weights, wanted.weights)
        assert np.array_equal(found.together, wanted.together)


FEWER = [("ring", 1), ("ps(servers=1)", 3), ("ps(servers=1, on=workers)", 1)]


@pytest.mark.every(2)
@over(
    lambda workers, text, before: [
        Run(text, "adam", workers, push="alike", after=Run(text, "adam", before, last=3, push="alike", saved=3))
    ],
    numpy=[
        (text, (1, 2, 4)[number % 3])
        for number, text in enumerate([*REDUCED, *SERVED[:3], "ps(servers=1, on=workers)"])
    ],
    torch=zip([REDUCED[1], SERVED[1], "ps(servers=1, on=workers)"], (1, 2, 4), strict=True),
    jax=FEWER,
    tensorflow=FEWER,
)
def test_a_run_goes_on_with_other_numbers_of_workers(cell: Cell) -> None:
    """Their gradients are the same, so that the number does not matter."""
    (found,), wanted = cell.results(), by_hand(Run("ring", push="alike"))[0][0]
    for one in found:
        near(one.weights, wanted)


@pytest.mark.every(2)
@over(
    lambda usual, text, workers: [
        whole := Run(text, "adam", usual, last=9, saved=4),
        Run(text, "adam", workers, last=9, after=whole),
    ],
    numpy=[(text, 2 + number % 2 * 2) for number, text in enumerate([*CODED, *PERIODIC])],
    torch=[(text, 2) for text in [*CODED[1::2], *PERIODIC[1::2]]],
    jax=[("ring codec=int8", 3), ("ring sync=local(steps=3)", 3)],
    tensorflow=[("ring codec=int8", 3), ("ring sync=local(steps=3)", 3)],
)
def test_what_workers_had_of_their_own_is_shared_out(cell: Cell) -> None:
    """Under another number of workers, which begin with the mean of their weights."""
    before, later = cell.results()
    middle = np.mean([one.saved[0] for one in before if one.saved is not None], axis=0)
    for one in later:
        near(one.begun, middle)
    assert are_equal([one.together for one in later])
    if "easgd" not in cell.case[0] and "gossip" not in cell.case[0]:
        assert are_equal([one.weights for one in later])


KEPT = [
    "ring sync=local(steps=3)",
    "ring sync=easgd(steps=3)",
    "ring sync=gossip(steps=2)",
    "ring sync=diloco(steps=3) codec=feedback(int8)",
    "ring sync=post_local(after=2, steps=3)",
    "ring sync=post_local(after=3, steps=2) codec=topk(ratio=0.2)",
    "ring codec=topk(ratio=0.2)",
    "ring codec=powersgd(rank=1)",
    "ring codec=feedback(onebit, warmup=2)",
    "ps(servers=1, on=workers) codec=topk(ratio=0.2)",
    "ps(servers=1, on=workers, update=worker) codec=topk(ratio=0.3)",
]


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:this state")
@over(
    lambda _, text: [
        Run(text, "sgd", 2, 11, after=Run(text, "sgd", 1, last=4, saved=4), given_up=steps) for steps in (0, 1, 4)
    ],
    numpy=KEPT,
    torch=KEPT[::4],
)
def test_a_state_leaves_nothing_of_the_steps_before(cell: Cell) -> None:
    """One worker's knows nothing of codecs and of what is agreed on: both begin anew, as in a fresh run."""
    fresh, *late = cell.results()
    for found in late:
        for mine, wanted in zip(found, fresh, strict=True):
            assert np.array_equal(mine.weights, wanted.weights)
            assert np.array_equal(mine.together, wanted.together)


# Pushes that are updates by themselves.

ALONE = list(product(["ps(servers=2)", "ps(servers=1, on=workers)"], ["asp", "ssp(staleness=2)", "asp(rate=own)"]))
SOME_ALONE = [
    ("ps(servers=1)", "asp"),
    ("ps(servers=1)", "asp(rate=own)"),
    ("ps(servers=2, on=workers)", "ssp(staleness=2)"),
]


@pytest.mark.every(2)
@over(
    lambda workers, place, sync: [
        whole := Run(f"{place} sync={sync}", "sgd", workers, push="constant", saved=3),
        Run(whole.strategy, "sgd", workers, push="constant", after=whole),
    ],
    numpy=ALONE,
    torch=ALONE[::2],
    jax=SOME_ALONE,
    tensorflow=SOME_ALONE,
)
def test_nothing_that_is_pushed_is_lost(cell: Cell) -> None:
    """Each push has a share of the learning rate, or all of it; also where the run is resumed."""
    pushes = cell.runs[0].workers if "own" in cell.case[1] else 1
    for found in cell.results():
        for one in found:
            near(one.together, flat(start()) - 0.1 * pushes * sum(range(1, STEPS + 1)))
