"""Sums payloads that can be added: the architecture's plan adds them like uncompressed gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from ...codecs import Codec, Sums
from ...errors import UsageError
from ...nouns import numpy_dtype
from . import Computing, Operand, Participant, Reducer, Sum, Summed, Traffic, Way
from .formats import spec_of


def pieces(parts: Sequence[Operand], me: Participant) -> list[Callable[[], Reducer]]:
    """One reducer per number type."""
    return [partial(reduce, found, me) for found in alike(parts)]


def traffic(parts: Sequence[Operand], workers: int, owners: Sequence[int]) -> list[Traffic]:  # noqa: ARG001
    """One sum per number type."""
    return [[Summed(4 * sum(_words(found)))] for found in alike(parts)]


def computing(workers: int) -> Computing:
    """A bandwidth-optimal plan adds all but one share on each rank."""
    return Computing(1, 1, (workers - 1) / workers)


def alike(parts: Sequence[Operand]) -> list[list[Operand]]:
    """The parts, grouped by the number type of their payloads."""
    found: dict[str, list[Operand]] = {}
    for part in parts:
        found.setdefault(number_of(part.codec), []).append(part)
    return list(found.values())


def number_of(codec: Codec) -> str:
    """The number type of the payloads of a codec whose payloads can be added."""
    if not isinstance(codec, Sums):
        raise UsageError(f"{codec} declares combine='sum' but no number type: give it ``number``")
    return codec.number


def reduce(parts: Sequence[Operand], me: Participant) -> Reducer:
    """Encode all payloads into one buffer, sum it, decode it."""
    lengths = _words(parts)
    buffer = me.room.take(4 * sum(lengths))
    words = buffer[: 4 * sum(lengths)].view(np.uint32)
    at = 0
    for part, length in zip(parts, lengths, strict=True):
        made = part.codec.encode(part.array, words[at : at + length], part.state, part.start)
        if not made.finite:
            me.report(part.name)
        at += length
    yield Sum(words.view(numpy_dtype(number_of(parts[0].codec))))
    at = 0
    for part, length in zip(parts, lengths, strict=True):
        part.codec.decode(words[at : at + length], part.array, part.state, start=part.start)
        at += length
    me.room.give(buffer)


def _words(parts: Sequence[Operand]) -> list[int]:
    """The lengths of the payloads in 32-bit words. They are fixed, so that the ranks' payloads align in a sum."""
    return [part.codec.wire_bytes(spec_of(part))[1] // 4 for part in parts]


WAY = Way(pieces, traffic, computing, "payloads are summed by {architecture}")
