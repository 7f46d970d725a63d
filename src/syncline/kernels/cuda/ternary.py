"""Rounding to -1, 0 or 1 times the largest magnitude of a block on a GPU, like ``kernels.ternary``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    INFINITY,
    NAN,
    decode_blocks,
    encode_blocks,
    float_of_bits,
    folded,
    gather,
    load_codes,
    put_row,
    store_codes,
    store_float,
    store_row,
)
from .draws import chance, draw, other_key

_TRITS = tl.constexpr(20)
_HALF_TRITS = tl.constexpr(10)
_HALF_WEIGHT = tl.constexpr(3**10)


@triton.jit
def _clipped(rows, largest, n, LANES: tl.constexpr, CLIP: tl.constexpr):
    """The maximum, or ``CLIP`` standard deviations if these are smaller."""
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    unit = float_of_bits((254 - exponent) << 23)
    lanes = tl.zeros([LANES], tl.float32)
    for k in tl.static_range(_TRITS):
        value = rows[k] * unit
        lanes += value * value
    limit = CLIP * tl.sqrt_rn(tl.div_rn(folded(lanes), n.to(tl.float32)))
    return tl.div_rn(tl.minimum(float_of_bits(largest) * unit, limit), unit)


@triton.jit
def _encode(
    x, residual, out, bad, words, n, seed, index,
    LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    STOCHASTIC: tl.constexpr = ARGUMENT[0]
    CLIP: tl.constexpr = ARGUMENT[1]
    lane = tl.arange(0, LANES)
    rows, largest = gather(x, residual, words, n, lane, _TRITS, LANES, WHOLE, FEEDBACK)
    codes = tl.zeros([LANES], tl.uint32)
    if largest >= INFINITY:
        tl.store(out, NAN)
        tl.atomic_add(bad, 1)
    else:
        # A comparison, because Triton does not compile a float as a condition for a GPU.
        maximum = _clipped(rows, largest, n, LANES, CLIP) if CLIP != 0 else float_of_bits(largest)
        other = other_key(seed)
        store_float(out, maximum)
        for k in tl.static_range(_TRITS):
            value, at = rows[k], k * words + lane
            share = chance(draw(index + at.to(tl.uint32), seed, other)) if STOCHASTIC else 0.5
            threshold = share * maximum
            trit = tl.where(tl.abs(value) > threshold, tl.where(value < 0.0, -1, 1), 0)
            digit = trit + 1 if WHOLE else tl.where(at < n, trit + 1, 0)
            codes += digit.to(tl.uint32) * (3**k)
            if FEEDBACK:
                store_row(residual, value - trit.to(tl.float32) * maximum, k, words, n, lane, WHOLE)
    store_codes(out + 1, codes, words, lane, WHOLE)


@triton.jit
def _decode(
    payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, ARGUMENT: tl.constexpr
):
    lane = tl.arange(0, LANES)
    maximum = float_of_bits(tl.load(payload))
    codes = load_codes(payload + 1, words, lane, WHOLE)
    upper = codes // _HALF_WEIGHT
    rest = codes - upper * _HALF_WEIGHT
    for k in tl.static_range(_TRITS):
        if k == _HALF_TRITS:
            rest = upper & 0xFFFF
        code = rest
        rest = code // 3
        trit = (code - rest * 3).to(tl.int32) - 1
        put_row(out, trit.to(tl.float32) * maximum, k, words, n, lane, WHOLE, ADD)


def encode_trits(
    x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor,
    block: int, stochastic: bool, clip: float, seed: int, index: int,
) -> torch.Tensor:  # fmt: skip
    """Encode ``x`` + ``residual`` (empty: none), ``x`` from ``index`` on; return how many blocks are not finite.

    A block has 512 words at most. It is clipped at ``clip`` standard deviations unless ``clip`` is 0.
    """
    return encode_blocks(_encode, x, residual, out, block, 20, (stochastic, clip), seed=seed, index=index)


def decode_trits(payload: torch.Tensor, out: torch.Tensor, block: int, add: bool) -> None:
    """Write or add the elements that a payload of the right length encodes."""
    decode_blocks(_decode, payload, out, block, 20, add=add)
