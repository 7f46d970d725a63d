"""How gradients come to the owners of a model's weights, and how the weights go back, as workers and owners see it.

``merged`` moves what all workers push as one, ``single`` what each pushes by itself. Both know plans, keys and arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..compression.compression import Compression
from ..engine.order import When, Work
from ..session.layout import Layout
from .records import Array, Record
from .shard import Holding

Update = Callable[[int], None]
"""Updates a bucket, or ``ALL``, with the values of one step."""


@dataclass(frozen=True, eq=False)
class Model:
    """A prepared model's arrays, by bucket; ``weights`` are those that all workers have.

    ``first_key`` begins the keys that tell its exchanges from those of others.
    """

    layout: Layout
    gradients: Sequence[Array]
    weights: Sequence[Array]
    compression: Compression | None
    first_key: int = 0


class Pushes(Protocol):
    """What an owner is pushed. ``worker`` is ``ALL`` where the pushes of all workers are one."""

    def settle(self, worker: int) -> None:
        """Return when the push of that worker lies in the gradients, and nothing under way reads the weights."""
        ...

    def add(self, worker: int, bucket: int, scale: float) -> None:
        """Add what that worker has pushed of a bucket, or of ``ALL``, times ``scale``, to the next update of all."""
        ...

    def update(self, worker: int, bucket: int, update: Update) -> None:
        """Have what that worker has pushed of a bucket, or of ``ALL``, updated, now or as soon as it is there."""
        ...


class Exchanges(Pushes, Protocol):
    """An owner's part in pushes and pulls."""

    def coming(self, worker: int) -> Sequence[Work]:
        """What has to be done before anything is done for what a worker says of its gradients, by bucket if at all."""
        ...

    def release(self, workers: Sequence[int], bucket: int) -> None:
        """Start to send these workers the weights of a bucket, or of ``ALL``."""
        ...

    def rest(self) -> None:
        """Return when nothing under way reads the weights."""
        ...

    def close(self) -> None:
        """Leave nothing behind: others take the place of these, after the last update."""
        ...


class Traffic(Protocol):
    """This process's part in the pushes and pulls of one model, in so many ``buckets``."""

    @property
    def buckets(self) -> int:
        """How many there are."""
        ...

    def push(self, number: int, when: When) -> Work:
        """Start this worker's part in the push of a bucket."""
        ...

    def pull(self, number: int, when: When) -> Work:
        """Start this worker's part in the pull of a bucket's weights."""
        ...

    def exchanges(self, apart: bool) -> Exchanges:
        """An owner's part of all, which begins with that in the first push; it never ends when the workers leave.

        ``apart`` says whether buckets may be updated one after the other.
        """
        ...

    def holdings(self) -> list[Holding] | None:
        """What this process owns, None where it is no owner."""
        ...

    @property
    def keeps(self) -> bool:
        """True when the owners' weights may say more than the workers', which a checkpoint then needs."""
        ...

    def know(self, records: Sequence[Record]) -> None:
        """The workers have other weights than they were sent: these."""
        ...

    def resume_at(self, step: int) -> None:
        """Have an owner go on from that step, counted from 0."""
        ...
