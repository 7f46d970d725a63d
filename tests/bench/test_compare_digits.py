"""The whole way: real processes train on real data, and the result file says what it promises."""

from __future__ import annotations

import io
import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from syncline.bench import compare
from timelines import load

pytest.importorskip("torch")

NEEDS = ("sklearn", "jinja2", "matplotlib")
pytestmark = pytest.mark.skipif(not all(map(find_spec, NEEDS)), reason="the digits and the report need more packages")

NUMBERS = (
    "accuracy",
    "loss",
    "images_per_s",
    "scaling_efficiency",
    "iteration_s",
    "loading_s",
    "h2d_s",
    "forward_s",
    "backward_s",
    "update_s",
    "compute_s",
    "exposed_comm_s",
    "bytes_sent_per_step",
)
FILES = {"json_path": "r.json", "report_path": "r.html", "timeline_path": "t.json.gz"}
COUNTED = {"compute_s", "exposed_comm_s", "bytes_sent_per_step"}
"""What nobody counts in a peer."""


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


@pytest.mark.slow
def test_two_workers_by_parameter_server_and_by_a_peer(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "console_beside", lambda *_: console)
    paths = {name: tmp_path / file for name, file in FILES.items()}
    strategies = ["ps(servers=1)", "ddp(bucket=1MiB)"]
    workload = "digits(prefetch=2, channels_last=on)"
    status = compare.run(workload, 2, strategies, iterations=30, seed=3, timeout=120, console=console, **paths)
    data = json.loads(paths["json_path"].read_text())
    assert data["workload"] == workload
    assert [row["error"] for row in data["rows"]] == [None] * 3
    assert status == 0
    assert [row["strategy"] for row in data["rows"]] == ["single", *strategies]
    assert [row["workers"] for row in data["rows"]] == [1, 2, 2]
    single, server, peer = data["rows"]
    for row in data["rows"]:
        names = set(NUMBERS) - (COUNTED if row is peer else set())
        assert all(isinstance(row[name], int | float) and math.isfinite(row[name]) for name in names)
        assert row["replicas_equal"] is True
        assert row["iterations"] == 30
        # The same updates up to rounding: after a few iterations the same model, within a few test images.
        assert row["accuracy"] == pytest.approx(single["accuracy"], abs=0.02)
    assert single["scaling_efficiency"] == 1.0
    assert single["exposed_comm_s"] == single["bytes_sent_per_step"] == 0
    assert server["bytes_sent_per_step"] > 0
    assert server["exposed_comm_s"] > 0
    assert len(server["traffic"]) == server["workers"] + server["servers"]
    assert all(peer[name] is None for name in COUNTED)
    assert peer["traffic"] == []
    text = paths["report_path"].read_text()
    assert all(strategy in text for strategy in strategies)
    assert "Timeline: ps(servers=1)" in text
    processes = load(paths["timeline_path"])["otherData"]["processes"]
    names = [name.removeprefix("ps(servers=1): ").partition(" (")[0] for name in processes]
    assert names == ["rank 0", "rank 1", "server 0"]
    assert isinstance(console.file, io.StringIO)
    assert "ps(servers=1)" in console.file.getvalue()
