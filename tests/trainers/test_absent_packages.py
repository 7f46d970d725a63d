"""What is said where a trainer's package is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import scripts_of_trainers as scripts

from syncline.errors import UsageError


def test_a_missing_lightning_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for name in ("lightning", "pytorch_lightning", "syncline.lightning", "syncline.frameworks.torch.lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in ("lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"needs Lightning: pip install 'syncline\[lightning\]'"):
        import syncline.lightning  # noqa: F401


def test_every_example_has_tests() -> None:
    for path in scripts.EXAMPLES.glob("*.py"):
        assert (Path(__file__).parent / f"test_{path.stem.removeprefix('with_')}.py").is_file(), path
