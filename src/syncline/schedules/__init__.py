"""Schedules: which tensors travel together, in which order, and when the result is needed.

Pure: layers in, buckets out. The engine and the simulator read what the protocol below offers and nothing else, so
what is predicted is what is run. A schedule knows nothing of codecs, plans, transports or clocks.

A value that no engine knows is refused when the strategy is built, and one that a framework's adapter does not do when
a model is prepared.

What holds for every schedule: each element of each tensor is in exactly one bucket, a bucket has one element type, and
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
"""Seconds to exchange that many bytes, measured or modelled."""


@dataclass(frozen=True)
class PushAndPull:
    """The cost where others hold the weights: gradients go to them, and weights come back the other way.

    The two directions of a link are used at once. Called it is a ``Cost``, of one after the other.
    """

    push: Cost
    pull: Cost

    def __call__(self, nbytes: int) -> float:
        """The seconds of both."""
        return self.push(nbytes) + self.pull(nbytes)


class Schedule(Protocol):
    """What the engine and the simulator need to know."""

    @property
    def release(self) -> Release:
        """When a bucket may go: as soon as its gradients exist, or when backward has ended."""
        ...

    @property
    def phases(self) -> Phases:
        """One exchange per bucket, or a reduce-scatter and an all-gather of their own."""
        ...

    @property
    def apply(self) -> Application:
        """What waits for the result: the optimizer step, the layer's next forward, or the step after."""
        ...

    @property
    def in_flight(self) -> int:
        """How many buckets of one priority may be under way at once."""
        ...

    @property
    def measures(self) -> int:
        """After how many steps, in which layers are timed, the buckets are made anew; 0 where times do not matter."""
        ...

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:
        """The buckets of ``layers`` (in forward order); ``cost`` is None when nothing has been measured."""
        ...

    def priority(self, bucket: Bucket) -> float:
        """The smallest goes first among the buckets that wait."""
        ...


@runtime_checkable
class GoesAhead(Protocol):
    """A schedule that may have workers compute ahead of the weights that all have, by steps of their own."""

    @property
    def local(self) -> bool:
        """Whether a worker goes on from a plain step with its own gradient; ``apply`` has to be "next_step" then."""
        ...


def goes_ahead(schedule: Schedule) -> bool:
    """Whether workers compute ahead of the weights that all have; a schedule that says nothing of it lets none."""
    return isinstance(schedule, GoesAhead) and schedule.local
