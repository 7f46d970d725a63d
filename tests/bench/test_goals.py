"""The table of goals: what counts, what is judged by the worst, and what has not been measured."""

from __future__ import annotations

from dataclasses import replace

from syncline_bench.collectives.request import DEFAULT_CONTENDERS, LAB_CONTENDERS
from syncline_bench.goals import GOALS, Goal, judge, times_faster, times_the_cpu
from syncline_bench.report.bench import Measured

OWN = Measured("shm", "auto", 2, 60_970_000, median_s=0.010, cpu_s_per_gb=1.0, of_limit=0.9, correct=True)
FAST = replace(OWN, transport="mpi", algorithm="native", median_s=0.040)
SLOW = replace(OWN, transport="openmpi", algorithm="native", median_s=0.060)


def goal(**changes: object) -> Goal:
    values: dict[str, object] = {
        "where": "shm",
        "against": "faster than MPI",
        "contenders": ("shm:auto",),
        "figure": times_faster("mpi:native", "openmpi:native"),
        "bound": 3.0,
        "holds": lambda row: row.bytes > 1000,
    }
    return Goal(**{**values, **changes})  # type: ignore[arg-type]


def test_the_fastest_of_the_peers_counts() -> None:
    verdict = goal().judge([OWN, FAST, SLOW])
    assert (verdict.measured, verdict.reached) == ("4.00 x", True)
    assert verdict.goal == "shm: at least 3.00 x faster than MPI"
    assert verdict.at == "shm:auto, 2 ranks, 60.97 MB"


def test_the_worst_row_decides_and_places_are_not_mixed() -> None:
    four = [replace(row, ranks=4) for row in (replace(OWN, median_s=0.020), FAST)]
    verdict = goal().judge([OWN, SLOW, *four])
    assert (verdict.measured, verdict.reached, verdict.at) == ("2.00 x", False, "shm:auto, 4 ranks, 60.97 MB")
    # The peer's row of another number of ranks is no comparison.
    assert goal().judge([OWN, replace(FAST, ranks=4)]).reached is None


def test_what_was_not_measured_is_not_reached_and_not_missed() -> None:
    failed = replace(FAST, median_s=None, error="rank 1 died")
    for rows in ([], [OWN], [OWN, failed], [replace(OWN, collective="broadcast"), FAST]):
        assert goal().judge(rows).reached is None
    assert goal(lab=True).judge([OWN, FAST]).reached is None
    assert goal(lab=None).judge([replace(row, lab_bit_per_s=1e9) for row in (OWN, FAST)]).reached is True


def test_a_bound_from_above() -> None:
    least = goal(figure=times_the_cpu("mpi:native"), bound=1.0, at_most=True)
    assert least.judge([OWN, FAST]).reached is True
    assert least.judge([replace(OWN, cpu_s_per_gb=1.1), FAST]).reached is False


def test_every_goal_can_be_measured_by_the_default_rows() -> None:
    """Each is reached by a run in which Syncline is a hundred times faster than anything else."""
    rows = []
    for rate, worlds in ((None, (2, 4)), (1e9, (4,))):
        for ranks in worlds:
            for nbytes in (1000, 64_000, 1_000_000, 4_000_000, 16_000_000, 60_970_000, 256_000_000):
                for name in LAB_CONTENDERS if rate else DEFAULT_CONTENDERS:
                    transport, _, algorithm = name.partition(":")
                    own = algorithm == "auto"
                    median_s = 1e-5 if own else 1e-3
                    row = Measured(transport, algorithm, ranks, nbytes, lab_bit_per_s=rate, correct=True)
                    rows.append(replace(row, median_s=median_s, cpu_s_per_gb=median_s, of_limit=1.0))
    for algorithm, median_s in (("hierarchical codec=int8", 1e-5), ("direct codec=int8", 1e-3)):
        row = Measured("auto", algorithm, 4, 33_600_000, lab_bit_per_s=1e9, per_host=2, correct=True)
        rows.append(replace(row, median_s=median_s, cpu_s_per_gb=median_s, of_limit=1.0))
    assert [verdict.reached for verdict in judge(rows)] == [True] * len(GOALS)
    slow = {"median_s": 1.0, "cpu_s_per_gb": 2.0, "of_limit": 0.1}
    own = ("auto", "hierarchical codec=int8")
    worse = [replace(row, **slow) if row.algorithm in own else row for row in rows]  # type: ignore[arg-type]
    assert [verdict.reached for verdict in judge(worse)] == [False] * len(GOALS)
