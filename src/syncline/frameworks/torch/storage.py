"""Contiguous storage for tensors: one block of memory per element type, with tensors and buckets as views of it.

A framework's gradients (and, under a parameter server, weights) are scattered in memory. Here each bucket is one piece
of memory that the transport moves without copies (contiguous gradients, Zhu, Liu and Fang 2020). Tensors lie in the
order of the buckets. A view has the strides of its parameter, as autograd prefers. Tensors on a device have blocks of
the same layout there; ``staging`` copies between the two.

This module also detects whether tensors were changed. Autograd counts the in-place writes to a tensor (``Writes``), but
not writes through ``tensor.data``. ``Contents`` therefore compares a sample of each tensor's elements bit by bit, and
moves the sample each time. A write past autograd that hits none of the sampled elements goes unnoticed. Cost: two
passes over ``SAMPLES`` elements per tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import NotBuiltError, UsageError
from ...nouns import Bucket, Layer, Spec, numpy_dtype
from ...training.memory import Allocate, Blocks

Array = NDArray[Any]


def dtype_name(dtype: torch.dtype) -> str:
    """The numpy (or ml_dtypes) name of a torch type."""
    return str(dtype).removeprefix("torch.")


def layers_of(parameters: Sequence[tuple[str, torch.Tensor]]) -> tuple[Layer, ...]:
    """The layers of these parameters for a schedule, in their order."""
    return tuple(
        Layer(Spec(name, tuple(tensor.shape), dtype_name(tensor.dtype)))  #
        for name, tensor in parameters
    )


def flat_view(tensor: Any) -> tuple[Array, Callable[[], object]]:
    """A one-dimensional array over a tensor's memory, or over a copy, and a function to call after a write.

    Raises UsageError or NotBuiltError for other objects, and for a tensor without elements of its own.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"expected a torch tensor or a numpy array, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        raise NotBuiltError("only dense tensors with memory of their own can be exchanged so far")
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise UsageError("this tensor is expanded, so several of its elements share memory: give its .clone()")
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dense = _brought_down(dense) if dense.is_cuda else dense.cpu()
    array = memory(dense).view(numpy_dtype(dtype_name(tensor.dtype)))

    def write_back() -> None:
        if tensor.device != dense.device or dense.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(dense)
        else:  # count it as an in-place write, because a graph may still need the old values
            torch.autograd.graph.increment_version(tensor)

    return array, write_back


_PINNED_BYTES = 1 << 30
"""The largest tensor to pin: torch keeps pinned memory until the process ends."""


