"""The course of a bench: number of ranks by number of ranks, size by size, with what is there kept at every step.

Owns which contenders share a set of processes, what happens when a set fails (the contender whose turn it was is given
up with its error, the rest goes on in fresh processes), the resuming of a bench, and the making of rows. How ranks are
started is ``start``'s business, and how it looks ``display``'s.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...errors import DataError, SynclineError, UsageError
from ...launch.mpi_library import LIBRARIES, MpiLibrary, find_library
from ...report.bench_rows import BenchResult, Measured
from ...report.units import decimal_size as size_text
from ..machine import provenance
from ..messages import Message
from .contenders import Name
from .display import Display
from .request import WARM_UP, Request, expected_s, missing
from .start import SILENCE_S, Here, InLab, LabLike, RanksFailed, Testbed, run_ranks, where_text
from .work import Position, Work

Save = Callable[[BenchResult], None]
_PATIENCE = 20.0
"""A turn may take so many times what was expected of it before it counts as stuck."""


def origin() -> BenchResult:
    """An empty result of this machine and code."""
    return BenchResult(**provenance())


def resumed(fresh: BenchResult, path: Path) -> BenchResult:
    """``fresh`` with the finished rows of a file of the same machine and code; raises UsageError for another's."""
    try:
        before = BenchResult.from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} is no text: choose another file") from None
    except DataError as error:
        raise UsageError(f"{path}: {error}; choose another file") from None
    if not before.same_origin(fresh):
        raise UsageError(
            f"{path} was measured on another machine or with another version of the code or its libraries, so that its"
            " rows cannot stand beside new ones: choose another file, or delete it"
        )
    return replace(before, rows=tuple(row for row in before.rows if row.finished))


def measure(requests: Sequence[Request], result: BenchResult, save: Save, display: Display) -> BenchResult:
    """Measure what ``result`` does not have yet; ``save`` is called after every size and at every end."""
    run = _Run(requests, result, save, display)
    try:
        for request in requests:
            run.request(request)
    finally:
        save(run.result)
    return run.result


