"""The parameter server as a state machine: messages in, actions out. No sockets, threads, clocks or arrays.

Each worker commits its step once its gradients are under way. The commits of all workers for one step are merged into
one update, applied when the last of them is there; the sync mode decides which workers wait for it and which may go on
before. In bulk-synchronous mode everyone waits. Applying every worker's gradient by itself (asynchronous SGD) is
another rule and not in here.

Rules
* A worker's message is for its next step, and it sends none while it waits to be released; all else raises and changes
  nothing.
* All workers bring the same values for a step, and ask for the norm of its gradients all or none.
* ``Apply`` comes once per step, in order, with the values of that step, and before the ``Release`` it makes possible.

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
    """Compute the norm of the summed gradients of that step and tell the workers."""

    clock: int
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
    """Keeps the workers' clocks (steps committed so far), what they wait for, and the values of steps to be applied."""

    def __init__(self, workers: int, mode: Mode) -> None:
        self._mode = mode
        self.clocks = [0] * workers
        self._applied = 0
        self._asked: dict[int, dict[int, Request]] = {}  # step -> worker -> its question for the norm
        self._committed: dict[int, Request] = {}  # step -> its first commit
        self._waiting: set[int] = set()

    @property
    def awaited(self) -> dict[int, int]:
        """Worker -> step of those whose commit, or question for the norm, others wait for; from any thread."""
        clocks = list(self.clocks)
        newest = max((clocks[worker] for worker in tuple(self._waiting)), default=0)
        late = {worker: newest for worker, clock in enumerate(clocks) if clock < newest}
        for step, asked in list(self._asked.items()):
            late |= {worker: step for worker in range(len(clocks)) if worker not in asked}
        return late

    def handle(self, request: Request) -> list[Action]:
        """Take a worker's message; what has to be done now, in order.

        Raises MismatchError, and changes nothing, when the message is not the worker's next one or when it differs from
        the other workers' for that step.
        """
        worker, clock = request.worker, request.clock
        if not 0 <= worker < len(self.clocks) or clock != self.clocks[worker] + 1 or worker in self._waiting:
            expected = self.clocks[worker] + 1 if 0 <= worker < len(self.clocks) else 0
            raise MismatchError(
                f"rank {worker} sent a {request.kind} for step {clock}, its next one is step {expected}: do all ranks"
                " call step() once for every backward()?"
            )
        self._check_norm(request)
        self._check_values(request)
        if request.kind == "norm":
            self._asked.setdefault(clock, {})[worker] = request
            return self._answer_norm(clock)
        self._committed.setdefault(clock, request)
        self._waiting.add(worker)
        self.clocks[worker] = clock
        return self._advance()

    def _answer_norm(self, clock: int) -> list[Action]:
        if len(self._asked[clock]) < len(self.clocks):
            return []
        del self._asked[clock]
        return [Measure(clock, tuple(range(len(self.clocks))))]

    def _advance(self) -> list[Action]:
        actions: list[Action] = []
        slowest = min(self.clocks)
        while self._applied < slowest:
            self._applied += 1
            actions.append(Apply(self._applied, self._committed.pop(self._applied).values))
        free = [worker for worker in sorted(self._waiting) if self._mode.may_proceed(self.clocks[worker], slowest)]
        if free:
            self._waiting.difference_update(free)
            actions.append(Release(tuple(free)))
        return actions

    def _check_norm(self, request: Request) -> None:
        """A worker that waits for the norm would wait forever for one that commits without asking."""
        clock, worker = request.clock, request.worker
        asked = self._asked.get(clock, {})
        if request.kind == "norm":
            first = self._committed.get(clock)
            wrong = worker in asked or first is not None
        else:
            first = next(iter(asked.values()), None)
            wrong = first is not None
        if wrong:
            other = worker if first is None or worker in asked else first.worker
            raise MismatchError(
                f"rank {worker} sent a {request.kind} for step {clock} out of turn with rank {other}: do all ranks call"
                " clip_grad_norm_() as often in every step?"
            )

    def _check_values(self, request: Request) -> None:
        asked = self._asked.get(request.clock, {}).values()
        other = next(iter(asked), None) if request.kind == "norm" else self._committed.get(request.clock)
        if other is not None and other.values != request.values:
            names = sorted(
                key for key in {*other.values, *request.values} if other.values.get(key) != request.values.get(key)
            )
            raise MismatchError(
                f"rank {request.worker} and rank {other.worker} disagree on the optimizer's values in step"
                f" {request.clock} ({', '.join(names)}): set learning rates and clipping, and change weights, alike on"
                " all ranks"
            )
