"""The Trainer of Transformers over a process group of Syncline's has DDP's weights."""

from __future__ import annotations

from pathlib import Path

import scripts_of_trainers as scripts

scripts.need("transformers", "accelerate")


def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    for backend in ("gloo", "syncline"):
        script = scripts.EXAMPLES / "with_transformers.py"
        printed = scripts.run(*scripts.TORCHRUN, script, backend, tmp_path, HF_HUB_OFFLINE="1")
        assert f"2 ranks over {backend}: 12 steps" in printed
    assert scripts.distance(scripts.weights(tmp_path, "gloo"), scripts.weights(tmp_path, "syncline")) < 1e-6
