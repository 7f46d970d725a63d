from __future__ import annotations

import pytest

from syncline_bench.report.comparison import Point, Result, Row

NASTY = "tree <script>alert('$x^2$')</script> & \"quoted\" _under %s {brace}"


def measured(strategy: str, workers: int, servers: int = 0, **changes: object) -> Row:
    count = workers + servers
    curve = (
        *(Point(step, step * 0.01, loss=2.0 / step) for step in range(1, 40)),
        Point(20, 0.2, accuracy=0.9, test_loss=0.3),
        Point(39, 0.39, accuracy=0.98, test_loss=0.1),
    )
    values: dict[str, object] = {
        "accuracy": 0.98,
        "loss": 0.1,
        "images_per_s": 6400.0,
        "scaling_efficiency": 1.0 / workers,
        "iteration_s": 0.010,
        "loading_s": 0.0005,
        "h2d_s": 0.0,
        "forward_s": 0.002,
        "backward_s": 0.003,
        "update_s": 0.001,
        "compute_s": 0.0065,
        "exposed_comm_s": 0.0035 if workers > 1 else 0.0,
        "bytes_sent_per_step": 233_000.0 if workers > 1 else 0.0,
        "replicas_equal": True,
        "chosen": f"{strategy} transport=shm" if workers > 1 else strategy,
        "servers": servers,
        "iterations": 39,
        "warmup": 7,
        "batch": 64,
        "curve": curve,
        "traffic": tuple(tuple(float(i != j) * 1000 for j in range(count)) for i in range(count)),
    }
    return Row(strategy, workers, **{**values, **changes})  # type: ignore[arg-type]


def result_of(*rows: Row, cores: int = 2) -> Result:
    versions = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.3.1", "syncline": "0.1.0"}
    return Result(
        "x86_64, a <processor>",
        cores,
        versions,
        "0" * 40,
        workload="digits",
        rows=rows,
        epochs=12,
        started="2026-01-01",
    )


@pytest.fixture(scope="session")
def mixed() -> Result:
    """A baseline, two strategies, one with a text full of markup, and one that failed before it measured anything."""
    return result_of(
        measured("single", 1),
        measured("ring", 4),
        measured("ps(servers=1)", 4, 1),
        measured(NASTY, 4),
        Row("direct", 4, error="worker 2 failed: PeerLost: rank 3 <b>died</b>\nsecond line"),
    )
