"""What torch.compile has to leave alone: hooks and whatever else communicates."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def eager(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that torch.compile neither inlines nor compiles; the compiler is not loaded for that."""
    disabled: list[Callable[..., Any]] = []

    def outside(*arguments: Any) -> Any:
        if not disabled and "torch._dynamo" in sys.modules:
            import torch

            disabled.append(torch.compiler.disable(call))  # type: ignore[no-untyped-call]
        return (disabled[0] if disabled else call)(*arguments)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    return outside
