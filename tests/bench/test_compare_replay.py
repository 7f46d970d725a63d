"""The whole way for replayed layers: real processes, Syncline and DistributedDataParallel on the same trace."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from syncline.bench import compare

pytest.importorskip("torch")

LAYERS = """name,elements,forward_s,backward_s
conv1,3001,0.0005,0.001
pool,0,0.0002,0.0002
conv2,20000,0.0005,0.001
fc,500007,0.0002,0.0005
"""


@pytest.mark.slow
def test_ring_and_ddp_learn_the_same_from_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=80)
    monkeypatch.setattr(compare, "Console", lambda **_: console)
    trace, path = tmp_path / "layers.csv", tmp_path / "r.json"
    trace.write_text(LAYERS)
    contenders = ["ring", "ddp(bucket=1MiB)", "ddp(hook=bf16)"]
    status = compare.run(f"trace:{trace}", 2, contenders, iterations=10, json_path=path, timeout=120, console=console)
    data = json.loads(path.read_text())
    assert [row["error"] for row in data["rows"]] == [None] * 4
    assert status == 0
    assert [row["strategy"] for row in data["rows"]] == ["single", *contenders]
    single, ring, ddp, compressed = data["rows"]
    for row in data["rows"]:
        assert row["replicas_equal"] is True
        assert row["bound_s"] == pytest.approx(0.0041)
        assert row["of_bound"] == pytest.approx(row["bound_s"] / row["iteration_s"])
        assert row["batch"] == row["workers"]
    # The same samples and means, to the last bit where nothing is rounded.
    assert ring["replica_sha256"] == ddp["replica_sha256"] != single["replica_sha256"]
    assert compressed["replica_sha256"] != ddp["replica_sha256"]
    assert ring["exposed_comm_s"] > 0
    assert ddp["exposed_comm_s"] is None
    assert ddp["traffic"] == []
    assert "bnd %" in console.file.getvalue()  # type: ignore[attr-defined]
