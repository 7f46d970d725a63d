"""Keras on PyTorch: a model that is prepared and fitted has the weights of Keras' own loop under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import scripts_of_trainers as scripts

scripts.need("keras")

EXAMPLE = scripts.EXAMPLES / "with_keras.py"


@pytest.mark.deep
def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    """Which is Keras' way of several processes, over Gloo or over Syncline."""
    for backend in ("gloo", "syncline"):
        scripts.run_forked("keras", Path(__file__).with_name("keras_in_ddp.py"), backend, tmp_path)
    ddp = scripts.weights(tmp_path, "gloo-in-ddp")
    assert scripts.distance(ddp, scripts.weights(tmp_path, "syncline-in-ddp")) < 1e-6
    assert "2 ranks with ring" in scripts.run(*scripts.RUN, "--strategy", "ring", EXAMPLE, tmp_path)
    assert scripts.distance(ddp, scripts.weights(tmp_path, "syncline")) < 1e-6
    scripts.run_forked("keras", EXAMPLE, tmp_path, SYNCLINE_STRATEGY="codec=int8")
    assert 1e-6 < scripts.distance(ddp, scripts.weights(tmp_path, "syncline")) < 0.05


def test_what_needs_an_optimizer_of_torch_is_refused() -> None:
    printed = scripts.run_forked("keras", EXAMPLE, status=1, SYNCLINE_STRATEGY="ps(servers=1, on=workers)")
    assert "give syncline.prepare() the model and its optimizer, or use ps(update=worker)" in printed
