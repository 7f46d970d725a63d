"""A run of one worker, for the samplers of the public calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import syncline


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "SYNCLINE_LAUNCHER", "SYNCLINE_STRATEGY", "SYNCLINE_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    syncline.init()
    yield
    syncline.shutdown()
