"""Examples for laws of codecs: tensors of many sizes and kinds, encoded and decoded in guarded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...codecs import Chooses, Codec, Floats, Payload, State
from ...nouns import Spec
from ..laws import require, same
from ..tensors import KINDS, LARGE, SIZES, Room, spec_of, values


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
    require(0 <= words <= room.words.size, f"encode says {words} words, and there is room for {room.words.size}")
    require(was_finite == finite, f"encode says finite={was_finite} of an input of which {finite} is right")
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
    require(mine.keys() == theirs.keys(), f"the state has {sorted(mine)} in place of {sorted(theirs)}")
    for name, array in mine.items():
        same(array.view(np.uint32), theirs[name].view(np.uint32), f"the bits of {name}")
