"""Results of ``syncline predict``: collectives and workloads, each with its rows, file and table; and constants.

``syncline calibrate`` shows the constants of a network, in a table of its own.

Owns the names, units and JSON of these results, and the columns of their tables. Each field's annotation has its
meaning; ``files`` has the rules of the JSON. Does not know how anything was predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from . import units
from .columns import Column, Sheet, Table
from .files import ResultFile, grouped


@dataclass(frozen=True)
class CollectiveRow:
    """One collective with a number of workers."""

    algorithm: Annotated[str, "the algorithm"]
    bytes: Annotated[int, "of the array"]
    workers: Annotated[int, "the number of workers"]
    comm_s: Annotated[float, "the predicted time"]
    low_s: Annotated[float, "with every constant at the fast end of its range"]
    high_s: Annotated[float, "the same at the slow end"]
    per_node: Annotated[int, "workers on each host"] = 1
    model: Annotated[
        str, "`plan`: every message of the plan, on the clocks of all ranks; `formula`: for plans that are too large"
    ] = "plan"

    @property
    def busbw_bytes_per_s(self) -> float | None:
        """As in nccl-tests, for an allreduce; None if nothing is sent."""
        if self.comm_s <= 0:
            return None
        return 2 * (self.workers - 1) / self.workers * self.bytes / self.comm_s


@dataclass(frozen=True, kw_only=True)
class CollectivePrediction(ResultFile):
    """Collectives on a network; ``constants`` has the network's constants with their ranges and sources.

    ``assumed`` names the constants that were not measured; ``notes`` name inputs without an effect.
    """

    verb: ClassVar = "predict --collective"

    network: str
    about: str
    source: str
    date: str
    topology: str
    ports_per_host: int
    constants: Mapping[str, Mapping[str, Any]]
    assumed: list[str]
    notes: list[str] = field(default_factory=list)
    rows: tuple[CollectiveRow, ...] = ()


@dataclass(frozen=True)
class Predicted:
    """One strategy on a number of workers of a network. Seconds are per iteration, in the mean."""

    strategy: Annotated[str, "the simulated strategy"]
    requested: Annotated[str, "as requested"]
    network: Annotated[str, "the network with the constants"]
    workers: Annotated[int, "the number of workers"]
    per_node: Annotated[int, "workers on each host"]
    servers: Annotated[int, "server processes"]
    batch: Annotated[int, "samples of an iteration, of all workers"]
    iteration_s: Annotated[float, "the mean time of an iteration"]
    low_s: Annotated[float, "the expected range of the iteration"]
    high_s: Annotated[float, "the expected range of the iteration"]
    images_per_s: Annotated[float, "of all workers"]
    scaling_efficiency: Annotated[
        float, "images per second relative to one worker's on this network times the number of workers"
    ]
    comm_s: Annotated[float, "the time that exchanges use the busiest resource: ports, links inside hosts, or servers"]
    exposed_comm_s: Annotated[float, "the time that the training thread waits for exchanges"]
    bottleneck: Annotated[str, "the resource with the largest potential saving, and others within 5 % of it"]
    remedy: Annotated[str, "the remedy for the bottleneck"]
    would_save_s: Annotated[
        Mapping[str, float], "by resource: the time by which an iteration would be shorter without its cost"
    ]
    loading_s: Annotated[float, "a stage, as in `compare`"]
    h2d_s: Annotated[float, "the same"]
    forward_s: Annotated[float, "the same"]
    backward_s: Annotated[float, "the same"]
    update_s: Annotated[float, "the same"]
    other_s: Annotated[float, "the same"]
    bytes_sent_per_step: Annotated[float | None, "by a worker; none if some steps do not exchange all gradients"] = None
    chosen: Annotated[str, "the choices made by simulation"] = ""
    note: Annotated[str, "the differences from the original of a preset"] = ""
    price: Annotated[float | None, "of an epoch, with `--price` of a worker for an hour"] = None
    epoch_s: Annotated[float | None, "of an epoch, with `--epoch-images`"] = None
    model: Annotated[str, "`plan`, the messages of an exchange; `formula`, its closed form, for too many messages"] = (
        "plan"
    )


@dataclass(frozen=True)
class Stated:
    """A constant of a network as used: seconds, their range and source."""

    network: str
    name: str
    value: float
    low: float
    high: float
    measured: bool
    source: str


@dataclass(frozen=True, kw_only=True)
class Prediction(ResultFile):
    """Rows, their constants, and the information needed to judge them.

    ``single_s`` is one worker's iteration on each network. ``knees`` has, by network and strategy, the number of
    workers where scaling ends. ``winners`` has the fastest strategy by network and number of workers, ``break_even``
    the link speed below which each codec pays, in words, and ``holdout`` the model's error by network.
    """

    verb: ClassVar = "predict --workload"

    workload: str
    rows: tuple[Predicted, ...]
    constants: tuple[Stated, ...] = ()
    single_s: Mapping[str, float] = field(default_factory=dict)
    knees: tuple[Mapping[str, Any], ...] = ()
    winners: tuple[Mapping[str, Any], ...] = ()
    break_even: tuple[Mapping[str, Any], ...] = ()
    holdout: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    price: float | None = None
    epoch_images: int | None = None


def render_collectives(result: CollectivePrediction) -> Sheet:
    """The table, its legend, and remarks on the network's constants."""
    columns: tuple[Column[CollectiveRow], ...] = (
        Column("algorithm", "algorithm", kind="name", means=""),
        Column("bytes", "bytes", units.decimal_size, means=""),
        Column("W", "workers", units.count, means=""),
        Column("time", "comm_s", units.seconds, means=""),
        Column("low", "low_s", units.seconds),
        Column("high", "high_s", units.seconds),
        Column(
            "busbw",
            "busbw_bytes_per_s",
            lambda value: units.significant(value and value / 1e9),
            2,
            unit="GB/s",
            means="as in nccl-tests, for an allreduce",
        ),
        Column("model", "model", rank=1),
    )
    table = Table(columns, result.rows, section=lambda row: (row.bytes, row.workers))
    return Sheet([table], remarks=remarks(result))


