"""Describes the messages of a compressed bucket, step by step, without any gradients.

Predictions use it. The sizes come from the code that cuts, encodes and sends (``reducers``), so predictions match runs.
Payloads without a fixed size count with their expected bytes. This module knows no network and no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ..codecs import Codec, State, codec_of
from ..nouns import Bucket, Layer, Spec
from ..plans.plan import Plan
from .compression import codec_at
from .reducers import Flows, Operand, Traffic


def parts_of(codec: Codec, layers: Sequence[Layer], bucket: Bucket, step: int | None = None) -> list[Operand]:
    """A bucket's parts without data, as ``ways.traffic`` and the halves of ``owners`` need them.

    ``layers`` are the model's. ``step`` counts from 0, for codecs that warm up; without it all warm-ups have ended.
    """
    found = []
    for part in bucket.slices:
        spec = replace(layers[part.tensor].spec, dtype="float32")
        applied = codec_of(codec, spec)
        found.append(without_data(spec.name, codec_at(applied, step), spec, part.start, part.stop))
    return found


def moved_bytes(traffic: Sequence[Traffic], processes: int, plan: Callable[[int], Plan]) -> NDArray[np.float64]:
    """The bytes from every process (row) to every other (column). ``plan(nbytes)`` is the plan that sums such an
    array.
    """
    found = np.zeros((processes, processes))
    for step in (step for one in traffic for step in one):
        if isinstance(step, Flows):
            np.add.at(found, (step.src, step.dst), step.nbytes)
        else:
            summing = plan(step.nbytes)
            np.add.at(found, (summing.src, summing.dst), summing.count * (step.nbytes / summing.chunks))
    return found


def without_data(name: str, codec: Codec, spec: Spec, start: int, stop: int) -> Operand:
    """Elements ``start`` to ``stop`` of a tensor, with a broadcast zero for its gradients."""
    state = State(spec, 0)
    return Operand(name, codec, np.broadcast_to(np.float32(0), stop - start), state, state, start)
