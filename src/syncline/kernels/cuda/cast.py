"""Rounding to 16-bit and 8-bit floating-point numbers on a GPU, like ``kernels.cast``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    BODY,
    INFINITY,
    NAN,
    SIGN,
    TINY,
    bits_of_float,
    decode_blocks,
    encode_blocks,
    float_of_bits,
    gather,
    load_codes,
    load_row,
    put_row,
    step_of,
    store_codes,
    store_float,
    store_row,
)
from .halves import narrow_bfloat16, narrow_float16, widen_bfloat16, widen_float16
from .launch import blocks_of, counter, launch

_TILE = 1024
_WARPS = 4
"""Elements and warps of a program that rounds to 16 bits: 8 elements per thread."""

_LARGEST_FLOAT16 = tl.constexpr(0x477FE000)
_LARGEST_BFLOAT16 = tl.constexpr(0x7F7F0000)
_LARGEST_E4M3 = tl.constexpr(448.0)

_SMALLEST_NORMAL = tl.constexpr(2.0**-6)
_SMALLEST_NORMAL_BITS = tl.constexpr((127 - 6) << 23)
_SUBNORMAL_MAGIC = tl.constexpr(2.0**14)
_SUBNORMAL_MAGIC_BITS = tl.constexpr((127 + 14) << 23)
_E4M3_BIAS = tl.constexpr((127 - 7) << 23)
_E4M3_ROUND = tl.constexpr((1 << 32) - ((127 - 7) << 23) + 0x7FFFF)


@triton.jit
def _widen(half, BRAIN: tl.constexpr):
    return widen_bfloat16(half) if BRAIN else widen_float16(half)


@triton.jit
def _narrow(bits, BRAIN: tl.constexpr):
    """The 16 bits of the nearest number; finite numbers out of range are clipped to the largest."""
    LARGEST: tl.constexpr = _LARGEST_BFLOAT16 if BRAIN else _LARGEST_FLOAT16
    body = bits & BODY
    kept = tl.where((body > LARGEST) & (body < INFINITY), LARGEST, body).to(tl.uint32) | (bits & SIGN)
    return narrow_bfloat16(kept) if BRAIN else narrow_float16(kept)


@triton.jit
def _encode_tile(x, residual, out, bad, n, TILE: tl.constexpr, WHOLE: tl.constexpr, BRAIN: tl.constexpr,
                 FEEDBACK: tl.constexpr):  # fmt: skip
    lane = tl.arange(0, TILE)
    value = load_row(x, 0, TILE, n, lane, WHOLE)
    if FEEDBACK:
        value += load_row(residual, 0, TILE, n, lane, WHOLE)
    bits = bits_of_float(value)
    half = _narrow(bits, BRAIN)
    finite = (bits & BODY) < INFINITY
    store_row(out, half.to(tl.uint16).to(tl.int16, bitcast=True), 0, TILE, n + n % 2, lane, WHOLE)
    wrong = tl.sum(tl.where(finite, 0, 1), 0)
    if wrong > 0:
        tl.atomic_add(bad, wrong)
    if FEEDBACK:
        left = value - _widen(half, BRAIN)
        if wrong > 0:
            tl.store(residual + lane, left, mask=(lane < n) & finite)
        else:
            store_row(residual, left, 0, TILE, n, lane, WHOLE)


@triton.jit(do_not_specialize=["n"])
def _encode_halves(x, residual, out, bad, n, TILE: tl.constexpr, BRAIN: tl.constexpr, FEEDBACK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    x += first
    residual += first
    out += first
    here = tl.minimum(n - first, TILE).to(tl.int32)
    if here == TILE:
        _encode_tile(x, residual, out, bad, here, TILE, True, BRAIN, FEEDBACK)
    else:
        _encode_tile(x, residual, out, bad, here, TILE, False, BRAIN, FEEDBACK)


@triton.jit
def _decode_tile(payload, out, n, TILE: tl.constexpr, WHOLE: tl.constexpr, BRAIN: tl.constexpr, ADD: tl.constexpr):
    lane = tl.arange(0, TILE)
    half = load_row(payload, 0, TILE, n, lane, WHOLE).to(tl.uint16, bitcast=True).to(tl.uint32)
    put_row(out, _widen(half, BRAIN), 0, TILE, n, lane, WHOLE, ADD)


@triton.jit(do_not_specialize=["n"])
def _decode_halves(payload, out, n, TILE: tl.constexpr, BRAIN: tl.constexpr, ADD: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    here = tl.minimum(n - first, TILE).to(tl.int32)
    if here == TILE:
        _decode_tile(payload + first, out + first, here, TILE, True, BRAIN, ADD)
    else:
        _decode_tile(payload + first, out + first, here, TILE, False, BRAIN, ADD)


def _encode(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, brain: bool) -> torch.Tensor:
    bad, feedback = counter(x), len(residual) > 0
    launch(
        _encode_halves, blocks_of(len(x), _TILE), _WARPS, x, residual if feedback else x, out, bad, len(x),
        TILE=_TILE, BRAIN=brain, FEEDBACK=feedback,
    )  # fmt: skip
    return bad == 0


def _decode(halves: torch.Tensor, out: torch.Tensor, add: bool, brain: bool) -> None:
    launch(
        _decode_halves, blocks_of(len(out), _TILE), _WARPS, halves, out, len(out),
        TILE=_TILE, BRAIN=brain, ADD=add,
    )  # fmt: skip


def encode_float16(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round ``x`` + ``residual`` (empty: none) to float16; return whether all elements were finite.

    Payloads are int16; an odd number of elements is followed by a 0.
    """
    return _encode(x, residual, out, False)


