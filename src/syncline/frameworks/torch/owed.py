"""What the optimizer has been called for and weights have not got yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ...nouns import Bucket
from .intact import Writes
from .parts import Values
from .storage import Storage


class Owed:
    """What a step still owes to the weights: the gradients in ``storage``, as ``written`` knows them, in ``buckets``.

    The optimizer has the tensors ``held``, and its groups had these ``values``.
    """

    def __init__(
        self, storage: Storage, written: Writes, buckets: Sequence[Bucket], values: Values, held: Collection[int]
    ) -> None:
        self.storage, self.written, self.values, self.after = storage, written, values, values
        self._held = held
        self._buckets = buckets
        self._left: dict[int, int] = {}  # buckets of each tensor
        for bucket in buckets:
            for part in bucket.slices:
                self._left[part.tensor] = self._left.get(part.tensor, 0) + 1

    def complete(self, buckets: Iterable[int]) -> list[int]:
        """The tensors that the optimizer has of which these were the last buckets."""
        found = []
        for number in buckets:
            for part in self._buckets[number].slices:
                self._left[part.tensor] -= 1
                if self._left[part.tensor] == 0:
                    del self._left[part.tensor]
                    found.append(part.tensor)
        return [tensor for tensor in found if tensor in self._held]

    @property
    def over(self) -> bool:
        """Whether all tensors have had the update."""
        return not self._left
