"""Constructed runs with planted causes: workers on a ring, or with servers, whose every time is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from syncline.timeline.chrome import RecordedRun
from syncline.timeline.spans import ProcessSpans, TimedSpan
from syncline_bench.explain.activity import observe
from syncline_bench.explain.causes import judge
from syncline_bench.report.explanation import Cause
from timelines import process, span

Times = Mapping[str, float]
STAGES: Times = {"loading": 0.001, "forward": 0.03, "backward": 0.06, "optimizer": 0.002}
AGREED = 1 << 22


@dataclass
class Planted:
    """A run of ``workers`` ranks. ``slow`` changes a rank's stage in an iteration; links carry ``rate`` bytes a second.

    The buckets become ready evenly during the backward pass, or all at its end (``late``). An exchange begins when all
    ranks have submitted it and the one before is over. It takes ``fixed`` seconds, and its bytes on the links.
    """

    workers: int = 4
    steps: int = 6
    buckets: Sequence[int] = (4_000_000, 4_000_000)
    rate: float = 1e9
    rates: Mapping[tuple[int, int], float] = field(default_factory=dict)
    fixed: float = 0.0002
    late: bool = False
    slow: Callable[[int, str, int], float] = lambda rank, stage, step: STAGES[stage]  # noqa: ARG005
    servers: int = 0
    strategy: str = "ring"
    host: Callable[[int], str] = lambda rank: ""  # noqa: ARG005

    def run(self) -> RecordedRun:
        """The recording."""
        spans: list[list[TimedSpan]] = [[] for _ in range(self.workers + self.servers)]
        now = [1.0] * self.workers
        for step in range(self.steps):
            self._step(spans, now, step)
        for its in spans:
            its.sort(key=lambda one: one.begin_s)
        return RecordedRun([self._process(rank, its) for rank, its in enumerate(spans)])

    def _process(self, rank: int, spans: Sequence[TimedSpan]) -> ProcessSpans:
        server = rank >= self.workers
        name = f"server {rank - self.workers}" if server else f"rank {rank}"
        where = self.host(rank)
        notes = {"workers": self.workers, "strategy": self.strategy}
        return process(rank, *spans, name=f"{name} ({where})" if where else name, **notes)

    def _step(self, spans: list[list[TimedSpan]], now: list[float], step: int) -> None:
        begun = []
        for rank in range(self.workers):
            at = now[rank] + self.slow(rank, "loading", step)
            forward, backward = (self.slow(rank, stage, step) for stage in ("forward", "backward"))
            spans[rank].append(span(at, at + forward, kind="forward", label="forward"))
            begun.append(at + forward)
            spans[rank].append(span(begun[rank], begun[rank] + backward, kind="backward", label="backward"))
            now[rank] = begun[rank] + backward
        agreed = max(begun)
        for rank, begin in enumerate(begun):
            self._exchange(spans[rank], begin, begin, agreed + self.fixed, "a training step", AGREED + step, 40)
        free = [agreed + self.fixed] * self.workers
        for number, nbytes in enumerate(self.buckets):
            part = 1.0 if self.late else (number + 1) / len(self.buckets)
            submitted = [begin + part * (end - begin) for begin, end in zip(begun, now, strict=True)]
            free = self._carry(spans, submitted, max(*free, *submitted), number, nbytes)
        for rank in range(self.workers):
            if free[rank] > now[rank]:
                label = f"bucket 0 (t0, {self.buckets[0]} bytes) and 1 more"
                spans[rank].append(span(now[rank], free[rank], kind="wait", label=label))
            now[rank] = max(now[rank], free[rank])
            optimizer = self.slow(rank, "optimizer", step)
            spans[rank].append(span(now[rank], now[rank] + optimizer, kind="optimizer", label="SGD"))
            now[rank] += optimizer

    def _exchange(
        self, into: list[TimedSpan], submit: float, begin: float, end: float, label: str, key: int, nbytes: int
    ) -> None:
        into.append(span(submit, end, kind="work", label=label, key=key))
        into.append(span(begin, end, kind="run", label=label, key=key, nbytes=nbytes))

    def _carry(
        self, spans: list[list[TimedSpan]], submitted: Sequence[float], begin: float, number: int, nbytes: int
    ) -> list[float]:
        """The messages of a bucket, and its end on each rank."""
        label = f"bucket {number} (t{number}, {nbytes} bytes)"
        ends = (self._serve if self.servers else self._go_round)(spans, begin, number, nbytes, label)
        for rank, submit in enumerate(submitted):
            self._exchange(spans[rank], submit, begin, ends[rank], label, number, nbytes)
        return ends

    def _go_round(
        self, spans: list[list[TimedSpan]], begin: float, number: int, nbytes: int, label: str
    ) -> list[float]:
        """A ring: a rank sends what it has received in the step before."""
        steps, ready = 2 * (self.workers - 1), [begin] * self.workers
        free = [begin] * self.workers  # of the link from each rank
        for step in range(steps):
            after = list(ready)
            for src in range(self.workers):
                dst = (src + 1) % self.workers
                end = self._lasts(src, dst, nbytes / self.workers, steps) + max(ready[src], free[src])
                self._message(spans, src, dst, ready[src], begin, end, number, step, int(nbytes / self.workers), label)
                after[dst] = free[src] = end
            ready = after
        return ready

    def _serve(self, spans: list[list[TimedSpan]], begin: float, number: int, nbytes: int, label: str) -> list[float]:
        """Servers with equal parts: a server's messages follow each other, first in, then out."""
        ends = [begin] * self.workers
        for server in range(self.workers, self.workers + self.servers):
            now = begin
            for step, out in enumerate((False, True)):
                asked = now
                for rank in range(self.workers):
                    src, dst = (server, rank) if out else (rank, server)
                    now += self._lasts(src, dst, nbytes / self.servers, 2)
                    share = int(nbytes / self.servers)
                    self._message(spans, src, dst, asked, begin, now, number, step, share, label)
                    ends[rank] = max(ends[rank], now)
        return ends

    def _lasts(self, src: int, dst: int, nbytes: float, steps: int) -> float:
        return self.fixed / steps + nbytes / self.rates.get((src, dst), self.rate)

    @staticmethod
    def _message(
        spans: list[list[TimedSpan]],
        src: int,
        dst: int,
        sent: float,
        posted: float,
        end: float,
        key: int,
        step: int,
        nbytes: int,
        label: str,
    ) -> None:
        what = {"key": key, "segment": 0, "step": step, "nbytes": nbytes, "label": label}
        spans[src].append(span(sent, sent + 1e-5, kind="send", peer=dst, **what))
        spans[dst].append(span(posted, end, kind="receive", peer=src, **what))


def slower(rank: int | None, stage: str, seconds: float) -> Callable[[int, str, int], float]:
    """One rank, or every rank, takes longer in a stage."""
    return lambda one, at, _: STAGES[at] + (seconds if at == stage and rank in (None, one) else 0.0)


def causes(run: RecordedRun) -> list[Cause]:
    """Why the iterations of a run are as slow as they are, the main cause first."""
    return judge(observe(run))
