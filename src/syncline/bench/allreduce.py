"""``syncline bench``: allreduce over sizes, ranks, algorithms and transports, beside the library one would use instead.

All contenders run in the same processes and in turn: every repetition measures each of them once, so that a busy
moment of the machine hits all alike. A repetition begins when all ranks have met; its time is the slowest rank's. Input
differs in every element and rank, and the result is checked as in nccl-tests.

Figures: the median and the 99th percentile of the repetitions; algbw = bytes / time and busbw = algbw 2(N-1)/N as in
nccl-tests; processor seconds of all ranks per gigabyte reduced; ``memory_bytes``, the growth of a rank's proportional
set size (PSS) from after the imports, the array to reduce included, measured in processes that run nothing else.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import SynclineError, UsageError
from ..launch.local import LocalRun
from ..report.units import seconds as seconds_text
from ..report.units import size as bytes_text
from ..strategy import Strategy
from .machine import describe
from .messages import Mailbox, Message

GLOO = "gloo:native"
DEFAULT_CONTENDERS = ("shm:direct", "shm:ring", "tcp:ring", "tcp:direct", GLOO)
_SILENCE_S = 300.0

Advance = Callable[[int], None]
_POLL_S = 0.1


@dataclass(frozen=True)
class Work:
    """What the ranks of one run measure; travels to them as JSON."""

    contenders: tuple[str, ...]
    sizes: tuple[int, ...]
    fds: tuple[int, ...]
    memory: bool = False

    def to_json(self) -> str:
        """As an argument for the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        """Back from the argument."""
        fields = json.loads(text)
        return cls(tuple(fields["contenders"]), tuple(fields["sizes"]), tuple(fields["fds"]), fields["memory"])


@dataclass(frozen=True)
class Measured:
    """One contender at one size: a row of the result."""

    transport: str
    algorithm: str
    ranks: int
    bytes: int
    median_s: float | None = None
    p99_s: float | None = None
    algbw_bytes_per_s: float | None = None
    busbw_bytes_per_s: float | None = None
    cpu_s_per_gb: float | None = None
    correct: bool | None = None
    memory_bytes: int | None = None
    error: str | None = None


def repetitions(nbytes: int) -> int:
    """How often a size is measured: more for small ones, whose times vary more."""
    return 60 if nbytes <= 1 << 20 else 20 if nbytes <= 1 << 24 else 10


def calls_per_repetition(nbytes: int) -> int:
    """Small reductions are timed in a row, so that the ranks' coming together does not count."""
    return 20 if nbytes <= 1 << 16 else 5 if nbytes <= 1 << 20 else 1


def run(
    ranks: Sequence[int],
    sizes: Sequence[int],
    contenders: Sequence[str],
    json_path: Path | None,
    console: Console | None = None,
) -> int:
    """Measure and print; 0 when every row was measured and correct, else 1."""
    chosen = tuple(part for text in contenders for part in _split(text)) or DEFAULT_CONTENDERS
    _check(chosen, sizes)
    console = console or Console()
    rows: list[Measured] = []
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
    )
    with progress:
        for world in ranks:
            total = sum(repetitions(size) for size in sizes) + len(chosen)
            task = progress.add_task(f"{world} ranks", total=total)
            rows += _measure(world, sizes, chosen, partial(_advance, progress, task))
            if json_path is not None:
                _write(json_path, rows)
    for world in ranks:
        console.print(_table(world, [row for row in rows if row.ranks == world]))
    return 0 if all(row.error is None and row.correct for row in rows) else 1


def _advance(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, advance=done)


def _split(text: str) -> Iterator[str]:
    """``shm:ring,tcp:ring`` into its parts; commas inside brackets belong to arguments."""
    depth, part = 0, ""
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += letter
    if part.strip():
        yield part.strip()


def strategy_of(contender: str) -> Strategy:
    """``shm:ring`` as a strategy."""
    transport, _, algorithm = contender.partition(":")
    return Strategy.parse(f"{algorithm} transport={transport}")


def _check(contenders: Sequence[str], sizes: Sequence[int]) -> None:
    for contender in contenders:
        if ":" not in contender:
            raise UsageError(f"{contender!r}: a contender is TRANSPORT:ALGORITHM, such as tcp:ring or {GLOO}")
        if contender != GLOO and strategy_of(contender).servers:
            raise UsageError(f"{contender!r}: bench compares groups without servers of their own")
    for size in sizes:
        if size < 4 or size % 4:
            raise UsageError(f"{size} bytes are not a number of float32 elements: use multiples of 4 bytes")


