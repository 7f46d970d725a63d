"""The order of a data set's samples in an epoch: the same on every worker, which is told only where its parts lie.

It follows from the seed and the epoch, so that nothing but positions has to travel.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import MismatchError, UsageError
from ..session.session import Session

MOST_SAMPLES = 1 << 48
MOST_EPOCHS = 1 << 32
MOST_SEED = 1 << 63
_PIECES = 64
"""What a worker's share of an epoch is handed out in at least, where batches are not made here."""
_MOST_PIECE = 256


@dataclass(frozen=True)
class SampleOrder:
    """So many samples, in batches of ``batch_size`` or one by one; raises UsageError for values that make no sense."""

    samples: int
    batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("batch_size", self.batch_size, 1, MOST_SAMPLES),
            ("seed", self.seed, 0, MOST_SEED),
            ("the data set's length", self.samples, 1, MOST_SAMPLES),
        ):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"sampler(): {name} must be a whole number, got {value!r}")
            if not least <= value <= most:
                raise UsageError(f"sampler(): {name} must be a number from {least} to {most}, got {value}")

    def indices(self, epoch: int) -> NDArray[np.int64]:
        """All samples in the order of that epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)

    def positions(self, rank: int, world: int) -> NDArray[np.int64]:
        """A fair share: every ``world``-th from ``rank`` on; the first come twice where some would have one less."""
        return np.arange(rank, -(-self.samples // world) * world, world) % self.samples

    def piece(self, workers: int) -> int:
        """How many samples a pool hands out at once: a batch, or few where nobody has said what a batch is."""
        return self.batch_size or max(1, min(_MOST_PIECE, self.samples // (workers * _PIECES)))

    def check_alike(self, session: Session) -> None:
        """Raise MismatchError unless all workers, which call this together, have this order."""
        mine = asdict(self)
        for rank, text in enumerate(session.gather(json.dumps(mine).encode())):
            if (theirs := json.loads(text)) != mine:
                name = next(name for name in mine if theirs.get(name) != mine[name])
                error = MismatchError(
                    f"sampler(): {name} is {theirs.get(name)} on {session.name(rank)} and {mine[name]} on"
                    f" {session.name(session.rank)}: give all workers the same data set and the same arguments"
                )
                session.fail(error)
                raise error
