"""``syncline bench collectives``: numbers of ranks in turn, and sizes within each; results are kept at every step.

Every contender has a set of ranks of its own, which runs ``collective_ranks``, and so have the limits of the machine.
Owns the turns of the sets, the end of a contender whose set fails, the rows, and the resuming of an earlier run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from syncline.errors import SynclineError, UsageError
from syncline.nouns import Rate

from ..display import Display, Task, console_beside
from ..goals import ONE_LEVEL, TWO_LEVELS, TWO_LEVELS_BYTES, judge
from ..machine import provenance
from ..messages import Message
from ..ranks import SILENCE_S, OnThisMachine, Ranks, RanksFailed
from ..report import bench
from ..report.bench import BenchResult, Measured
from ..report.files import keep_text, replace_text, result_paths
from ..report.units import decimal_size as size_text
from .contenders import Name
from .request import WARM_UP, Request, Work, expected_s, missing, request_of, turns_of

RANK = ("-m", "syncline_bench.collectives.collective_ranks")
Save = Callable[[BenchResult], None]
_PATIENCE = 20.0
"""A turn may take this many times its expected time before it counts as stuck."""

TRIALS = 3
"""The repetitions that choose a setting."""

_TRIAL_S = 3.0
"""Beyond as many times its expected time a setting is given up: it is not tried at larger sizes."""


def origin() -> BenchResult:
    """An empty result that describes this machine and code."""
    return BenchResult(**provenance())


def resumed(fresh: BenchResult, path: Path) -> BenchResult:
    """``fresh`` with the finished rows of a result file. Raises UsageError if machine or code are not the same."""
    before = fresh.earlier(path)
    return replace(before, rows=tuple(row for row in before.rows if row.finished))


def measure(requests: Sequence[Request], result: BenchResult, save: Save, display: Display) -> BenchResult:
    """Measure the rows that ``result`` lacks. Calls ``save`` after every size, and also after an error."""
    run = _Run(requests, result, save, display)
    try:
        for request in requests:
            run.request(request)
    finally:
        save(run.result)
    return run.result


@contextmanager
def open_place(request: Request) -> Iterator[tuple[OnThisMachine, float | None]]:
    """Where the ranks of a request run, and in a lab the goodput of its links in bytes/s."""
    if request.lab_rate is None:
        yield OnThisMachine(), None
        return
    from ..lab import Lab  # loads modules that only a lab needs

    with Lab(hosts=max(request.ranks) // request.per_host, rate=request.lab_rate) as lab:
        yield OnThisMachine(lab, request.per_host), lab.goodput(seconds=2)


class _Run:
    """A running benchmark: its rows so far, where to save them, and where to show progress."""

    def __init__(self, requests: Sequence[Request], result: BenchResult, save: Save, display: Display) -> None:
        self.result = result
        self.display = display
        self._save = save
        self._order = {key: place for place, key in enumerate(key for asked in requests for key in asked.keys)}

    def request(self, request: Request) -> None:
        """Measure one request. If all its rows exist, start nothing."""
        todo = {ranks: self._todo(request, ranks) for ranks in request.ranks}
        if not any(todo.values()):
            return
        with ExitStack() as stack:
            try:
                place, goodput = stack.enter_context(open_place(request))
            except UsageError as error:
                if not request.optional:
                    raise
                self.display.say(f"no lab: {error}")
                return
            for ranks, cells in todo.items():
                if cells:
                    _Stage(self, request, ranks, place, goodput).measure(cells)

    def add(self, *rows: Measured) -> None:
        """Add rows and save the result."""
        found = self.result.with_rows(rows).rows
        # In the order of the requests, whichever rows were kept, failed or measured first.
        found = tuple(sorted(found, key=lambda row: self._order.get(row.key, -1)))
        self.result = replace(self.result, rows=found)
        self._save(self.result)

    def _todo(self, request: Request, ranks: int) -> list[tuple[int, Name]]:
        """The cells to measure. Contenders that are not installed get their rows at once, with the reason."""
        kept = {(row.key, row.repetitions) for row in self.result.rows if row.finished}
        found = []
        rows = []
        reasons = {name: missing(name, ranks) for name in request.contenders}
        for size, name in request.cells():
            row = request.empty_row(ranks, size, name)
            if (row.key, request.repetitions(size)) in kept:
                continue
            reason = reasons[name]
            if reason is None:
                found.append((size, name))
            else:
                rows.append(replace(row, error=reason, missing=True))
        if rows:
            self.add(*rows)
        return found


@dataclass
class _Taken:
    """The measurements of a contender at one size."""

    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    correct: bool = True
    chosen: str | None = None
    memory_bytes: int | None = None

    def add(self, message: Message) -> None:
        """Add the measurements of one turn."""
        self.times_s += message["times_s"]
        self.cpu_s += message["cpu_s"]
        self.correct &= message["correct"]
        self.chosen, self.memory_bytes = message["chosen"], message["memory_bytes"]


class _Stage:
    """The measurements with one number of ranks. Every contender has a set of ranks; one works, the others sleep."""

    def __init__(self, run: _Run, request: Request, ranks: int, place: OnThisMachine, goodput: float | None) -> None:
        self._run, self._request, self._ranks = run, request, ranks
        self._place, self._goodput = place, goodput
        self._sets: dict[Name, dict[str, Ranks]] = {}  # by setting
        self._best: dict[tuple[Name, int], str] = {}  # by size
        self._limits: Ranks | None = None

    def measure(self, cells: Sequence[tuple[int, Name]]) -> None:
        """Measure all cells. If a contender's ranks fail, the others continue."""
        self._left = list(cells)
        lab = "" if self._request.lab_rate is None else " in the lab"
        expected = {size: self._expected_s(size) * sum(at == size for at, _ in cells) for size, _ in cells}
        with ExitStack() as stack, self._run.display.task(f"{self._ranks} ranks{lab}", sum(expected.values())) as task:
            self._start(stack, task)
            for number, size in enumerate(expected):
                self._measure_size(size, task, sum([*expected.values()][:number]))
            self._end()
        if self._request.lab_rate is None:
            self._measure_memory(cells)

    def _start(self, stack: ExitStack, task: Task) -> None:
        """Start one set after the other: a set may measure while it connects, which no other should disturb."""
        for name in dict.fromkeys(name for _, name in self._left):
            self._choose(name, [size for size, other in self._left if other == name], task)
            task.at(0.0, "connecting")
            sets = self._sets[name] = {}
            most = {setting: size for (other, size), setting in self._best.items() if other == name}  # sizes rise
            try:
                for setting, size in most.items():
                    sets[setting] = stack.enter_context(self._ranks_of(name, size, setting))
            except SynclineError as failure:
                self._give_up(name, f"while {name.text} was connecting: {failure}")
        link = self._goodput is None and any(name.moves == "link" for name in self._sets)
        if self._sets:
            work = Work(self._request.collective.name, "", max(size for size, _ in self._left), link)
            self._limits = stack.enter_context(Ranks(work.to_json(), self._ranks, self._place, RANK))

    def _choose(self, name: Name, sizes: Sequence[int], task: Task) -> None:
        """Choose the setting of each size: the fastest of a few repetitions by ranks of its own.

        In a lab the first setting is taken, which yields cores and leaves the algorithm to the library.
        """
        settings = name.settings()
        first = next(iter(settings))
        self._best |= {(name, size): first for size in sizes}
        if len(settings) == 1 or self._request.lab_rate is not None:
            return
        fastest: dict[int, float] = {}
        for setting in settings:
            task.at(0.0, f"settings of {name.text}")
            for size, median in self._tried(name, setting, sizes):
                if median < fastest.get(size, math.inf):
                    fastest[size], self._best[name, size] = median, setting

    def _tried(self, name: Name, setting: str, sizes: Sequence[int]) -> Iterator[tuple[int, float]]:
        """The median of each size with this setting, until a size fails or takes too long."""
        try:
            with self._ranks_of(name, max(sizes), setting) as ranks:
                for size in sizes:
                    taken = _Taken()
                    silence_s = _TRIAL_S * (1 + TRIALS * expected_s(size, self._ranks, None))
                    ranks.order(taken.add, silence_s, nbytes=size, repetitions=TRIALS)
                    yield size, float(np.median(taken.times_s))
                ranks.end()
        except SynclineError:
            return  # if no setting works, the row says why

    def _ranks_of(self, name: Name, most: int, setting: str) -> Ranks:
        """The ranks of a contender for sizes up to ``most``, not started. SynclineError if a library is missing."""
        library = name.find_library() if name.library else None
        if isinstance(library, str):
            raise SynclineError(library)
        place = replace(self._place, library=library, settings=name.settings()[setting])
        work = Work(self._request.collective.name, name.text, most)
        return Ranks(work.to_json(), self._ranks, place, RANK)

    def _measure_size(self, size: int, task: Task, done: float) -> None:
        """Check all contenders at one size, time them in turn, check them again, and add their rows."""
        taken = {name: _Taken() for at, name in self._left if at == size}
        limits: dict[str, list[float]] = {"memory": [], "link": []}
        counts = turns_of(self._request.repetitions(size))
        turns = [([*range(WARM_UP)], 0), *(([], count) for count in counts), ([WARM_UP], 0)]
        each = self._expected_s(size) / (self._request.repetitions(size) + len(turns))
        for number, (seeds, count) in enumerate(turns):
            live = [name for name in taken if name in self._sets]
            shift = number % len(live) if live else 0
            for name in (*live[shift:], *live[:shift]):
                task.at(done, size_text(size))
                self._turn(name, size, taken[name], seeds, count)
                done += each * (count + 1)
            if not self._sets:
                self._drop_limits()
            elif count and live:
                self._probe(size, count, limits)
        for name in taken:
            if name in self._sets:
                self._left.remove((size, name))
                row = _figures(self._row(size, name), taken[name], limits, self._request, self._goodput, name)
                self._run.add(row)

    def _turn(self, name: Name, size: int, taken: _Taken, seeds: list[int], count: int) -> None:
        """Run one contender's turn while the other sets sleep."""
        silence_s = SILENCE_S + _PATIENCE * self._expected_s(size)
        try:
            ranks = self._sets[name][self._best[name, size]]
            ranks.order(taken.add, silence_s, nbytes=size, repetitions=count, seeds=seeds)
        except RanksFailed as failure:
            self._give_up(name, f"during {name.text} of {size_text(size)}: {failure}", size)

    def _probe(self, size: int, count: int, limits: dict[str, list[float]]) -> None:
        """Run the turn of the limits. If it fails, later rows have no limit."""

        def add(message: Message) -> None:
            for kind, found in limits.items():
                found += message[kind]

        if self._limits is not None:
            try:
                self._limits.order(add, nbytes=size, repetitions=count)
            except RanksFailed as failure:
                self._run.display.say(f"limits are not measured from {size_text(size)} on: {failure}")
                self._drop_limits()

    def _drop_limits(self) -> None:
        """End the ranks that measure limits: they have failed, or no contender is left to compare with them."""
        if self._limits is not None:
            self._limits.close()
            self._limits = None

    def _give_up(self, name: Name, text: str, nbytes: int = 0) -> None:
        """End a contender's ranks, and write the reason into its remaining rows."""
        for ranks in self._sets.pop(name, {}).values():
            ranks.close()
        for size in [size for size, other in self._left if other == name]:
            self._left.remove((size, name))
            later = nbytes and size != nbytes
            error = f"not measured after the failure at {size_text(nbytes)}: {text}" if later else text
            self._run.add(replace(self._row(size, name), error=error))

    def _end(self) -> None:
        """End all sets after the last row. Print a failure, which no row can hold any more."""
        limits = [] if self._limits is None else [("the limits", self._limits)]
        sets = ((name.text, ranks) for name, found in self._sets.items() for ranks in found.values())
        for text, ranks in (*sets, *limits):
            try:
                ranks.end()
            except RanksFailed as failure:
                self._run.display.say(f"while {text} was ending, after its last row: {failure}")

    def _measure_memory(self, cells: Sequence[tuple[int, Name]]) -> None:
        """Measure the growth of memory at the largest size, in fresh processes."""
        greatest = max(self._request.sizes)
        names = [name for size, name in cells if size == greatest]
        with self._run.display.task(f"{self._ranks} ranks, memory", len(names)) as task:
            for done, name in enumerate(names):
                task.at(done, name.text)
                row = next(row for row in self._run.result.rows if row.key == self._row(greatest, name).key)
                if row.error is None:
                    self._run.add(replace(row, memory_bytes=self._memory_of(name, greatest)))

    def _memory_of(self, name: Name, size: int) -> int | None:
        taken = _Taken()
        try:
            with self._ranks_of(name, size, self._best[name, size]) as ranks:
                ranks.order(taken.add, nbytes=size, memory=True)
                ranks.end()
        except SynclineError:
            return None
        return taken.memory_bytes

    def _row(self, size: int, name: Name) -> Measured:
        row = self._request.empty_row(self._ranks, size, name)
        return replace(row, setting=self._best.get((name, size)) or None)

    def _expected_s(self, size: int) -> float:
        """The expected seconds of one contender at one size."""
        return self._request.repetitions(size) * expected_s(size, self._ranks, self._request.lab_rate)


