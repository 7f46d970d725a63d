"""Every sync mode of the registry keeps the laws of its kind: ``testing.sync`` has them."""

from __future__ import annotations

import pytest

from syncline import registry
from syncline.testing import check_sync
from syncline.testing.sync import LAWS

TEXTS = [text for entry in registry.entries("sync") for text in entry.capabilities.get("examples", (entry.name,))]


@pytest.mark.every(2)
@pytest.mark.parametrize("text", TEXTS)
def test_every_mode_keeps_all_laws(text: str) -> None:
    assert check_sync(text, examples=8) == LAWS.names
