"""Accelerate over a process group of Syncline's: DDP's weights, its hook, and models that have two owners."""

from __future__ import annotations

from pathlib import Path

import scripts_of_trainers as scripts

scripts.need("accelerate")

EXAMPLE = scripts.EXAMPLES / "with_accelerate.py"
SCRIPT = Path(__file__).with_name("accelerate_otherwise.py")


def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    """With gradients that are accumulated, and clipped."""
    printed = scripts.run(*scripts.TORCHRUN, EXAMPLE, "syncline", tmp_path)
    assert "2 ranks over syncline: loss" in printed
    found = scripts.weights(tmp_path, "syncline")
    for backend, strategy in (("gloo", ""), ("syncline", "ring transport=tcp")):
        printed = scripts.run_forked("accelerate", EXAMPLE, backend, tmp_path, SYNCLINE_STRATEGY=strategy)
        assert f"2 ranks over {backend}: loss" in printed
    ddp = scripts.weights(tmp_path, "gloo")
    assert scripts.distance(ddp, found) < 1e-6
    assert scripts.distance(ddp, scripts.weights(tmp_path, "syncline")) < 1e-6


def test_a_hook_compresses_what_it_has_wrapped(tmp_path: Path) -> None:
    for how in ("plain", "hook"):
        scripts.run_forked("accelerate", SCRIPT, how, tmp_path)
    assert 1e-6 < scripts.distance(scripts.weights(tmp_path, "plain"), scripts.weights(tmp_path, "hook")) < 0.05


def test_a_model_is_either_its_own_or_that_of_prepare(tmp_path: Path) -> None:
    printed = scripts.run_forked("accelerate", SCRIPT, "both", tmp_path, status=1)
    assert "UsageError: the model is wrapped in DistributedDataParallel" in printed
    assert "GradientError: " in printed
    assert "given to syncline.prepare() and then to DistributedDataParallel (Accelerate and Trainers do" in printed


def test_a_backend_that_it_does_not_know_is_not_just_left_out(tmp_path: Path) -> None:
    """Named as the backend it is refused by Accelerate itself, which says nothing of a way round."""
    printed = scripts.run_forked("accelerate", SCRIPT, "named", tmp_path, status=1)
    assert "backend syncline is not available" in printed


def test_a_group_that_is_made_after_it_is_refused_by_torch(tmp_path: Path) -> None:
    """As docs/how-to/trainers.md says first: it has one over Gloo by then."""
    printed = scripts.run_forked("accelerate", SCRIPT, "late", tmp_path, status=1)
    assert "it has made a group over gloo" in printed
    assert "trying to initialize the default process group twice" in printed
