"""Checks during training, for whoever asks: replicas are equal bit for bit, and gradients are finite.

``Checks`` is what was asked, the same on all ranks. ``ModelChecks`` runs the checks of one model. Both compare what the
ranks have found by a ``gather``, so all ranks know the same, raise the same error and name the rank that is at fault.
A check of replicas costs a pass over the weights on the host; it is made before the gradients of a step are sent, when
all updates of the step before have been made. A check of gradients costs a pass over each bucket before it is sent, and
one ``gather`` per step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import GradientError, MismatchError, SynclineError, UsageError
from ..nouns import Bucket
from ..schedules import goes_ahead
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO
from ..sync import Averages
from .communicator import Array, Communicator

Finite = bool | Literal["warn"]

REPLICAS, FINITE = "SYNCLINE_CHECK_REPLICAS", "SYNCLINE_CHECK_FINITE"
"""The environment variables for scripts that are not changed."""

_FINITE_WORDS: dict[str, Finite] = {"": False, "0": False, "off": False, "1": True, "on": True, "warn": "warn"}
_FOUND = struct.Struct("<iqqq")
_NAMED = 8
"""The maximum number of ranks that an error names."""

log = logging.getLogger("syncline")


@dataclass(frozen=True)
class Checks:
    """The checks of a run: replicas every ``replicas`` steps (0: never), and whether gradients must be ``finite``.

    With ``finite="warn"`` gradients that are not finite cause a warning. Raises UsageError for other values.
    """

    replicas: int = 0
    finite: Finite = False

    def __post_init__(self) -> None:
        if isinstance(self.replicas, bool) or not isinstance(self.replicas, int) or self.replicas < 0:
            raise UsageError(f"check_replicas={self.replicas!r}: give a number of steps, or 0 for no check")
        if self.finite not in (True, False, "warn"):
            raise UsageError(f"check_finite={self.finite!r}: choose True, False or 'warn'")

    @property
    def asked(self) -> str:
        """The checks, for messages; empty if there are none."""
        given = {"check_replicas": self.replicas, "check_finite": self.finite}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value)

    def check_fit(self, strategy: Strategy) -> None:
        """Raise UsageError if a check cannot hold, or cannot be made, under this strategy."""
        mode, sync = strategy.sync_mode(), strategy.sync.name
        if self.finite and isinstance(mode, Averages):
            raise UsageError(
                f"check_finite looks at gradients before they are exchanged, but sync={sync} exchanges weights: leave"
                " it out, or use sync=bsp"
            )
        if self.replicas and (isinstance(mode, Averages) or not mode.merges):
            raise UsageError(
                f"check_replicas compares weights, which differ between ranks by design under sync={strategy.sync}:"
                " leave it out, or use sync=bsp; after syncline.consolidate() all ranks have equal weights"
            )
        if self.replicas and strategy.schedule != AUTO and goes_ahead(strategy.schedule_object()):
            raise UsageError(
                f"check_replicas compares weights, but under schedule={strategy.schedule} every worker's weights"
                " include its own last gradient: leave it out, or use delayed(local=off)"
            )


def asked_for(replicas: int | None = None, finite: Finite | None = None) -> Checks:
    """The checks of the arguments of ``init`` or, where these are None, of the environment."""
    if replicas is None:
        text = os.environ.get(REPLICAS) or "0"
        if not (text.isascii() and text.isdigit()):
            raise UsageError(f"{REPLICAS} must be a number of steps, got {text!r}")
        replicas = int(text)
    if finite is None:
        text = os.environ.get(FINITE, "")
        if text not in _FINITE_WORDS:
            raise UsageError(f"{FINITE}={text!r}: choose on, off or warn")
        finite = _FINITE_WORDS[text]
    return Checks(replicas, finite)


class ModelChecks:
    """The checks of one model among the ranks ``us``; ``names`` are those of the tensors whose gradients are sent."""

    def __init__(self, us: Communicator, asked: Checks, names: Sequence[str]) -> None:
        self._us, self._names = us, names
        self.every, self.finite = asked.replicas, asked.finite
        self._equal_at = -1  # the last step at which replicas were equal
        self._found = -1, 0, 0, 0  # the first tensor that is not finite; its NaNs, infinities and elements

    def compare(self, step: int, weights: Callable[[], Iterable[tuple[str, Array]]] | None) -> None:
        """Compare the ranks' weights if a check is due before that step. Raises MismatchError if they differ.

        ``weights`` returns the name and the bytes of each tensor; None on a rank without batches.
        """
        if not self.every or step % self.every:
            return
        named = [] if weights is None else [(name, zlib.crc32(array)) for name, array in weights()]
        mine = np.array([digest for _, digest in named], np.uint32)
        ranks = {
            rank: np.frombuffer(theirs, np.uint32)
            for rank, theirs in enumerate(self._us.gather(mine.tobytes()))
            if theirs
        }
        different = [
            number
            for number, digests in enumerate(zip(*(found.tolist() for found in ranks.values()), strict=True))
            if len(set(digests)) > 1
        ]
        if different:
            name = repr(named[different[0]][0]) if named else f"parameter {different[0]}"
            digests = {rank: int(found[different[0]]) for rank, found in ranks.items()}
            self._raise_together(MismatchError(self._us.titled(self._parted(name, len(different), digests, step))))
        self._equal_at = step

    def _parted(self, name: str, different: int, digests: dict[int, int], step: int) -> str:
        """The error for replicas that differ. The ranks with the rarer values are at fault."""
        (usual, _), *_ = Counter(digests.values()).most_common(1)  # of equal numbers the first, that of the lowest rank
        odd = [rank for rank, digest in digests.items() if digest != usual]
        others = [rank for rank, digest in digests.items() if digest == usual]
        which = f"{name}, the first of {different} parameters that differ" if different > 1 else name
        last = f"they were equal before step {self._equal_at}" if self._equal_at >= 0 else "no check found them equal"
        return (
            f"replicas differ before step {step}: {self._named(odd)} {'have' if len(odd) > 1 else 'has'} other values"
            f" of {which} than {self._named(others)} ({last}). Does the script change weights on some ranks only (a"
            " write to a weight, another learning rate, random values after prepare)? If not, suspect the machine"
        )

    def look(self, bucket: Bucket, elements: Any) -> None:
        """Look at a bucket that is about to be sent. The first tensor that is not finite is remembered."""
        if self._found[0] >= 0 or is_finite(elements):
            return
        start = 0
        for part in bucket.slices:
            values = elements[start : start + part.elements]
            start += part.elements
            if not is_finite(values):
                host = values if isinstance(values, np.ndarray) else values.detach().float().cpu().numpy()
                self._found = part.tensor, int(np.isnan(host).sum()), int(np.isinf(host).sum()), int(host.size)
                return

    def conclude(self, step: int, together: bool) -> None:
        """Tell what was found in that step's gradients: all ranks if they make it ``together``.

        Raises GradientError, the same on all ranks, or warns.
        """
        if not self.finite:
            return
        mine, self._found = self._found, (-1, 0, 0, 0)
        if together:
            told = [_FOUND.unpack(theirs) for theirs in self._us.gather(_FOUND.pack(*mine))]
        else:
            told = [(-1, 0, 0, 0)] * self._us.world_size
            told[self._us.rank] = mine
        faults = {rank: found for rank, found in enumerate(told) if found[0] >= 0}
        if not faults:
            return
        text = self._us.titled(self._not_finite(faults, step))
        if self.finite == "warn":
            if self._us.rank == (0 if together else min(faults)):
                log.warning("%s", text)
            return
        remedy = "; under a GradScaler infinities are normal: use check_finite='warn'"
        error = GradientError(text + remedy)
        if together:
            self._raise_together(error)
        raise self._us.process.fail(error)

    def _not_finite(self, faults: dict[int, tuple[int, ...]], step: int) -> str:
        first = min(faults)
        number, nans, infinities, elements = faults[first]
        others = [rank for rank in faults if rank != first]
        also = f"; the same step has such gradients on {self._named(others)}" if others else ""
        return (
            f"in step {step} the gradient of {self._names[number]!r} on {self._us.name(first)} is not finite before the"
            f" exchange: of {elements} elements {nans} are NaN and {infinities} infinite{also}"
        )

    def _named(self, ranks: Sequence[int]) -> str:
        names = [self._us.name(rank) for rank in ranks[:_NAMED]]
        return ", ".join([*names, f"{len(ranks) - _NAMED} more"] if len(ranks) > _NAMED else names)

    def _raise_together(self, error: SynclineError) -> None:
        """Raise an error that all ranks have found, once all know of it: none is cut short by the end of another."""
        with contextlib.suppress(SynclineError):
            self._us.barrier()
        raise self._us.process.fail(error)


def is_finite(elements: Any) -> bool:
    """Whether all elements of an array, or of a tensor of PyTorch, are finite. One pass unless their sum overflows."""
    if not isinstance(elements, np.ndarray):
        return bool(elements.isfinite().all())
    with np.errstate(over="ignore", invalid="ignore"):
        total = elements.sum(dtype=np.float64 if elements.dtype == np.float64 else np.float32)
        return bool(np.isfinite(total)) or bool(np.isfinite(elements).all())
