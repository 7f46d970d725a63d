"""Quantisers on a GPU: the functions of ``kernels.linear``, ``cast``, ``stochastic``, ``ternary`` and ``signs``.

A program reads its block once, keeps it in registers while it finds the maximum, and writes codes and residual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    BODY,
    INFINITY,
    MAGIC,
    NAN,
    SIGN,
    TINY,
    bits_of_float,
    blocks_of,
    chance,
    counter,
    decode_blocks,
    draw,
    encode_blocks,
    float_of_bits,
    folded,
    gather,
    launch,
    load_codes,
    load_row,
    narrow_bfloat16,
    narrow_float16,
    negated,
    other_key,
    put_row,
    step_of,
    store_codes,
    store_float,
    store_row,
    widen_bfloat16,
    widen_float16,
)


@triton.jit
def _encode_linear(
    x, residual, out, bad, words, n, seed, index,
    LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // BITS
    LEVELS: tl.constexpr = (1 << (BITS - 1)) - 1.0
    lane = tl.arange(0, LANES)
    rows, largest = gather(x, residual, words, n, lane, FIELDS, LANES, WHOLE, FEEDBACK)
    codes = tl.zeros([LANES], tl.uint32)
    if largest >= INFINITY:
        tl.store(out, NAN)
        tl.atomic_add(bad, 1)
    else:
        maximum = float_of_bits(largest)
        some = maximum >= TINY
        step = tl.where(some, step_of(maximum, LEVELS), 0.0)
        inverse = tl.where(some, tl.div_rn(LEVELS, maximum), 0.0)
        store_float(out, step)
        for k in tl.static_range(FIELDS):
            shifted = rows[k] * inverse + MAGIC
            codes |= (bits_of_float(shifted) & ((1 << BITS) - 1)) << (k * BITS)
            if FEEDBACK:
                store_row(residual, rows[k] - (shifted - MAGIC) * step, k, words, n, lane, WHOLE)
    store_codes(out + 1, codes, words, lane, WHOLE)


@triton.jit
def _decode_linear(
    payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, BITS: tl.constexpr
):
    lane = tl.arange(0, LANES)
    step = float_of_bits(tl.load(payload))
    codes = load_codes(payload + 1, words, lane, WHOLE)
    for k in tl.static_range(32 // BITS):
        top = (codes << (32 - BITS * (k + 1))).to(tl.int32, bitcast=True)
        value = (top >> (32 - BITS)).to(tl.float32) * step
        put_row(out, value, k, words, n, lane, WHOLE, ADD)


def encode_linear(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Encode ``x`` + ``residual`` (empty: none) into ``out``; return the number of blocks that are not finite."""
    return encode_blocks(_encode_linear, x, residual, out, block, 32 // bits, bits)


def decode_linear(payload: torch.Tensor, out: torch.Tensor, bits: int, block: int, add: bool) -> None:
    """Write or add the elements that a payload of the right length encodes."""
    decode_blocks(_decode_linear, payload, out, block, 32 // bits, bits, add=add)


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


def _start_encoding(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, brain: bool) -> torch.Tensor:
    bad, feedback = counter(x), len(residual) > 0
    launch(
        _encode_halves, blocks_of(len(x), _TILE), _WARPS, x, residual if feedback else x, out, bad, len(x),
        TILE=_TILE, BRAIN=brain, FEEDBACK=feedback,
    )  # fmt: skip
    return bad == 0


def _start_decoding(halves: torch.Tensor, out: torch.Tensor, add: bool, brain: bool) -> None:
    launch(
        _decode_halves, blocks_of(len(out), _TILE), _WARPS, halves, out, len(out),
        TILE=_TILE, BRAIN=brain, ADD=add,
    )  # fmt: skip


def encode_float16(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round ``x`` + ``residual`` (empty: none) to float16; return whether all elements were finite.

    Payloads are int16; an odd number of elements is followed by a 0.
    """
    return _start_encoding(x, residual, out, False)


def encode_bfloat16(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round ``x`` + ``residual`` (empty: none) to bfloat16; return whether all elements were finite.

    Payloads are int16; an odd number of elements is followed by a 0.
    """
    return _start_encoding(x, residual, out, True)


def decode_float16(halves: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Write or add the elements of a float16 payload, given as int16."""
    _start_decoding(halves, out, add, False)


def decode_bfloat16(halves: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Write or add the elements of a bfloat16 payload, given as int16."""
    _start_decoding(halves, out, add, True)


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
def _encode_e4m3(
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
def _decode_e4m3(
    payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, ARGUMENT: tl.constexpr
):
    lane = tl.arange(0, LANES)
    scale = float_of_bits(tl.load(payload))
    codes = load_codes(payload + 1, words, lane, WHOLE)
    for k in tl.static_range(4):
        put_row(out, _widen_e4m3(codes >> (8 * k)) * scale, k, words, n, lane, WHOLE, ADD)


def encode_e4m3(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, block: int) -> torch.Tensor:
    """Encode ``x`` + ``residual`` (empty: none) into ``out``; return the number of blocks that are not finite."""
    return encode_blocks(_encode_e4m3, x, residual, out, block, 4)


def decode_e4m3(payload: torch.Tensor, out: torch.Tensor, block: int, add: bool) -> None:
    """Write or add the elements that a payload of the right length encodes."""
    decode_blocks(_decode_e4m3, payload, out, block, 4, add=add)


_NORM_LANES = tl.constexpr(256)
_LARGEST_NORM = tl.constexpr(2.0**127)


@triton.jit
def _norm(x, residual, n, maximum, FEEDBACK: tl.constexpr):
    """The L2 norm of a block. Reads the block again, from the cache, in the order of the sum."""
    unit = tl.div_rn(1.0, maximum)
    lane = tl.arange(0, _NORM_LANES)
    lanes = tl.zeros([_NORM_LANES], tl.float32)
    for first in range(0, n, _NORM_LANES):
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
def _encode_trits(
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
def _decode_trits(
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
    return encode_blocks(_encode_trits, x, residual, out, block, 20, (stochastic, clip), seed=seed, index=index)


def decode_trits(payload: torch.Tensor, out: torch.Tensor, block: int, add: bool) -> None:
    """Write or add the elements that a payload of the right length encodes."""
    decode_blocks(_decode_trits, payload, out, block, 20, add=add)


_SIGNS_BLOCK = 16384
_SIGNS = tl.constexpr(32)


@triton.jit
def _finite(value):
    return (bits_of_float(value) & BODY) < INFINITY


@triton.jit
def _keep(rows, residual, above, below, words, n, lane, WHOLE: tl.constexpr):
    """Update the residual of a block."""
    for k in tl.static_range(_SIGNS):
        value = rows[k]
        sent = tl.where((bits_of_float(value) >> 31) > 0, below, above)
        store_row(residual, value - sent, k, words, n, lane, WHOLE)


@triton.jit
def _encode_means(
    x, residual, out, bad, words, n, seed, index,
    LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    rows, _ = gather(x, residual, words, n, lane, _SIGNS, LANES, WHOLE, FEEDBACK)
    codes = tl.zeros([LANES], tl.uint32)
    above = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    count = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(_SIGNS):
        bit = bits_of_float(rows[k]) >> 31
        codes |= bit << k
        above += tl.where(bit > 0, 0.0, rows[k])
        below += tl.where(bit > 0, rows[k], 0.0)
        count += bit.to(tl.int32)
    set_bits = tl.sum(count, 0)
    high = tl.div_rn(folded(above), tl.maximum(n - set_bits, 1).to(tl.float32))
    low = tl.div_rn(folded(below), tl.maximum(set_bits, 1).to(tl.float32))
    if _finite(high) & _finite(low):
        store_float(out, high)
        store_float(out + 1, low)
        if FEEDBACK:
            _keep(rows, residual, high, low, words, n, lane, WHOLE)
    else:
        tl.store(out, NAN)
        tl.store(out + 1, NAN)
        tl.atomic_add(bad, 1)
    store_codes(out + 2, codes, words, lane, WHOLE)


@triton.jit
def _encode_signs(
    x, kept, out, bad, words, n, seed, index,
    LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    VOTE: tl.constexpr = ARGUMENT[0]
    DECAY: tl.constexpr = ARGUMENT[1]
    lane = tl.arange(0, LANES)
    rows = ()
    codes = tl.zeros([LANES], tl.uint32)
    lanes = tl.zeros([LANES], tl.float32)
    for k in tl.static_range(_SIGNS):
        value = load_row(x, k, words, n, lane, WHOLE)
        if FEEDBACK:
            value += load_row(kept, k, words, n, lane, WHOLE) * DECAY
        bits = bits_of_float(value)
        codes |= (bits >> 31) << k
        lanes += float_of_bits(bits & BODY)
        rows += (value,)
    mean = tl.div_rn(folded(lanes), n.to(tl.float32))
    if _finite(mean):
        # A comparison, because Triton does not compile a float as a condition for a GPU.
        scale = tl.full([], VOTE, tl.float32) if VOTE != 0 else mean
        store_float(out, scale)
        if FEEDBACK and VOTE != 0:
            for k in tl.static_range(_SIGNS):
                store_row(kept, rows[k], k, words, n, lane, WHOLE)
        elif FEEDBACK:
            _keep(rows, kept, scale, negated(scale), words, n, lane, WHOLE)
    else:
        tl.store(out, NAN)
        tl.atomic_add(bad, 1)
    store_codes(out + 1, codes, words, lane, WHOLE)


@triton.jit
def _decode_bits(
    payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, SCALES: tl.constexpr
):
    lane = tl.arange(0, LANES)
    above = float_of_bits(tl.load(payload))
    below = float_of_bits(tl.load(payload + 1)) if SCALES == 2 else negated(above)
    codes = load_codes(payload + SCALES, words, lane, WHOLE)
    for k in tl.static_range(_SIGNS):
        put_row(out, tl.where(((codes >> k) & 1) > 0, below, above), k, words, n, lane, WHOLE, ADD)


def encode_means(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Encode ``x`` + ``residual`` (empty: none); return the number of blocks that are not finite."""
    return encode_blocks(_encode_means, x, residual, out, _SIGNS_BLOCK, 32, heads=2)


def encode_signs(
    x: torch.Tensor, kept: torch.Tensor, out: torch.Tensor, vote: float, decay: float
) -> torch.Tensor:  # fmt: skip
    """Encode ``x`` + ``decay`` * ``kept`` (empty: none); return the number of blocks that are not finite.

    With ``vote`` of 0 the scale is the mean magnitude, and ``kept`` becomes the residual. Otherwise ``vote`` is the
    scale, and ``kept`` becomes the encoded sum itself, the momentum.
    """
    return encode_blocks(_encode_signs, x, kept, out, _SIGNS_BLOCK, 32, (vote, decay))


def decode_bits(payload: torch.Tensor, out: torch.Tensor, scales: int, add: bool) -> None:
    """Write or add the elements of a payload of the right length with 1 or 2 scales."""
    decode_blocks(_decode_bits, payload, out, _SIGNS_BLOCK, 32, scales, heads=scales, add=add)
