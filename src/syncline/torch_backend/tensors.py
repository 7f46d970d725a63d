"""Tensors as arrays: the memory that travels, helpers for several tensors, and the reductions.

A dense contiguous tensor is used in place; any other is copied, and written back at the end. Only reductions depend on
the element type; other calls move bytes. Plans add; every other reduction combines whole arrays in rank order, so that
all ranks get the same bits. Element types behave as in Gloo: sums of bool are "or", complex numbers are pairs of reals.
This module knows no ranks, calls or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import UsageError
from ..frameworks.torch.storage import dtype_name, memory
from ..nouns import numpy_dtype

Array = NDArray[Any]
Tensors = Sequence[torch.Tensor]
Sizes = list[tuple[int, str]]
"""The tensors of a call, equal on all ranks: (elements, torch's element type) each."""

_NUMPY = {
    kind: numpy_dtype(dtype_name(kind))
    for kind in (torch.float64, torch.float16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
}
_NUMPY[torch.float32], _NUMPY[torch.bool] = np.dtype(np.float32), np.dtype(np.bool_)
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Memory(NamedTuple):
    """The bytes of a tensor that travel, and the tensor that a copy belongs to."""

    dense: torch.Tensor
    tensor: torch.Tensor

    @property
    def data(self) -> Array:
        """The bytes that travel, one-dimensional."""
        return memory(self.dense)

    @property
    def numbers(self) -> Array:
        """The elements, one-dimensional, complex ones as pairs. UsageError if they cannot be added."""
        kind = _PARTS.get(self.dense.dtype, self.dense.dtype)
        if kind is self.dense.dtype and kind in _NUMPY:
            return memory(self.dense, _NUMPY[kind].str)
        return self.data.view(_NUMPY.get(kind) or numpy_dtype(dtype_name(kind)))

    def write_back(self) -> None:
        """Copy changed bytes back into the tensor."""
        if self.dense.data_ptr() != self.tensor.data_ptr():
            with torch.no_grad():
                self.tensor.copy_(self.dense.view(self.tensor.shape))


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory of a tensor or of a copy. UsageError for tensors without dense memory of their own."""
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        raise NotImplementedError(
            f"the backend syncline does not exchange sparse tensors: use the backend gloo for {tuple(tensor.shape)} of"
            f" {tensor.layout}, or give .to_dense()"
        )
    if plain.is_contiguous() and not (plain.is_conj() or plain.is_neg()):
        return Memory(plain, plain)
    if torch._debug_has_internal_overlap(plain) == 1:
        raise UsageError("this tensor is expanded, so several of its elements share memory: give its .clone()")
    return Memory(plain.resolve_conj().resolve_neg().contiguous(), plain)


def sizes_of(tensors: Tensors) -> Sizes:
    """The number of elements and the type of each tensor."""
    return [(tensor.numel(), dtype_name(tensor.dtype)) for tensor in tensors]


# Several tensors of one call


def together(tensors: Tensors) -> Array:
    """The bytes of several tensors, concatenated in new memory."""
    return np.concatenate([memory_of(tensor).data for tensor in tensors]) if tensors else np.empty(0, np.uint8)


def share_out(data: Array, memories: Sequence[Memory]) -> None:
    """Copy concatenated bytes into tensors."""
    start = 0
    for one in memories:
        place = one.data
        place[:] = data[start : start + place.size]
        start += place.size
        one.write_back()


def table_of(inputs: Tensors, outputs: Tensors, world: int) -> Array:
    """A copy of inputs with one output-sized part per rank; row r has the parts for rank r."""
    for output, given in zip(outputs, inputs, strict=True):
        check(
            given.numel() == world * output.numel() and given.dtype == output.dtype,
            f"reduce_scatter: the input has {given.numel()} elements of {given.dtype}, the output {output.numel()}"
            f" of {output.dtype}; with {world} ranks the input is {world} times the output",
        )
    check_one_type(inputs)
    numbers = [memory_of(given).numbers.reshape(world, -1) for given in inputs]
    return numbers[0].copy() if len(numbers) == 1 else np.concatenate(numbers, axis=1)


def cut(tensor: torch.Tensor, sizes: Sequence[int], world: int, what: str) -> tuple[dict[int, Array], Memory]:
    """The bytes of a tensor for each rank. ``sizes`` count along the first dimension; empty means equal parts."""
    length = tensor.shape[0] if tensor.dim() else 1
    check(not sizes or len(sizes) == world, f"all-to-all: {len(sizes)} sizes of the {what} for {world} ranks")
    check(
        bool(sizes) or length % world == 0,
        f"all-to-all: the {what}'s first dimension, {length}, is not a multiple of the {world} ranks",
    )
    chosen = list(sizes) or [length // world] * world
    check(sum(chosen) == length, f"all-to-all: the sizes of the {what} sum to {sum(chosen)}, not to {length}")
    whole = memory_of(tensor)
    data = whole.data
    row = data.size // length if length else 0
    edges = [0, *np.cumsum(chosen).tolist()]
    return {rank: data[edges[rank] * row : edges[rank + 1] * row] for rank in range(world)}, whole


def check(fine: bool, fault: str) -> None:
    """Raise UsageError unless ``fine``."""
    if not fine:
        raise UsageError(fault)


def check_alike(one: torch.Tensor, other: torch.Tensor, what: str) -> None:
    """Raise UsageError unless both have the same number of elements and the same type."""
    check(
        one.numel() == other.numel() and one.dtype == other.dtype,
        f"{what} has {one.numel()} elements of {one.dtype}, but another tensor of this call has {other.numel()} of"
        f" {other.dtype}: all tensors of a call must have the same size and type",
    )


def check_one_type(tensors: Tensors) -> None:
    """Raise UsageError unless there are tensors, all of one type."""
    check(bool(tensors), "give at least one tensor")
    kinds = {tensor.dtype for tensor in tensors}
    check(
        len(kinds) == 1, f"tensors of one call must have one type, but these have {', '.join(sorted(map(str, kinds)))}"
    )


# Reductions


class Reduction(NamedTuple):
    """A reduction: element-wise ``combine``, and division of the sum if ``averaged``."""

    name: str
    combine: Callable[..., Any]
    averaged: bool = False

    def adds(self, dtype: np.dtype[Any]) -> bool:
        """Whether a plan, which adds numbers, can do it."""
        return self.combine is np.add and dtype != np.bool_

    def of(self, arrays: Sequence[Array], world: int) -> Array:
        """The result for arrays in rank order, in new memory."""
        found = arrays[0].copy()
        with np.errstate(all="ignore"):  # overflow is reported by torch's own means, as with any other backend
            for other in arrays[1:]:
                self.combine(found, other, out=found)
        self.finish(found, world)
        return found

    def finish(self, array: Array, world: int) -> None:
        """Finish in place: ``array`` is the sum over that many ranks."""
        if self.averaged and array.dtype.kind in "iu":
            np.floor_divide(array, world, out=array)
        elif self.averaged:
            np.divide(array, array.dtype.type(world), out=array)


_REDUCTIONS = {
    "SUM": Reduction("sum", np.add),
    "AVG": Reduction("mean", np.add, averaged=True),
    "PRODUCT": Reduction("product", np.multiply),
    "MIN": Reduction("minimum", np.minimum),
    "MAX": Reduction("maximum", np.maximum),
    "BAND": Reduction("bitwise and", np.bitwise_and),
    "BOR": Reduction("bitwise or", np.bitwise_or),
    "BXOR": Reduction("bitwise xor", np.bitwise_xor),
}
_BITWISE = {np.bitwise_and, np.bitwise_or, np.bitwise_xor}


def reduction_of(op: Any, dtype: np.dtype[Any], complex_numbers: bool = False) -> Reduction:
    """The reduction for torch's ``op`` on such elements. NotImplementedError or UsageError if there is none."""
    name = str(getattr(op, "op", op)).rpartition(".")[2]
    found = _REDUCTIONS.get(name)
    if found is None:
        raise NotImplementedError(
            f"the backend syncline has no ReduceOp.{name}: use the backend nccl, or multiply before a sum"
        )
    if found.combine in _BITWISE and dtype.kind not in "iub":
        raise UsageError(f"ReduceOp.{name} is for integers, not for {dtype}")
    if complex_numbers and found.combine is not np.add:
        raise UsageError(f"ReduceOp.{name} is not for complex numbers: use SUM or AVG")
    if found.averaged and dtype == np.bool_:
        raise UsageError("ReduceOp.AVG is not for bool: use SUM, MIN or MAX")
    return found
