"""Compiles the kernels for a GPU that need not be there, and prints what became of each, as JSON.

Encodes and decodes with the codecs named as arguments; kernels are compiled for compute capability 9.0 instead of
being started. A program of its own, since Triton decides when it is imported whether it interprets or compiles.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from syncline.codecs import Codec
from syncline.kernels.cuda import blocks, quantisers, sparse
from syncline.nouns import Spec
from syncline.strategy.grammar import read_part
from syncline.strategy.words import build

TYPES = {
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int16: "*i16",
    torch.bool: "*i1",
    float: "fp32",
    int: "i32",
}
INSTRUCTION = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z]+\.[a-z0-9._:]+)", re.MULTILINE)


def compiled(kernel: Any, programs: int, warps: int, *arguments: Any, **constants: Any) -> None:
    """Stands in for ``launch``."""
    signature = dict.fromkeys(kernel.arg_names, "constexpr")
    aligned = {}
    for i, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        tensor = isinstance(argument, torch.Tensor)
        signature[name] = TYPES[argument.dtype if tensor else type(argument)]
        if tensor or (not kernel.params[i].do_not_specialize and argument % 16 == 0):
            aligned[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": triton.next_power_of_2(max(1, warps)), "enable_fp_fusion": False}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    name = f"{current} {kernel.__name__}"
    print(json.dumps({"kernel": name, "programs": programs, "ptx": Counter(INSTRUCTION.findall(made.asm["ptx"]))}))


blocks.launch = quantisers.launch = sparse.launch = compiled
for current in sys.argv[1:]:
    codec: Codec = build("codecs", read_part(current))
    x = torch.zeros(2 * max(codec.block, 1024))
    state = codec.init(Spec("a", (len(x),)), 0)
    state.residual = torch.zeros_like(x)  # type: ignore[assignment]
    words = codec.wire_bytes(state.spec)[1] // 4
    payload: Any = torch.zeros(words, dtype=torch.int32)
    codec.encode(x, payload, state)  # type: ignore[arg-type]
    codec.decode(payload, x, state, add=True)  # type: ignore[arg-type]
