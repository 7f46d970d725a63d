"""Two hosts of two ranks each: a message library sums inside them, and only payloads cross the link."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from syncline.launch.local import launch
from syncline_bench.lab import Lab

LIMIT_S = 120.0
SCRIPT = Path(__file__).with_name("two_levels.py")
STEPS, NBYTES = 3, 4 * 1024 * 512


@pytest.mark.slow
def test_gloo_sums_inside_hosts_and_payloads_cross_the_link(lab: Lab) -> None:
    """A host receives half of the array and then half of the sum, with int8 a quarter of these bytes."""
    pytest.importorskip("torch")
    shares = {"hierarchical(inside=native)": 1.0, "hierarchical(inside=native) codec=int8": 0.25}
    lines: list[str] = []
    outcome = launch(
        [sys.executable, str(SCRIPT), *shares],
        4,
        place=partial(lab.placement, per_host=2),
        on_output=lambda _, line: lines.append(line),
        timeout_s=LIMIT_S,
    )
    assert outcome.status == 0, lines
    found = [json.loads(line.partition("RAN ")[2]) for line in lines if "RAN " in line]
    for strategy, share in shares.items():
        rows = [row for row in found if row[0] == strategy]
        assert len(rows) == 4, lines
        assert len({digest for _, digest, *_ in rows}) == 1
        assert all("transport=torch" in shown for *_, shown in rows)
        for *_, received, _ in rows:
            assert share * STEPS * NBYTES < received < 1.3 * share * STEPS * NBYTES + 100_000
