"""Frameworks that train in a comparison; one file each, a registry of their own (kind ``frameworks``).

A file makes of a workload a ``Training``: the model, its solver, and one step of it, behind the calls that the loop of
``syncline_bench.train`` makes. It is registered under the framework's name and declares

* ``needs``: the packages that have to be installed, and ``install``: what installs them,
* ``environ``: variables of its processes, with which each computes with one thread and keeps freed memory.

A file of this folder imports its framework when ``loaded`` is called or an object is made, so that a run imports that
framework and no other, and the process that starts a comparison none. Most build their model from the workload's
blueprint, which is the same network from the same weights for all.
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

By default glibc raises these limits by what a process has freed so far. A training whose activations lie above them
takes page faults in every step (75,000 a second for ``digits``, a fifth of the step), and a comparison of two processes
then compares their allocators."""


class Training(Protocol):
    """One worker's model in training. Raises what its framework raises."""

    fused: bool
    """Whether a step is one computation, which ``backward`` does: it is then measured as a whole."""

    def __init__(self, workload: Workload, job: Job, process: int) -> None:
        """Build model and optimizer of this process of the run."""
        ...

    @staticmethod
    def loaded() -> str:
        """Import the framework, to compute with one thread, and say its version."""
        ...

    @staticmethod
    def lacks(workload: Workload) -> str:
        """Why it cannot train a workload, as a clause; empty where it can. Imports no framework."""
        ...

    @staticmethod
    def check(strategy: Strategy) -> None:
        """Raise UsageError for a strategy that its adapter does not do. Imports no framework."""
        ...

    def prepare(self, side: Side, weight: Any) -> None:
        """Make model and optimizer part of a run; what follows is of this worker alone. ``weight`` weighs its batches.

        Where ranks are weighed by ``Batch.share`` instead, the loss that gradients are of is that many times as large.
        """
        ...

    def taken(self, part: Part) -> tuple[Any, Any]:
        """Images and labels as the model takes them; called by whoever loads batches, perhaps in a thread."""
        ...

    def moved(self, batch: Batch) -> Batch:
        """A batch on the device, where it may be already."""
        ...

    def now(self) -> float:
        """A clock in seconds that is read when all that was asked of the device is done."""
        ...

    def forward(self, batch: Batch) -> None:
        """Up to the loss."""
        ...

    def backward(self) -> None:
        """The loss's gradients; they may be under way when it ends."""
        ...

    def update(self, position: int) -> float:
        """The optimizer's step, and the learning rate of step ``position`` of the run; returns the batch's loss."""
        ...

    def pause(self) -> None:
        """The model is about to be looked at; called on all workers, since what is read may have to be exchanged."""
        ...

    def resume(self) -> None:
        """The training goes on."""
        ...

    def consolidate(self, side: Side) -> None:
        """Give all workers the same weights, where they have others."""
        ...

    def copied(self) -> Mapping[str, Any]:
        """Copies of all that an evaluation needs, by name; each knows its ``nbytes``."""
        ...

    def evaluate(self, weights: Mapping[str, Any] | None = None) -> tuple[float, float]:
        """Accuracy and mean loss on the test set, of the model as it is or with the weights of ``copied``."""
        ...

    def digest(self) -> str:
        """The SHA-256 of all that replicas have to agree on."""
        ...


def framework_of(name: str) -> Entry:
    """The framework of that name; raises UsageError for an unknown one, and for one that is not installed."""
    entry = get("frameworks", name)
    missing = [package for package in entry.capabilities["needs"] if find_spec(package) is None]
    if missing:
        raise UsageError(
            f"--framework {name} needs {' and '.join(missing)}: pip install '{entry.capabilities['install']}'"
        )
    return entry


def frameworks_of(chosen: Sequence[str]) -> tuple[Entry, ...]:
    """All of these names, which differ."""
    if not chosen or len(set(chosen)) < len(chosen):
        raise UsageError(f"--framework takes names that differ, got {', '.join(chosen) or 'none'}")
    return tuple(framework_of(name) for name in chosen)


def check_workload(entries: Sequence[Entry], workload: Workload) -> None:
    """Raise UsageError where one cannot train a workload, and say which can."""
    for entry in entries:
        if why := entry.target.lacks(workload):  # type: ignore[attr-defined]
            raise UsageError(f"--framework {entry.name} cannot train {workload.name}: {why}; {_others(workload)}")


def _others(workload: Workload) -> str:
    able = [name for name in names("frameworks") if not get("frameworks", name).target.lacks(workload)]  # type: ignore[attr-defined]
    return f"use --framework {' or '.join(able)}" if able else "no framework can"
