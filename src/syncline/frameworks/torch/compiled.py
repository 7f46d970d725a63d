"""Whether torch.compile or torch.jit has to do with a forward pass: what happens inside is then not seen."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a model, a part of it, or what calls it has been compiled; asked when a forward pass begins."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return True
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return False
    if sys.modules["torch._dynamo.utils"].counters["frames"]["total"] > 0:
        return True  # something has been, and what calls what is not known
    compiled = compiler.OptimizedModule
    if any(module._compiled_call_impl is not None or isinstance(module, compiled) for module in model.modules()):
        return True
    return _called_by(compiler.__file__, "compile_wrapper")


def _called_by(file: str, function: str) -> bool:
    """Whether a function is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