def _brought_down(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, to and from which the device copies directly; new pages in each call cost more."""
    if tensor.nbytes > _PINNED_BYTES:
        return tensor.cpu()
    # The script may have set a default device, which has no memory to pin: name the CPU.
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor)


class _Exported:
    """Exports memory to ``numpy.asarray``, whose array then keeps this object, and so the tensor, alive."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self._tensor = tensor
        count = tensor.nbytes if kind == _BYTES else tensor.numel()
        where = (tensor.data_ptr(), False)
        self.__array_interface__ = {"data": where, "shape": (count,), "typestr": kind, "version": 3}


_BYTES = "|u1"


def memory(tensor: torch.Tensor, kind: str = _BYTES) -> Array:
    """The bytes of a contiguous tensor on the host, or its elements of NumPy type ``kind``, without a copy.

    ``Tensor.numpy()`` would mark the storage as not resizable, but FSDP resizes the storages that it exchanges.
    """
    return np.asarray(_Exported(tensor, kind))


def as_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over the memory of a numpy array."""
    return torch.from_numpy(array.view(np.uint8)).view(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes."""
    # Not by ``view(-1)``: a single element counts as contiguous whatever its stride, and keeps it.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def pack_bytes(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """Copy tensors of any type one after the other into a flat uint8 tensor on any device."""
    at = 0
    for tensor in tensors:
        into[at : at + tensor.nbytes].copy_(as_bytes(tensor.detach().contiguous()))
        at += tensor.nbytes


def unpack_bytes(packed: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy the bytes of ``pack_bytes`` back into the tensors."""
    at = 0
    with torch.no_grad():
        for tensor in tensors:
            raw = packed[at : at + tensor.nbytes]
            # ``data`` has a version of its own, so autograd does not count the write: a graph that still waits for its
            # backward pass may ignore new batch statistics.
            if tensor.is_contiguous():
                as_bytes(tensor.data).copy_(raw)
            else:
                # Through a fresh tensor: a piece may begin at an address that does not suit the element type.
                tensor.data.copy_(raw.clone().view(tensor.dtype).view(tensor.shape))
            at += tensor.nbytes


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """An expanded tensor without its repetitions: each element has its own memory. Others are returned unchanged.

    Ranks whose tensors have the same shape and strides get the same part.
    """
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def view_like(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of flat memory with the shape of a tensor and, if they are dense, its strides."""
    if torch._debug_has_internal_overlap(like) != 0 or not _dense(like):
        return flat.view(like.shape)
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a contiguous piece of memory in some order of dimensions."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _holders(tensors: list[torch.Tensor], index: int) -> int:
    """The number of references to a tensor in a list, as Python counts them."""
    return sys.getrefcount(tensors[index])


_NOBODY_ELSE = _holders([torch.empty(0)], 0)


def _holders_of_gradient() -> int:
    parameter, tensors = torch.nn.Parameter(torch.empty(0)), [torch.empty(0)]
    parameter.grad = tensors[0]
    return _holders(tensors, 0)


_ONLY_ITS_PARAMETER = _holders_of_gradient()


def _users(memory: torch.UntypedStorage) -> int | None:
    """The number of users of this memory (tensors, and this caller); None if this version of torch does not tell."""
    return None if _USE_COUNT is None else int(_USE_COUNT(memory._cdata))


_USE_COUNT = getattr(torch._C, "_storage_Use_Count", None)

_ALONE = 2
"""The number of users of an unshared tensor's memory: the tensor and the caller of ``_users``."""


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory has other users, or may have: reads through them go unnoticed.

    Such users are other tensors, other processes, and the creator of memory that torch has not allocated (NumPy, a
    mapped file). Takes less than a microsecond.
    """
    memory = tensor.untyped_storage()
    users = _users(memory)
    if users is None or users > _ALONE:
        return True
    return tensor.is_cpu and (memory.is_shared() or not memory.resizable())


class Pair(NamedTuple):
    """The same flat elements on the tensors' device and in the transport's memory; one tensor if these are the same."""

    device: torch.Tensor
    host: torch.Tensor


class Storage(Blocks):
    """One block of the transport's memory per element type, laid out for a list of buckets.

    ``arrays[b]`` is bucket b as a numpy array, and ``flat`` has the whole blocks as tensors, by type. ``views[i]`` is
    tensor i of the given parameters, at address ``places[i]``. It lies in ``resident``: a block on ``device``, or
    ``flat`` itself if there is no device.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.Tensor]],
        buckets: Sequence[Bucket],
        allocate: Allocate,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(layers_of(parameters), buckets, allocate)
        self._forms = [tensor for _, tensor in parameters]
        self.flat = {dtype: as_torch(block, getattr(torch, dtype)) for dtype, block in self.blocks.items()}
        self.resident = (
            self.flat
            if device is None
            else {dtype: torch.zeros_like(flat, device=device) for dtype, flat in self.flat.items()}
        )
        self._addresses = {dtype: flat.data_ptr() for dtype, flat in self.flat.items()}
        self.views = [self._view(tensor) for tensor in range(len(self.placed))]
        self.places = tuple(view.data_ptr() for view in self.views)
        self.count_users()

    def fresh(self, tensor: int) -> torch.Tensor:
        """The view of a tensor, to be overwritten. A script that has kept the former view keeps its values.

        A gradient that a script holds is the view itself. It then moves to memory of its own, and a new view replaces
        it. Views of it, and the results of its ``detach`` or ``data``, still share the storage.
        """
        if _holders(self.views, tensor) > _NOBODY_ELSE:
            held = self.views[tensor]
            held.data = held.clone()
        if self.views[tensor].data_ptr() != self.places[tensor]:
            self.views[tensor] = self._view(tensor)
        return self.views[tensor]

    def _view(self, tensor: int) -> torch.Tensor:
        return self.view_in(self.resident, tensor).data  # with a version of its own

    def view_in(self, blocks: Mapping[str, torch.Tensor], tensor: int) -> torch.Tensor:
        """A view of a tensor in other blocks of the same layout."""
        placed = self.placed[tensor]
        return view_like(blocks[placed.dtype][placed.start : placed.stop], self._forms[tensor])

    def count_users(self) -> None:
        """Record the present users of the memory, which all belong to Syncline."""
        self._users = {dtype: _users(flat.untyped_storage()) for dtype, flat in self.flat.items()}

    @property
    def kept(self) -> bool:
        """Whether a gradient has a holder other than its parameter, or its memory has a user outside Syncline.

        Users of the memory are only counted if the tensors lie in the transport's memory: copies use it too.
        """
        views = self.views
        if any(_holders(views, tensor) > _ONLY_ITS_PARAMETER for tensor in range(len(views))):
            return True
        here = self.flat is self.resident
        return here and any(_users(flat.untyped_storage()) != self._users[dtype] for dtype, flat in self.flat.items())

    def pair(self, number: int) -> Pair:
        """A bucket on the tensors' device and in the transport's memory."""
        bucket = self.buckets[number]
        place = slice(self.starts[number], self.starts[number] + bucket.elements)
        return Pair(self.resident[bucket.dtype][place], self.flat[bucket.dtype][place])

    @property
    def moved(self) -> bool:
        """Whether the tensors were given memory other than the transport's, as ``share_memory`` does."""
        return any(flat.data_ptr() != self._addresses[dtype] for dtype, flat in self.flat.items())

    def flat_of(self, tensor: int) -> torch.Tensor:
        """A tensor's elements in the transport's memory, in memory order."""
        placed = self.placed[tensor]
        return self.flat[placed.dtype][placed.start : placed.stop]

    def bring_down(self, tensor: int) -> None:
        """Copy a tensor from its device to the transport's memory, and return when that is done."""
        placed = self.placed[tensor]
        if self.flat[placed.dtype] is not self.resident[placed.dtype]:
            self.flat_of(tensor).copy_(self.resident[placed.dtype][placed.start : placed.stop])

    def bring_all_down(self) -> None:
        """Copy all tensors from their device to the transport's memory."""
        for dtype, flat in self.flat.items():
            if flat is not self.resident[dtype]:
                flat.copy_(self.resident[dtype])

    def bring_up(self, number: int) -> None:
        """Copy a bucket from the transport's memory to its device, in the order of the current stream there.

        Autograd does not record it, like everything that the transport writes.
        """
        pair = self.pair(number)
        with torch.no_grad():
            pair.device.copy_(pair.host, non_blocking=True)


