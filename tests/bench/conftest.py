"""What begins and ends with a test of comparisons: a stand-in for the processes that train."""

from __future__ import annotations

import pytest
from accuracies import Trained

from syncline_bench import accuracy


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    stand_in = Trained()
    monkeypatch.setattr(accuracy, "measure", stand_in)
    return stand_in
