"""Frameworks that train in a comparison, one file each, in a registry of their own (kind ``frameworks``).

Each file implements ``Training`` for a workload: the model, its optimizer and one step, behind the calls of the loop in
``syncline_bench.train``. It is registered under the framework's name and declares

* ``needs``: the packages that have to be installed, and ``install``: what installs them,
* ``environ``: variables of its processes, such as those that limit it to one thread or keep freed memory.

A file imports its framework only when ``loaded`` is called or an object is made. So a run imports one framework, and
the process that starts a comparison none. Most files build their model from the workload's blueprint: the same network
from the same weights under every framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from syncline.errors import UsageError
from syncline.registry import Entry, get, names
from syncline.strategy.strategy import Strategy

from ..batches import Batch
from ..messages import Job
from ..sides import Side
from ..workloads import Part, Workload

DEFAULT = "torch"
KEEPS_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**28)}
"""The environment in which glibc keeps freed memory for the process instead of returning it to the system.

By default glibc raises these limits as a process frees memory. A training whose activations lie above them takes page
faults in every step (75,000 a second for ``digits``, a fifth of the step), and a comparison of two processes then
compares their allocators."""


class Training(Protocol):
    """One worker's model in training. Raises what its framework raises."""

    fused: bool
    """Whether ``backward`` computes a whole step, so that only the step as a whole can be timed."""

    def __init__(self, workload: Workload, job: Job, process: int) -> None:
        """Build the model and optimizer of process ``process`` of the run."""
        ...

    @staticmethod
    def loaded() -> str:
        """Import the framework, limit it to one thread, and return its version."""
        ...

    @staticmethod
    def lacks(workload: Workload) -> str:
        """The reason why it cannot train a workload, as a clause; empty if it can. Imports no framework."""
        ...

    @staticmethod
    def check(strategy: Strategy) -> None:
        """Raise UsageError for a strategy that the framework's adapter refuses. Imports no framework."""
        ...

    def prepare(self, side: Side, weight: Any) -> None:
        """Join model and optimizer to a run, and seed this worker's random numbers. ``weight`` weighs its batches.

        If the framework weighs by ``Batch.share`` instead, the loss is multiplied by the share.
        """
        ...

    def taken(self, part: Part) -> tuple[Any, Any]:
        """Samples and labels as the model takes them. The thread that loads batches calls this."""
        ...

    def moved(self, batch: Batch) -> Batch:
        """The batch on the model's device."""
        ...

    def now(self) -> float:
        """A clock in seconds, read when the device has finished its queue."""
        ...

    def forward(self, batch: Batch) -> None:
        """Compute up to the loss."""
        ...

    def backward(self) -> None:
        """Compute the gradients. Their exchange may still be in flight on return."""
        ...

    def update(self, position: int) -> float:
        """Make the optimizer's step at the learning rate of the run's step ``position``. Returns the batch's loss."""
        ...

    def pause(self) -> None:
        """Prepare for an evaluation. All workers call this, because weights may have to be exchanged first."""
        ...

    def resume(self) -> None:
        """Continue the training after an evaluation."""
        ...

    def consolidate(self, side: Side) -> None:
        """Give all workers the same weights, if theirs differ."""
        ...

    def copied(self) -> Mapping[str, Any]:
        """Copies of all arrays that an evaluation needs, by name; each has ``nbytes``."""
        ...

    def evaluate(self, weights: Mapping[str, Any] | None = None) -> tuple[float, float]:
        """Accuracy and mean loss on the test set, with the present weights or those from ``copied``."""
        ...

    def digest(self) -> str:
        """The SHA-256 of all values that have to be equal on all replicas."""
        ...


def framework_of(name: str) -> Entry:
    """The framework with this name. Raises UsageError if it is unknown or not installed."""
    entry = get("frameworks", name)
    missing = [package for package in entry.capabilities["needs"] if find_spec(package) is None]
    if missing:
        raise UsageError(
            f"--framework {name} needs {' and '.join(missing)}: pip install '{entry.capabilities['install']}'"
        )
    return entry


def frameworks_of(chosen: Sequence[str]) -> tuple[Entry, ...]:
    """The frameworks with these names. Raises UsageError if a name is repeated."""
    if not chosen or len(set(chosen)) < len(chosen):
        raise UsageError(f"--framework takes names that differ, got {', '.join(chosen) or 'none'}")
    return tuple(framework_of(name) for name in chosen)


def check_workload(entries: Sequence[Entry], workload: Workload) -> None:
    """Raise UsageError if a framework cannot train the workload. The error names those that can."""
    for entry in entries:
        if why := entry.target.lacks(workload):  # type: ignore[attr-defined]
            raise UsageError(f"--framework {entry.name} cannot train {workload.name}: {why}; {_others(workload)}")


def _others(workload: Workload) -> str:
    able = [name for name in names("frameworks") if not get("frameworks", name).target.lacks(workload)]  # type: ignore[attr-defined]
    return f"use --framework {' or '.join(able)}" if able else "no framework can"
