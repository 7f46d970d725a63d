"""The programs in ``benchmarks`` as modules: they are no package, and have no ending."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Load one by its name, which does not run it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_loader(name, SourceFileLoader(name, str(BENCHMARKS / name)))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
        return sys.modules[name]

    yield load
    for name in {
        "gpu",
        "same",
        "way",
        "lines",
        "mutants",
        "ranks",
        "combinations",
        "trainings",
        "tuning",
        "replays",
    } - before:
        sys.modules.pop(name, None)
