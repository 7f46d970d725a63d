"""What several verbs' tests call instead of the work."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from calling import Recorder

import syncline_bench


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Stands for what compare does."""
    recorder = Recorder()
    module: Any = types.ModuleType("syncline_bench.compare")
    module.run = recorder
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(syncline_bench, "compare", module, raising=False)
    return recorder
