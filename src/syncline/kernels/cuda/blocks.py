"""Parts of all kernels on a GPU: their start, blocks of elements, 16-bit numbers and random numbers.

A GPU's floating-point arithmetic gives the bits of the CPU's:

contraction   a*b + c stays two roundings: kernels are compiled without fused multiply-add
division      ``/`` of float32 is approximate in Triton: kernels use ``tl.div_rn``, and ``tl.sqrt_rn`` for roots
denormals     are kept: neither Triton nor the Numba kernels flush them to zero
sums          of a block use lanes that are folded in halves, since ``tl.sum`` promises no order
NaN           GPU and CPU produce different NaNs: these show in payloads of 16-bit numbers, and their sign bits in
              payloads of signs; everywhere else a payload has one fixed NaN

**Blocks.** ``kernels.blocks`` describes the layout. ``encode_blocks`` and ``decode_blocks`` start a program for every
block. The program calls a codec's function with pointers to the block, its residual and its part of the payload:

    encode(x, residual, out, bad, words, n, seed, index, LANES, WHOLE, FEEDBACK, ARGUMENT)
    decode(payload, out, words, n, LANES, WHOLE, ADD, ARGUMENT)

The block has ``n`` elements and ``words`` words of codes, both int32. Vectors have ``LANES`` lanes. ``index`` is the
index of the block's first element in its tensor, a uint32 like ``seed``. ``bad`` counts blocks that are not finite, and
``ARGUMENT`` is the codec's own.

A program treats its block as rows of lanes. Row k, elements k*W to (k+1)*W, is one vector and goes into field k of the
block's W words. So packing is arithmetic within a lane and needs no shuffles. A whole block whose W is a power of two
(``WHOLE``) is read and written without masks, 16 bytes at a time.

**16-bit numbers** use integer arithmetic instead of the GPU's conversions, because Triton's interpreter has to give the
same bits; a codec is limited by memory anyway. Halves are uint32 whose upper half is 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...errors import UsageError
from . import LARGEST_BLOCK

_MOST_WARPS = 16


def launch(kernel: Any, programs: int, warps: int, *arguments: Any, **constants: Any) -> None:
    """Start ``programs`` programs in the current stream of the device of the first argument, a tensor."""
    if programs == 0:
        return
    warps = min(int(triton.next_power_of_2(max(1, warps))), _MOST_WARPS)
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def blocks_of(elements: int, block: int) -> int:
    """The number of blocks in a tensor; the last block may be shorter."""
    return -(-elements // block)


def counter(like: torch.Tensor) -> torch.Tensor:
    """A zero on the device of ``like``, in which kernels count."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word, as kernels take it."""
    return word - (1 << 32) if word >= 1 << 31 else word


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


_HALF_SCALE = tl.constexpr(2.0**-14)
_HALF_OVERFLOW = tl.constexpr((127 + 16) << 23)
_HALF_NORMAL = tl.constexpr((127 - 14) << 23)
_DENORMAL_MAGIC = tl.constexpr(0.5)
_DENORMAL_MAGIC_BITS = tl.constexpr(126 << 23)
_REBIAS = tl.constexpr((1 << 32) - ((127 - 15) << 23) + 0xFFF)


@triton.jit
def widen_float16(half):
    """The float32 of the bits of a float16."""
    body = (half & 0x7FFF) << 13
    exponent = body & 0x0F800000
    normal = body + ((127 - 15) << 23)
    special = normal + ((128 - 16) << 23)
    small = bits_of_float(float_of_bits(normal + (1 << 23)) - _HALF_SCALE)
    chosen = tl.where(exponent == 0x0F800000, special, tl.where(exponent == 0, small, normal))
    return float_of_bits(chosen | ((half & 0x8000) << 16))


@triton.jit
def narrow_float16(bits):
    """The bits of the float16 nearest to the float32 with these bits."""
    body = bits & BODY
    large = tl.where(body > INFINITY, 0x7E00, 0x7C00).to(tl.uint32)
    small = bits_of_float(float_of_bits(body) + _DENORMAL_MAGIC) - _DENORMAL_MAGIC_BITS
    normal = (body + _REBIAS + ((body >> 13) & 1)) >> 13
    chosen = tl.where(body >= _HALF_OVERFLOW, large, tl.where(body < _HALF_NORMAL, small, normal))
    return chosen | ((bits >> 16) & 0x8000)


@triton.jit
def widen_bfloat16(half):
    """The float32 of the bits of a bfloat16."""
    return float_of_bits(half << 16)


@triton.jit
def narrow_bfloat16(bits):
    """The bits of the bfloat16 nearest to the float32 with these bits."""
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    quiet = (bits >> 16) | 0x40
    return tl.where((bits & BODY) > INFINITY, quiet, rounded)


_FIRST = tl.constexpr(0x7FEB352D)
_SECOND = tl.constexpr(0x846CA68B)
_GOLDEN = tl.constexpr(0x9E3779B9)
_UNIT = tl.constexpr(2.0**-24)


@triton.jit
def draw(index, key, other):
    """32 random bits for an element; ``other`` is ``other_key(key)``."""
    bits = index ^ key
    bits = (bits ^ (bits >> 16)) * _FIRST
    bits = (bits ^ (bits >> 15)) + other
    bits = (bits ^ (bits >> 13)) * _SECOND
    return bits ^ (bits >> 16)


@triton.jit
def other_key(key):
    """The second key of a seed."""
    return draw(tl.full([], _GOLDEN, tl.uint32), key, tl.full([], 0, tl.uint32))


@triton.jit
def chance(bits):
    """A float32 in [0, 1) made of the upper 24 of 32 random bits."""
    return (bits >> 8).to(tl.int32).to(tl.float32) * _UNIT


@triton.jit
def below(bits, limit):
    """A whole number in [0, ``limit``) made of 32 random bits; ``limit`` and the result are int64."""
    return ((bits.to(tl.uint64) * limit.to(tl.uint64)) >> 32).to(tl.int64)
