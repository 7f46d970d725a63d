"""Results of ``syncline bench``: collectives, gradients, codecs and steps, each with its rows, file and table.

Owns the names, units and JSON of these results, and the columns of their tables. Each field's annotation has its
meaning; ``files`` has the rules of the JSON. Does not know how anything was measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from syncline.tuning.codec_times import ANY_LINK_BIT_PER_S

from . import units
from .columns import Column, Sheet, Table
from .files import ResultFile, grouped

PEERS = (
    "gloo:native",
    "torch:syncline",
    "mpi:native",
    "openmpi:native",
    "mpich:native",
    "intelmpi:native",
    "mpi:ring",
    "openmpi:ring",
    "mpich:ring",
    "intelmpi:ring",
)
"""Contenders that all others are compared with, in the order of the columns."""

BARE = "bare"
CONTIGUOUS = "contiguous"

PER_STEP_S = 1e-3
PER_BUCKET_S = 20e-6
"""The goal of a step is the sum of these."""


class _Checked:
    """The fields and properties of all measured rows."""

    median_s: float | None
    correct: bool | None
    error: str | None

    @property
    def finished(self) -> bool:
        """True if it was measured without an error and every element was right."""
        return self.error is None and self.median_s is not None and self.correct is True


@dataclass(frozen=True)
class Measured(_Checked):
    """One contender at one size and number of ranks; a repetition lasts as long as its slowest rank."""

    transport: Annotated[str, "as requested"]
    algorithm: Annotated[str, "as requested"]
    ranks: Annotated[int, "the number of ranks"]
    bytes: Annotated[int, "of the whole array"]
    collective: Annotated[str, "the operation"] = "allreduce"
    lab_bit_per_s: Annotated[float | None, "the rate of the lab's links; none on the machine itself"] = None
    per_host: Annotated[int, "ranks on each host of the lab"] = 1
    chosen: Annotated[
        str | None, "the algorithm and transport that ran if the name leaves them open, or the library and its version"
    ] = None
    setting: Annotated[str | None, "the library's setting that was measured, if it has several"] = None
    repetitions: Annotated[int, "each lasts as long as its slowest rank"] = 0
    median_s: Annotated[float | None, "of the slowest rank"] = None
    p99_s: Annotated[float | None, "the 99th percentile"] = None
    algbw_bytes_per_s: Annotated[float | None, "as in nccl-tests"] = None
    busbw_bytes_per_s: Annotated[float | None, "as in nccl-tests"] = None
    cpu_s_per_gb: Annotated[float | None, "processor seconds of all ranks, user and kernel, per 10^9 bytes"] = None
    limit: Annotated[str | None, "`memory` or `link`"] = None
    limit_s: Annotated[float | None, "the least time that the limit allows, measured in the same run"] = None
    of_limit: Annotated[float | None, "share of the speed of plain copies (or of the link), `limit_s / median_s`"] = (
        None
    )
    correct: Annotated[bool | None, "every element right on every rank, before and after the timed repetitions"] = None
    memory_bytes: Annotated[
        int | None,
        "the growth of a rank's proportional set size, including the array, at the greatest size, in separate"
        " processes",
    ] = None
    missing: Annotated[bool, "its library is not installed here: it has an error but is not a failure"] = False
    error: Annotated[str | None, "the reason why there are no figures"] = None

    @property
    def contender(self) -> str:
        """The transport and algorithm, as they were asked for."""
        return f"{self.transport}:{self.algorithm}"

    @property
    def place(self) -> tuple[str, float | None, int, int]:
        """Rows of one place (collective, lab, ranks and ranks per host) can be compared: one table and chart each."""
        return self.collective, self.lab_bit_per_s, self.ranks, self.per_host

    @property
    def key(self) -> tuple[str, float | None, int, int, int, str]:
        """The identity of the measurement."""
        return (*self.place, self.bytes, self.contender)


@dataclass(frozen=True, kw_only=True)
class BenchResult(ResultFile):
    """The result of ``syncline bench``: a row per transport, algorithm, size and place."""

    verb: ClassVar = "bench"
    work: ClassVar = {"commit": "commit"}

    rows: tuple[Measured, ...] = ()

    def with_rows(self, rows: tuple[Measured, ...]) -> BenchResult:
        """This result with more rows, which replace earlier rows of the same measurements."""
        fresh = {row.key for row in rows}
        return dataclasses.replace(self, rows=(*(row for row in self.rows if row.key not in fresh), *rows))


@dataclass(frozen=True)
class GradientRow(_Checked):
    """One form of an iteration's gradient exchange, for the network of one workload and a number of ranks.

    An iteration is ``zero_grad``, a backward pass that computes nothing, and, with several ranks, the exchange, until
    the mean is in the form's place. A repetition lasts as long as its slowest rank.
    """

    workload: Annotated[str, "as requested"]
    form: Annotated[str, "the treatment of the gradients"]
    ranks: Annotated[int, "as requested"]
    tensors: Annotated[int, "the number of the network's gradients"]
    parameters: Annotated[int, "the number of the network's parameters"]
    bytes: Annotated[int, "of the network's gradients, float32"]
    passes: Annotated[int, "the number of times that the form reads or writes all gradients, besides the exchange"]
    repetitions: Annotated[int, "each lasts as long as its slowest rank"] = 0
    median_s: Annotated[float | None, "of an iteration that computes nothing, slowest rank"] = None
    p99_s: Annotated[float | None, "the 99th percentile"] = None
    added_s: Annotated[float | None, "the time beyond `bare`, which moves no gradient, in the same repetition"] = None
    share: Annotated[float | None, "of the median, `added_s / median_s`"] = None
    limit_s: Annotated[
        float | None, "the passes at the speed of plain copies by all ranks, measured in the same run"
    ] = None
    of_limit: Annotated[
        float | None,
        "`limit_s / added_s`; `null` if nothing is moved; above 1 the gradients were in a cache, and this is not a"
        " limit",
    ] = None
    cpu_s: Annotated[
        float | None, "processor time of all ranks per iteration, mean; other work on the machine changes it little"
    ] = None
    sent_bytes: Annotated[float | None, "the bytes that a rank's transport counted per iteration"] = None
    correct: Annotated[
        bool | None, "every element is right on every rank, before the timed repetitions and after the last"
    ] = None
    error: Annotated[str | None, "the reason why there are no figures"] = None

    @property
    def place(self) -> tuple[str, int]:
        """Rows of one place can be compared, and share one table and chart."""
        return self.workload, self.ranks


@dataclass(frozen=True, kw_only=True)
class GradientResult(ResultFile):
    """A whole run: where and with what it was measured, and its rows."""

    verb: ClassVar = "bench gradients"

    rows: tuple[GradientRow, ...] = ()


@dataclass(frozen=True)
class CodecRow:
    """One codec with or without error feedback; times are medians on one core."""

    codec: Annotated[str, "the codec's text, without the feedback"]
    feedback: Annotated[bool, "whether with error feedback"]
    combine: Annotated[str, "how payloads are combined"]
    elements: Annotated[int, "of the array; low-rank codecs work on a matrix that may be some elements smaller"]
    encode_s: Annotated[float, "gradient (plus residual) to payload, including the new residual"]
    decode_s: Annotated[float, "payload to gradient, *added* to an array"]
    bytes: Annotated[int, "of the payload"]
    bits_per_element: Annotated[float, "of the payload, on the wire"]
    encode_gb_per_s: Annotated[float, "GB/s of float32: 4 bytes x elements / seconds / 10^9"]
    decode_gb_per_s: Annotated[float, "GB/s of float32, added"]
    np_add_gb_per_s: Annotated[float, "GB/s of `np.add(a, b, out=c)`, of `torch.add` on a GPU"]
    torch_s: Annotated[
        float | None,
        "the torch composition's compression with the same feedback, to compare with `encode_s`; `null` if there is"
        " none",
    ] = None
    pays_below_bit_per_s: Annotated[
        float | None, "the link speed below which an allreduce gets faster; `null`: nowhere; 10^12: on any link"
    ] = None


@dataclass(frozen=True, kw_only=True)
class CodecResult(ResultFile):
    """A whole run; ``workers`` is the number of ranks of the allreduce for ``pays_below_bit_per_s``."""

    verb: ClassVar = "bench codecs"

    elements: int
    repetitions: int
    workers: int
    device: str = "cpu"
    rows: tuple[CodecRow, ...] = ()


@dataclass(frozen=True)
class StepRow:
    """A step of one framework on a number of tensors, each a bucket; times are medians of the slowest rank."""

    framework: Annotated[str, "whose steps"]
    tensors: Annotated[int, "each tensor is a bucket"]
    elements: Annotated[int, "of each tensor, float32"]
    bare_s: Annotated[float | None, "a step of the framework alone"] = None
    exchange_s: Annotated[float | None, "the exchange that a step hands to the engine, called from Python"] = None
    step_s: Annotated[float | None, "a step with Syncline"] = None
    beyond_s: Annotated[float | None, "the time of the step beyond both, in the same repetition"] = None
    quiet_beyond_s: Annotated[
        float | None, "the same from the fifth percentiles of the three times, which other work changes less"
    ] = None
    cpu_beyond_s: Annotated[float | None, "the same from the processor time of all threads of a rank"] = None
    correct: Annotated[bool | None, "the weights are right after this number of steps"] = None
    error: Annotated[str | None, "the reason why there are no figures"] = None

    @property
    def goal_s(self) -> float:
        """The time that a step may take beyond both."""
        return PER_STEP_S + PER_BUCKET_S * self.tensors

    @property
    def finished(self) -> bool:
        """True if it was measured without an error and the weights were right."""
        return self.error is None and self.beyond_s is not None and self.correct is True


@dataclass(frozen=True, kw_only=True)
class StepResult(ResultFile):
    """A whole run: machine, versions and request, and its rows; ``load`` is the machine's load after the run."""

    verb: ClassVar = "bench steps"

    strategy: str
    ranks: int
    repetitions: int
    load: float | None = None
    rows: tuple[StepRow, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """A goal and its worst figure; ``measured`` is empty and ``reached`` None if there is no figure."""

    goal: str
    measured: str = ""
    at: str = ""
    reached: bool | None = None


def places(rows: Sequence[Measured]) -> list[list[Measured]]:
    """The rows of each place: places and contenders in the order of their first row, sizes ascending."""
    order = {name: number for number, name in enumerate(dict.fromkeys(row.contender for row in rows))}
    parts = grouped(rows, lambda row: row.place).values()
    return [sorted(part, key=lambda row: (row.bytes, order[row.contender])) for part in parts]


def collectives(result: BenchResult) -> list[Table[Measured]]:
    """A table for each place, sizes down, peers as ratios."""
    return [_collective(rows, result.cores) for rows in places(result.rows)]


def render(result: BenchResult) -> Sheet:
    """The result of a bench for a terminal."""
    return Sheet(collectives(result))


def title(rows: Sequence[Measured], cores: int) -> str:
    """The title of the rows of one place: collective, ranks and location."""
    first = rows[0]
    where = (
        f"{cores} cores" if first.lab_bit_per_s is None else f"a lab of {units.link_rate(first.lab_bit_per_s)} links"
    )
    hosts = "" if first.per_host == 1 else f", {first.per_host} on each host,"
    return f"{first.collective} of float32, {first.ranks} ranks{hosts} on {where}"


def _collective(rows: Sequence[Measured], cores: int) -> Table[Measured]:
    there = {row.contender for row in rows}
    failed = grouped((row for row in rows if row.error is not None), lambda row: (row.contender, row.error))
    return Table(
        (
            Column("bytes", "bytes", units.decimal_size, means="", once=True),
            Column("contender", "contender", kind="name", by=_named),
            Column("", "setting", lambda value: value or "", head="setting", kind="text", when=lambda row: row.setting),
            Column("median", "median_s", units.seconds, fails=True),
            Column("p99", "p99_s", units.seconds, 5),
            Column("busbw", "busbw_bytes_per_s", _gigabytes, 3),
            Column("CPU", "cpu_s_per_gb", units.significant, 4, head="CPU s/GB"),
            Column("limit", "of_limit", units.percent, 2, head="of limit"),
            *(_against(rows, name) for name in PEERS if name in there),
            Column("", "memory_bytes", units.size, head="memory"),
            Column("ok", "correct", units.verdict, head="right"),
        ),
        rows,
        title(rows, cores),
        section=lambda row: row.bytes,
        measured=lambda row: row.error is None,
        style=_failure,
        errors=[
            f"{name}, {', '.join(units.decimal_size(row.bytes) for row in its)}: {error}"
            for (name, error), its in failed.items()
        ],
    )


def _named(row: Measured) -> str:
    """The contender with its setting, unless its name has it already."""
    return row.contender if row.setting is None or "(" in row.contender else f"{row.contender} ({row.setting})"


def _failure(row: Measured | GradientRow) -> str:
    return "red" if row.error is not None or row.correct is False else ""


def _gigabytes(value: float | None) -> str:
    return units.MISSING if value is None else f"{value / 1e9:.3g} GB/s"


def _against(rows: Sequence[Measured], name: str) -> Column[Measured]:
    """The speed relative to a peer, under a title of two lines, so that the column stays narrow."""
    peers = {row.bytes: row.median_s for row in reversed(rows) if row.contender == name}

    def cell(row: Measured) -> str:
        peer_s = peers.get(row.bytes)
        if row.contender == name or not row.median_s or peer_s is None:
            return ""
        return units.significant(peer_s / row.median_s, 3 if peer_s >= row.median_s else 2)

    library, _, algorithm = name.partition(":")
    means = "speed relative to that peer"
    return Column(f"x {library}\n{algorithm}", by=cell, head=f"x {name}", means=means)


def goals(verdicts: Sequence[Verdict]) -> Table[Verdict]:
    """The closing table of a bench."""
    return Table(
        (
            Column("goal", "goal", kind="name"),
            Column("measured", "measured", lambda value: value or units.MISSING),
            Column("at", "at", kind="text"),
            Column("reached", "reached", units.verdict),
        ),
        verdicts,
        "goals, each judged by its worst row",
    )


def gradients(result: GradientResult) -> list[Table[GradientRow]]:
    """A table for each model and number of ranks."""
    return [_gradients(rows, result.cores) for rows in grouped(result.rows, lambda row: row.place).values()]


def render_gradients(result: GradientResult) -> Sheet:
    """The result of a bench of gradients for a terminal."""
    return Sheet(gradients(result), GRADIENT_WORDS)


GRADIENT_WORDS = (
    "noise: no time above bare, within the noise. no limit: faster than the limit, from the cache. layerwise and"
    " copied:flatten: including the transport's staging of foreign memory."
)


def _gradients(rows: Sequence[GradientRow], cores: int) -> Table[GradientRow]:
    first = rows[0]
    where = "1 process, no exchange" if first.ranks == 1 else f"{first.ranks} ranks on {cores} cores"
    failed = grouped((row for row in rows if row.error is not None), lambda row: row.error)
    ours = next((row.added_s for row in rows if row.form == CONTIGUOUS), None)
    return Table(
        (
            Column("form", "form", kind="name"),
            Column("", "passes", lambda value: str(value or units.MISSING), head="passes"),
            Column("median", "median_s", units.seconds, fails=True),
            Column("p99", "p99_s", units.seconds, 4),
            Column("added", "added_s", by=_added),
            Column("share", "share", rank=3, by=_share),
            Column("limit", "limit_s", rank=1, by=lambda row: units.seconds(row.limit_s) if row.passes else ""),
            Column("of limit", rank=2, by=_of_limit, means="the share of it reached"),
            Column("x", by=partial(_times, ours), means="added, as a multiple of contiguous"),
            Column("ok", "correct", units.verdict),
        ),
        rows,
        f"{first.workload}, {units.decimal_size(first.bytes)} in {first.tensors} tensors, {where}",
        measured=lambda row: row.error is None,
        style=_failure,
        errors=[f"{', '.join(row.form for row in its)}: {error}" for error, its in failed.items()],
    )


def _added(row: GradientRow) -> str:
    if row.form == BARE:
        return ""
    return "noise" if row.added_s is not None and row.added_s <= 0 else units.seconds(row.added_s)


def _share(row: GradientRow) -> str:
    if row.form == BARE:
        return ""
    return units.MISSING if row.added_s is not None and row.added_s <= 0 else units.percent(row.share)


def _of_limit(row: GradientRow) -> str:
    if not row.passes:
        return ""
    return units.percent(row.of_limit) if row.of_limit is None or row.of_limit <= 1 else "no limit"


def _times(ours: float | None, row: GradientRow) -> str:
    if row.form in (BARE, CONTIGUOUS) or row.added_s is None or ours is None:
        return ""
    return units.MISSING if row.added_s <= 0 or ours <= 0 else units.significant(row.added_s / ours, 2)


def render_codecs(result: CodecResult) -> Sheet:
    """The table of codecs, with a verdict on each in words."""
    if not result.rows:
        return Sheet(())
    add = units.significant(result.rows[0].np_add_gb_per_s)
    added, where = ("np.add", "one core") if result.device == "cpu" else ("torch.add", result.device)
    columns: tuple[Column[CodecRow], ...] = (
        Column("codec", "codec", kind="name", means=""),
        Column("fb", "feedback", lambda value: "yes" if value else "", means="with error feedback"),
        Column("bits", "bits_per_element", units.significant),
        Column("encode", "encode_gb_per_s", units.significant),
        Column("decode", "decode_gb_per_s", units.significant, 2),
        Column(
            "of add",
            rank=1,
            by=lambda row: units.percent(row.encode_gb_per_s / row.np_add_gb_per_s),
            means=f"encode as a share of {added}'s {add} GB/s",
        ),
        Column(
            "x torch",
            rank=3,
            by=lambda row: units.significant(row.torch_s and row.torch_s / row.encode_s, 2),
            means="speed relative to the usual composition of torch operations",
        ),
        Column(
            "verdict",
            "pays_below_bit_per_s",
            _pays,
            kind="text",
            means=f"below this link speed an allreduce of {result.workers} ranks is faster with the codec",
        ),
    )
    return Sheet([Table(columns, result.rows, f"codecs on {result.elements:,} float32, {where}")])


def _pays(rate: float | None) -> str:
    """The links on which the codec makes an allreduce faster: ``pays below 3.2 Gbit/s``."""
    if rate is None:
        return "never pays"
    return "pays on any link" if rate >= ANY_LINK_BIT_PER_S else f"pays below {units.link_rate(rate)}"


def render_steps(result: StepResult) -> Sheet:
    """A table of what a step costs beyond its exchange, per framework and number of tensors."""
    rows = result.rows

    columns: tuple[Column[StepRow], ...] = (
        Column("framework", "framework", kind="name", means=""),
        Column("buckets", "tensors", means=""),
        Column("bare", "bare_s", units.seconds, 3),
        Column("exchange", "exchange_s", units.seconds, 2),
        Column("step", "step_s", units.seconds, fails=True),
        Column("beyond", "beyond_s", units.seconds),
        Column("quiet", "quiet_beyond_s", units.seconds),
        Column("cpu", "cpu_beyond_s", units.seconds),
        Column(
            "each",
            rank=1,
            by=lambda row: units.seconds(each(row, rows)),
            means="quiet, per additional bucket since the row above",
        ),
        Column("goal", "goal_s", units.seconds, means="1 ms, and 20 microseconds a bucket"),
        Column("ok", "correct", units.verdict),
    )
    failed = {row.error: row.framework for row in rows if row.error}
    table = Table(
        columns,
        rows,
        f"{result.strategy}, {result.ranks} ranks on {result.cores} cores, {result.repetitions} repetitions",
        section=lambda row: row.framework,
        measured=lambda row: row.error is None,
        errors=[f"{framework}: {error}" for error, framework in failed.items()],
    )
    return Sheet([table], "Figures are medians of the slowest rank.")


def each(row: StepRow, rows: Sequence[StepRow]) -> float | None:
    """The time of an additional bucket, relative to the framework's previous row."""
    less = [one for one in rows if one.framework == row.framework and one.tensors < row.tensors]
    if not less or row.quiet_beyond_s is None:
        return None
    before = max(less, key=lambda one: one.tensors)
    if before.quiet_beyond_s is None:
        return None
    return (row.quiet_beyond_s - before.quiet_beyond_s) / (row.tensors - before.tensors)
