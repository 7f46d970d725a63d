"""The bench: what it refuses, how it counts, and one small run beside the peer."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from syncline.bench import allreduce
from syncline.bench.allreduce_rank import fill, is_sum
from syncline.errors import StrategyError, UsageError


def test_the_check_sees_a_wrong_element() -> None:
    world, repetition = 3, 1
    total = np.zeros(1000, np.float32)
    for rank in range(world):
        mine = np.zeros(1000, np.float32)
        fill(mine, rank, repetition)
        assert len(np.unique(mine)) == mine.size
        total += mine
    assert is_sum(total, world, repetition)
    total[617] += 1
    assert not is_sum(total, world, repetition)


@pytest.mark.parametrize(
    ("contender", "size", "error", "text"),
    [
        ("ring", 4096, UsageError, "TRANSPORT:ALGORITHM"),
        ("tcp:rign", 4096, StrategyError, "ring"),
        ("tcp:ps(servers=1)", 4096, UsageError, "servers"),
        ("tcp:ring", 6, UsageError, "multiples of 4"),
    ],
)
def test_what_makes_no_sense_is_refused_before_any_process(
    contender: str, size: int, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        allreduce.run([2], [size], [contender], None)


def test_contenders_may_be_separated_by_commas_outside_of_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(allreduce, "_measure", lambda *arguments: seen.append(arguments[2]) or [])
    allreduce.run([2], [4], ["shm:ring,tcp:double_tree(pieces=2)", "gloo:native"], None, Console(file=StringIO()))
    assert seen == [("shm:ring", "tcp:double_tree(pieces=2)", "gloo:native")]


@pytest.mark.slow
def test_two_ranks_beside_the_peer(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    out = Console(file=StringIO(), width=120)
    assert allreduce.run([2], [4096, 400_000], ["shm:direct", "tcp:ring", "gloo:native"], path, out) == 0
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 6
    for row in rows:
        assert row["correct"]
        assert 0 < row["median_s"] <= row["p99_s"]
        assert row["busbw_bytes_per_s"] == pytest.approx(row["bytes"] / row["median_s"])
    assert {row["bytes"] for row in rows if row["memory_bytes"] is not None} == {400_000}
    assert "gloo" in out.file.getvalue()  # type: ignore[attr-defined]
