"""What is said where a trainer's package is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import scripts_of_trainers as scripts

from syncline.errors import UsageError
from syncline.frameworks import adapter_of


def test_a_missing_lightning_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for name in ("lightning", "pytorch_lightning", "syncline.lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"needs Lightning: pip install 'syncline\[lightning\]'"):
        import syncline.lightning  # noqa: F401


def test_a_backend_of_keras_without_an_adapter_is_named() -> None:
    model = type("Sequential", (), {"__module__": "keras.src.models.sequential"})()
    with pytest.raises(UsageError, match="set KERAS_BACKEND=tensorflow, or torch, before anything imports keras"):
        adapter_of(model)


def test_every_example_has_tests() -> None:
    for path in scripts.EXAMPLES.glob("*.py"):
        assert (Path(__file__).parent / f"test_{path.stem.removeprefix('with_')}.py").is_file(), path
