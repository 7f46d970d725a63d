"""Stores a codec's state as arrays by name, for checkpoints and for replaced buckets.

This module knows names and ranges; ``compression`` decides which process keeps which state.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import State
from ..codecs._device import overwrite
from ..errors import UsageError
from .reducers import Operand

Array = NDArray[Any]
Saved = dict[str, Array]
"""Arrays named ``own/PARAMETER/what`` and ``again/PARAMETER/first element``, and ``clock``.

On two levels the former are partitioned, ``own/PARAMETER/what/first element``, and ``host`` is the index of the host.
"""


def arrays_of(state: State) -> Iterator[tuple[str, Array]]:
    """A codec's state of one tensor, by name."""
    if state.residual is not None:
        yield "residual", state.residual
    yield from state.memory.items()


def range_of(part: Operand, array: Array) -> tuple[Array, int]:
    """A part's range of an array of its tensor's state, and its start; the whole array if it is not per element."""
    if array.size != part.state.spec.elements:
        return array.reshape(-1), 0
    return array.reshape(-1)[part.start : part.start + part.elements], part.start


def by_encoder(saved: Sequence[Mapping[str, Array]]) -> list[Mapping[str, Array]]:
    """The saved state of each encoder: of each worker, or of each host, joined from its ranks."""
    found: dict[int, dict[str, Array]] = {}
    for number, one in enumerate(saved):
        found.setdefault(int(one["host"][0]) if "host" in one else number, {}).update(one)
    return [found[number] for number in sorted(found)]


def join(whole: Array, kept: Mapping[str, Array], prefix: str, start: int, stop: int) -> None:
    """Copy elements ``start`` to ``stop`` of a tensor from the saved pieces that contain them."""
    for key, piece in kept.items():
        if key.startswith(prefix):
            first = int(key.removeprefix(prefix))
            if not 0 <= first <= first + piece.size <= len(whole):
                raise UsageError(f"the codec's part of this state has {key!r} beyond {len(whole)} elements")
            low, high = max(start, first), min(stop, first + piece.size)
            if low < high:
                overwrite(whole[low:high], piece[low - first : high - first])


def as_bytes(saved: Saved) -> bytes:
    """Arrays by name, serialized for another process."""
    found = io.BytesIO()
    np.savez(found, **saved)  # type: ignore[arg-type]
    return found.getvalue()


def from_bytes(data: bytes) -> Saved:
    """Read the result of ``as_bytes``. Raises ValueError for other data and never reads beyond it."""
    found: Saved = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > len(data):
                    raise ValueError(f"{entry.filename!r} is compressed, or larger than the archive")
                found[entry.filename.removesuffix(".npy")] = _array(archive.read(entry))
    except Exception as error:  # the libraries raise many types for malformed data
        raise ValueError(f"{len(data)} bytes are not an archive of arrays: {error!r}") from error
    return found


def _array(data: bytes) -> Array:
    """The array of an archive member; ValueError unless header and length agree."""
    file, form = io.BytesIO(data), np.lib.format
    version = form.read_magic(file)
    read = form.read_array_header_1_0 if version == (1, 0) else form.read_array_header_2_0
    shape, columns_first, kind = read(file)
    count, left = math.prod(shape), len(data) - file.tell()
    if kind.hasobject or count * kind.itemsize != left:
        raise ValueError(f"{left} bytes cannot hold an array of {kind} with shape {shape}")
    order = "F" if columns_first else "C"
    return np.frombuffer(data, kind, count, file.tell()).reshape(shape, order=order).copy(order)  # type: ignore[call-overload, no-any-return]


def whole_array(saved: Mapping[str, Array], key: str, like: Array) -> Array:
    """An array of a checkpoint, joined from its parts if necessary; UsageError unless it has the size of ``like``."""
    found = saved.get(key)
    if found is None and any(part.startswith(f"{key}/") for part in saved):
        found = np.zeros(like.size, like.dtype)
        join(found, saved, f"{key}/", 0, like.size)
    if found is None or found.size != like.size:
        raise UsageError(f"the codec's part of this state does not have {key!r} with {like.size} elements")
    return found.reshape(like.shape)
