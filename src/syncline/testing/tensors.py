"""Examples for laws of codecs: gradients of many kinds and sizes, encoded and decoded in guarded memory.

Guarded memory detects writes out of bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codecs import Chooses, Codec, Floats, Payload, State
from ..nouns import Spec
from .laws import require, same

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
                raise AssertionError(f"memory {where} of the output array was written")


@dataclass(frozen=True)
class Case:
    """A codec and a tensor: its kind, its number of elements, and the seed of everything drawn for it."""

    given: Codec
    kind: str
    size: int
    seed: int

    @cached_property
    def codec(self) -> Codec:
        """The codec for the tensor; for a choosing codec, the chosen one."""
        codec = self.given
        while isinstance(codec, Chooses):
            codec = codec.choose(self.spec)
        return codec

    @property
    def spec(self) -> Spec:
        """The tensor's spec."""
        return spec_of(self.size)

    @property
    def x(self) -> Floats:
        """The tensor's gradient."""
        return values(self.kind, self.size, self.seed)

    def draw(self) -> np.random.Generator:
        """A random generator for further choices of a law."""
        return np.random.default_rng([self.seed, 1])

    def state(self, rank: int = 0, feedback: bool | None = None, step: int = 0) -> State:
        """A new state. By default it has a residual if the codec supports error feedback."""
        state = self.codec.init(self.spec, rank, self.codec.contraction if feedback is None else feedback)
        state.step = step
        return state

    def __str__(self) -> str:
        return f"{self.size} elements ({self.kind!r}, seed {self.seed})"


def drawn(
    kinds: Sequence[str] = KINDS, sizes: Sequence[int] = (*SIZES, *LARGE)
) -> Callable[[Codec, int, int], Iterator[Case]]:
    """Cases of all kinds and sizes in turn, in random pairs."""

    def cases(codec: Codec, seed: int, count: int) -> Iterator[Case]:
        draw = np.random.default_rng(seed)
        chosen = np.resize(draw.permutation(sizes), count)
        characters = draw.permutation(np.resize(draw.permutation(kinds), count))
        for size, kind, own in sorted(zip(chosen, characters, draw.integers(0, 2**32, count), strict=True)):
            case = Case(codec, str(kind), int(size), int(own))
            if case.codec.combine != "rounds":
                yield case

    return cases


def crossed(kinds: Sequence[str], sizes: Sequence[int], own: int) -> Callable[[Codec, int, int], Iterator[Case]]:
    """Every kind in every size, always the same, for statistical laws."""

    def cases(codec: Codec, seed: int, count: int) -> Iterator[Case]:  # noqa: ARG001
        for size in sizes:
            for kind in kinds:
                case = Case(codec, kind, size, own)
                if case.codec.combine != "rounds":
                    yield case

    return cases


def encoded(codec: Codec, x: Floats, state: State, start: int = 0, finite: bool = True) -> Payload:
    """The payload. Checks that encoding writes in bounds and leaves ``x`` unchanged."""
    before = x.copy()
    room = Room.of(codec.wire_bytes(spec_of(x.size))[1] // 4)
    words, was_finite = codec.encode(x, room.words, state, start)
    room.check()
    same(x.view(np.uint32), before.view(np.uint32), "encode changed its input")
    require(0 <= words <= room.words.size, f"encode reports {words} words, but there is room for {room.words.size}")
    require(was_finite == finite, f"encode reports finite={was_finite} for an input with finite={finite}")
    return room.words[:words].copy()


def decoded(
    codec: Codec, payload: Payload, size: int, state: State, start: int = 0, onto: Floats | None = None
) -> Floats:
    """The decoded payload, written or added ``onto`` an array. Checks that decoding writes in bounds."""
    room = Room.of(size)
    if onto is not None:
        room.floats[...] = onto
    before = payload.copy()
    codec.decode(payload, room.floats, state, add=onto is not None, start=start)
    room.check()
    same(payload, before, "decode changed the payload")
    return room.floats.copy()


def arrays_of(state: State) -> dict[str, NDArray[Any]]:
    """All arrays of a state, by name."""
    return ({} if state.residual is None else {"residual": state.residual}) | dict(state.memory)


def same_state(found: State, wanted: State) -> None:
    """Check that two states have the same bits."""
    mine, theirs = arrays_of(found), arrays_of(wanted)
    require(mine.keys() == theirs.keys(), f"the state has {sorted(mine)} instead of {sorted(theirs)}")
    for name, array in mine.items():
        same(array.view(np.uint32), theirs[name].view(np.uint32), f"the bits of {name}")
