"""The parameter server as a state machine: messages in, actions out. No sockets, threads, clocks or arrays.

Each worker commits its step once its gradients are under way; the sync mode decides when the update is applied and
which workers may go on. In bulk-synchronous mode all commits of a step are merged into one update; a mode that lets
workers run ahead applies every commit by itself.

Theory: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ..errors import MismatchError


class Mode(Protocol):
    """What the server asks of a sync mode."""

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Whether a worker at ``clock`` may go on while the slowest is at ``slowest``."""
        ...


Kind = Literal["norm", "commit"]


@dataclass(frozen=True)
class Request:
    """A worker's message: ``norm`` asks for the gradient's norm before its ``commit``.

    ``values`` are what the update needs from the worker: the optimizer's group values and the clipping factor.
    """

    kind: Kind
    worker: int
    clock: int
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measure:
    """Compute the norm of the summed gradients and tell the workers."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class Apply:
    """Apply the summed gradients of that step with these values."""

    clock: int
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    """Send the weights to these workers: they go on."""

    workers: tuple[int, ...]


Action = Measure | Apply | Release


class Server:
    """Keeps the workers' clocks (steps committed so far) and what they wait for."""

    def __init__(self, workers: int, mode: Mode) -> None:
        self._mode = mode
        self.clocks = [0] * workers
        self._applied = 0
        self._asked: dict[int, Request] = {}
        self._waiting: dict[int, Request] = {}

    def handle(self, request: Request) -> list[Action]:
        """Take a worker's message; what has to be done now, in order.

        Raises MismatchError, and changes nothing, when the message is not the worker's next one or when its values
        differ from the other workers'.
        """
        worker = request.worker
        if request.clock != self.clocks[worker] + 1 or worker in self._waiting:
            raise MismatchError(
                f"rank {worker} sent a {request.kind} for step {request.clock}, its next one is step"
                f" {self.clocks[worker] + 1}: do all ranks call step() once for every backward()?"
            )
        self._check_values(request)
        if request.kind == "norm":
            self._asked[worker] = request
            return self._answer_norm()
        self._waiting[worker] = request
        self.clocks[worker] = request.clock
        return self._advance()

    def _answer_norm(self) -> list[Action]:
        if len(self._asked) < len(self.clocks):
            return []
        self._asked.clear()
        return [Measure(tuple(range(len(self.clocks))))]

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        slowest = min(self.clocks)
        if slowest > self._applied:
            self._applied = slowest
            actions.append(Apply(slowest, next(iter(self._waiting.values())).values))
        free = [worker for worker in sorted(self._waiting) if self._mode.may_proceed(self.clocks[worker], slowest)]
        if free:
            for worker in free:
                del self._waiting[worker]
            actions.append(Release(tuple(free)))
        return actions

    def _check_values(self, request: Request) -> None:
        others = self._asked if request.kind == "norm" else self._waiting
        for other in others.values():
            if other.clock == request.clock and other.values != request.values:
                names = sorted(
                    key for key in {*other.values, *request.values} if other.values.get(key) != request.values.get(key)
                )
                raise MismatchError(
                    f"rank {request.worker} and rank {other.worker} disagree on the optimizer's values in step"
                    f" {request.clock} ({', '.join(names)}): set learning rates and clipping alike on all ranks"
                )
