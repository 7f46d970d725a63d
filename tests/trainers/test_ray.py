"""Ray Train with ``TorchConfig(backend="syncline")`` has DDP's weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import scripts_of_trainers as scripts

scripts.need("ray", "pyarrow")


def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # a socket's path may not be long
        for backend in ("gloo", "syncline"):
            printed = scripts.run(
                scripts.EXAMPLES / "with_ray.py",
                backend,
                tmp_path,
                RAY_TMPDIR=short,
                RAY_USAGE_STATS_ENABLED="0",
                RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # everything at 127.0.0.1
                SYNCLINE_STRATEGY="tree",
            )
            assert f"2 ranks over {backend}: loss" in printed
    assert scripts.distance(scripts.weights(tmp_path, "gloo"), scripts.weights(tmp_path, "syncline")) < 1e-6
