"""A comparison as a table: its columns, and what to keep in mind of its rows.

Owns which figures matter at a glance: the single worker stands in the first row, every strategy beside it on the same
work. Replayed layers learn nothing: where other rows have their accuracy, theirs have the share of the bound. The split
of an iteration into stages is on the page. A row that failed keeps its place, and its error stands below in full.
"""

from __future__ import annotations

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
    score = ("bnd", "of_bound", "of bound") if result.replayed else ("acc", "accuracy", "accuracy")
    ms = units.milliseconds
    return [
        Column("strategy", "name", kind="name"),
        Column("framework", by=_framework, kind="text", when=lambda row: row.framework != "torch"),
        Column("W", "workers", rank=1, head="", means="workers"),
        Column(score[0], score[1], units.hundredths, unit="%", head=score[2], fails=True),
        Column("", "loss", units.number, head="loss"),
        Column("img/s", "images_per_s", units.significant, head="images/s"),
        Column("eff", "scaling_efficiency", units.share, 5, unit="%", head="scaling"),
        Column("stale", "staleness", rank=6, by=staleness, head="staleness", when=lambda row: any(row.staleness)),
        Column("wait", "wait_s_per_step", _waited, 7, unit="ms", head="waited", when=lambda row: row.wait_s_per_step),
        Column(
            "to acc",
            "time_to_accuracy_s",
            units.significant,
            unit="s",
            means="",
            when=lambda row: row.time_to_accuracy_s is not None,
        ),
        Column("iter", "iteration_s", ms, 4, unit="ms", head="iteration"),
        Column("", "loading_s", ms, unit="ms", head="loading"),
        Column("", "h2d_s", ms, unit="ms", head="copy"),
        Column("", "forward_s", ms, unit="ms", head="forward"),
        Column("", "backward_s", ms, unit="ms", head="backward"),
        Column("", "update_s", ms, unit="ms", head="update"),
        Column("", "step_s", ms, unit="ms", head="step", when=lambda row: row.step_s is not None),
        Column("", "compute_s", ms, unit="ms", head="compute"),
        Column("comm", "exposed_comm_s", ms, 2, unit="ms", head="exposed"),
        Column("sent", "bytes_sent_per_step", units.size, 3),
        Column("cpu", "cpu_s_per_step", ms, 8, unit="ms", head=""),
        Column("", "start_s", units.seconds, head="start"),
        Column("", "peak_bytes", units.size, head="memory"),
        Column("equal", "replicas_equal", units.verdict),
    ]


def _framework(row: Row) -> str:
    return " ".join(filter(None, (row.framework, row.framework_version)))


def _waited(value: float | None) -> str:
    return units.milliseconds(value or None)


def staleness(row: Row) -> str:
    """By how many steps workers were ahead of the slowest: the mean, and the most."""
    if not any(row.staleness):
        return units.MISSING  # all in step
    return f"{units.significant(row.mean_staleness, 2)} ({max(row.staleness)})"


def remarks(result: Result) -> tuple[str, ...]:
    """Remarks that a reader needs to judge the numbers of this machine."""
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
    """The differences from the original, by preset."""
    return {row.preset: row.note for row in result.rows if row.preset is not None and row.note is not None}