SAMPLES = 64
"""The number of sampled elements per tensor; smaller tensors are compared as a whole."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Writes:
    """Autograd's counts of writes to each tensor of a storage at the time of construction."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._counts = [view._version for view in storage.views]

    def since(self, tensors: Iterable[int] | None = None) -> int | None:
        """The first of these tensors (all by default) that was written to since construction; None if there is none."""
        views, counts = self._storage.views, self._counts
        wanted = range(len(views)) if tensors is None else tensors
        return next((tensor for tensor in wanted if views[tensor]._version != counts[tensor]), None)


class Contents:
    """A record of the values of a storage's tensors, from samples of their elements."""

    def __init__(self, storage: Storage) -> None:
        self._blocks = [_Block(dtype, storage) for dtype in storage.resident]
        self._turn = 0

    def remember(self) -> None:
        """Record the present values."""
        self._turn += 1
        for block in self._blocks:
            block.remember(self._turn)

    def remember_mirror(self) -> None:
        """Record the values of the mirror in the transport's memory, which the tensors should have too."""
        self._turn += 1
        for block in self._blocks:
            block.remember_mirror(self._turn)

    def changed(self) -> list[int]:
        """The numbers of the tensors whose sampled values have changed since the last record."""
        return sorted(tensor for block in self._blocks for tensor in block.changed())

    def digest(self, tensors: Sequence[int]) -> bytes:
        """Bytes that differ if other tensors are named, or if their recorded values differ."""
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
        # Each row samples one tensor: every step-th element, from a first element that advances by one each time.
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
