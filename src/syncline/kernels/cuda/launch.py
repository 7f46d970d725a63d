"""Starting kernels, and what makes floating-point arithmetic on a GPU give the bits of the processor's.

contraction   a*b + c stays two roundings: kernels are compiled without fused multiply-add
division      ``/`` of float32 is approximate in Triton: kernels say ``tl.div_rn``, and ``tl.sqrt_rn`` for roots
denormals     are kept: neither Triton nor the Numba kernels flush them
sums          of a block go over lanes that are folded in halves; ``tl.sum`` promises no order
NaN           a GPU makes other NaNs than a processor does: only those of the 16-bit types get into payloads
"""

from __future__ import annotations

from typing import Any

import torch
import triton

_MOST_WARPS = 16


def launch(kernel: Any, programs: int, warps: int, *arguments: Any, **constants: Any) -> None:
    """Start ``programs`` programs on the device of the first argument, a tensor, in its current stream."""
    if programs == 0:
        return
    warps = min(int(triton.next_power_of_2(max(1, warps))), _MOST_WARPS)
    with torch.cuda.device_of(arguments[0]):
        kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)


def blocks_of(elements: int, block: int) -> int:
    """The number of blocks, the last of which may be shorter."""
    return -(-elements // block)


def counter(like: torch.Tensor) -> torch.Tensor:
    """A zero on the device of a tensor, for kernels to count in."""
    return torch.zeros(1, dtype=torch.int32, device=like.device)


def signed(word: int) -> int:
    """32 bits as kernels take them, whatever their value: a number of type int32."""
    return word - (1 << 32) if word >= 1 << 31 else word
