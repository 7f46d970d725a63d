"""The order of a data set's samples in an epoch, which is the same on every worker.

It follows from the seed and the epoch, so only positions have to be exchanged.
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
"""The minimum number of pieces per worker and epoch without a batch size."""
_MOST_PIECE = 256


@dataclass(frozen=True)
class SampleOrder:
    """The samples of a data set, in batches of ``batch_size`` or single. Raises UsageError for invalid values."""

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
        """All sample indices in the order of that epoch."""
        if not self.shuffle:
            return np.arange(self.samples)
        return np.random.default_rng((self.seed, epoch)).permutation(self.samples)

    def positions(self, rank: int, world: int) -> NDArray[np.int64]:
        """An equal share: every ``world``-th position from ``rank`` on. The first positions repeat to fill up the
        shares."""
        return np.arange(rank, -(-self.samples // world) * world, world) % self.samples

    def piece(self, workers: int) -> int:
        """The number of samples that a pool hands out at once: a batch, or a few if there is no batch size."""
        return self.batch_size or max(1, min(_MOST_PIECE, self.samples // (workers * _PIECES)))

    def check_alike(self, session: Session) -> None:
        """Raise MismatchError unless all workers have this order. Collective."""
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