def encode_bfloat16(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round ``x`` + ``residual`` (empty: none) to bfloat16; return whether all elements were finite.

    Payloads are int16; an odd number of elements is followed by a 0.
    """
    return _encode(x, residual, out, True)


def decode_float16(halves: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Write or add the elements of a float16 payload, given as int16."""
    _decode(halves, out, add, False)


def decode_bfloat16(halves: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Write or add the elements of a bfloat16 payload, given as int16."""
    _decode(halves, out, add, True)


@triton.jit
def _narrow_e4m3(value):
    """The 8 bits of the E4M3 number nearest to a float32 of at most 448, ties to even, as a uint32."""
    bits = bits_of_float(value)
    body = bits & BODY
    small = bits_of_float(float_of_bits(body) + _SUBNORMAL_MAGIC) - _SUBNORMAL_MAGIC_BITS
    normal = (body + _E4M3_ROUND + ((body >> 20) & 1)) >> 20
    return tl.where(body < _SMALLEST_NORMAL_BITS, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def _widen_e4m3(code):
    """The float32 of the 8 bits of an E4M3 number in a uint32."""
    body = (code & 0x7F) << 20
    normal = body + _E4M3_BIAS
    small = bits_of_float(float_of_bits(normal + (1 << 23)) - _SMALLEST_NORMAL)
    return float_of_bits(tl.where(body < (1 << 23), small, normal) | ((code & 0x80) << 24))


@triton.jit
def _encode_block(
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
        maximum = float_of_bits(largest)
        some = maximum >= TINY
        scale = tl.where(some, step_of(maximum, _LARGEST_E4M3), 0.0)
        inverse = tl.where(some, tl.div_rn(_LARGEST_E4M3, maximum), 0.0)
        store_float(out, scale)
        for k in tl.static_range(4):
            code = _narrow_e4m3(rows[k] * inverse)
            codes |= code << (8 * k)
            if FEEDBACK:
                store_row(residual, rows[k] - _widen_e4m3(code) * scale, k, words, n, lane, WHOLE)
    store_codes(out + 1, codes, words, lane, WHOLE)


@triton.jit
def _decode_block(
    payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, ARGUMENT: tl.constexpr
):
    lane = tl.arange(0, LANES)
    scale = float_of_bits(tl.load(payload))
    codes = load_codes(payload + 1, words, lane, WHOLE)
    for k in tl.static_range(4):
        put_row(out, _widen_e4m3(codes >> (8 * k)) * scale, k, words, n, lane, WHOLE, ADD)


def encode_e4m3(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, block: int) -> torch.Tensor:
    """Encode ``x`` + ``residual`` (empty: none) into ``out``; return the number of blocks that are not finite."""
    return encode_blocks(_encode_block, x, residual, out, block, 4)


def decode_e4m3(payload: torch.Tensor, out: torch.Tensor, block: int, add: bool) -> None:
    """Write or add the elements that a payload of the right length encodes."""
    decode_blocks(_decode_block, payload, out, block, 4, add=add)
