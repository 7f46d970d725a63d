"""Torch without its compiler, which optimizers import with their first step: two seconds of a core for nothing here.

They ask it for no more than to be left alone (``disable``, ``graph_break``). Scripts that tests start many processes of
put something in its place that does so, and that brings the compiler itself as soon as anything else is asked of it.

As a program it runs another one so: ``quick_torch.py SCRIPT [ARGUMENT ...]``.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "torch._dynamo"


class Compiler(ModuleType):
    """What optimizers need of the compiler."""

    def disable(self, function: Any, *_: Any, **__: Any) -> Any:
        return function

    def graph_break(self) -> None:
        """There is no graph."""

    def __getattr__(self, name: str) -> Any:
        sys.modules.pop(NAME, None)
        vars(torch).pop("_dynamo", None)
        return getattr(importlib.import_module(NAME), name)


def without_compiler() -> None:
    """Call it before the first optimizer is made."""
    if NAME not in sys.modules:
        sys.modules[NAME] = torch._dynamo = Compiler(NAME)  # type: ignore[assignment]


if __name__ == "__main__":
    without_compiler()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
