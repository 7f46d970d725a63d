"""Tensors as arrays: the memory that travels, and what is to be done when it has changed.

A dense contiguous tensor is its own memory; any other is copied, and written back at the end. Which elements are in it
matters to reductions only; whatever is merely moved is bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import UsageError
from ....nouns import numpy_dtype
from ..storage import dtype_name, memory

Array = NDArray[Any]

_NUMPY = {
    kind: numpy_dtype(dtype_name(kind))
    for kind in (torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}
_NUMPY[torch.float32], _NUMPY[torch.bool] = np.dtype(np.float32), np.dtype(np.bool_)
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Memory(NamedTuple):
    """What of a tensor travels: its bytes, where they lie, and the tensor that a copy belongs to."""

    dense: torch.Tensor
    tensor: torch.Tensor

    @property
    def data(self) -> Array:
        """One-dimensional, uint8."""
        return memory(self.dense)

    @property
    def numbers(self) -> Array:
        """One-dimensional, the elements, complex ones as pairs; raises UsageError where these cannot be added."""
        kind = _PARTS.get(self.dense.dtype, self.dense.dtype)
        if kind is self.dense.dtype and kind in _NUMPY:
            return memory(self.dense, _NUMPY[kind].str)
        return self.data.view(_NUMPY.get(kind) or numpy_dtype(dtype_name(kind)))

    def write_back(self) -> None:
        """The bytes have changed: the tensor shall have them."""
        if self.dense.data_ptr() != self.tensor.data_ptr():
            with torch.no_grad():
                self.tensor.copy_(self.dense.view(self.tensor.shape))


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory of a tensor, or of a copy; raises UsageError for what has no memory of its own here."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        raise NotImplementedError(
            f"sparse tensors are not there in the backend syncline: use the backend gloo for {tuple(tensor.shape)} of"
            f" {tensor.layout}, or give .to_dense()"
        )
    if plain.is_contiguous() and not (plain.is_conj() or plain.is_neg()):
        return Memory(plain, plain)
    if torch._debug_has_internal_overlap(plain) == 1:
        raise UsageError("this tensor is expanded, several of its elements are one in memory: give its .clone()")
    return Memory(plain.resolve_conj().resolve_neg().contiguous(), plain)


def kind_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's element type."""
    return dtype_name(tensor.dtype)


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, str]]:
    """How many elements of which type each has."""
    return [(tensor.numel(), kind_of(tensor)) for tensor in tensors]


def together(tensors: list[torch.Tensor]) -> Any:
    """The bytes of several tensors one behind the other, in new memory."""
    return np.concatenate([memory_of(tensor).data for tensor in tensors]) if tensors else np.empty(0, np.uint8)
