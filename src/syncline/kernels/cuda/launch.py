"""Starting kernels, and what makes floating-point arithmetic on a GPU give the bits of the processor's.

    contraction   a*b + c stays two roundings: kernels are compiled without fused multiply-add
    division      ``/`` of float32 is approximate in Triton: kernels say ``tl.div_rn``, which is IEEE 754's
    denormals     are kept: neither Triton nor the Numba kernels flush them
    NaN           a GPU makes other NaNs than a processor does: no payload holds the bits of a computed one

Kernels see a block as rows of lanes, as the payload has it: row k of a block is what goes into field k of its words. A
row is one vector of the program, so that packing is arithmetic within a lane and nothing is shuffled.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

INFINITY = tl.constexpr(0x7F800000)
"""What ``magnitude_bits`` are at least where a number is not finite."""

_ELEMENTS_PER_THREAD = 4  # of a row: what a thread loads at once
_MOST_WARPS = 8


def launch(kernel: Any, programs: int, lanes: int, *tensors: torch.Tensor, **arguments: Any) -> None:
    """Start ``programs`` programs that work on vectors of ``lanes``, on the tensors' device, in its current stream."""
    if programs == 0:
        return
    warps = min(max(1, lanes // (32 * _ELEMENTS_PER_THREAD)), _MOST_WARPS)
    with torch.cuda.device_of(tensors[0]):
        kernel[(programs,)](*tensors, **arguments, num_warps=warps, enable_fp_fusion=False)


def lanes_of(words: int) -> int:
    """The length of a vector for that many words: Triton's are powers of two."""
    return int(triton.next_power_of_2(words))


def blocks_of(elements: int, block: int) -> int:
    """The number of blocks, the last of which may be shorter."""
    return -(-elements // block)


def counter(like: torch.Tensor) -> torch.Tensor:
    """A zero on the device of a tensor, for kernels to count in."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


@triton.jit
def float_of_bits(bits):
    """The float32 with these 32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of_float(value):
    """The 32 bits of a float32, as an int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_bits(value):
    """The bits of |value|: ordered as magnitudes are."""
    return bits_of_float(value) & 0x7FFFFFFF


@triton.jit
def load_row(array, k, words, n, lane, WHOLE: tl.constexpr):
    """Row ``k`` of the block of ``n`` elements at ``array``, zeros behind its end; ``WHOLE``: all lanes are within."""
    at = k * words + lane
    if WHOLE:
        row = tl.load(array + at)
    else:
        row = tl.load(array + at, mask=(lane < words) & (at < n), other=0.0)
    return row


@triton.jit
def store_row(array, row, k, words, n, lane, WHOLE: tl.constexpr):
    """The reverse: nothing is written behind the block's end."""
    at = k * words + lane
    if WHOLE:
        tl.store(array + at, row)
    else:
        tl.store(array + at, row, mask=(lane < words) & (at < n))


@triton.jit
def store_words(out, row, words, lane, WHOLE: tl.constexpr):
    """The words of a block."""
    if WHOLE:
        tl.store(out + lane, row)
    else:
        tl.store(out + lane, row, mask=lane < words)


@triton.jit
def load_words(payload, words, lane, WHOLE: tl.constexpr):
    """The words of a block."""
    if WHOLE:
        row = tl.load(payload + lane)
    else:
        row = tl.load(payload + lane, mask=lane < words, other=0)
    return row
