"""A comparison as a table: its columns, and what to keep in mind of its rows.

Owns which figures matter at a glance: the single worker stands in the first row, every strategy beside it on the same
work. Replayed layers learn nothing: where other rows have their accuracy, theirs have the share of the bound. The split
of an iteration into stages is on the page. A row that failed keeps its place, and its error stands below in full.
"""

from __future__ import annotations

import dataclasses

from . import units
from .columns import Column, Sheet, Table
from .result_file import grouped
from .rows import Result, Row


def render(result: Result) -> Sheet:
    """The table of all rows with its legend, then what failed and what to keep in mind."""
    return Sheet([table(result)], remarks=remarks(result))


def table(result: Result) -> Table[Row]:
    """The rows, all strategies in one table."""
    return Table(
        _columns(result),
        result.rows,
        measured=lambda row: row.error is None or row.iteration_s is not None,
        errors=[f"{result.label(row)}: {row.error}" for row in result.rows if row.error is not None],
    )


def _columns(result: Result) -> list[Column[Row]]:
    """Those of merit first, on a page they are seen without scrolling; the others say why a row is as it is."""
    merit: list[Column[Row]] = [
        Column("strategy", lambda row: row.name, kind="name"),
        Column("framework", _framework, kind="text", when=lambda row: row.framework != "torch"),
        Column("W", lambda row: str(row.workers), 1, head="", means="workers"),
        _BOUND if result.replayed else _ACCURACY,
        Column("", lambda row: units.number(row.loss), head="loss", means="of the test set after the last iteration"),
        Column("img/s", lambda row: units.rate(row.images_per_s), head="images/s", means="of all workers together"),
        Column(
            "eff",
            lambda row: units.percent(row.scaling_efficiency, 0, ""),
            5,
            unit="%",
            head="scaling",
            means="images per second against W times the single worker's",
        ),
    ]
    return [*merit, *_COORDINATION, *_TIMES, *_COSTS]


def _times(field: str, head: str, means: str, title: str = "", rank: int = 0) -> Column[Row]:
    """A time of an iteration, which most rows have in milliseconds."""
    return Column(title, lambda row: units.milliseconds(getattr(row, field)), rank, unit="ms", head=head, means=means)


_ACCURACY: Column[Row] = Column(
    "acc",
    lambda row: units.percent(row.accuracy, 2, ""),
    unit="%",
    head="accuracy",
    means="test accuracy after the last iteration",
    fails=True,
)
_BOUND: Column[Row] = Column(
    "bnd",
    lambda row: units.percent(row.of_bound, 2, ""),
    unit="%",
    head="of bound",
    means="the share of an iteration that no communication can make shorter without compression: the trace's compute, "
    "or its gradients over the link if that takes longer",
    fails=True,
)
_COORDINATION: tuple[Column[Row], ...] = (
    Column(
        "stale",
        lambda row: staleness(row) if any(row.staleness) else units.MISSING,
        6,
        head="staleness",
        means="steps ahead of the slowest worker when a step begins, mean (most)",
        when=lambda row: any(row.staleness),
    ),
    Column(
        "wait",
        lambda row: units.milliseconds(row.wait_s_per_step or None),
        7,
        unit="ms",
        head="waited",
        means="time per step that a worker was held up by others",
        when=lambda row: row.wait_s_per_step,
    ),
    Column(
        "to acc",
        lambda row: units.MISSING if row.time_to_accuracy_s is None else units.significant(row.time_to_accuracy_s),
        unit="s",
        when=lambda row: row.time_to_accuracy_s is not None,
    ),
)
_TIMES = (
    _times("iteration_s", "iteration", "median", "iter", 4),
    _times("loading_s", "loading", "median of the stage"),
    _times("h2d_s", "copy", "median of the copy of a batch to the device"),
    _times("forward_s", "forward", "median of the stage"),
    _times("backward_s", "backward", "median of the stage"),
    _times("update_s", "update", "median of the stage"),
    dataclasses.replace(
        _times("step_s", "step", "forward, backward and update where a framework makes one computation of them"),
        when=lambda row: row.step_s is not None,
    ),
    _times("compute_s", "compute", "an iteration without the time blocked in communication"),
    _times("exposed_comm_s", "exposed", "time that the training thread was blocked in communication", "comm", 2),
)
_COSTS: tuple[Column[Row], ...] = (
    Column("sent", lambda row: units.size(row.bytes_sent_per_step), 3, means="by one worker in one iteration"),
    _times("cpu_s_per_step", "", "processor time of all processes per iteration", "cpu", 8),
    Column("", lambda row: units.seconds(row.start_s), head="start", means="joining the group, preparing the model"),
    Column("", lambda row: units.size(row.peak_bytes), head="memory", means="the most that a worker's process had"),
    Column("equal", lambda row: units.verdict(row.replicas_equal), means="replicas agree bit for bit"),
)


