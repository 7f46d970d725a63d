"""Less than a second in place of one and a half for every process with torch that tests start.

It is imported first by all of them, as if it were the machine's own setting up of Python.

Optimizers import the compiler when they are made, process groups and DistributedDataParallel ask it whether it has
anything to forget: two and a half seconds of a core for nothing here. In its place is a module that says what a
compiler says with which nothing was compiled, and that brings the real one as soon as anything else is asked of it.

What operations do on the device ``meta`` is left out too, a fifth of a second. The compiler brings it; without it
operations that need it say that they are not implemented there.
The processes that run tests have the real ones.

Nobody searches for garbage in what an import of torch makes, neither meanwhile nor ever after, and nobody at the end,
when all memory is given back anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
META = "torch._meta_registrations"
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


class Registrations(ModuleType):
    """Stands in for what operations do on the device ``meta``, which registers itself as it is imported."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(real(META), name)


class Large(Loader):
    """Loads a package with what there is for it, and looks for no garbage meanwhile."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        searched = gc.isenabled()
        gc.disable()
        try:
            self._loader.exec_module(module)
        finally:
            gc.freeze()
            if searched:
                gc.enable()

    def __getattr__(self, name: str) -> Any:
        """What else is asked of a loader, such as a module's source."""
        return getattr(self._loader, name)


class Finder(MetaPathFinder, Loader):
    """Finds nothing but torch, and those that have something in their place until the real ones are wanted."""

    def __init__(self) -> None:
        self.instead: dict[str, type[ModuleType]] = {NAME: Compiler, META: Registrations}

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:  # noqa: ARG002
        if fullname in self.instead:
            return ModuleSpec(fullname, self)
        spec = PathFinder.find_spec(fullname, path) if fullname == "torch" else None
        if spec is not None and spec.loader is not None:
            spec.loader = Large(spec.loader)
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """An ordinary one, to begin with: its import asks it for more than it will know."""

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = self.instead[module.__name__]
        if module.__name__ == META:
            with contextlib.suppress(ImportError):  # what generators of random numbers need of it, where they do
                importlib.import_module("torch._prims.rng_prims")


def real(name: str = NAME) -> ModuleType:
    """The module itself, which is there from now on; the compiler needs what operations do on ``meta``."""
    if name == NAME:
        real(META)
    if finder.instead.pop(name, None):
        sys.modules.pop(name, None)
    return importlib.import_module(name)


finder = Finder()
sys.meta_path.insert(0, finder)
atexit.register(gc.freeze)
