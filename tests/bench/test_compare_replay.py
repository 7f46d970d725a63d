"""The whole way for replayed layers: real processes, Syncline and DistributedDataParallel on the same trace."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

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


def compared(trace: Path, path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[dict[str, Any], str]:
    """The result file of ten iterations on two workers, all of whose rows have finished, and what was printed."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=False, width=80)
    monkeypatch.setattr(compare, "Console", lambda **_: console)
    trace.write_text(LAYERS)
    status = compare.run(f"trace:{trace}", 2, iterations=10, json_path=path, timeout=120, console=console, **changes)
    data = json.loads(path.read_text())
    assert [row["error"] for row in data["rows"]] == [None] * len(data["rows"])
    assert all(row["replicas_equal"] for row in data["rows"])
    assert status == 0
    return data, output.getvalue()


@pytest.mark.slow
def test_ring_and_ddp_learn_the_same_from_one_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = ["ring", "ddp(bucket=1MiB)", "ddp(hook=bf16)"]
    data, shown = compared(tmp_path / "layers.csv", tmp_path / "r.json", monkeypatch, strategies=contenders)
    assert [row["strategy"] for row in data["rows"]] == ["single", *contenders]
    single, ring, ddp, compressed = data["rows"]
    for row in data["rows"]:
        assert row["bound_s"] == pytest.approx(0.0041)
        assert row["of_bound"] == pytest.approx(row["bound_s"] / row["iteration_s"])
        assert row["batch"] == row["workers"]
    # The same samples and means, to the last bit where nothing is rounded.
    assert ring["replica_sha256"] == ddp["replica_sha256"] != single["replica_sha256"]
    assert compressed["replica_sha256"] != ddp["replica_sha256"]
    assert ring["exposed_comm_s"] > 0
    assert ddp["exposed_comm_s"] is None
    assert ddp["traffic"] == []
    assert "bnd %" in shown


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("tc") is None, reason="a lab needs root and iproute2")
def test_in_a_lab_the_link_is_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("syncline.lab")
    data, _ = compared(
        tmp_path / "layers.csv", tmp_path / "r.json", monkeypatch, strategies=["ring", "ddp"], lab="100mbit"
    )
    goodput = data["goodput_bytes_per_s"]
    assert 0 < goodput < 12.5e6
    single, ring, ddp = data["rows"]
    assert single["bound_s"] == pytest.approx(0.0041)
    assert ring["bound_s"] == ddp["bound_s"] == pytest.approx(4 * 523_008 / max(goodput, 12.5e6 * 1448 / 1514))
    assert ring["replica_sha256"] == ddp["replica_sha256"]
    assert ring["chosen"] == "ring schedule=fixed transport=tcp"
    assert "eth0" in ddp["chosen"]