@contextmanager
def open_place(request: Request) -> Iterator[tuple[Testbed, float | None]]:
    """Where the ranks of a request run, and the goodput of its links in bytes/s when they are a lab's."""
    if request.lab_rate is None:
        yield Here(), None
        return
    lab_module = importlib.import_module("syncline.lab")  # only a bench in a lab needs what a lab needs
    lab: LabLike
    with lab_module.Lab(hosts=max(request.ranks) // request.per_host, rate=request.lab_rate) as lab:
        yield InLab(lab, request.per_host), lab.goodput(seconds=2)


class _Run:
    """A bench under way: the rows so far, where new ones go, and where progress is shown."""

    def __init__(self, requests: Sequence[Request], result: BenchResult, save: Save, display: Display) -> None:
        self.result = result
        self.display = display
        self._save = save
        self._order = {key: place for place, key in enumerate(key for asked in requests for key in asked.keys)}

    def request(self, request: Request) -> None:
        """Measure one request; nothing is started when all its rows are there."""
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
                for library, names in _sets(cells):
                    own = [(size, name) for size, name in cells if name in names]
                    _Set(self, request, ranks, place, goodput, library).measure(own)

    def add(self, *rows: Measured) -> None:
        """New rows, kept at once."""
        found = self.result.with_rows(rows).rows
        # In the order of asking, whatever was kept, failed or measured first.
        found = tuple(sorted(found, key=lambda row: self._order.get(row.key, -1)))
        self.result = replace(self.result, rows=found)
        self._save(self.result)

    def _todo(self, request: Request, ranks: int) -> list[tuple[int, Name]]:
        """The cells to measure; those of contenders that are not installed become rows at once."""
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


class _Set:
    """The contenders of one number of ranks that can be in one process."""

    def __init__(
        self, run: _Run, request: Request, ranks: int, place: Testbed, goodput: float | None, library: str
    ) -> None:
        self._run, self._request, self._ranks = run, request, ranks
        self._place, self._goodput, self._library = place, goodput, library
        self._left: list[tuple[int, Name]] = []
        self._begun: list[tuple[int, Name]] = []  # what was left when the present processes started
        self._names: list[Name] = []
        self._retried = False

    def measure(self, cells: Sequence[tuple[int, Name]]) -> None:
        """Measure all cells, giving up one contender after the other where processes fail."""
        self._left = list(cells)
        lab = "" if self._request.lab_rate is None else " in the lab"
        expected = {size: self._expected_s(size, cells) for size, _ in cells}
        with self._run.display.task(f"{self._ranks} ranks{lab}", sum(expected.values())) as task:
            while self._left:
                self._attempt(lambda position: task.at(self._progress(position, expected), self._doing(position)))
        if self._request.lab_rate is None:
            self._measure_memory(cells)

    def _attempt(self, moved: Callable[[Position], None]) -> None:
        self._begun = list(self._left)
        self._names = list(dict.fromkeys(name for _, name in self._left))
        sizes = list(dict.fromkeys(size for size, _ in self._left))
        numbers = {name: number for number, name in enumerate(self._names)}
        turns = tuple((size, tuple(numbers[name] for at, name in self._left if at == size)) for size in sizes)
        library = self._library if any(name.library for name in self._names) else ""
        link = self._goodput is None and any(name.moves == "link" for name in self._names)
        kind, repeat = self._request.collective.name, self._request.repeat
        work = Work(kind, self._texts, turns, "", library=library, repeat=repeat, link=link)
        longest = expected_s(max(sizes), self._ranks, 1, self._request.lab_rate)
        try:
            run_ranks(work, self._ranks, self._place, self._heard, moved, SILENCE_S + _PATIENCE * longest)
        except RanksFailed as failure:
            self._give_up(failure)
        else:
            # Every cell has been reported, or there would be no end of it.
            self._fail(list(self._left), "the ranks ended without a result")

    def _heard(self, message: Message) -> None:
        name, size = self._names[message["contender"]], message["bytes"]
        self._left.remove((size, name))
        row = _figures(self._row(size, name), message, self._request, self._goodput, name)
        self._run.add(row)

    def _give_up(self, failure: RanksFailed) -> None:
        """The contender whose turn it was is given up; without one there is a second try, then MPI goes, then all."""
        at = failure.position
        text = f"{failure} {where_text(self._texts, at)}".strip()
        if at.contender is None and at.turns and not self._retried:
            self._retried = True
            self._run.display.say(f"{text} between two turns: starting again with what is left")
            return
        if at.contender is not None:
            blamed = [self._names[at.contender]]
        else:
            blamed = [name for name in self._names if name.library] or self._names
        self._fail([cell for cell in self._left if cell[1] in blamed], text, at.nbytes)

    def _fail(self, cells: Sequence[tuple[int, Name]], text: str, nbytes: int = 0) -> None:
        for size, name in cells:
            self._left.remove((size, name))
            later = nbytes and size != nbytes
            error = f"not measured after the failure at {size_text(nbytes)}: {text}" if later else text
            self._run.add(replace(self._row(size, name), error=error))

    def _measure_memory(self, cells: Sequence[tuple[int, Name]]) -> None:
        """The growth of memory at the greatest size, each contender in processes of its own."""
        greatest = max(self._request.sizes)
        names = [name for size, name in cells if size == greatest]
        with self._run.display.task(f"{self._ranks} ranks, memory", len(names)) as task:
            for done, name in enumerate(names):
                task.at(done, name.text)
                row = next(row for row in self._run.result.rows if row.key == self._row(greatest, name).key)
                if row.error is None:
                    self._run.add(replace(row, memory_bytes=self._memory_of(name, greatest)))

    def _memory_of(self, name: Name, size: int) -> int | None:
        found: list[int] = []
        library = self._library if name.library else ""
        work = Work(self._request.collective.name, (name.text,), ((size, (0,)),), "", library=library, memory=True)
        try:
            run_ranks(
                work,
                self._ranks,
                self._place,
                lambda message: found.append(message["memory_bytes"]),
                lambda _: None,
                SILENCE_S,
            )
        except SynclineError:
            return None
        return max(found, default=None)

    def _row(self, size: int, name: Name) -> Measured:
        return self._request.empty_row(self._ranks, size, name)

    @property
    def _texts(self) -> tuple[str, ...]:
        return tuple(name.text for name in self._names)

    def _expected_s(self, size: int, cells: Sequence[tuple[int, Name]]) -> float:
        count = sum(at == size for at, _ in cells)
        return self._request.repetitions(size) * expected_s(size, self._ranks, count, self._request.lab_rate)

    def _progress(self, position: Position, expected: dict[int, float]) -> float:
        """Expected seconds of work that is done: whole sizes, and the part of the present one."""
        left = {size for size, _ in self._left}
        done = sum(value for size, value in expected.items() if size not in left)
        return done + expected.get(position.nbytes, 0.0) * self._share(position)

    def _share(self, position: Position) -> float:
        """The share of the present size that is done, from the turns of this set of processes."""
        before = len(self._names)  # connecting took a turn each
        for size in dict.fromkeys(size for size, _ in self._begun):
            turns = sum(at == size for at, _ in self._begun) * (WARM_UP + self._request.repetitions(size))
            if size == position.nbytes:
                return min(1.0, max(0, position.turns - before) / turns)
            before += turns
        return 0.0

    def _doing(self, position: Position) -> str:
        if position.contender is None or not position.nbytes:
            return "connecting" if not position.turns else ""
        return size_text(position.nbytes)


def _sets(cells: Sequence[tuple[int, Name]]) -> list[tuple[str, list[Name]]]:
    """Which contenders share processes: all that need no MPI, with those of the first MPI library; then the others.

    Only one MPI library can be loaded into a process.
    """
    names = list(dict.fromkeys(name for _, name in cells))
    libraries = {name: _installed(name.library) for name in names}
    used = [library for library in LIBRARIES if library in libraries.values()]
    first = used[0] if used else ""
    together = [name for name in names if libraries[name] in ("", first)]
    found = [(first, together)] if together else []
    for library in used[1:]:
        found.append((library, [name for name in names if libraries[name] == library]))
    return found


def _installed(library: str) -> str:
    """The library that a name stands for here."""
    if not library:
        return ""
    found = find_library(library)
    return found.name if isinstance(found, MpiLibrary) else ""


def _figures(row: Measured, message: Message, request: Request, goodput: float | None, name: Name) -> Measured:
    """The row that the ranks' report makes."""
    kind = request.collective
    times = np.array(message["times_s"])
    median = float(np.median(times))
    limit = "link" if goodput is not None else name.moves
    if limit == "link":
        limit_s = kind.link_bytes(row.ranks // row.per_host, row.bytes) / (goodput or message["speeds"]["link"])
    else:
        limit_s = kind.memory_bytes(row.ranks, row.bytes) / message["speeds"]["memory"]
    return replace(
        row,
        chosen=message["chosen"],
        repetitions=len(times),
        median_s=median,
        p99_s=float(np.percentile(times, 99)),
        algbw_bytes_per_s=row.bytes / median,
        busbw_bytes_per_s=row.bytes / median * kind.bus_factor(row.ranks),
        cpu_s_per_gb=message["cpu_s"] / (row.bytes / 1e9),
        limit=limit,
        limit_s=limit_s,
        of_limit=limit_s / median,
        correct=message["correct"],
    )