def remarks(result: CollectivePrediction) -> tuple[str, ...]:
    """Remarks on the constants' sources, on constants that were not measured, and on inputs without an effect."""
    where = f"Network {result.network}" + (f": {result.about}" if result.about else "")
    if result.source and result.source != "given":
        where += f" ({result.source}{', ' if result.date else ''}{result.date})"
    measured = [name for name in result.constants if name not in result.assumed]
    lines = [f"{where}."]
    if measured:
        lines.append(f"Measured: {', '.join(measured)}.")
    if result.assumed:
        lines.append(f"Assumed, not measured: {', '.join(result.assumed)}.")
    return (*lines, *result.notes)


def iterations(result: Prediction) -> list[Table[Predicted]]:
    """A table for each network."""
    return [
        Table(ITERATIONS, rows, f"{result.workload} on {network}", section=lambda row: row.workers)
        for network, rows in grouped(result.rows, lambda row: row.network).items()
    ]


def render(result: Prediction) -> Sheet:
    """A table for each network, the legend, and remarks."""
    return Sheet(iterations(result), remarks=(*findings(result), *result.warnings))


ITERATIONS: tuple[Column[Predicted], ...] = (
    Column("strategy", "requested", kind="name", means=""),
    Column("W", "workers", units.count, head="workers", means=""),
    Column("iter", "iteration_s", units.milliseconds, unit="ms", head="iteration", means=""),
    Column("low", "low_s", units.milliseconds),
    Column("high", "high_s", units.milliseconds),
    Column("img/s", "images_per_s", units.significant, 5, means=""),
    Column("eff", "scaling_efficiency", units.share, 1, unit="%", head="efficiency"),
    Column("comm", "comm_s", units.milliseconds, 4, unit="ms"),
    Column("exp", "exposed_comm_s", units.milliseconds, 2, unit="ms", head="exposed"),
    Column("sent", "bytes_sent_per_step", units.size, 6),
    Column("price", "price", units.significant, 7, means="of an epoch", when=lambda row: row.price is not None),
    Column("bottleneck", "bottleneck", kind="text", means=""),
)


