"""Stochastic rounding to steps of a block's norm and to powers of two on a GPU, like ``kernels.stochastic``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    BODY,
    INFINITY,
    NAN,
    TINY,
    bits_of_float,
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

_LANES = tl.constexpr(256)
_LARGEST_NORM = tl.constexpr(2.0**127)


@triton.jit
def _norm(x, residual, n, maximum, FEEDBACK: tl.constexpr):
    """The L2 norm of a block. Reads the block again, from the cache, in the order of the sum."""
    unit = tl.div_rn(1.0, maximum)
    lane = tl.arange(0, _LANES)
    lanes = tl.zeros([_LANES], tl.float32)
    for first in range(0, n, _LANES):
        at = first + lane
        value = tl.load(x + at, mask=at < n, other=0.0)
        if FEEDBACK:
            value += tl.load(residual + at, mask=at < n, other=0.0)
        value = value * unit
        lanes += value * value
    return maximum * tl.sqrt_rn(folded(lanes))


@triton.jit
def _encode_steps(
    x, residual, out, bad, words, n, seed, index,
    LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    BITS: tl.constexpr = ARGUMENT[0]
    LEVELS: tl.constexpr = ARGUMENT[1] * 1.0
    FIELDS: tl.constexpr = 32 // BITS
    lane = tl.arange(0, LANES)
    rows, largest = gather(x, residual, words, n, lane, FIELDS, LANES, WHOLE, FEEDBACK)
    maximum = float_of_bits(largest)
    some = maximum >= TINY
    norm = tl.where(some, _norm(x, residual, n, maximum, FEEDBACK), 0.0)
    codes = tl.zeros([LANES], tl.uint32)
    if (largest >= INFINITY) | (norm >= _LARGEST_NORM):
        tl.store(out, NAN)
        tl.atomic_add(bad, 1)
    else:
        step = tl.div_rn(norm, LEVELS)
        inverse = tl.where(some, tl.div_rn(LEVELS, norm), 0.0)
        other = other_key(seed)
        store_float(out, step)
        for k in tl.static_range(FIELDS):
            value = rows[k]
            size = tl.minimum(tl.abs(value) * inverse, LEVELS)
            level = size.to(tl.int32)
            uniform = chance(draw(index + (k * words + lane).to(tl.uint32), seed, other))
            level += (uniform < size - level.to(tl.float32)).to(tl.int32)
            level = tl.where(value < 0.0, -level, level)
            codes |= (level.to(tl.uint32, bitcast=True) & ((1 << BITS) - 1)) << (k * BITS)
            if FEEDBACK:
                store_row(residual, value - level.to(tl.float32) * step, k, words, n, lane, WHOLE)
    store_codes(out + 1, codes, words, lane, WHOLE)


def encode_steps(
    x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor,
    bits: int, levels: int, block: int, seed: int, index: int,
) -> torch.Tensor:  # fmt: skip
    """Encode ``x`` + ``residual`` (empty: none), ``x`` from ``index`` on; return how many blocks are not finite."""
    return encode_blocks(_encode_steps, x, residual, out, block, 32 // bits, (bits, levels), seed=seed, index=index)


@triton.jit
def _power(code):
    """2**(e - 127) with the sign of the code, 0 for e = 0."""
    return float_of_bits(((code & 0x7F) << 23) | ((code & 0x80) << 24))


@triton.jit
def _encode_powers(
    x, residual, out, bad, words, n, seed, index,
    LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    rows, largest = gather(x, residual, words, n, lane, 4, LANES, WHOLE, FEEDBACK)
    codes = tl.zeros([LANES], tl.uint32)
    if largest >= INFINITY:
        tl.store(out, NAN)
        tl.atomic_add(bad, 1)
    else:
        above = tl.minimum((largest >> 23) + 1, 254)
        unit = float_of_bits(above << 23)
        scale = tl.div_rn(1.0, unit)
        other = other_key(seed)
        store_float(out, unit)
        for k in tl.static_range(4):
            bits = bits_of_float(rows[k] * scale)
            random = draw(index + (k * words + lane).to(tl.uint32), seed, other) >> 9
            exponent = tl.minimum(((bits & BODY) + random) >> 23, 127)
            code = exponent | ((bits >> 24) & 0x80)
            codes |= code << (8 * k)
            if FEEDBACK:
                store_row(residual, rows[k] - _power(code) * unit, k, words, n, lane, WHOLE)
    store_codes(out + 1, codes, words, lane, WHOLE)


@triton.jit
def _decode_powers(
    payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, ARGUMENT: tl.constexpr
):
    lane = tl.arange(0, LANES)
    unit = float_of_bits(tl.load(payload))
    codes = load_codes(payload + 1, words, lane, WHOLE)
    for k in tl.static_range(4):
        put_row(out, _power(codes >> (8 * k)) * unit, k, words, n, lane, WHOLE, ADD)


def encode_powers(
    x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, block: int, seed: int, index: int
) -> torch.Tensor:
    """Encode ``x`` + ``residual`` (empty: none), ``x`` from ``index`` on; return how many blocks are not finite."""
    return encode_blocks(_encode_powers, x, residual, out, block, 4, seed=seed, index=index)


def decode_powers(payload: torch.Tensor, out: torch.Tensor, block: int, add: bool) -> None:
    """Write or add the elements that a payload of the right length encodes."""
    decode_blocks(_decode_powers, payload, out, block, 4, add=add)
