"""A bucket of DDP that a codec compresses, in DDP's own memory where that is the processor's.

A bucket whose payloads owners add is not divided beforehand: owners divide the sums. What a codec keeps back is then of
a rank's gradient and not of its share of the mean, and is worth more where ranks have become more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ....codecs import Codec, codec_of
from ....compression.compression import Compression
from ....compression.reducers import Participant
from ....compression.reducers.ways import way_of
from ....compression.saved import Array
from ....errors import PeerError, SynclineError
from ....nouns import Bucket, Layer, Slice, Spec, numpy_dtype
from ....wire.scratch import Scratch
from ..storage import as_bytes, as_torch, dtype_name
from .carrier import Carrier
from .lanes import Lanes, drive


class CompressedBucket:
    """Bucket ``index``, whose parameters have these ``numbers``, and what its codec keeps back."""

    def __init__(
        self,
        codec: Codec,
        index: int,
        numbers: tuple[int, ...],
        parameters: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        lanes: Lanes,
    ) -> None:
        self.index, self.numbers = index, numbers
        self._rank, self._world = lanes.rank, lanes.world
        kind = dtype_name(buffer.dtype)
        layers = [
            Layer(Spec(f"parameter {number}", tuple(parameter.shape), kind))
            for number, parameter in zip(numbers, parameters, strict=True)
        ]
        codecs = [codec_of(codec, Spec(layer.spec.name, layer.spec.shape, "float32")) for layer in layers]
        self._means = all(way_of(one.codec).again and not one.warmup for one in codecs)
        bucket = Bucket(tuple(Slice(place, 0, one.numel()) for place, one in enumerate(parameters)), kind)
        me = Participant(self._rank, self._world, tuple(range(self._world)), Scratch(), means=self._means)
        self._address, self._array = buffer.data_ptr(), _memory_of(buffer)
        name = f"rank {self._rank}"
        self.compression = Compression(codec, layers, [bucket], [self._array], me, served=False, name=name)

    def load(self, saved: Sequence[Mapping[str, Array]]) -> None:
        """Take up what the ranks had saved, who may have been others in number."""
        more = self._world / len(saved) if self._means else 1.0
        self.compression.load([{key: _worth(key, array, more) for key, array in one.items()} for one in saved])

    def reduce(self, buffer: torch.Tensor, carrier: Carrier) -> None:
        """Replace a bucket by the mean over the ranks."""
        if buffer.device.type == "cpu" and buffer.data_ptr() != self._address:
            self._address, self._array = buffer.data_ptr(), _memory_of(buffer)
            self.compression = self.compression.beside([self._array])
        here = as_torch(self._array, buffer.dtype)
        if buffer.device.type != "cpu":
            here.copy_(buffer.detach())
        if not self._means:
            here.div_(self._world)
        drive(self.compression.pieces(0), carrier)
        self.compression.finish(0)
        if buffer.device.type != "cpu":
            with torch.no_grad():
                buffer.copy_(here)

    def named(self, error: Exception) -> Exception:
        """The error with the rank and the bucket in front, of the same kind where it is one of Syncline's."""
        text = f"rank {self._rank}: bucket {self.index} of DistributedDataParallel: {error}"
        if isinstance(error, PeerError):
            named: Exception = type(error)(text, rank=error.rank, host=error.host)
        else:
            named = type(error)(text) if isinstance(error, SynclineError) else SynclineError(text)
        named.__cause__ = error
        return named


def _memory_of(buffer: torch.Tensor) -> Any:
    """The memory of a bucket as numbers, or as much of the processor's."""
    there = buffer.detach() if buffer.device.type == "cpu" else torch.empty(buffer.numel(), dtype=buffer.dtype)
    return as_bytes(there).numpy().view(numpy_dtype(dtype_name(buffer.dtype)))


def _worth(key: str, array: Array, more: float) -> Array:
    """What is kept back of a rank's gradient, where ranks are ``more`` times as many."""
    return array * np.float32(more) if more != 1 and key.startswith("own/") and key.endswith("/residual") else array
