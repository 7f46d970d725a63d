"""Evaluates a model at several points of its training without disturbing the training.

Owns the times of the evaluations on rank 0. An evaluation during training would delay the other workers if they wait
for rank 0, and would give them a lead if they do not. The weights are therefore only copied during training and
evaluated afterwards. An accuracy belongs to the training time at which its weights were copied. If the copies exceed
``KEPT_BYTES``, they are evaluated at once and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .frameworks import Training
from .measure import Record

KEPT_BYTES = 1 << 28
"""The most memory that copies may take before they are evaluated."""


class _Look(NamedTuple):
    position: int
    seconds: float
    weights: Mapping[str, Any]
    needed: bool
    """Whether these weights are evaluated even if earlier ones reached the target."""


class Looks:
    """Evaluates a model after every ``every`` steps and every ``epoch`` steps, both counted over all workers.

    ``keeps`` is true on the rank that evaluates. With a ``target``, copies from within epochs are evaluated only until
    one has that accuracy.
    """

    def __init__(self, training: Training, *, every: int, epoch: int, target: float | None, keeps: bool) -> None:
        self._training, self._every, self._epoch, self._target, self._keeps = training, every, epoch, target, keeps
        self._looks: list[_Look] = []
        self._reached = False
        self._before = 0

    def look(self, record: Record) -> None:
        """Copy the weights if an evaluation is due. All ranks call it after each step, since a copy may exchange."""
        before, now = self._before, record.position
        self._before = max(before, now)
        epoch_ended = now // self._epoch > before // self._epoch
        if now >= record.iterations or not (epoch_ended or now // self._every > before // self._every):
            return  # end() evaluates the final weights
        self._training.pause()
        if self._keeps:
            weights = self._training.copied()
            self._looks.append(_Look(now, record.seconds, weights, epoch_ended))
            if sum(tensor.nbytes for tensor in weights.values()) * len(self._looks) > KEPT_BYTES:
                self._test_kept(record)
        self._training.resume()

    def end(self, record: Record) -> None:
        """Evaluate the remaining copies and the final model."""
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
