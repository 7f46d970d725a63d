"""``architecture=auto`` between real processes: one table for all, kept for the next start, used again on resume."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tuning_bodies

from pool import Pool
from syncline.launch.local import Placement, launch

LIMIT_S = 120.0
EQUALS = """
import numpy, syncline
from syncline.algorithms.tree import tree
from syncline.registry import register
from syncline.tuning import cache

def named(name):
    def equal(group):
        return tree(group)
    equal.__qualname__ = name
    register("algorithms", name, goal="allreduce")(equal)

for name in ("star", "palm", "teak", "mast"):
    named(name)
cache.write = lambda *_: None
syncline.init("transport=tcp")
syncline.allreduce(numpy.ones(100, numpy.float32))
print(sorted(syncline.stats().algorithms.items()))
"""
# The fastest of all, if it may run.
SHUFFLED = """
import sys
import numpy, syncline
from syncline.plans.plan import COPY, REDUCE, Plan
from syncline.registry import register
from syncline.tuning import algorithm_choice, cache

@register("algorithms", "shuffled", goal="allreduce")
def shuffled(group):
    chunks = [int(name) for name in {str(chunk) for chunk in range(8)}]
    up = [(0, 0, 1, chunk, 1, REDUCE) for chunk in chunks]
    return Plan.of("shuffled", group, 8, up + [(1, 1, 0, chunk, 1, COPY) for chunk in chunks])

