"""What tensors of one call have to have in common, checked before anything travels; and bytes shared out among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from ....errors import UsageError
from .tensors import Memory

Tensors = Sequence[torch.Tensor]
Array = NDArray[Any]


def share_out(data: Array, memories: Sequence[Memory]) -> None:
    """Bytes, one behind the other, into tensors."""
    start = 0
    for memory in memories:
        place = memory.data
        place[:] = data[start : start + place.size]
        start += place.size
        memory.write_back()


def check(fine: bool, fault: str) -> None:
    """Raise UsageError where something is not ``fine``."""
    if not fine:
        raise UsageError(fault)


def check_alike(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """Raise UsageError unless both have as many elements of one type."""
    check(
        one.numel() == other.numel() and one.dtype == other.dtype,
        f"{what} has {one.numel()} elements of {one.dtype}, another tensor of this call {other.numel()} of"
        f" {other.dtype}: all have to be alike",
    )


def check_parts(parts: Tensors, world: int, output: torch.Tensor, what: str) -> None:
    """Raise UsageError unless there is a part for each rank, like the output."""
    check(len(parts) == world, f"{what} has {len(parts)} tensors for {world} ranks")
    for part in parts:
        check_alike(part, output, what)


def check_one_type(tensors: Tensors) -> None:
    """Raise UsageError unless there are tensors, of one type."""
    check(bool(tensors), "give at least one tensor")
    kinds = {tensor.dtype for tensor in tensors}
    check(len(kinds) == 1, f"tensors of one call have one type, these {', '.join(sorted(map(str, kinds)))}")


def nothing() -> None:
    """What a rank does with a result that another one keeps."""
