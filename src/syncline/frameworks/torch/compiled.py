"""Beside torch.compile and torch.jit: what these have to leave alone, and whether a forward pass has to do with them.

Hooks and whatever else communicates run outside of what is compiled (``eager``). What happens inside is not seen, so
who watches a forward pass asks first (``is_compiled``).
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
    """A function that torch.compile neither inlines nor compiles; the compiler is not loaded for that."""

    @wraps(call)
    def outside(*arguments: Any, **keywords: Any) -> Any:
        return within(*arguments, **keywords)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    within = call if _skip(outside) else _disabled(call)
    return outside


def _disabled(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call as torch disables its compilation, once the compiler is loaded; that costs more than many a hook."""
    disabled: list[Callable[..., Any]] = []

    def choose(*arguments: Any, **keywords: Any) -> Any:
        if not disabled and "torch._dynamo" in sys.modules:
            import torch

            disabled.append(torch.compiler.disable(call))  # type: ignore[no-untyped-call]
        return (disabled[0] if disabled else call)(*arguments, **keywords)

    return choose


def eager_methods(kind: _C) -> _C:
    """A class none of whose methods torch.compile looks into, even where torch calls them within a compiled model."""
    for name, method in list(vars(kind).items()):
        if inspect.isfunction(method) and not name.startswith("__"):
            setattr(kind, name, eager(method))
    return kind


def _skip(call: Any) -> bool:
    """Let the compiler pass over a function that torch calls by itself while a compiled model runs.

    It would look at its frame before anything in it has run, and ask for no attribute of the function. These names are
    torch's private ones: where a version has others the compiler looks, and nothing else is lost. Whether it passes
    over what the function calls, too.
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
