"""The interface between the training loop of a comparison and the library that exchanges gradients.

``Side`` has the names of Syncline's public interface, so the package ``syncline`` itself is a side. ``peers`` has
others, and ``Alone`` is the single worker, which exchanges nothing. The loop (``train``) knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from syncline.launch.environment import recognise

from .report.comparison import BASELINE


class Counters(Protocol):
    """The counters that a measurement reads: blocked seconds so far (None if not counted), bytes so far per process.

    ``syncline.Stats`` documents the other counters, and provides all of them.
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
    """The counters of a side without communication, or without counters if ``blocked_s`` is None."""

    chosen: str
    blocked_s: float | None
    bytes_sent: Mapping[int, int] = field(default_factory=dict)
    bytes_received: Mapping[int, int] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    version_lag: Mapping[int, int] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)


class Side(Protocol):
    """A library that exchanges gradients in a comparison, as the training loop calls it."""

    def rank(self) -> int: ...  # noqa: D102
    def world_size(self) -> int: ...  # noqa: D102
    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]: ...  # noqa: D102
    def stats(self) -> Counters: ...  # noqa: D102
    def barrier(self) -> None: ...  # noqa: D102
    def consolidate(self) -> None: ...  # noqa: D102
    def shutdown(self) -> None: ...  # noqa: D102


class Placed:
    """A side that takes its rank and number of workers from its process's environment, and whose replicas are equal."""

    def __init__(self) -> None:
        self.environment = recognise()

    def rank(self) -> int:
        """The rank that the launcher has set."""
        return self.environment.rank

    def world_size(self) -> int:
        """The number of processes that the launcher has set."""
        return self.environment.world

    def consolidate(self) -> None:
        """Return at once: replicas never differ."""


class Alone:
    """One worker in its plain framework, without any call of Syncline or a peer: the baseline."""

    def rank(self) -> int:
        """The rank of the only worker, 0."""
        return 0

    def world_size(self) -> int:
        """The number of workers, always 1."""
        return 1

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the model and the optimizer unchanged."""
        return model, optimizer

    def stats(self) -> NoCounts:
        """Zero blocked time and no traffic."""
        return NoCounts(BASELINE, blocked_s=0.0)

    def barrier(self) -> None:
        """Return at once: there is no other worker to wait for."""

    def consolidate(self) -> None:
        """Return at once: there are no other weights to average with."""

    def shutdown(self) -> None:
        """Return at once: there is no group to leave."""
