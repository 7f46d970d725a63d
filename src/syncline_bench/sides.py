"""Sides of a comparison: what the training loop asks of whoever exchanges gradients, and the one that exchanges none.

Owns the names, which are those of Syncline's public interface, so that the package itself is a side; ``peers`` has
others. Does not know the loop (``train``), nor what anything is measured by.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from syncline.launch.environment import recognise

from .report.rows import BASELINE


class Counters(Protocol):
    """What the measurement reads: seconds blocked so far, None where nobody counts, and bytes so far per process.

    How the worker was coordinated with the others is what ``Stats`` says.
    """

    @property
    def blocked_s(self) -> float | None: ...  # noqa: D102
    @property
    def bytes_sent(self) -> Mapping[int, int]: ...  # noqa: D102
    @property
    def bytes_received(self) -> Mapping[int, int]: ...  # noqa: D102
    @property
    def chosen(self) -> str: ...  # noqa: D102
    @property
    def staleness(self) -> Mapping[int, int]: ...  # noqa: D102
    @property
    def version_lag(self) -> Mapping[int, int]: ...  # noqa: D102
    @property
    def waited_s(self) -> Mapping[int, float]: ...  # noqa: D102


@dataclass(frozen=True)
class NoCounts:
    """The counters of a side that has nothing to count, or, with ``blocked_s`` None, does not count."""

    chosen: str
    blocked_s: float | None
    bytes_sent: Mapping[int, int] = field(default_factory=dict)
    bytes_received: Mapping[int, int] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    version_lag: Mapping[int, int] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)


class Side(Protocol):
    """What a contender in a comparison has to offer."""

    def rank(self) -> int: ...  # noqa: D102
    def world_size(self) -> int: ...  # noqa: D102
    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]: ...  # noqa: D102
    def stats(self) -> Counters: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def consolidate(self) -> None: ...  # noqa: D102
    def shutdown(self) -> None: ...  # noqa: D102


class Placed:
    """A side whose rank and number of workers are what its process was started with."""

    def __init__(self) -> None:
        self.environment = recognise()

    def rank(self) -> int:
        """This worker's rank."""
        return self.environment.rank

    def world_size(self) -> int:
        """The number of workers."""
        return self.environment.world


class Alone:
    """One worker in plain PyTorch: the baseline, which no call of Syncline's or of a peer's is part of."""

    def rank(self) -> int:
        """The only one."""
        return 0

    def world_size(self) -> int:
        """One worker."""
        return 1

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Both as they are."""
        return model, optimizer

    def stats(self) -> NoCounts:
        """It is never blocked, and sends nothing."""
        return NoCounts(BASELINE, blocked_s=0.0)

    def barrier(self) -> None:
        """Nobody is waited for."""

    def consolidate(self) -> None:
        """Nobody has other weights."""

    def shutdown(self) -> None:
        """There is no group to leave."""
