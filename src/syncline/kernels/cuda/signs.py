"""One bit per element on a GPU, with one or two scales per block, like ``kernels.signs``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    BODY,
    INFINITY,
    NAN,
    bits_of_float,
    decode_blocks,
    encode_blocks,
    float_of_bits,
    folded,
    gather,
    load_codes,
    load_row,
    negated,
    put_row,
    store_codes,
    store_float,
    store_row,
)

_BLOCK = 16384
_BITS = tl.constexpr(32)


@triton.jit
def _finite(value):
    return (bits_of_float(value) & BODY) < INFINITY


@triton.jit
def _keep(rows, residual, above, below, words, n, lane, WHOLE: tl.constexpr):
    """Update the residual of a block."""
    for k in tl.static_range(_BITS):
        value = rows[k]
        sent = tl.where((bits_of_float(value) >> 31) > 0, below, above)
        store_row(residual, value - sent, k, words, n, lane, WHOLE)


@triton.jit
def _encode_means(
    x, residual, out, bad, words, n, seed, index,
    LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, LANES)
    rows, _ = gather(x, residual, words, n, lane, _BITS, LANES, WHOLE, FEEDBACK)
    codes = tl.zeros([LANES], tl.uint32)
    above = tl.zeros([LANES], tl.float32)
    below = tl.zeros([LANES], tl.float32)
    count = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(_BITS):
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
    for k in tl.static_range(_BITS):
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
            for k in tl.static_range(_BITS):
                store_row(kept, rows[k], k, words, n, lane, WHOLE)
        elif FEEDBACK:
            _keep(rows, kept, scale, negated(scale), words, n, lane, WHOLE)
    else:
        tl.store(out, NAN)
        tl.atomic_add(bad, 1)
    store_codes(out + 1, codes, words, lane, WHOLE)


@triton.jit
def _decode(payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, SCALES: tl.constexpr):
    lane = tl.arange(0, LANES)
    above = float_of_bits(tl.load(payload))
    below = float_of_bits(tl.load(payload + 1)) if SCALES == 2 else negated(above)
    codes = load_codes(payload + SCALES, words, lane, WHOLE)
    for k in tl.static_range(_BITS):
        put_row(out, tl.where(((codes >> k) & 1) > 0, below, above), k, words, n, lane, WHOLE, ADD)


def encode_means(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Encode ``x`` + ``residual`` (empty: none); return the number of blocks that are not finite."""
    return encode_blocks(_encode_means, x, residual, out, _BLOCK, 32, heads=2)


def encode_signs(
    x: torch.Tensor, kept: torch.Tensor, out: torch.Tensor, vote: float, decay: float
) -> torch.Tensor:  # fmt: skip
    """Encode ``x`` + ``decay`` * ``kept`` (empty: none); return the number of blocks that are not finite.

    With ``vote`` of 0 the scale is the mean magnitude, and ``kept`` becomes the residual. Otherwise ``vote`` is the
    scale, and ``kept`` becomes the encoded sum itself, the momentum.
    """
    return encode_blocks(_encode_signs, x, kept, out, _BLOCK, 32, (vote, decay))


def decode_bits(payload: torch.Tensor, out: torch.Tensor, scales: int, add: bool) -> None:
    """Write or add the elements of a payload of the right length with 1 or 2 scales."""
    decode_blocks(_decode, payload, out, _BLOCK, 32, scales, heads=scales, add=add)
