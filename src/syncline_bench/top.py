"""``syncline top``: a table of the ranks of running trainings, refreshed each second from their metrics.

Any process may answer at a port, so what it answers is bounded in size and time, and control characters are replaced.
A terminal shows a live table; elsewhere one table is printed.
"""

from __future__ import annotations

import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from syncline.errors import UsageError
from syncline.metrics import PATH, announced
from syncline.session.stats import Stats
from syncline.wire.meeting import printable

_EVERY_S = 1.0
_WINDOW = 6
"""The number of refreshes over which rates are taken."""
_ANSWER_S = 1.0
"""The time limit for an answer."""
_ANSWER_BYTES = 1 << 20
_READERS = 16
_MOST_PORTS = 128
"""The processes of a host that are asked, however many its answer names."""
_GONE = 3
"""The refreshes without any answer after which a run has ended."""

_LINE = re.compile(r"(syncline_\w+)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PORTS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_TEXT_CHARS = 200

_COLUMNS = (
    ("ms", "step_ms", "{:.1f}"),
    ("comm %", "exposed_percent", "{:.0f}"),
    ("sent MB/s", "sent_mb_per_s", "{:.1f}"),
    ("stale", "staleness", "{:.1f}"),
    ("error", "compression_error", "{:.3f}"),
    ("repairs", "repairs", "{}"),
)
"""The title of each column, the name of its values, those of ``Stats.since`` among them, and the format. A table has a
column if any rank has it."""


class Address(NamedTuple):
    """Where a process serves its metrics."""

    host: str
    port: int


class Seen(NamedTuple):
    """The contents of an answer."""

    rank: str
    strategy: str
    workers: str
    ports: tuple[int, int]
    stats: Stats


@dataclass
class Watched:
    """The answers of one process."""

    address: Address
    past: deque[Stats] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    seen: Seen | None = None
    """The last answer."""
    fault: str = ""
    """Why the last question got no answer."""
    values: dict[str, float] = field(default_factory=dict)
    """The last known value of each column."""

    def take(self, answer: Seen | str) -> None:
        """Note an answer, or why there is none."""
        if isinstance(answer, str):
            self.fault = answer
            return
        self.fault, self.seen = "", answer
        if self.past:
            self.values |= answer.stats.since(self.past[0])
        if answer.stats.repairs:
            self.values["repairs"] = answer.stats.repairs
        self.past.append(answer.stats)


def run(given: Sequence[str]) -> None:
    """Show a live table until the runs end or the user interrupts; one table if the output is no terminal."""
    console = Console()
    watch = Watch([_address(text) for text in given])
    try:
        watch.refresh()
        watch.check_any()
        if not console.is_terminal:
            time.sleep(_EVERY_S)
            watch.refresh()
            console.print(watch.table())
            return
        with Live(watch.table(), console=console, auto_refresh=False) as live:
            while not watch.over:
                time.sleep(_EVERY_S)
                watch.refresh()
                live.update(watch.table(), refresh=True)
        console.print("The run has ended.")
    except KeyboardInterrupt:
        pass  # the user's way to end it


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16):
        raise UsageError(f"{text!r} is not the address of a run's metrics: give HOST:PORT, such as 127.0.0.1:9400")
    return Address(host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port))


class Watch:
    """The processes at the ``given`` addresses, or those that this user's runs have announced, if none are given."""

    def __init__(
        self,
        given: Sequence[Address],
        ask: Callable[[Address], Seen | str] | None = None,
        found: Callable[[], Sequence[str]] = announced,
    ) -> None:
        self._given, self._ask, self._found = list(given), ask or asked, found
        self._watched: dict[Address, Watched] = {address: Watched(address) for address in given}
        self._silent = 0  # refreshes without any answer

    @property
    def over(self) -> bool:
        """Whether no process is left."""
        return not self._watched or self._silent >= _GONE

    def refresh(self) -> None:
        """Ask all processes once, and note their answers."""
        if not self._given:
            now = [_address(text) for text in self._found()]
            self._watched = {address: self._watched.get(address) or Watched(address) for address in now}
        with ThreadPoolExecutor(_READERS) as pool:
            self._take(list(self._watched.values()), pool)
            self._take(self._neighbours(), pool)
        self._silent = 0 if any(not one.fault for one in self._watched.values()) else self._silent + 1

    def _take(self, watched: Sequence[Watched], pool: ThreadPoolExecutor) -> None:
        for one, answer in zip(watched, pool.map(self._ask, [one.address for one in watched]), strict=True):
            one.take(answer)

    def _neighbours(self) -> list[Watched]:
        """The further processes of the hosts at given addresses."""
        fresh = []
        for address in self._given:
            seen = self._watched[address].seen
            first, last = (0, -1) if seen is None else seen.ports
            for port in range(first, last + 1) if first <= address.port <= last < first + _MOST_PORTS else ():
                other = Address(address.host, port)
                if other not in self._watched:
                    self._watched[other] = Watched(other)
                    fresh.append(self._watched[other])
        return fresh

    def check_any(self) -> None:
        """Raise UsageError unless a process has answered."""
        if any(one.seen for one in self._watched.values()):
            return
        faults = "; ".join(f"{one.address.host}:{one.address.port}: {one.fault}" for one in self._watched.values())
        raise UsageError(
            f"no run answers{f' ({faults})' if faults else ' on this machine'}: start it with syncline run --metrics"
            " 9400, or with SYNCLINE_METRICS=9400 under another launcher, and name HOST:PORT of a run elsewhere"
        )

    def table(self) -> RenderableType:
        """The present table, one for each run of another strategy or size."""
        runs: dict[tuple[str, str], list[Watched]] = {}
        for one in self._watched.values():
            runs.setdefault(("", "") if one.seen is None else (one.seen.strategy, one.seen.workers), []).append(one)
        parts: list[RenderableType] = []
        for (strategy, workers), ranks in sorted(runs.items()):
            parts.append(Text(f"{workers} workers, {strategy}" if strategy else "no answer", style="bold"))
            parts.append(_table(sorted(ranks, key=_in_order)))
        return Group(*parts)


