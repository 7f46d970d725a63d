"""Whether torch.compile or torch.jit has to do with a forward pass: what happens inside is then not seen."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether a model, a part of it, or what calls it has been compiled; asked when a forward pass begins.

    A script may put a module into a model, or compile one, at any time and in ways that call nobody, so that all are
    looked at each time: 80 microseconds for 200 modules, whose own forward pass takes a millisecond at the least.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return _has_module(model, torch.jit.ScriptModule)
    if sys.modules["torch._dynamo.utils"].counters["frames"]["total"] > 0:
        return True  # something has been, and what calls what is not known
    kinds = torch.jit.ScriptModule, compiler.OptimizedModule
    return _has_module(model, kinds, compiled=True) or _called_by(compiler.__file__, "compile_wrapper")


def _has_module(model: torch.nn.Module, kinds: type | tuple[type, ...], *, compiled: bool = False) -> bool:
    """Whether a model or a part of it is one of these, or, where that is asked for, has been ``compiled`` in place.

    Without ``modules()``, whose nested generators take several times as long.
    """
    left, seen = [model], {model}
    while left:
        module = left.pop()
        if isinstance(module, kinds) or (compiled and module._compiled_call_impl is not None):
            return True
        for part in module._modules.values():
            if part is not None and part not in seen:
                seen.add(part)
                left.append(part)
    return False


def _called_by(file: str, function: str) -> bool:
    """Whether a function is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
