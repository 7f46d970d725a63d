"""The parts of the examples keep the laws: what an author writes, and how it is tested."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from syncline import registry
from syncline.errors import UsageError
from syncline.testing import check_algorithm, check_codec, check_schedule
from syncline.testing.laws import Laws

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the head of an example, which registers its part for this test."""
    for kind in ("algorithms", "codecs", "schedules"):
        registry.names(kind)  # so that all are loaded
        monkeypatch.setitem(registry._entries, kind, dict(registry._entries[kind]))
    return lambda name: runpy.run_path(str(EXAMPLES / name))


def test_the_codec(example: Any) -> None:
    example("own_codec.py")
    assert "unsent parts are kept" in check_codec("upper")


def test_the_algorithm(example: Any) -> None:
    example("own_algorithm.py")
    assert "every plan is proved" in check_algorithm("star")


def test_the_schedule(example: Any) -> None:
    example("own_strategy.py")
    assert "training keeps its promises" in check_schedule("even(count=3)")


def test_a_part_that_no_law_concerns_does_not_pass() -> None:
    laws: Laws[str, str] = Laws()
    laws.law(lambda *case: [str(case)], lambda _: False)(lambda _: None)
    with pytest.raises(UsageError, match="no law applies to the part mine: only a training can test it"):
        laws.hold("mine", "part mine", 0, 1)