def _in_order(one: Watched) -> tuple[bool, int, str, Address]:
    rank = "" if one.seen is None else one.seen.rank
    return not rank.isdigit(), int(rank) if rank.isdigit() else 0, rank, one.address


def _table(ranks: Sequence[Watched]) -> Table:
    columns = [column for column in _COLUMNS if any(column[1] in one.values for one in ranks)]
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("rank", no_wrap=True)
    for title in ("step", *(title for title, *_ in columns)):
        table.add_column(title, justify="right", no_wrap=True)
    for one in ranks:
        if one.seen is None or one.fault:
            name = f"{one.address.host}:{one.address.port}" if one.seen is None else one.seen.rank
            table.add_row(Text(name), Text("no answer", style="red"))
            continue
        cells = [shape.format(one.values[name]) if name in one.values else "-" for _, name, shape in columns]
        table.add_row(Text(one.seen.rank), str(one.seen.stats.steps), *cells)
    return table


# Answers.


def asked(address: Address, limit_s: float = _ANSWER_S) -> Seen | str:
    """The answer of the process at an address, or the reason why there is none."""
    try:
        return read(_answer(address, limit_s))
    except (OSError, ValueError) as error:
        return printable(str(getattr(error, "strerror", None) or error))


def _answer(address: Address, limit_s: float) -> str:
    """The metrics as text. Raises OSError or ValueError for no answer, too long an answer, or one too late."""
    deadline, parts, size = time.monotonic() + limit_s, list[bytes](), 0
    with socket.create_connection(address, timeout=limit_s) as sock:
        sock.sendall(f"GET {PATH} HTTP/1.0\r\nHost: {address.host}\r\n\r\n".encode())
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no whole answer within {limit_s:g} s")
            sock.settimeout(left_s)
            data = sock.recv(1 << 16)
            if not data:
                break
            parts.append(data)
            size += len(data)
            if size > _ANSWER_BYTES:
                raise ValueError("the answer is too long for metrics of Syncline")
    head, _, body = b"".join(parts).partition(b"\r\n\r\n")
    if not re.match(rb"HTTP/1\.\d 200 ", head):
        raise ValueError("something else than metrics of Syncline is served there")
    return body.decode(errors="replace")


def read(text: str) -> Seen:
    """An answer's numbers. Raises ValueError for metrics of another program."""
    numbers: dict[str, float] = {}
    peers: dict[str, dict[int, int]] = {"syncline_sent_bytes_total": {}, "syncline_received_bytes_total": {}}
    info: dict[str, str] = {}
    for name, labels, value in _samples(text.splitlines()):
        if name == "syncline_info":
            info = labels
        elif name in peers:
            peers[name][len(peers[name])] = int(value)
        else:
            numbers[name] = value
    if "rank" not in info:
        raise ValueError("something else than metrics of Syncline is served there")
    ports = _PORTS.fullmatch(info.get("ports", ""))
    sent, received = peers.values()
    return Seen(
        info["rank"],
        info.get("strategy", ""),
        info.get("workers", ""),
        (0, -1) if ports is None else (int(ports[1]), int(ports[2])),
        Stats(
            "",
            blocked_s=numbers.get("syncline_blocked_seconds_total", 0.0),
            bytes_sent=sent,
            bytes_received=received,
            staleness=_counts(numbers, "syncline_staleness_steps"),
            version_lag=_counts(numbers, "syncline_version_lag"),
            at_s=time.perf_counter(),
            steps=int(numbers.get("syncline_steps_total", 0)),
            timed_steps=int(numbers.get("syncline_step_seconds_count", 0)),
            timed_s=numbers.get("syncline_step_seconds_sum", 0.0),
            samples=numbers.get("syncline_samples_total"),
            compression_error=numbers.get("syncline_compression_error"),
            repairs=int(numbers.get("syncline_repairs_total", 0)),
        ),
    )


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, str], float]]:
    """The finite samples of Syncline: name, labels and value."""
    for line in lines:
        found = _LINE.fullmatch(line)
        if found is not None:
            value = float(found[3])
            labels = {key: _shown(text) for key, text in _LABEL.findall(found[2] or "")}
            if abs(value) < 1e300:
                yield found[1], labels, value


def _shown(text: str) -> str:
    return printable(text.replace("\n", " "))[:_TEXT_CHARS]


def _counts(numbers: dict[str, float], name: str) -> dict[int, int]:
    """Counts with this number and this sum, which is all that means need."""
    count, total = int(numbers.get(f"{name}_count", 0)), int(numbers.get(f"{name}_sum", 0))
    return {0: count - 1, total: 1} if total else ({0: count} if count else {})
