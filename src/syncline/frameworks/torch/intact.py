"""Whether tensors still hold what ``prepare`` or an exchange has left in them.

Autograd counts the in-place writes to a tensor (``Writes``), but not those through ``tensor.data``. Of what a tensor
holds a few elements are therefore compared bit by bit, others each time. A write past autograd that hits none of them
is not seen. Cost: two passes over ``SAMPLES`` elements per tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch

from .storage import Storage

SAMPLES = 64
"""How many elements of a tensor are looked at, of smaller ones all."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Writes:
    """How often autograd had counted a write to each tensor of a storage when this was made."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._counts = [view._version for view in storage.views]

    def since(self, tensors: Iterable[int] | None = None) -> int | None:
        """The first of these tensors, or of all, that has been written to since then; None where none has."""
        views, counts = self._storage.views, self._counts
        wanted = range(len(views)) if tensors is None else tensors
        return next((tensor for tensor in wanted if views[tensor]._version != counts[tensor]), None)


class Contents:
    """What the tensors of a storage hold, as far as some of their elements tell."""

    def __init__(self, storage: Storage) -> None:
        self._blocks = [_Block(dtype, storage) for dtype in storage.resident]
        self._turn = 0

    def remember(self) -> None:
        """Keep what they hold now."""
        self._turn += 1
        for block in self._blocks:
            block.remember(self._turn)

    def remember_mirror(self) -> None:
        """Keep what their mirror in the transport's memory holds, which they should hold too."""
        self._turn += 1
        for block in self._blocks:
            block.remember_mirror(self._turn)

    def changed(self) -> list[int]:
        """The tensors that are seen to hold something else since ``remember``, by number."""
        return sorted(tensor for block in self._blocks for tensor in block.changed())

    def digest(self, tensors: Sequence[int]) -> bytes:
        """Bytes that differ where other tensors are named or they hold something else, as far as seen."""
        wanted = frozenset(tensors)
        return b"".join([str(sorted(wanted)).encode(), *(block.digest(wanted) for block in self._blocks)])


class _Block:
    """The tensors of one element type."""

    def __init__(self, dtype: str, storage: Storage) -> None:
        flat = storage.resident[dtype]
        bits = _BITS[flat.itemsize]
        words = flat.itemsize // bits.itemsize
        self._flat = flat.view(bits).view(-1, words)
        self._mirror = storage.flat[dtype].view(bits).view(-1, words)
        self._row = SAMPLES * words
        mine = [(i, placed) for i, placed in enumerate(storage.placed) if placed.dtype == dtype]
        self._tensors = [i for i, placed in mine if placed.stop > placed.start]
        filled = [placed for _, placed in mine if placed.stop > placed.start]
        starts = torch.tensor([placed.start for placed in filled], dtype=torch.int64)
        sizes = torch.tensor([placed.stop - placed.start for placed in filled], dtype=torch.int64)
        # Rows are tensors: every step-th element from a first one that moves on by one each time.
        steps = (-(-sizes // SAMPLES)).view(-1, 1)
        self._steps = steps.to(flat.device)
        self._firsts = (starts.view(-1, 1) + torch.arange(SAMPLES) * steps).to(flat.device)
        self._lasts = (starts + sizes - 1).view(-1, 1).to(flat.device)
        self._places, self._held = self._firsts, torch.empty(0)

    def remember(self, turn: int) -> None:
        self._move(turn)
        self._held = self._flat[self._places]

    def remember_mirror(self, turn: int) -> None:
        self._move(turn)
        self._held = self._mirror[self._places.to(self._mirror.device)].to(self._flat.device)

    def _move(self, turn: int) -> None:
        self._places = torch.minimum(self._firsts + turn % self._steps, self._lasts).view(-1)

    def changed(self) -> list[int]:
        now = self._flat[self._places]
        if torch.equal(now, self._held):
            return []
        rows = (now != self._held).view(-1, self._row).any(1).tolist()
        return [tensor for tensor, differs in zip(self._tensors, rows, strict=True) if differs]

    def digest(self, wanted: Collection[int]) -> bytes:
        rows = [tensor in wanted for tensor in self._tensors]
        return self._held.view(-1, self._row)[torch.tensor(rows, dtype=torch.bool)].cpu().numpy().tobytes()
