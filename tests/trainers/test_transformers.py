"""The Trainer of Transformers over a process group of Syncline's has DDP's weights."""

from __future__ import annotations

from pathlib import Path

import scripts_of_trainers as scripts

scripts.need("transformers", "accelerate")


def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    """And with a codec nearly."""
    example = scripts.EXAMPLES / "with_transformers.py"
    printed = scripts.run(*scripts.TORCHRUN, example, "syncline", tmp_path)
    assert "2 ranks over syncline: 12 steps" in printed
    found = scripts.weights(tmp_path, "syncline")
    assert "2 ranks over gloo: 12 steps" in scripts.run_forked("transformers", example, "gloo", tmp_path)
    ddp = scripts.weights(tmp_path, "gloo")
    assert scripts.distance(ddp, found) < 1e-6
    scripts.run_forked("transformers", Path(__file__).with_name("transformers_hooked.py"), tmp_path)
    assert 1e-6 < scripts.distance(ddp, scripts.weights(tmp_path, "syncline")) < 0.05
