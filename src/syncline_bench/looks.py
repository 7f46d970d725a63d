"""How accurate a model was on the way, without the training noticing.

Owns when rank 0's weights are looked at, and their test. A test in the middle of a training would hold up the others
where they wait for rank 0, and give them time for nothing where they do not. So weights are only copied on the way, and
tested when the training is over; what an accuracy belongs to is the time on the training's clock when they were copied.
Of a large model the copies are tested, and dropped, whenever they take too much memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .frameworks import Training
from .measure import Record

KEPT_BYTES = 1 << 28
"""What copies may take together before they are tested."""


class _Look(NamedTuple):
    position: int
    seconds: float
    weights: Mapping[str, Any]
    needed: bool
    """Whether it is tested even when the target was reached before."""


class Looks:
    """Looks at the model of ``training`` every ``every`` steps of all workers, and after every ``epoch`` of them.

    Only where it ``keeps`` them are there any. With a ``target``, what was taken between epochs is tested only until
    one had that accuracy.
    """

    def __init__(self, training: Training, *, every: int, epoch: int, target: float | None, keeps: bool) -> None:
        self._training, self._every, self._epoch, self._target, self._keeps = training, every, epoch, target, keeps
        self._looks: list[_Look] = []
        self._reached = False
        self._before = 0

    def look(self, record: Record) -> None:
        """A step has ended; called on every rank, since what is read may still have to be exchanged."""
        before, now = self._before, record.position
        self._before = max(before, now)
        epoch_ended = now // self._epoch > before // self._epoch
        if now >= record.iterations or not (epoch_ended or now // self._every > before // self._every):
            return  # the end has a look of its own
        self._training.pause()
        if self._keeps:
            weights = self._training.copied()
            self._looks.append(_Look(now, record.seconds, weights, epoch_ended))
            if sum(tensor.nbytes for tensor in weights.values()) * len(self._looks) > KEPT_BYTES:
                self._test_kept(record)
        self._training.resume()

    def end(self, record: Record) -> None:
        """Test what has been kept, and the model as it is now."""
        if not self._keeps:
            return
        self._test_kept(record)
        record.evaluated(*self._training.evaluate())

    def _test_kept(self, record: Record) -> None:
        kept, self._looks = self._looks, []
        for look in kept:
            if self._reached and not look.needed:
                continue
            scores = self._training.evaluate(look.weights)
            record.evaluated(*scores, position=look.position, seconds=look.seconds)
            self._reached = self._target is not None and (self._reached or scores[0] >= self._target)
