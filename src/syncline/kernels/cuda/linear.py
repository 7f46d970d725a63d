"""Quantisation to equal steps between -max and max of a block on a GPU, like ``kernels.linear``.

A program reads its block once, keeps it in registers while it finds the maximum, and writes codes and residual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import (
    INFINITY,
    MAGIC,
    NAN,
    TINY,
    bits_of_float,
    decode_blocks,
    encode_blocks,
    float_of_bits,
    gather,
    load_codes,
    put_row,
    step_of,
    store_codes,
    store_float,
    store_row,
)


@triton.jit
def _encode(
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
def _decode(payload, out, words, n, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, BITS: tl.constexpr):
    lane = tl.arange(0, LANES)
    step = float_of_bits(tl.load(payload))
    codes = load_codes(payload + 1, words, lane, WHOLE)
    for k in tl.static_range(32 // BITS):
        top = (codes << (32 - BITS * (k + 1))).to(tl.int32, bitcast=True)
        value = (top >> (32 - BITS)).to(tl.float32) * step
        put_row(out, value, k, words, n, lane, WHOLE, ADD)


def encode_linear(x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, bits: int, block: int) -> torch.Tensor:
    """Encode ``x`` + ``residual`` (empty: none) into ``out``; return the number of blocks that are not finite."""
    return encode_blocks(_encode, x, residual, out, block, 32 // bits, bits)


def decode_linear(payload: torch.Tensor, out: torch.Tensor, bits: int, block: int, add: bool) -> None:
    """Write or add the elements that a payload of the right length encodes."""
    decode_blocks(_decode, payload, out, block, 32 // bits, bits, add=add)