def _seconds(value: float) -> str:
    return f"{value:.4g} s"


CONSTANTS: tuple[Column[Stated], ...] = (
    Column("constant", "name", kind="name"),
    Column("value", "value", _seconds),
    Column("low", "low", _seconds),
    Column("high", "high", _seconds),
    Column("measured", "measured", lambda value: "yes" if value else "no"),
    Column("source", "source", kind="text"),
)
"""Of the page only."""


def findings(result: Prediction) -> list[str]:
    """Bottlenecks with the most workers, knees, winners and the links on which compression pays, in words."""
    lines = []
    most = max(row.workers for row in result.rows)
    largest = [row for row in result.rows if row.workers == most]
    networks = len({row.network for row in result.rows}) > 1

    def on(network: object) -> str:
        return f" on {network}" if networks else ""

    for row in largest:
        remedy = row.remedy[:1].upper() + row.remedy[1:]
        lines.append(f"{row.requested}{on(row.network)}, {most} workers: {row.bottleneck}. {remedy}.")
    for row in largest:
        closed = "a closed form of its exchange, whose plan has too many messages to simulate"
        said = "; ".join(text for text in (row.chosen, row.note, closed * (row.model == "formula")) if text)
        if said:
            lines.append(f"{row.requested}{on(row.network)}: {said}.")
    for knee in result.knees:
        at = knee["workers"]
        where = f"from {at} workers on a doubling brings less than 1.5 times" if at else "every doubling brings as much"
        lines.append(f"{knee['strategy']}{on(knee['network'])}: {where}.")
    for won in result.winners:
        clear = "" if won["clear"] else ", within the interval of others"
        lines.append(f"Fastest on {won['workers']} workers{on(won['network'])}: {won['strategy']}{clear}.")
    for even in result.break_even:
        where = even["where"]
        if even["below_bit_per_s"] is not None:
            where = f"below {units.link_rate(even['below_bit_per_s'])}"
        beats = f"{even['strategy']}{on(even['network'])} beats itself without the codec {where}"
        lines.append(f"{beats}, on {even['workers']} workers.")
    return lines


_PER_MESSAGE = ("alpha", "flight", "message", "bucket", "tensor")


@dataclass(frozen=True)
class ConstantRow:
    """A constant by its name in the file, in seconds per message or byte, with the ends of its interval.

    ``samples`` is 0 for a constant that was not measured; ``outliers`` were excluded.
    """

    name: str
    value: float
    low: float
    high: float
    samples: int
    outliers: int
    measured: bool


_COLUMNS: tuple[Column[ConstantRow], ...] = (
    Column("constant", "name", kind="name"),
    Column("value", by=lambda row: amount(row.name, row.value)),
    Column(
        "interval",
        by=lambda row: f"{amount(row.name, row.low)} to {amount(row.name, row.high)}",
        means="95 %, by bootstrap",
    ),
    Column("samples", rank=2, by=lambda row: f"{row.samples:,}" if row.measured else "assumed"),
    Column("outliers", "outliers", lambda value: str(value or ""), 1, means="excluded samples"),
)


def render_constants(rows: Sequence[ConstantRow], title: str, remarks: Sequence[str]) -> Sheet:
    """The table, the meanings of its columns, and remarks."""
    table = Table(_COLUMNS, rows, title, style=lambda row: "" if row.measured else "dim", spare=64)
    words = (
        "Values are seconds per message, or per byte moved, added, updated, copied, encoded or decoded; a slowdown is"
        " the time that layers lose per second of the thread that moves messages."
    )
    return Sheet([table], words, remarks, kept="-o")


def amount(name: str, value: float) -> str:
    """A constant for readers: seconds per message, nanoseconds per byte, a ratio of seconds."""
    if name.startswith("slowdown."):
        return units.significant(value)
    if name.rpartition(".")[2] in _PER_MESSAGE:
        return units.seconds(value)
    return f"{units.significant(1e9 * value)} ns"
