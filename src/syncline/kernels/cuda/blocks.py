"""Parts of all block codecs on a GPU; ``kernels.blocks`` describes the layout.

``encode_blocks`` and ``decode_blocks`` start a program for every block. The program calls a codec's function with
pointers to the block, its residual and its part of the payload:

    encode(x, residual, out, bad, words, n, seed, index, LANES, WHOLE, FEEDBACK, ARGUMENT)
    decode(payload, out, words, n, LANES, WHOLE, ADD, ARGUMENT)

The block has ``n`` elements and ``words`` words of codes, both int32. Vectors have ``LANES`` lanes. ``index`` is the
index of the block's first element in its tensor, a uint32 like ``seed``. ``bad`` counts blocks that are not finite, and
``ARGUMENT`` is the codec's own.

A program treats its block as rows of lanes. Row k, elements k*W to (k+1)*W, is one vector and goes into field k of the
block's W words. So packing is arithmetic within a lane and needs no shuffles. A whole block whose W is a power of two
(``WHOLE``) is read and written without masks, 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import UsageError
from .launch import blocks_of, counter, launch, signed

TINY = tl.constexpr(2.0**-100)
"""Blocks with a smaller maximum are sent as zeros by codecs that would have to divide by the maximum."""

MAGIC = tl.constexpr(1.5 * 2.0**23)
"""Adding it rounds a float32 below 2**22 to the nearest integer, ties to even, and puts that into the lowest bits."""

NAN = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(0x7F800000)
SIGN = tl.constexpr(0x80000000)
BODY = tl.constexpr(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

_MOST_HALVINGS = tl.constexpr(10)
LARGEST_BLOCK = 1 << 15
"""Elements of the largest block, which a program keeps in registers."""


@triton.jit
def float_of_bits(bits):
    """The float32 that has these 32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of_float(value):
    """The 32 bits of a float32, as a uint32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def negated(value):
    """-value, for zeros too: Triton computes ``-value`` as ``0 - value``, which is +0 for +0."""
    return float_of_bits(bits_of_float(value) ^ SIGN)


@triton.jit
def store_float(pointer, value):
    """Store a float32 as a word of a payload."""
    tl.store(pointer, value.to(tl.int32, bitcast=True))


@triton.jit
def load_row(array, k, words, n, lane, WHOLE: tl.constexpr):
    """Row ``k`` of a block of ``n`` elements, with zeros after its end."""
    at = k * words + lane
    return tl.load(array + at) if WHOLE else tl.load(array + at, mask=(lane < words) & (at < n), other=0)


@triton.jit
def store_row(array, row, k, words, n, lane, WHOLE: tl.constexpr):
    """Write row ``k`` of a block of ``n`` elements, up to its end."""
    at = k * words + lane
    if WHOLE:
        tl.store(array + at, row)
    else:
        tl.store(array + at, row, mask=(lane < words) & (at < n))


@triton.jit
def put_row(out, row, k, words, n, lane, WHOLE: tl.constexpr, ADD: tl.constexpr):
    """Write row ``k`` of a decoded block of ``n`` elements, or add it to what is there."""
    if ADD:
        row = load_row(out, k, words, n, lane, WHOLE) + row
    store_row(out, row, k, words, n, lane, WHOLE)


@triton.jit
def load_codes(payload, words, lane, WHOLE: tl.constexpr):
    """The words of a block's codes, as uint32."""
    return load_row(payload, 0, words, words, lane, WHOLE).to(tl.uint32, bitcast=True)


@triton.jit
def store_codes(out, codes, words, lane, WHOLE: tl.constexpr):
    """Write the words of a block's codes, given as uint32."""
    store_row(out, codes.to(tl.int32, bitcast=True), 0, words, words, lane, WHOLE)


