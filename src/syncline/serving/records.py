"""Records of what owners hold for slices of tensors, and their serialisation without pickle.

    8 bytes   length of the table (little endian)
    table     JSON: [[tensor, start, stop, key, type, shape] or [tensor, start, stop, key, null, value], ...]
    elements  raw, in the order of the table

An owner holds slices of tensors; a checkpoint has whole ones. Records of any slices that cover a tensor are equivalent,
so state is saved and loaded as if one process had trained, whichever process owns what. A slice counts elements in
memory order. Elements may have the types of any framework, because this module does not compute with them.

Data from another process is checked: every length against the bytes that are there, every type and name, and that no
entry is repeated and no byte left over.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ProtocolError, UsageError
from ..nouns import Slice, numpy_dtype

Array = NDArray[Any]

ITEM_BYTES = {
    **{name: np.dtype(name).itemsize for name in ("bool", "float16", "float32", "float64", "complex64", "complex128")},
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
    **{f"float8_{kind}": 1 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
    "bfloat16": 2,
    "bcomplex32": 4,
    "complex32": 4,
    "float4_e2m1fn_x2": 1,
}
"""The types that elements may have, by their names in NumPy, ml_dtypes and PyTorch, and the bytes of one."""


@dataclass(frozen=True, eq=False)
class Elements:
    """A tensor without a framework: the name of its type, its shape, and its memory as flat bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, array: Array) -> Elements:
        """The elements of a contiguous array, sharing its memory."""
        return cls(str(array.dtype), array.shape, array.reshape(-1).view(np.uint8))

    @property
    def array(self) -> Array:
        """The same memory as a NumPy array."""
        found: Array = self.data.view(numpy_dtype(self.dtype)).reshape(self.shape)
        return found


Value = Elements | bool | int | float | str | None
"""One entry of an optimizer's state."""

State = dict[str, Value]
"""The optimizer's state of a slice. An entry is a scalar or tensor; some have one element for each of the slice."""


@dataclass(frozen=True)
class Record:
    """One entry of what an owner holds for a slice."""

    slice: Slice
    key: str
    value: Value

    @property
    def elementwise(self) -> bool:
        """Whether the value has one element for each element of the slice."""
        value = self.value
        return isinstance(value, Elements) and value.shape != () and math.prod(value.shape) == self.slice.elements


def states_of(records: Iterable[Record], slices: Sequence[Slice]) -> list[State]:
    """The states of these slices, from records of whole tensors or of any slices that cover them; copies values."""
    found: list[State] = [{} for _ in slices]
    known = _by_tensor(records)
    for state, part in zip(found, slices, strict=True):
        for record in known[part.tensor]:
            if not record.elementwise:
                state[record.key] = copy.deepcopy(record.value)
            elif _common(record.slice, part):
                assert isinstance(record.value, Elements)
                dtype = record.value.dtype
                item = record.value.data.size // record.slice.elements
                target = state.get(record.key)
                if not isinstance(target, Elements) or target.dtype != dtype:
                    target = Elements(dtype, (part.elements,), np.zeros(part.elements * item, np.uint8))
                    state[record.key] = target
                _copy(record, part, target.data)
    return found


def write_into(records: Iterable[Record], parts: Iterable[tuple[Slice, Array]]) -> None:
    """Fill arrays of slices from records of whole tensors or of any slices.

    Raises ValueError for a record without one element of the array's type for each element of its slice.
    """
    known = _by_tensor(records)
    for part, array in parts:
        for record in known[part.tensor]:
            value = record.value
            if not isinstance(value, Elements) or not record.elementwise or value.dtype != str(array.dtype):
                raise ValueError(f"{record.key!r:.100} of tensor {part.tensor} has no elements of type {array.dtype}")
            if _common(record.slice, part):
                _copy(record, part, array.view(np.uint8))


def _by_tensor(records: Iterable[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        found[record.slice.tensor].append(record)
    return found


def _common(one: Slice, other: Slice) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)


def _copy(record: Record, part: Slice, target: NDArray[np.uint8]) -> None:
    """Copy the elements that a record and a slice share into the slice's memory."""
    assert isinstance(record.value, Elements)
    known = record.slice
    start, stop = max(part.start, known.start), min(part.stop, known.stop)
    source = record.value.data.reshape(known.elements, -1)
    target.reshape(part.elements, -1)[start - part.start : stop - part.start] = source[
        start - known.start : stop - known.start
    ]


def pack(records: Iterable[Record]) -> bytes:
    """Serialise records; raises UsageError for a value that is neither a tensor nor a plain value."""
    table: list[list[object]] = []
    bodies: list[bytes] = []
    for record in records:
        part, value = record.slice, record.value
        head: list[object] = [part.tensor, part.start, part.stop, record.key]
        if isinstance(value, Elements):
            table.append([*head, value.dtype, list(value.shape)])
            bodies.append(value.data.tobytes())
        elif value is None or isinstance(value, (bool, int, float, str)):
            table.append([*head, None, value])
        else:
            raise UsageError(f"optimizer state {record.key!r} is a {type(value).__name__}, which cannot be sent")
    text = json.dumps(table).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *bodies])


def unpack(data: bytes, who: str, rank: int) -> list[Record]:
    """Parse the records that process ``rank``, called ``who`` in messages, has packed; raises ProtocolError."""
    try:
        return _unpack(memoryview(data))
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(
            f"the optimizer state or weights from {who} make no sense: {error}; do all processes run the same version"
            " on sound machines?",
            rank=rank,
        ) from error


_LENGTH = struct.Struct("<Q")


def _unpack(data: memoryview) -> list[Record]:
    if data.nbytes < _LENGTH.size:
        raise ValueError(f"{data.nbytes} bytes")
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    if at > data.nbytes:
        raise ValueError(f"a table of {length} bytes in {data.nbytes}")
    found: dict[tuple[Slice, str], Record] = {}
    for tensor, start, stop, key, kind, rest in json.loads(bytes(data[_LENGTH.size : at])):
        if not (_whole(tensor, start, stop) and start <= stop and isinstance(key, str)):
            raise ValueError(f"an entry {key!r:.100} of elements {start!r:.20} to {stop!r:.20} of {tensor!r:.20}")
        part, value = Slice(tensor, start, stop), rest
        if kind is not None:
            value, at = _elements(data, at, kind, rest)
        elif not (value is None or isinstance(value, (bool, int, float, str))):
            raise ValueError(f"{key!r:.100} is a {type(value).__name__}")
        if (part, key) in found:
            raise ValueError(f"{key!r:.100} of {part} comes twice")
        found[part, key] = Record(part, key, value)
    if at != data.nbytes:
        raise ValueError(f"{data.nbytes - at} bytes more than its table says")
    return list(found.values())


def _whole(*numbers: Any) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63 for number in numbers)


def _elements(data: memoryview, at: int, kind: Any, shape: Any) -> tuple[Elements, int]:
    """Copy the elements at an offset; return them and the offset of the next ones."""
    if kind not in ITEM_BYTES or not isinstance(shape, list) or not _whole(*shape):
        raise ValueError(f"a tensor of type {kind!r:.100} and shape {shape!r:.100}")
    size = math.prod(shape) * ITEM_BYTES[kind]
    if at + size > data.nbytes:
        raise ValueError(f"a tensor of {size} bytes where {data.nbytes - at} are left")
    return Elements(kind, tuple(shape), np.frombuffer(data[at : at + size], np.uint8).copy()), at + size
