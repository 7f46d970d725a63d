"""Schedules decide which tensors travel together, in which order, and when the result is needed.

They are pure: layers in, buckets out. Engine and simulator read the same protocol, defined here, so predictions match
runs. A schedule knows no codecs, plans, transports or clocks.

Building a strategy refuses values that no engine supports; preparing a model refuses those that the framework's adapter
does not support.

Laws for every schedule: each element of each tensor is in exactly one bucket, a bucket has one element type, and
buckets are listed in the order in which backward completes them (the last layer's first).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ..nouns import Bucket, Layer

Release = Literal["ready", "backward_end"]
Phases = Literal["whole", "split"]
Application = Literal["step", "layer", "next_step"]

Cost = Callable[[int], float]
"""The seconds to exchange that many bytes, measured or modelled."""


@dataclass(frozen=True)
class PushAndPull:
    """The cost of an exchange if owners hold the weights: gradients are pushed, and weights are pulled back.

    Both directions of a link work concurrently. Calling the object gives the ``Cost`` of one after the other.
    """

    push: Cost
    pull: Cost

    def __call__(self, nbytes: int) -> float:
        """The seconds of push and pull together."""
        return self.push(nbytes) + self.pull(nbytes)


class Schedule(Protocol):
    """The interface of a schedule to engine and simulator."""

    @property
    def release(self) -> Release:
        """When a bucket may start: as soon as its gradients exist, or after backward."""
        ...

    @property
    def phases(self) -> Phases:
        """Whether a bucket has one exchange, or a separate reduce-scatter and all-gather."""
        ...

    @property
    def apply(self) -> Application:
        """The point that waits for the result: the optimizer's step, the layer's next forward, or the step after."""
        ...

    @property
    def in_flight(self) -> int:
        """The number of buckets per priority that may be in flight."""
        ...

    @property
    def measures(self) -> int:
        """The number of steps that time the layers before buckets are replaced; 0 if the schedule ignores times."""
        ...

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
        """The buckets of ``layers`` (in forward order); ``cost`` is None before anything has been measured."""
        ...

    def priority(self, bucket: Bucket) -> float:
        """The priority of a bucket. Among the waiting buckets, the one with the smallest number is sent first."""
        ...


@runtime_checkable
class GoesAhead(Protocol):
    """A schedule in which workers may run ahead of the common weights by local steps."""

    @property
    def local(self) -> bool:
        """Whether a worker continues from a plain step with its own gradient. Requires ``apply="next_step"``."""
        ...


def goes_ahead(schedule: Schedule) -> bool:
    """Whether workers run ahead of the common weights. False for schedules without ``local``."""
    return isinstance(schedule, GoesAhead) and schedule.local
