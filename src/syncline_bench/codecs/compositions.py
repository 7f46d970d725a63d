"""The usual compositions of torch operations, as users write them and frameworks ship them instead of a codec.

Each is the plainest correct form of the method in torch operations, after the compressors of GRACE (Xu et al., "GRACE:
a compressed communication framework for distributed machine learning", ICDCS 2021; github.com/sands-lab/grace): one
scale for the whole tensor, codes of less than a byte left in bytes, error feedback as a subtraction of the decompressed
gradient. Every operation reads and writes memory once more; fused kernels are compared with this.

A composition has the name of its codec. A codec is measured without one if it has none, or if an argument changes the
work and the composition does not support it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from syncline import registry
from syncline.codecs import Floats
from syncline.strategy.grammar import read_part
from syncline.strategy.words import bind
from syncline.tuning.codec_times import Trial

BLOCK = "block"
"""The argument of codecs with a scale per block. A composition has one scale."""


@dataclass(frozen=True)
class Composition:
    """A codec in torch operations: ``compress`` a flat float32 gradient, ``decompress`` the result."""

    compress: Callable[[Tensor], Any]
    decompress: Callable[[Any], Tensor]


MAKERS: dict[str, Callable[..., Composition | None]] = {}
"""The builder of each codec's composition, by name. Its parameters are the codec's arguments that it supports."""


def composes(*codecs: str) -> Callable[[Callable[..., Composition | None]], Callable[..., Composition | None]]:
    """Enter a maker under the names of its codecs."""

    def enter(maker: Callable[..., Composition | None]) -> Callable[..., Composition | None]:
        MAKERS.update({codec: functools.partial(maker, codec) for codec in codecs})
        return maker

    return enter


def composition_of(text: str) -> Composition | None:
    """The composition for a codec's text; None if there is no usual one."""
    part = bind("codecs", read_part(text))
    maker = MAKERS.get(part.name)
    if maker is None:
        return None
    known = inspect.signature(maker).parameters
    plain = {parameter.name: parameter.default for parameter in registry.get("codecs", part.name).parameters}
    if any(value != plain[name] for name, value in part.args if name not in known and name != BLOCK):
        return None
    return maker(**{name: value for name, value in part.args if name in known})


class Peer:
    """A composition ready for repeated timing, with a residual of its own if there is feedback."""

    def __init__(self, composition: Composition, elements: int, feedback: bool) -> None:
        self._composition = composition
        self._elements = elements
        self._residual = torch.zeros(elements) if feedback else None

    def __call__(self, x: Floats) -> tuple[float]:
        """Seconds to compress one gradient, including the residual's update."""
        gradient = torch.from_numpy(x[: self._elements])
        begun = time.perf_counter()
        if self._residual is None:
            self._composition.compress(gradient)
        else:
            value = gradient + self._residual
            self._residual = value - self._composition.decompress(self._composition.compress(value))
        return (time.perf_counter() - begun,)


def peers_of(trials: Sequence[Trial]) -> dict[int, Peer]:
    """The compositions of the trials that have one, by the trial's index."""
    found = ((place, trial, composition_of(trial.text)) for place, trial in enumerate(trials))
    return {
        place: Peer(composition, trial.elements, trial.feedback)
        for place, trial, composition in found
        if composition is not None
    }


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread as long as the context lives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@composes("fp16", "bf16")
def _cast(codec: str) -> Composition:
    narrow = torch.float16 if codec == "fp16" else torch.bfloat16
    return Composition(lambda value: value.to(narrow), lambda payload: payload.to(torch.float32))


@composes("fp8")
def _fp8(codec: str) -> Composition | None:  # noqa: ARG001 - makers are given it
    narrow = getattr(torch, "float8_e4m3fn", None)
    if narrow is None:
        return None

    def compress(value: Tensor) -> tuple[Tensor, Tensor]:
        scale = value.abs().max() / torch.finfo(narrow).max
        return (value / scale).to(narrow), scale

    return Composition(compress, lambda payload: payload[0].to(torch.float32) * payload[1])


@composes("int8", "int4")
def _linear(codec: str) -> Composition:
    levels = 127 if codec == "int8" else 7

    def compress(value: Tensor) -> tuple[Tensor, Tensor]:
        scale = value.abs().max() / levels
        return (value / scale).round().clamp(-levels, levels).to(torch.int8), scale

    return Composition(compress, _scaled)


@composes("qsgd")
def _qsgd(codec: str, levels: int) -> Composition:  # noqa: ARG001 - makers are given it
    narrow = torch.int8 if levels < 128 else torch.float16

    def compress(value: Tensor) -> tuple[Tensor, Tensor]:
        norm = value.norm()
        level = levels / norm * value.abs()
        low = level.floor()
        up = torch.empty_like(value).uniform_() < level - low
        return ((low + up.to(torch.float32)) * value.sign()).to(narrow), norm / levels

    return Composition(compress, _scaled)


