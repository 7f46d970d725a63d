"""What kernels of block codecs have in common on a GPU: see ``kernels.blocks``.

``encode_blocks`` and ``decode_blocks`` start a program for every block and call a codec's function in it, which gets
pointers to the block, its residual and its part of the payload:

    encode(x, residual, out, bad, words, n, seed, index, LANES, WHOLE, FEEDBACK, ARGUMENT)
    decode(payload, out, words, n, LANES, WHOLE, ADD, ARGUMENT)

The block has ``n`` elements and ``words`` words of codes, both int32; vectors have ``LANES`` lanes; ``index`` is that
of the block's first element in its tensor, a uint32 as ``seed`` is; ``bad`` counts blocks that are not finite, and
``ARGUMENT`` is the codec's own.

A program sees its block as rows of lanes: row k is what goes into field k of the block's W words, elements k*W to
(k+1)*W, and is one vector. Packing is arithmetic within a lane then, and nothing is shuffled. A whole block whose W is
a power of two (``WHOLE``) is read and written without masks, 16 bytes at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import UsageError
from .launch import blocks_of, counter, launch, signed

TINY = tl.constexpr(2.0**-100)
"""A block's maximum below which nothing is sent of it, by codecs that would have to divide by it."""

MAGIC = tl.constexpr(1.5 * 2.0**23)
"""Adding it rounds a float32 below 2**22 to nearest even, and the sum's lowest bits are the number."""

NAN = tl.constexpr(0x7FC00000)
INFINITY = tl.constexpr(0x7F800000)
SIGN = tl.constexpr(0x80000000)
BODY = tl.constexpr(0x7FFFFFFF)
"""The bits of a float32 without its sign."""

LARGEST_BLOCK = 1 << 15
"""Elements of the largest block: a program keeps it in registers."""


@triton.jit
def float_of_bits(bits):
    """The float32 with these 32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of_float(value):
    """The 32 bits of a float32, as a uint32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def negated(value):
    """-value, of zeros too: Triton's own sign is a subtraction from 0."""
    return float_of_bits(bits_of_float(value) ^ SIGN)


@triton.jit
def store_float(pointer, value):
    """A float32 among the words of a payload."""
    tl.store(pointer, value.to(tl.int32, bitcast=True))


@triton.jit
def load_row(array, k, words, n, lane, WHOLE: tl.constexpr):
    """Row ``k`` of a block of ``n`` elements, zeros behind its end."""
    at = k * words + lane
    return tl.load(array + at) if WHOLE else tl.load(array + at, mask=(lane < words) & (at < n), other=0)


@triton.jit
def store_row(array, row, k, words, n, lane, WHOLE: tl.constexpr):
    """Write row ``k`` of a block of ``n`` elements, nothing behind its end."""
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
    """The words of codes of a block, uint32."""
    return load_row(payload, 0, words, words, lane, WHOLE).to(tl.uint32, bitcast=True)


@triton.jit
def store_codes(out, codes, words, lane, WHOLE: tl.constexpr):
    """Write the words of codes of a block, uint32."""
    store_row(out, codes.to(tl.int32, bitcast=True), 0, words, words, lane, WHOLE)


@triton.jit
def gather(
    x, residual, words, n, lane,
    FIELDS: tl.constexpr, LANES: tl.constexpr, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr,
):  # fmt: skip
    """The rows of x + residual (with ``FEEDBACK``) of a block, and the bits of the largest magnitude, an int32."""
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
def folded(lanes, LANES: tl.constexpr):
    """The sum of the lanes, a power of two of them: lane j += lane j + half, half by half.

    A sum of two has one order only.
    """
    HALF: tl.constexpr = LANES // 2
    return tl.sum(lanes, 0) if HALF == 0 else folded(tl.sum(tl.reshape(lanes, [2, HALF]), 0), HALF)


@triton.jit
def step_of(maximum, LEVELS: tl.constexpr):
    """The step with which ``LEVELS`` (float) of them make the maximum; one bit less where they would exceed float32."""
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
    """Let ``function`` encode every block of ``x`` + ``residual`` (empty: none); how many blocks are not finite.

    Raises UsageError for a block that a program cannot keep in its registers.
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
    """Let ``function`` decode every block, or add what it says; blocks as in ``encode_blocks``."""
    if block > LARGEST_BLOCK:
        raise UsageError(f"block={block}: on a GPU choose {LARGEST_BLOCK} elements or fewer")
    launch(
        _decode, blocks_of(len(out), block), _warps(block, fields), payload, out, len(out),
        DECODE=function, HEADS=heads, ADD=add, ARGUMENT=argument, **_shape(block, fields),
    )  # fmt: skip


def _shape(block: int, fields: int) -> dict[str, int]:
    """A block's words and lanes: Triton's vectors are as long as a power of two."""
    words = -(-block // fields)
    return {"BLOCK": block, "FIELDS": fields, "WORDS": words, "LANES": int(triton.next_power_of_2(words))}


def _warps(block: int, fields: int) -> int:
    """So many that a thread loads 16 bytes of a row at once, and more where it would have to keep over 64 elements."""
    return max(block // fields // 128, block // 2048)
