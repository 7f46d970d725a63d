"""The whole way: real processes train on real data, and the result file says what it promises."""

from __future__ import annotations

import io
import json
import math
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from syncline_bench import compare
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

GLOO_ENDED = "terminate called without an active exception"
"""What torch says that ends, now and then, while a thread of Gloo's still runs."""


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


@pytest.mark.slow
def test_workers_at_their_own_pace_share_the_batches(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "console_beside", lambda *_: console)
    path = tmp_path / "r.json"
    workload, text = "digits(step=2ms, slow_rank=1, slowdown=5.0)", "ps(on=workers)  sync=asp"
    status = compare.run(workload, 2, [text], iterations=20, json_path=path, console=console, timeout=120, target=0.1)
    data = json.loads(path.read_text())
    _, row = data["rows"]
    assert (row["error"], status) == (None, 0)
    assert (row["requested"], row["preset"], row["iterations"]) == (text, None, 20)
    assert sum(row["steps"]) == sum(row["staleness"].values()) == sum(row["version_lag"].values()) == 40
    assert row["replicas_equal"] is True
    assert row["waits"] == [[0.0, 0.0], [0.0, 0.0]]
    assert row["wait_s_per_step"] == 0
    scores = [(point["seconds"], point["accuracy"]) for point in row["curve"] if point["accuracy"] is not None]
    assert row["time_to_accuracy_s"] == next(seconds for seconds, accuracy in scores if accuracy >= 0.1)
    assert data["target"] == 0.1


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


@pytest.mark.deep
def test_ddp_takes_either_hook_and_either_group(tmp_path: Path) -> None:
    hooks = "ddp(hook=powersgd)", "ddp(codec=onebit)"
    groups = "ddp(group=syncline, rate=8Gbit)", "ddp(codec=int8, group=syncline)"
    path = tmp_path / "r.json"
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    strategies = ("ddp", *hooks, *groups)
    for _ in range(2):
        status = compare.run("digits", 2, strategies, iterations=6, json_path=path, timeout=120, console=console)
        rows = json.loads(path.read_text())["rows"]
        if not any(GLOO_ENDED in (row["error"] or "") for row in rows):
            break
    assert [(row["error"], row["replicas_equal"]) for row in rows] == [(None, True)] * 6
    assert status == 0
    learnt = [row["replica_sha256"] for row in rows[1:]]
    assert learnt[0] == learnt[3]  # which no hook has rounded
    assert len(set(learnt)) == 4
    assert [row["chosen"].split(" on ")[0] for row in rows[1:]] == [
        *["ddp over gloo"] * 3,
        "ddp over syncline's tcp at 8Gbit",
        "ddp over syncline",
    ]