@composes("natural")
def _natural(codec: str) -> Composition:  # noqa: ARG001 - makers are given it
    one, least, most = 1 << 23, 18, 18 + 127  # steps of the exponent, and the window of exponents that 7 bits hold

    def compress(value: Tensor) -> Tensor:
        bits = value.view(torch.int32)
        up = (bits & (one - 1)) > torch.randint(one, value.shape, dtype=torch.int32)
        exponent = (((bits & 0x7F800000) + up.to(torch.int32) * one) >> 23).clamp(least, most) - least
        return (((bits >> 24) & 0x80) | exponent).to(torch.uint8)

    def decompress(payload: Tensor) -> Tensor:
        code = payload.to(torch.int32)
        exponent = code & 0x7F
        magnitude = torch.where(exponent > 0, (exponent + least) << 23, 0)
        return (((code & 0x80) << 24) | magnitude).view(torch.float32)

    return Composition(compress, decompress)


@composes("ternary")
def _ternary(codec: str, rounding: str = "stochastic", clip: float = 0.0) -> Composition:  # noqa: ARG001 - as above
    def compress(value: Tensor) -> tuple[Tensor, Tensor]:
        if clip and rounding == "stochastic":
            limit = clip * value.std()
            value = torch.clamp(value, -limit, limit)
        magnitude = value.abs()
        scale = magnitude.max()
        if rounding == "nearest":
            return (value / scale).round().to(torch.int8), scale
        sent = torch.empty_like(value).uniform_() * scale < magnitude
        return (value.sign() * sent).to(torch.int8), scale

    return Composition(compress, _scaled)


@composes("onebit")
def _onebit(codec: str) -> Composition:  # noqa: ARG001 - makers are given it
    def compress(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        negative = value < 0
        below = value[negative].sum() / negative.sum().clamp(min=1)
        positive = ~negative
        above = value[positive].sum() / positive.sum().clamp(min=1)
        return negative.to(torch.uint8), below, above

    def decompress(payload: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        negative, below, above = payload
        return torch.where(negative.to(torch.bool), below, above)

    return Composition(compress, decompress)


@composes("sign")
def _sign(codec: str, vote: str = "off", scale: float = 1.0) -> Composition:  # noqa: ARG001 - makers are given it
    def compress(value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sign(value).to(torch.int8), torch.tensor(scale) if vote == "on" else value.abs().mean()

    return Composition(compress, _scaled)


@composes("topk", "gtopk")
def _topk(codec: str, ratio: float) -> Composition:  # noqa: ARG001 - makers are given it
    def compress(value: Tensor) -> tuple[Tensor, Tensor, int]:
        _, indices = torch.topk(value.abs(), _count(value, ratio), sorted=False)
        return torch.gather(value, 0, indices), indices, value.numel()

    return Composition(compress, _scattered)


@composes("threshold")
def _threshold(codec: str, ratio: float) -> Composition:  # noqa: ARG001 - makers are given it
    def compress(value: Tensor) -> tuple[Tensor, Tensor, int]:
        magnitude = value.abs()
        sample = magnitude[torch.randint(value.numel(), (_count(value, 0.01),))]
        least = torch.topk(sample, _count(sample, ratio)).values.min()
        indices = (magnitude >= least).nonzero().flatten()
        return value[indices], indices, value.numel()

    return Composition(compress, _scattered)


@composes("randomk")
def _randomk(codec: str, ratio: float) -> Composition:  # noqa: ARG001 - makers are given it
    def compress(value: Tensor) -> tuple[Tensor, Tensor, int]:
        indices = torch.randperm(value.numel())[: _count(value, ratio)]
        return value[indices], indices, value.numel()

    return Composition(compress, _scattered)


@composes("powersgd")
def _powersgd(codec: str, rank: int) -> Composition:  # noqa: ARG001 - makers are given it
    kept: dict[str, Tensor] = {}

    def compress(value: Tensor) -> tuple[Tensor, Tensor]:
        matrix = value.view(math.isqrt(value.numel()), -1)
        start = kept.get("right")
        if start is None:
            start = torch.randn(matrix.shape[1], min(rank, *matrix.shape))
        left, _ = torch.linalg.qr(matrix @ start)
        kept["right"] = right = matrix.T @ left
        return left, right

    return Composition(compress, lambda payload: (payload[0] @ payload[1].T).flatten())


def _count(value: Tensor, ratio: float) -> int:
    return max(1, int(value.numel() * ratio))


def _scaled(payload: tuple[Tensor, Tensor]) -> Tensor:
    return payload[0].to(torch.float32) * payload[1]


def _scattered(payload: tuple[Tensor, Tensor, int]) -> Tensor:
    values, indices, elements = payload
    return torch.zeros(elements).scatter_(0, indices, values)
