"""The whole way for replayed layers: real processes, Syncline and DistributedDataParallel on the same trace."""

from __future__ import annotations

import io
import json
import os
import shutil
from typing import Any

import pytest
from rich.console import Console

from syncline_bench import compare

pytest.importorskip("torch")

LAYERS = """name,elements,forward_s,backward_s
conv1,3001,0.0005,0.001
pool,0,0.0002,0.0002
conv2,20000,0.0005,0.001
fc,500007,0.0002,0.0005
"""


IN_A_LAB = os.geteuid() == 0 and shutil.which("tc") is not None
CONTENDERS = ("ring", "ddp(bucket=1MiB)", "ddp(hook=bf16)")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The result file of ten iterations on two workers, in a lab where there can be one, and what was printed."""
    folder = tmp_path_factory.mktemp("replay")
    trace, path, output = folder / "layers.csv", folder / "r.json", io.StringIO()
    console = Console(file=output, force_terminal=False, width=80)
    trace.write_text(LAYERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "console_beside", lambda *_: console)
        lab = "100mbit" if IN_A_LAB else None
        workload = f"trace:{trace}(loading=2ms, h2d=1ms, prefetch=2)"
        status = compare.run(
            workload, 2, CONTENDERS, iterations=10, json_path=path, timeout=120, console=console, lab=lab
        )
    data = json.loads(path.read_text())
    assert [row["error"] for row in data["rows"]] == [None] * len(data["rows"])
    assert all(row["replicas_equal"] for row in data["rows"])
    assert status == 0
    return data, output.getvalue()


@pytest.mark.slow
def test_ring_and_ddp_learn_the_same_from_one_trace(compared: tuple[dict[str, Any], str]) -> None:
    data, shown = compared
    assert [row["strategy"] for row in data["rows"]] == ["single", *CONTENDERS]
    single, ring, ddp, compressed = data["rows"]
    for row in data["rows"]:
        assert row["of_bound"] == pytest.approx(row["bound_s"] / row["iteration_s"])
        assert row["batch"] == row["workers"]
        assert row["bound_s"] == pytest.approx(0.0041 + 0.001) or (IN_A_LAB and row is not single)
        assert row["h2d_s"] >= 0.001
    # The same samples and means, to the last bit where nothing is rounded.
    assert ring["replica_sha256"] == ddp["replica_sha256"] != single["replica_sha256"]
    assert compressed["replica_sha256"] != ddp["replica_sha256"]
    assert ring["exposed_comm_s"] > 0
    assert ddp["exposed_comm_s"] is None
    assert ddp["traffic"] == []
    assert "bnd %" in shown


@pytest.mark.slow
@pytest.mark.skipif(not IN_A_LAB, reason="a lab needs root and iproute2")
def test_in_a_lab_the_link_is_the_bound(compared: tuple[dict[str, Any], str]) -> None:
    data, _ = compared
    goodput = data["goodput_bytes_per_s"]
    assert 0 < goodput < 12.5e6
    _, ring, ddp, compressed = data["rows"]
    link = max(goodput, 12.5e6 * 1448 / 1514)
    assert ring["bound_s"] == ddp["bound_s"] == compressed["bound_s"] == pytest.approx(4 * 523_008 / link)
    assert ring["chosen"] == "ring schedule=fixed transport=tcp"
    assert "eth0" in ddp["chosen"]
