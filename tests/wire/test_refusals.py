"""Refusals are logged in full at first, then counted; none is left out of the last count."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.wire.listener import IN_FULL, Refusals

log = logging.getLogger("syncline.test")


@given(st.integers(0, 5000))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_any_number_makes_few_lines_and_the_last_has_the_count(caplog: pytest.LogCaptureFixture, number: int) -> None:
    caplog.clear()
    refusals = Refusals(log)
    for caller in range(number):
        refusals.add(f"10.0.0.{caller}", "it does not speak this protocol")
    refusals.close()
    refusals.close()
    lines = [record.getMessage() for record in caplog.records]
    in_full = min(number, IN_FULL)
    assert lines[:in_full] == [
        f"refused a connection from 10.0.0.{caller}: it does not speak this protocol" for caller in range(in_full)
    ]
    assert len(lines) <= IN_FULL + max(0, (number // IN_FULL).bit_length())
    if number > IN_FULL:
        assert lines[-1].startswith(f"refused {number} connections so far, the latest from 10.0.0.{number - 1}: it")
