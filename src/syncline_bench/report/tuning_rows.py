"""The result file of a tuning: what every number in it means, and its JSON form. The rules of ``result_file`` hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .result_file import ResultFile, reader


@dataclass(frozen=True)
class Tried:
    """One candidate: what an iteration was predicted to take, what it took, and what became of it.

    ``predicted_s`` is None where nothing was predicted, ``measured_s`` where it did not run, or not to its end;
    ``times_s`` are its single measurements, each the median of some iterations, of which ``measured_s`` is the median.
    ``efficiency`` is what a step brings against one of exact training, where that was looked at: what counts is
    ``measured_s`` over it.
    """

    strategy: str
    predicted_s: float | None = None
    measured_s: float | None = None
    why: str = ""
    times_s: tuple[float, ...] = ()
    efficiency: float | None = None

    @property
    def counts_s(self) -> float | None:
        """Seconds of an iteration over how far it goes."""
        return None if self.measured_s is None else self.measured_s / (self.efficiency or 1.0)


@dataclass(frozen=True)
class Tuned(ResultFile):
    """Everything that a tuning knows; ``tried`` has the measured ones first, the fastest before the others.

    ``best`` is a strategy's text, ``iteration_s`` what an iteration takes under it, ``default_iteration_s`` under the
    strategy that was asked for with every open word left to the run. ``lab`` is the rate of the links between hosts.
    ``networks`` are network files by transport, as ``syncline calibrate`` writes them: what predictions rest on.
    """

    verb: ClassVar[str] = "tune"
    lists: ClassVar[Mapping[str, Any]] = {"tried": reader(Tried)}

    best: str = ""
    iteration_s: float | None = None
    default: str = ""
    default_iteration_s: float | None = None
    tried: tuple[Tried, ...] = ()
    explanation: str = ""
    workload: str = ""
    workers: int = 0
    framework: str = "torch"
    lab: str | None = None
    budget_s: float = 0.0
    spent_s: float = 0.0
    searcher: str = ""
    seed: int = 0
    loss: float | None = None
    networks: Mapping[str, Any] = field(default_factory=dict)

    def same_work(self, other: Tuned) -> bool:
        """Whether what was measured in one would be measured alike in the other."""

        def work(of: Tuned) -> tuple[object, ...]:
            origin = of.machine, of.cores, dict(of.versions), of.source_sha256
            return (*origin, of.workload, of.workers, of.framework, of.lab, of.default)

        return work(self) == work(other)