def _figures(
    row: Measured,
    taken: _Taken,
    limits: Mapping[str, Sequence[float]],
    request: Request,
    goodput: float | None,
    name: Name,
) -> Measured:
    """The row with the statistics of all turns."""
    kind = request.collective
    times = np.array(taken.times_s)
    median = float(np.median(times))
    limit = "link" if goodput is not None else name.moves
    speeds = [goodput] if goodput is not None else limits[limit]
    least = kind.link_bytes(row.ranks // row.per_host, row.bytes)
    if limit == "memory":
        least = kind.memory_bytes(row.ranks, row.bytes)
    limit_s = least / float(np.median(speeds)) if speeds else None
    return replace(
        row,
        chosen=taken.chosen,
        repetitions=len(times),
        median_s=median,
        p99_s=float(np.percentile(times, 99)),
        algbw_bytes_per_s=row.bytes / median,
        busbw_bytes_per_s=row.bytes / median * kind.bus_factor(row.ranks),
        cpu_s_per_gb=float(np.mean(taken.cpu_s)) / (row.bytes / 1e9),
        limit=limit,
        limit_s=limit_s,
        of_limit=None if limit_s is None else limit_s / median,
        correct=taken.correct,
    )


LAB_RATE = Rate(1e9)
"""The rate of the links of the lab in which the goals are measured."""


def goal_requests(sizes: Sequence[int] = ()) -> list[Request]:
    """The requests for the table of goals: the default contenders on this machine, and as root in labs.

    One lab has 4 hosts. The other has 2 hosts with 2 ranks each, for two levels with a codec.
    """
    found = [request_of(sizes=sizes)]
    if os.geteuid() == 0:
        found.append(replace(request_of(sizes=sizes, lab_rate=LAB_RATE), optional=True))
        asked = request_of(
            sizes=sizes or (TWO_LEVELS_BYTES,), contenders=(TWO_LEVELS, ONE_LEVEL), lab_rate=LAB_RATE, per_host=2
        )
        found.append(replace(asked, optional=True))
    return found


def run(
    requests: Sequence[Request],
    *,
    json_path: Path | None = None,
    resume_path: Path | None = None,
    report_path: Path | None = None,
    goals: bool = False,
    console: Console | None = None,
) -> int:
    """Measure, and print the tables. Returns 0 if every installed contender was measured with right results, else 1.

    With ``resume_path`` all rows of that file are kept and none is measured again. If ``json_path`` names a file of the
    same machine and code, its rows for this request are kept. The result file is written after every size, the page at
    the end; both also after an interrupt. Raises UsageError before anything is measured.
    """
    target, report = result_paths({"--json": json_path or resume_path, "--report": report_path})
    console = console or console_beside(target, report)
    result = _start(requests, json_path, resume_path, console)

    def keep(found: BenchResult) -> None:
        nonlocal result
        result = found
        keep_text(target, found.to_json())

    try:
        with Display(console) as display:
            measure(requests, result, keep, display)
    finally:
        if target is not None and result.rows:
            result.save(target)
        verdicts = judge(result.rows) if goals else ()
        if report is not None:
            from ..report.page import bench_page  # matplotlib is only loaded for a page

            replace_text(report, bench_page(result, verdicts))
    console.print(bench.render(result))
    if goals:
        console.print(bench.goals(verdicts))
    return 0 if all(row.finished or row.missing for row in result.rows) else 1


def _start(
    requests: Sequence[Request], json_path: Path | None, resume_path: Path | None, console: Console
) -> BenchResult:
    """The result before the first measurement, with the rows of an earlier run."""
    fresh = origin()
    if resume_path is not None:
        found = resumed(fresh, resume_path)
    elif json_path is not None and json_path.is_file():
        try:
            found = resumed(fresh, json_path)
        except UsageError:
            return fresh  # another bench's, which this one replaces
        asked = {key for request in requests for key in request.keys}
        found = replace(found, rows=tuple(row for row in found.rows if row.key in asked))
    else:
        return fresh
    if found.rows:
        console.print(f"{len(found.rows)} rows of {resume_path or json_path} are kept", style="dim", markup=False)
    return found
