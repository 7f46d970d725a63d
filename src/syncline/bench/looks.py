"""How accurate a model was on the way, without the training noticing.

Owns when rank 0's weights are looked at, and their test. A test in the middle of a training would hold up the others
where they wait for rank 0, and give them time for nothing where they do not. So weights are only copied on the way, and
tested when the training is over; what an accuracy belongs to is the time on the training's clock when they were copied.
Of a large model the copies are tested, and dropped, whenever they take too much memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..workloads import Workload
from .measure import Record

if TYPE_CHECKING:
    from torch import Tensor, nn

KEPT_BYTES = 1 << 28
"""What copies may take together before they are tested."""


class _Look(NamedTuple):
    position: int
    seconds: float
    weights: dict[str, Tensor]
    needed: bool
    """Whether it is tested even when the target was reached before."""


class Looks:
    """Looks at ``model`` every ``every`` steps of all workers, and when an epoch, ``epoch`` of them, ends.

    ``bare`` is the model that ``model`` may wrap; ``spare`` makes another one of the same kind. With a ``target``, what
    was taken between epochs is tested only until one had that accuracy.
    """

    def __init__(
        self,
        workload: Workload,
        model: nn.Module,
        bare: nn.Module,
        spare: Callable[[], nn.Module],
        *,
        every: int,
        epoch: int,
        target: float | None,
        keeps: bool,
    ) -> None:
        self._workload, self._model, self._bare, self._make = workload, model, bare, spare
        self._every, self._epoch, self._target = every, epoch, target
        self._keeps = keeps and workload.test is not None
        self._looks: list[_Look] = []
        self._spare: nn.Module | None = None
        self._reached = False
        self._before = 0

    def look(self, record: Record) -> None:
        """A step has ended; called on every rank, since what is read may still have to be exchanged."""
        before, now = self._before, record.position
        self._before = max(before, now)
        epoch_ended = now // self._epoch > before // self._epoch
        if now >= record.iterations or not (epoch_ended or now // self._every > before // self._every):
            return  # the end has a look of its own
        self._model.eval()
        if self._keeps:
            weights = {name: tensor.detach().clone() for name, tensor in self._bare.state_dict().items()}
            self._looks.append(_Look(now, record.seconds, weights, epoch_ended))
            if sum(tensor.nbytes for tensor in weights.values()) * len(self._looks) > KEPT_BYTES:
                self._test_kept(record)
        self._model.train()

    def end(self, record: Record) -> None:
        """Test what has been kept, and the model as it is now."""
        if not self._keeps:
            return
        self._test_kept(record)
        scores = self._workload.evaluate(self._bare)
        assert scores is not None
        record.evaluated(*scores)

    def _test_kept(self, record: Record) -> None:
        kept, self._looks = self._looks, []
        for look in kept:
            if self._reached and not look.needed:
                continue
            self._spare = self._spare or self._make()
            self._spare.load_state_dict(look.weights)
            scores = self._workload.evaluate(self._spare)
            assert scores is not None
            record.evaluated(*scores, position=look.position, seconds=look.seconds)
            self._reached = self._target is not None and (self._reached or scores[0] >= self._target)
