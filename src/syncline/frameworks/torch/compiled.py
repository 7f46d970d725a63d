"""Keeps hooks out of torch.compile and torch.jit, and tells whether a forward pass involves compiled code.

``eager`` marks hooks and everything else that communicates, so that they run outside compiled code. Reads of weights
inside compiled code cannot be observed; code that relies on such reads calls ``is_compiled`` first.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import torch

_C = TypeVar("_C", bound=type)


def eager(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that torch.compile neither inlines nor compiles it. The compiler is not loaded for that."""

    @wraps(call)
    def outside(*arguments: Any, **keywords: Any) -> Any:
        return within(*arguments, **keywords)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    within = call if _skip(outside) else _disabled(call)
    return outside


def _disabled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Disable compilation of ``call`` in PyTorch's way, once the compiler is loaded: loading it would take long."""
    disabled: list[Callable[..., Any]] = []

    def choose(*arguments: Any, **keywords: Any) -> Any:
        if not disabled and "torch._dynamo" in sys.modules:
            import torch

            disabled.append(torch.compiler.disable(call))  # type: ignore[no-untyped-call]
        return (disabled[0] if disabled else call)(*arguments, **keywords)

    return choose


def eager_methods(kind: _C) -> _C:
    """Apply ``eager`` to all methods of a class, because torch calls some of them inside a compiled model."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(kind, name, eager(method))
    return kind


def _skip(call: Any) -> bool:
    """Make the compiler skip a function that torch itself calls while a compiled model runs.

    The compiler inspects the function's frame before any of its code has run, and reads no attribute of the function.
    The names used here are private to torch. If a version has other names, the compiler inspects the frame, which costs
    only time. Returns whether the compiler also skips the functions that this one calls.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from torch._C import _dynamo

        evaluation: Any = _dynamo.eval_frame
        if hasattr(evaluation, "set_code_exec_strategy"):
            skip = evaluation._FrameAction.SKIP
            evaluation.set_code_exec_strategy(call.__code__, evaluation._FrameExecStrategy(skip, skip))
            return True
        evaluation.skip_code(call.__code__)  # before torch 2.7
    return False


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model, a part of it, or its caller has been compiled. Call it at the start of a forward pass.

    A script may insert or compile a module at any time, and no hook reports that, so every call checks all modules: 80
    microseconds for 200 modules, whose own forward pass takes at least a millisecond.
    """
    compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is None:
        return _has_module(model, torch.jit.ScriptModule)
    if sys.modules["torch._dynamo.utils"].counters["frames"]["total"] > 0:
        return True  # something was compiled, and it may call this model
    kinds = torch.jit.ScriptModule, compiler.OptimizedModule
    return _has_module(model, kinds, compiled=True) or _called_by(compiler.__file__, "compile_wrapper")


def _has_module(model: torch.nn.Module, kinds: type | tuple[type, ...], *, compiled: bool = False) -> bool:
    """Whether the model has a module of these kinds or, with ``compiled``, a module that was compiled in place.

    It does not use ``modules()``, whose nested generators are several times slower.
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
    """Whether a function of that file is on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == file:
            return True
        frame = frame.f_back
    return False
