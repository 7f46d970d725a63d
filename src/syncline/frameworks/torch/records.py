"""Optimizer state as bytes: a JSON table and the tensors behind one another. No pickle.

8 bytes  length of the table (little endian)
table    [[tensor, start, stop, key, type, shape] or [tensor, start, stop, key, null, value], ...]
tensors  raw, in the order of the table

What comes from another process is checked: every length against the bytes that are there, every type and name, and that
nothing comes twice or is left over.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import ProtocolError, UsageError
from .shard import Piece, Record
from .storage import dtype_name

_LENGTH = struct.Struct("<Q")

_DTYPES = {
    dtype_name(value): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not dtype_name(value).startswith(("q", "bits"))
}
"""What tensors of an optimizer's state may consist of."""


def pack(records: Iterable[Record]) -> bytes:
    """Records to bytes; raises UsageError for a value that is neither a tensor nor plain."""
    table: list[list[object]] = []
    bodies: list[bytes] = []
    for record in records:
        piece, value = record.piece, record.value
        head: list[object] = [piece.tensor, piece.start, piece.stop, record.key]
        if isinstance(value, torch.Tensor):
            table.append([*head, dtype_name(value.dtype), list(value.shape)])
            bodies.append(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif value is None or isinstance(value, (bool, int, float, str)):
            table.append([*head, None, value])
        else:
            raise UsageError(f"optimizer state {record.key!r} is a {type(value).__name__}, which cannot be sent")
    text = json.dumps(table).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *bodies])


def unpack(data: bytes, who: str, rank: int) -> list[Record]:
    """Bytes that process ``rank``, which messages call ``who``, has packed, to records; raises ProtocolError."""
    try:
        return _unpack(memoryview(data))
    except (ValueError, TypeError, RecursionError, RuntimeError) as error:
        raise ProtocolError(
            f"the optimizer state or weights from {who} make no sense: {error}; do all processes run the same version"
            " on sound machines?",
            rank=rank,
        ) from error


def _unpack(data: memoryview) -> list[Record]:
    if data.nbytes < _LENGTH.size:
        raise ValueError(f"{data.nbytes} bytes")
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    if at > data.nbytes:
        raise ValueError(f"a table of {length} bytes in {data.nbytes}")
    found: dict[tuple[Piece, str], Record] = {}
    for tensor, start, stop, key, kind, rest in json.loads(bytes(data[_LENGTH.size : at])):
        if not (_whole(tensor, start, stop) and start <= stop and isinstance(key, str)):
            raise ValueError(f"an entry {key!r:.100} of elements {start!r:.20} to {stop!r:.20} of {tensor!r:.20}")
        piece, value = Piece(tensor, start, stop), rest
        if kind is not None:
            value, at = _tensor(data, at, kind, rest)
        elif not (value is None or isinstance(value, (bool, int, float, str))):
            raise ValueError(f"{key!r:.100} is a {type(value).__name__}")
        if (piece, key) in found:
            raise ValueError(f"{key!r:.100} of {piece} comes twice")
        found[piece, key] = Record(piece, key, value)
    if at != data.nbytes:
        raise ValueError(f"{data.nbytes - at} bytes more than its table says")
    return list(found.values())


def _whole(*numbers: Any) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 63 for number in numbers)


def _tensor(data: memoryview, at: int, kind: Any, shape: Sequence[Any]) -> tuple[torch.Tensor, int]:
    """The tensor at an offset, and where the next one is."""
    if kind not in _DTYPES or not isinstance(shape, list) or not _whole(*shape):
        raise ValueError(f"a tensor of type {kind!r:.100} and shape {shape!r:.100}")
    size = math.prod(shape) * _DTYPES[kind].itemsize
    if at + size > data.nbytes:
        raise ValueError(f"a tensor of {size} bytes where {data.nbytes - at} are left")
    raw = torch.empty(size, dtype=torch.uint8)
    raw.numpy()[:] = np.frombuffer(data[at : at + size], np.uint8)
    return raw.view(_DTYPES[kind]).reshape(shape), at + size
