"""Test data for codecs: gradients of many kinds, and memory that detects writes out of bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import Floats, Payload
from ..nouns import Spec

SIZES = (0, 1, 2, 3, 7, 19, 20, 21, 31, 32, 33, 255, 257, 1000, 1023, 1024, 1025, 2048, 2049, 5000)
LARGE = (10239, 10241, 16383, 16385, 40000, 50000, 70001)
"""Sizes near the blocks, words and lanes of codecs."""

ORDINARY = ("normal", "heavy", "sparse", "constant", "positive", "ties", "powers")
KINDS = (*ORDINARY, "zeros", "wide", "tiny", "denormal")
"""Kinds of gradients; a further one is "huge", near the largest number."""

_GUARD = 64
_CANARY = 0xA5A5A5A5


def values(kind: str, size: int, seed: int) -> Floats:
    """``size`` finite gradients of a kind."""
    draw = np.random.default_rng(seed)
    normal = draw.standard_normal(size)
    scale = 10.0 ** draw.integers(-6, 4)
    made: dict[str, Any] = {
        "normal": lambda: scale * normal,
        "heavy": lambda: scale * normal * 10.0 ** draw.integers(-12, 9, size),
        "sparse": lambda: scale * normal * (draw.random(size) < 0.02),
        "constant": lambda: np.full(size, normal[0] if size else 0.0),
        "positive": lambda: np.abs(normal),
        "zeros": lambda: np.where(draw.random(size) < 0.5, 0.0, -0.0),
        "powers": lambda: np.sign(normal) * 2.0 ** draw.integers(-12, 12, size),
        "wide": lambda: normal * 2.0 ** draw.integers(-120, 120, size),
        "ties": lambda: np.round(normal) * 0.5,
        "tiny": lambda: normal * 1e-36,
        "denormal": lambda: normal * 1e-42,
        "huge": lambda: float(np.finfo(np.float32).max) * np.clip(normal, -1, 1),
    }
    array: Floats = np.asarray(made[kind](), np.float64).astype(np.float32)
    return array


def spec_of(size: int) -> Spec:
    """The spec of a matrix, because choosing codecs leave vectors uncompressed."""
    return Spec("layer.weight", (1, size))


@dataclass
class Room:
    """An array with guard zones that detect writes out of bounds."""

    memory: NDArray[np.uint32]

    @classmethod
    def of(cls, words: int) -> Room:
        """Guarded memory of ``words`` words."""
        return cls(np.full(words + 2 * _GUARD, _CANARY, np.uint32))

    @property
    def words(self) -> Payload:
        """The array as words."""
        return self.memory[_GUARD:-_GUARD]

    @property
    def floats(self) -> Floats:
        """The array as float32."""
        return self.words.view(np.float32)

    def check(self) -> None:
        """Raise AssertionError if a guard zone has changed."""
        for ends, where in ((self.memory[:_GUARD], "before the start"), (self.memory[-_GUARD:], "behind the end")):
            if (ends != _CANARY).any():
                raise AssertionError(f"memory was written {where} of the array that was to be filled")