@triton.jit
def gather(
    x, residual, words, n, lane,
    FIELDS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """The rows of a block, x + residual with ``FEEDBACK``, and the bits of the largest magnitude as an int32."""
    rows = ()
    largest = tl.zeros([LANES], tl.int32)
    for k in tl.static_range(FIELDS):
        value = load_row(x, k, words, n, lane, WHOLE)
        if FEEDBACK:
            value += load_row(residual, k, words, n, lane, WHOLE)
        largest = tl.maximum(largest, value.to(tl.int32, bitcast=True) & BODY)
        rows += (value,)
    return rows, tl.max(largest, 0)


@triton.jit
def folded(lanes):
    """The sum of the lanes, a power of two up to 1024: lane j += lane j + half, half by half.

    Each ``tl.sum`` here adds two numbers, whose sum does not depend on their order.
    """
    for _ in tl.static_range(_MOST_HALVINGS):
        if lanes.shape[0] > 1:
            lanes = tl.sum(tl.reshape(lanes, [2, lanes.shape[0] // 2]), 0)
    return tl.sum(lanes, 0)


@triton.jit
def step_of(maximum, LEVELS: tl.constexpr):
    """The step that makes the maximum ``LEVELS`` steps, one bit smaller if their product would overflow float32."""
    step = tl.div_rn(maximum, LEVELS)
    bits = bits_of_float(step)
    above = bits_of_float(step * LEVELS) >= INFINITY
    return float_of_bits(tl.where(above, bits - 1, bits))


@triton.jit(do_not_specialize=["n", "seed", "index"])
def _encode(
    x, residual, out, bad, n, seed, index,
    ENCODE: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr, FIELDS: tl.constexpr,
    LANES: tl.constexpr, FEEDBACK: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    first = block * BLOCK
    x += first
    residual += first
    out += block * (HEADS + WORDS)
    left = n - first
    seed = seed.to(tl.uint32, bitcast=True)
    index = (index + first).to(tl.uint32)
    if left >= BLOCK:
        words, here = tl.full([], WORDS, tl.int32), tl.full([], BLOCK, tl.int32)
        ENCODE(x, residual, out, bad, words, here, seed, index, LANES, LANES == WORDS, FEEDBACK, ARGUMENT)
    else:
        here = left.to(tl.int32)
        words = (here + FIELDS - 1) // FIELDS
        ENCODE(x, residual, out, bad, words, here, seed, index, LANES, False, FEEDBACK, ARGUMENT)


@triton.jit(do_not_specialize=["n"])
def _decode(
    payload, out, n,
    DECODE: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, WORDS: tl.constexpr, FIELDS: tl.constexpr,
    LANES: tl.constexpr, ADD: tl.constexpr, ARGUMENT: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    payload += block * (HEADS + WORDS)
    out += block * BLOCK
    left = n - block * BLOCK
    if left >= BLOCK:
        words, here = tl.full([], WORDS, tl.int32), tl.full([], BLOCK, tl.int32)
        DECODE(payload, out, words, here, LANES, LANES == WORDS, ADD, ARGUMENT)
    else:
        here = left.to(tl.int32)
        words = (here + FIELDS - 1) // FIELDS
        DECODE(payload, out, words, here, LANES, False, ADD, ARGUMENT)


def encode_blocks(
    function: Any, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, block: int, fields: int,
    argument: Any = None, *, heads: int = 1, seed: int = 0, index: int = 0,
) -> torch.Tensor:  # fmt: skip
    """Encode every block of ``x`` + ``residual`` (empty: none) by ``function``; return how many are not finite.

    Raises UsageError for a block that does not fit in a program's registers.
    """
    if block > LARGEST_BLOCK:
        raise UsageError(f"block={block}: on a GPU choose {LARGEST_BLOCK} elements or fewer")
    bad, feedback = counter(x), len(residual) > 0
    launch(
        _encode, blocks_of(len(x), block), _warps(block, fields),
        x, residual if feedback else x, out, bad, len(x), signed(seed), index,
        ENCODE=function, HEADS=heads, FEEDBACK=feedback, ARGUMENT=argument, **_shape(block, fields),
    )  # fmt: skip
    return bad


def decode_blocks(
    function: Any, payload: torch.Tensor, out: torch.Tensor, block: int, fields: int, argument: Any = None,
    *, heads: int = 1, add: bool,
) -> None:  # fmt: skip
    """Decode every block by ``function``, which writes or adds; blocks are as in ``encode_blocks``."""
    if block > LARGEST_BLOCK:
        raise UsageError(f"block={block}: on a GPU choose {LARGEST_BLOCK} elements or fewer")
    launch(
        _decode, blocks_of(len(out), block), _warps(block, fields), payload, out, len(out),
        DECODE=function, HEADS=heads, ADD=add, ARGUMENT=argument, **_shape(block, fields),
    )  # fmt: skip


def _shape(block: int, fields: int) -> dict[str, int]:
    """The words and lanes of a block. Triton's vectors have a power of two of elements."""
    words = -(-block // fields)
    return {"BLOCK": block, "FIELDS": fields, "WORDS": words, "LANES": int(triton.next_power_of_2(words))}


def _warps(block: int, fields: int) -> int:
    """Warps with which a thread loads 16 bytes of a row at once, or more to keep at most 64 elements per thread."""
    return max(block // fields // 128, block // 2048)