def _measure(world: int, sizes: Sequence[int], contenders: Sequence[str], advance: Advance) -> list[Measured]:
    """All rows of one number of ranks; a contender that fails alone keeps the others' rows."""
    rows = {(contender, size): _empty_row(contender, world, size) for contender in contenders for size in sizes}
    try:
        for message in _spawn(world, contenders, sizes, memory=False, advance=advance):
            key = contenders[message["contender"]], message["bytes"]
            rows[key] = _figures(rows[key], message)
    except SynclineError as error:
        rows = {key: row if row.median_s else replace(row, error=str(error)) for key, row in rows.items()}
    biggest = max(sizes)
    for contender in contenders:
        try:
            found = _spawn(world, [contender], [biggest], memory=True, advance=advance)
            grown = max(message["memory_bytes"] for message in found)
            rows[contender, biggest] = replace(rows[contender, biggest], memory_bytes=grown)
        except SynclineError as error:
            rows[contender, biggest] = replace(rows[contender, biggest], error=str(error))
        advance(1)
    return list(rows.values())


def _empty_row(contender: str, world: int, size: int) -> Measured:
    transport, _, algorithm = contender.partition(":")
    return Measured(transport, algorithm, world, size)


def _figures(row: Measured, message: Message) -> Measured:
    times = np.array(message["times_s"])
    median = float(np.median(times))
    return replace(
        row,
        median_s=median,
        p99_s=float(np.percentile(times, 99)),
        algbw_bytes_per_s=row.bytes / median,
        busbw_bytes_per_s=row.bytes / median * 2 * (row.ranks - 1) / row.ranks,
        cpu_s_per_gb=message["cpu_s"] / len(times) / (row.bytes / 1e9),
        correct=message["correct"],
    )


def _spawn(
    world: int, contenders: Sequence[str], sizes: Sequence[int], memory: bool, advance: Advance
) -> list[Message]:
    """Run the ranks to their end; what they have measured. Raises SynclineError when they fail."""
    results: list[Message] = []
    printed: list[str] = []
    with Mailbox(world) as mailbox:
        fds = tuple(mailbox.fds)
        work = Work(tuple(contenders), tuple(sizes), fds, memory)
        command = [sys.executable, "-m", "syncline.bench.allreduce_rank", work.to_json()]
        heard = time.monotonic()
        environ = {"GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        with LocalRun(
            command, world, pass_fds=fds, env=environ, on_output=lambda _, line: printed.append(line)
        ) as started:
            mailbox.release()
            while (outcome := started.poll()) is None or mailbox.open:
                for _, message in mailbox.receive(_POLL_S):
                    heard = time.monotonic()
                    if message["kind"] == "measured":
                        results.append(message)
                    elif message["kind"] == "repetition":
                        advance(1)
                if time.monotonic() - heard > _SILENCE_S:
                    raise SynclineError(f"no news from the ranks for {_SILENCE_S:.0f} s: {' / '.join(printed[-3:])}")
    if outcome is None or outcome.status:
        raise SynclineError(" / ".join([outcome.text if outcome else "the ranks did not end", *printed[-3:]]))
    return results


def _write(path: Path, rows: Sequence[Measured]) -> None:
    unfinished = path.with_name(path.name + ".part")
    text = json.dumps({**asdict(describe()), "rows": [asdict(row) for row in rows]}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished.write_text(text + "\n")
    unfinished.replace(path)


def _table(world: int, rows: Sequence[Measured]) -> Table:
    peers = {row.bytes: row.median_s for row in rows if f"{row.transport}:{row.algorithm}" == GLOO}
    title = f"allreduce of float32, {world} ranks on {len(os.sched_getaffinity(0))} cores"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("bytes", "contender", "median", "busbw", "CPU s/GB", "memory", "vs gloo", "right"):
        table.add_column(name, justify="left" if name == "contender" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.bytes):
        name = f"{row.transport}:{row.algorithm}"
        if row.median_s is None or row.busbw_bytes_per_s is None:
            table.add_row(bytes_text(row.bytes), name, row.error or "not measured")
            continue
        peer = peers.get(row.bytes)
        table.add_row(
            bytes_text(row.bytes),
            name,
            seconds_text(row.median_s),
            f"{row.busbw_bytes_per_s / 1e9:.2f} GB/s",
            f"{row.cpu_s_per_gb:.3g}",
            "" if row.memory_bytes is None else f"+{row.memory_bytes / 2**20:.0f} MiB",
            "" if peer is None else f"{peer / row.median_s:.2f}x",
            "yes" if row.correct else "NO",
        )
    return table
