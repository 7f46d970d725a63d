"""The Trainer of Transformers over a process group of Syncline's has DDP's weights."""

from __future__ import annotations

from pathlib import Path

import scripts_of_trainers as scripts

scripts.need("transformers", "accelerate")


def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    """And with a codec nearly."""
    for backend in ("gloo", "syncline"):
        script = scripts.EXAMPLES / "with_transformers.py"
        printed = scripts.run(*scripts.TORCHRUN, script, backend, tmp_path, HF_HUB_OFFLINE="1")
        assert f"2 ranks over {backend}: 12 steps" in printed
    ddp = scripts.weights(tmp_path, "gloo")
    assert scripts.distance(ddp, scripts.weights(tmp_path, "syncline")) < 1e-6
    hooked = Path(__file__).with_name("transformers_hooked.py")
    scripts.run(*scripts.TORCHRUN, hooked, tmp_path, HF_HUB_OFFLINE="1")
    assert 1e-6 < scripts.distance(ddp, scripts.weights(tmp_path, "syncline")) < 0.05
