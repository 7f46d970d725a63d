"""Optimizer state as bytes: a JSON table and the tensors behind one another. No pickle.

8 bytes  length of the table (little endian)
table    [[tensor, start, stop, key, type, shape] or [tensor, start, stop, key, null, value], ...]
tensors  raw, in the order of the table
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable

import numpy as np
import torch

from ...errors import UsageError
from .shard import Piece, Record
from .storage import dtype_name

_LENGTH = struct.Struct("<Q")


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


def unpack(data: bytes) -> list[Record]:
    """Bytes to records."""
    (length,) = _LENGTH.unpack_from(data)
    at = _LENGTH.size + length
    found = []
    for tensor, start, stop, key, kind, rest in json.loads(data[_LENGTH.size : at]):
        value = rest
        if kind is not None:
            dtype = getattr(torch, kind)
            size = int(np.prod(rest, dtype=np.int64)) * dtype.itemsize
            raw = np.frombuffer(data, np.uint8, size, at).copy()
            value = torch.from_numpy(raw).view(dtype).reshape(rest)
            at += size
        found.append(Record(Piece(tensor, start, stop), key, value))
    return found
