"""What torch.compile has to leave alone: hooks and whatever else communicates."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

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
