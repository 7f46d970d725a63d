"""Torch without its compiler in every process that tests start, as if this were the machine's own setting up of Python.

Optimizers import the compiler when they are made, process groups and DistributedDataParallel ask it whether it has
anything to forget: two and a half seconds of a core for nothing here. In its place is a module that says what a
compiler says with which nothing was compiled, and that brings the real one as soon as anything else is asked of it.
The processes that run tests have the real one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
KNOWN = {
    "disable": lambda function, *_, **__: function,
    "graph_break": lambda: None,
    "trace_rules.clear_lru_cache": lambda: None,
    "utils.get_optimize_ddp_mode": lambda: "ddp_optimizer",
}
"""What it is asked without being used."""


class Compiler(ModuleType):
    """Stands in for the package."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked of all modules, by who looks for a source
            raise AttributeError(name)
        if any(known.startswith(f"{name}.") for known in KNOWN):
            return Part(name)
        return KNOWN.get(name) or getattr(real(), name)


class Part:
    """Stands in for a module of the package."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return KNOWN.get(f"{self._name}.{name}") or getattr(getattr(real(), self._name), name)


class Finder(MetaPathFinder, Loader):
    """Finds nothing but the package, and that until the real one is wanted."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:  # noqa: ARG002
        return ModuleSpec(fullname, self) if fullname == NAME else None

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary one, to begin with: its import asks it for more than it will know."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = Compiler


def real() -> ModuleType:
    """The compiler, which is there from now on."""
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
        sys.modules.pop(NAME, None)
    return importlib.import_module(NAME)


finder = Finder()
sys.meta_path.insert(0, finder)
