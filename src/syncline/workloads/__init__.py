"""Workloads: what is trained when strategies are compared, a model with its data and its solver.

A workload is named by a text: ``digits``, ``cifar10:PATH``, ``synthetic:resnet50``, ``trace:FILE.csv``; what follows
the colon is passed to the workload as it stands. Workloads are registered under their names; networks lie in
``models``. This folder knows torch, but nothing about strategies, groups or transports: a workload sees a rank and a
world size as two numbers. Neither importing it nor asking the registry for its names imports torch; building a model
does, and so does deriving the times of ``replay:NETWORK`` from one.
"""

from __future__ import annotations

from ..errors import UsageError
from ..registry import get
from ._trace import Trace
from ._workload import Images, Workload, layers

__all__ = ["Images", "Trace", "Workload", "layers", "load"]


def load(text: str) -> Workload:
    """The workload of that text, with its data in memory.

    Raises UsageError for an unknown name or argument, DataError for data that cannot be read.
    """
    name, _, argument = text.strip().partition(":")
    workload = get("workloads", name).target(argument)
    if not isinstance(workload, Workload):
        raise UsageError(f"workload {name!r} returned {type(workload).__name__}: it must return a Workload")
    return workload
