"""What is said where one worker trains under a strategy that needs several."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.frameworks._supported import warn_of_plain_steps
from syncline.strategy.strategy import Strategy


@pytest.mark.parametrize(
    ("sync", "warns"),
    [
        ("diloco(steps=2)", True),
        ("easgd(steps=2)", True),
        ("local(steps=2)", False),
        ("post_local(after=1, steps=2)", False),
        ("gossip", False),
        ("bsp", False),
    ],
)
def test_modes_that_would_change_one_workers_weights_say_that_they_do_not(
    caplog: pytest.LogCaptureFixture, sync: str, warns: bool
) -> None:
    session: Any = SimpleNamespace(strategy=Strategy.parse(f"ring sync={sync}"))
    with caplog.at_level(logging.WARNING, logger="syncline"):
        warn_of_plain_steps(session)
    said = [record.getMessage() for record in caplog.records]
    assert [f"sync={sync.partition('(')[0]} does nothing with one worker" in text for text in said] == [True] * warns
