"""Quantisation to equal steps between -max and max of a block, for tensors on a GPU: see ``kernels.linear``.

A program works on one block: it reads it once, keeps it in registers while the maximum is found, and writes codes and
residual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import (
    INFINITY,
    bits_of_float,
    blocks_of,
    counter,
    float_of_bits,
    lanes_of,
    launch,
    load_row,
    load_words,
    magnitude_bits,
    store_row,
    store_words,
)

_TINY = tl.constexpr(2.0**-100)
_MAGIC = tl.constexpr(1.5 * 2.0**23)
_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def _encode_block(
    x, residual, out, bad, words, n,
    BITS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    FIELDS: tl.constexpr = 32 // BITS
    LEVELS: tl.constexpr = float((1 << (BITS - 1)) - 1)
    lane = tl.arange(0, LANES)
    rows = ()
    largest = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(FIELDS):
        value = load_row(x, k, words, n, lane, WHOLE)
        if FEEDBACK:
            value += load_row(residual, k, words, n, lane, WHOLE)
        largest = tl.maximum(largest, magnitude_bits(value))
        rows += (value,)
    top = tl.max(largest, 0)
    codes = tl.zeros([LANES], tl.int32)
    if top >= INFINITY:
        tl.store(out, _NAN)
        tl.atomic_add(bad, 1)
    else:
        maximum = float_of_bits(top)
        some = maximum >= _TINY
        step = tl.where(some, tl.div_rn(maximum, LEVELS), 0.0)
        inverse = tl.where(some, tl.div_rn(LEVELS, tl.where(some, maximum, 1.0)), 0.0)
        tl.store(out, bits_of_float(step))
        for k in tl.static_range(FIELDS):
            shifted = rows[k] * inverse + _MAGIC
            codes |= (bits_of_float(shifted) & ((1 << BITS) - 1)) << (k * BITS)
            if FEEDBACK:
                store_row(residual, rows[k] - (shifted - _MAGIC) * step, k, words, n, lane, WHOLE)
    store_words(out + 1, codes, words, lane, WHOLE)


@triton.jit(do_not_specialize=["n"])
def _encode(
    x, residual, out, bad, n, BLOCK: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, FEEDBACK: tl.constexpr
):
    FIELDS: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // FIELDS
    block = tl.program_id(0).to(tl.int64)
    x += block * BLOCK
    residual += block * BLOCK
    out += block * (1 + WORDS)
    left = n - block * BLOCK
    if left >= BLOCK:
        _encode_block(x, residual, out, bad, WORDS, BLOCK, BITS, LANES, LANES == WORDS, FEEDBACK)
    else:
        _encode_block(x, residual, out, bad, (left + FIELDS - 1) // FIELDS, left, BITS, LANES, False, FEEDBACK)


def encode_linear(
    x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, bits: int, block: int
) -> torch.Tensor:
    """Payload of ``x`` + ``residual`` (None: none) into ``out``; the number of blocks that are not finite."""
    bad = counter(x)
    lanes = lanes_of(block * bits // 32)
    launch(
        _encode, blocks_of(x.numel(), block), lanes, x, x if residual is None else residual, out, bad,
        n=x.numel(), BLOCK=block, BITS=bits, LANES=lanes, FEEDBACK=residual is not None,
    )  # fmt: skip
    return bad


@triton.jit
def _decode_block(
    payload, out, words, n, BITS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr
):
    lane = tl.arange(0, LANES)
    step = float_of_bits(tl.load(payload))
    codes = load_words(payload + 1, words, lane, WHOLE)
    for k in tl.static_range(32 // BITS):
        value = ((codes << (32 - BITS * (k + 1))) >> (32 - BITS)).to(tl.float32) * step
        if ADD:
            value = load_row(out, k, words, n, lane, WHOLE) + value
        store_row(out, value, k, words, n, lane, WHOLE)


@triton.jit(do_not_specialize=["n"])
def _decode(payload, out, n, BLOCK: tl.constexpr, BITS: tl.constexpr, LANES: tl.constexpr, ADD: tl.constexpr):
    FIELDS: tl.constexpr = 32 // BITS
    WORDS: tl.constexpr = BLOCK // FIELDS
    block = tl.program_id(0).to(tl.int64)
    payload += block * (1 + WORDS)
    out += block * BLOCK
    left = n - block * BLOCK
    if left >= BLOCK:
        _decode_block(payload, out, WORDS, BLOCK, BITS, LANES, LANES == WORDS, ADD)
    else:
        _decode_block(payload, out, (left + FIELDS - 1) // FIELDS, left, BITS, LANES, False, ADD)


def decode_linear(payload: torch.Tensor, out: torch.Tensor, bits: int, block: int, add: bool) -> None:
    """The elements that a payload of the right length says, written or added."""
    lanes = lanes_of(block * bits // 32)
    launch(
        _decode, blocks_of(out.numel(), block), lanes, payload, out,
        n=out.numel(), BLOCK=block, BITS=bits, LANES=lanes, ADD=add,
    )  # fmt: skip