def _framework(row: Row) -> str:
    return " ".join(filter(None, (row.framework, row.framework_version)))


def staleness(row: Row) -> str:
    """By how many steps workers were ahead of the slowest: the mean, and the most."""
    mean = row.mean_staleness
    return units.MISSING if mean is None else f"{units.significant(mean, 2)} ({max(row.staleness)})"


def remarks(result: Result) -> tuple[str, ...]:
    """What a reader has to know to judge the numbers of this machine."""
    lines = []
    if result.lab is not None:
        goodput = result.goodput_bytes_per_s
        got = "" if goodput is None else f", of which one stream gets {goodput * 8 / 1e6:,.0f} Mbit/s"
        lines.append(f"Every process had a host of its own behind links of {result.lab}{got}.")
    elif result.replayed:
        lines.append(
            "The bound is loading and the trace's compute, and the link where a strategy limits its rate: nothing else"
            " does."
        )
    if result.target is not None and any(row.iteration_s is not None for row in result.rows):
        accuracy = units.percent(result.target, 0 if round(100 * result.target, 9).is_integer() else 2)
        never = [result.label(row) for row in result.rows if row.time_to_accuracy_s is None and row.error is None]
        lines.append(
            f"To acc is the training time after which the model was first seen to be {accuracy} accurate"
            + (f"; {', '.join(never)} never was." if never else ".")
        )
    lines += _launched(result)
    lines += _slowest(result)
    lines += [f"{preset}: {note}." for preset, note in _noted(result).items()]
    found = [row for row in result.rows if row.iteration_s is not None and row.exposed_comm_s is None]
    if found:
        uncounted, fused = dict.fromkeys(map(result.titled, found)), {row.step_s is not None for row in found}
        stage = " or ".join("step" if one else "backward" for one in sorted(fused))
        lines.append(f"{', '.join(uncounted)}: nobody counts waiting and bytes there; {stage} includes communication.")
    processes = max((row.workers + row.servers for row in result.rows if row.iteration_s is not None), default=0)
    if processes > result.cores:
        lines.append(
            f"Up to {processes} processes shared {result.cores} cores: the stages of the larger rows, and so their "
            "scaling, include waiting for a core."
        )
    if any(row.replicas_equal is False for row in result.rows):
        lines.append("Replicas that differ at the end are a fault, unless the strategy lets them drift on purpose.")
    return tuple(lines)


def _launched(result: Result) -> list[str]:
    """Which rows had processes that a launcher has started."""
    lines = []
    for launcher, rows in grouped(result.rows, lambda row: row.launcher).items():
        if launcher != "local":
            names = "all rows" if len(rows) == len(result.rows) else ", ".join(map(result.label, rows))
            lines.append(f"{launcher} started the processes of {names}.")
    return lines


def _slowest(result: Result) -> list[str]:
    """The slowest workers, and under which strategies they were, unless they were under all."""
    measured = [row for row in result.rows if row.compute_by_rank_s]
    lines = []
    for rank in sorted({row.slowest_rank for row in measured if row.slowest_rank is not None}):
        rows = [row for row in measured if row.slowest_rank == rank]
        ends = sorted({f"{row.slower or 0.0:.1f}" for row in rows}, key=float)
        where = "" if rows == measured else f" under {', '.join(map(result.label, rows))}"
        times = " to ".join(dict.fromkeys((ends[0], ends[-1])))
        lines.append(f"Rank {rank} computes {times} times as long as the median worker{where}.")
    return lines


def _noted(result: Result) -> dict[str, str]:
    """What is not as in the original, by preset."""
    return {row.preset: row.note for row in result.rows if row.preset is not None and row.note is not None}