real = algorithm_choice.Measuring.times
algorithm_choice.Measuring.times = lambda self: {
    name: [0.0 if name == "shuffled" else 1.0 for _ in found] for name, found in real(self).items()
}
cache.write = lambda *_: None
syncline.init(sys.argv[1])
array = numpy.arange(8000, dtype=numpy.float32)
syncline.allreduce(array, op="sum")
right = (array == 2 * numpy.arange(8000)).all()
used = "shuffled" in str(syncline.stats().algorithms)
print("right" if right else "wrong", "with it" if used else "without it", sep=", ")
"""

Environ = dict[str, str]


@pytest.fixture
def environ(tmp_path: Path) -> Environ:
    """Of ranks that choose by measuring, with a cache of their own."""
    return {"SYNCLINE_TUNING": "on", "XDG_CACHE_HOME": str(tmp_path)}


def start(
    pool: Pool, environ: Environ, nodes: list[int], address: str, strategy: str = "auto", budget_s: float = 0.1
) -> Any:
    case = [[[rank, len(nodes), address], nodes, strategy, budget_s] for rank in range(len(nodes))]
    with pool.start(tuning_bodies.starts, case, environ) as group:
        return group.results()


@pytest.mark.parametrize(
    ("nodes", "strategy", "printed"),
    [
        ([0, 0], "auto", "schedule=fixed transport=shm"),
        pytest.param([0, 0, 0], "transport=tcp", "schedule=fixed transport=tcp", marks=pytest.mark.slow),
        ([0, 0, 1], "schedule=fifo", "schedule=fifo"),
    ],
)
def test_all_ranks_have_one_table_and_it_is_kept(
    pool: Pool, addresses: Callable[[], str], environ: Environ, nodes: list[int], strategy: str, printed: str
) -> None:
    first = start(pool, environ, nodes, addresses(), strategy)
    again = start(pool, environ, nodes, addresses(), strategy)
    table = first[0][2]
    assert table[0][0] == 0
    for found, measured in ((first, ["measured"]), (again, [])):
        for did, text, algorithms, right, blocked_s in found:
            assert did == measured
            assert text == printed
            assert algorithms == table
            assert right
            assert blocked_s >= 0
    kept = list((Path(environ["XDG_CACHE_HOME"]) / "syncline" / "tuning").iterdir())
    assert len(kept) == 1


def test_fresh_measures_anew_and_off_does_not_measure(
    pool: Pool, addresses: Callable[[], str], environ: Environ
) -> None:
    for mode, measured, strategy in (
        ("on", ["measured"], "schedule=fixed transport=shm"),
        ("fresh", ["measured"], "schedule=fixed transport=shm"),
        ("off", [], "direct schedule=fixed transport=shm"),
    ):
        found = start(pool, {**environ, "SYNCLINE_TUNING": mode}, [0, 0], addresses())
        assert [(did, text) for did, text, *_ in found] == [(measured, strategy)] * 2


def test_named_architectures_are_never_measured(pool: Pool, address: str, environ: Environ) -> None:
    for did, text, algorithms, right, _ in start(pool, environ, [0, 0], address, "ring"):
        assert (did, text, algorithms, right) == ([], "ring schedule=fixed transport=shm", [], True)


def test_only_rank_0_needs_the_cache(
    pool: Pool, addresses: Callable[[], str], environ: Environ, tmp_path: Path
) -> None:
    """Hit or miss is the same for all, whatever the other ranks could find."""
    case = lambda address: [[[rank, 2, address], [0, 0], "auto", 0.1] for rank in range(2)]  # noqa: E731
    with pool.start(tuning_bodies.starts, case(addresses()), environ) as group:
        first = group.results()
    (kept,) = (tmp_path / "syncline" / "tuning").iterdir()
    kept.write_text("{")
    with pool.start(tuning_bodies.starts, case(addresses()), environ) as group:
        again = group.results()
    for found in (first, again):
        assert [did for did, *_ in found] == [["measured"]] * 2
        assert found[0][2] == found[1][2]


def test_a_rank_that_dies_while_all_measure_is_named(pool: Pool, address: str, environ: Environ) -> None:
    case = [[[rank, 3, address], 1] for rank in range(3)]
    with pool.start(tuning_bodies.dies, case, environ) as group:
        statuses = group.end()
        assert statuses[1] == -9
        for rank in (group.ranks[0], group.ranks[2]):
            assert rank.status == 1
            # Rank 0 tells how often each size is run: others may not have left that when the victim has.
            assert re.search(r"during (tuning|broadcast): rank 1 .* died", rank.printed())


def test_ranks_with_another_setting_are_told(pool: Pool, address: str, environ: Environ) -> None:
    case = [[[rank, 2, address], [0, 0], "auto", 0.1] for rank in range(2)]
    with (
        pool.start(tuning_bodies.starts, case[:1], environ) as one,
        pool.start(tuning_bodies.starts, case[1:], {**environ, "SYNCLINE_TUNING": "off"}) as other,
    ):
        assert [*one.end(), *other.end()] == [1, 1]
        assert "SYNCLINE_TUNING" in one.ranks[0].printed()
        assert "all ranks need the same" in one.ranks[0].printed()


def test_a_resumed_run_uses_the_recorded_table(pool: Pool, address: str, environ: Environ) -> None:
    recorded = [[0, "double_tree"], [1 << 20, "ring"]]
    case = [[[rank, 3, address], recorded] for rank in range(3)]
    with pool.start(tuning_bodies.resumes, case, environ) as group:
        results = group.results()
    assert [(plan, table) for plan, table, _ in results] == [("double_tree", recorded)] * 3
    assert len({weights for *_, weights in results}) == 1


@pytest.mark.slow
def test_ranks_that_hash_differently_choose_from_the_same_plans(tmp_path: Path) -> None:
    """Names of one length for one plan: what stays may not depend on the order of a set."""
    script, printed = tmp_path / "script.py", []
    script.write_text(EQUALS)
    outcome = launch(
        [sys.executable, str(script)],
        3,
        env={"SYNCLINE_TUNING": "fresh"},
        on_output=lambda _, line: printed.append(line),
        place=lambda rank: Placement(env={"PYTHONHASHSEED": str(rank)}),
        timeout_s=LIMIT_S,
    )
    assert outcome.status == 0, printed
    assert len(printed) == 3
    assert len(set(printed)) == 1
    assert not re.search("star|palm|teak|mast", printed[0])  # what comes with Syncline goes first


@pytest.mark.parametrize("strategy", ["transport=tcp", pytest.param("shuffled transport=tcp", marks=pytest.mark.slow)])
def test_ranks_that_list_the_same_transfers_in_another_order_never_add_up_wrongly(
    tmp_path: Path, strategy: str
) -> None:
    """An algorithm that lists from a set of texts: left out where it may be chosen, refused where it is named."""
    script, printed = tmp_path / "script.py", []
    script.write_text(SHUFFLED)
    outcome = launch(
        [sys.executable, str(script), strategy],
        2,
        env={"SYNCLINE_TUNING": "fresh"},
        on_output=lambda _, line: printed.append(line),
        place=lambda rank: Placement(env={"PYTHONHASHSEED": str(rank)}),
        timeout_s=LIMIT_S,
    )
    text = "\n".join(printed)
    if strategy.startswith("shuffled"):
        assert outcome.status == 1
        assert "shuffled has other transfers, or lists them in another order, on rank 1" in text
    else:
        assert outcome.status == 0, printed
        assert sum("right, without it" in line for line in printed) == 2
        assert "leaves shuffled out" in text


@pytest.mark.parametrize("how", ["another", pytest.param("lacks", marks=pytest.mark.slow), "wrong"])
def test_what_not_all_ranks_have_alike_is_left_out(
    pool: Pool, addresses: Callable[[], str], environ: Environ, how: str
) -> None:
    """An algorithm of another package on some hosts, or in another version, or one that does not add up."""
    for _ in range(2):  # measured, and as kept
        address = addresses()
        case = [[[rank, 3, address], how] for rank in range(3)]
        with pool.start(tuning_bodies.foreign, case, environ) as group:
            tables = group.results()
            said = group.ranks[0].printed()
        assert tables[0] == tables[1] == tables[2]
        assert "theirs" not in str(tables)
        assert "architecture=auto leaves theirs out: " in said
        assert {"lacks": "rank 1 ", "another": "a different algorithm", "wrong": "plan is wrong"}[how] in said
