"""Starts kernels, and explains how a GPU's floating-point arithmetic gives the bits of the CPU's.

contraction   a*b + c stays two roundings: kernels are compiled without fused multiply-add
division      ``/`` of float32 is approximate in Triton: kernels use ``tl.div_rn``, and ``tl.sqrt_rn`` for roots
denormals     are kept: neither Triton nor the Numba kernels flush them to zero
sums          of a block use lanes that are folded in halves, since ``tl.sum`` promises no order
NaN           GPU and CPU produce different NaNs: these show in payloads of 16-bit numbers, and their sign bits in
              payloads of signs; everywhere else a payload has one fixed NaN
"""

from __future__ import annotations

from typing import Any

import torch
import triton

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
