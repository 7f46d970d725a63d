"""Ray Train with ``TorchConfig(backend="syncline")`` has DDP's weights."""

from __future__ import annotations

import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest
import scripts_of_trainers as scripts

scripts.need("ray", "pyarrow")


@pytest.mark.deep
def test_the_weights_are_those_of_ddp(tmp_path: Path) -> None:
    assert "2 ranks over syncline: loss" in with_ray("syncline", tmp_path)
    scripts.run_forked("ray", Path(__file__).with_name("ray_in_ddp.py"), "gloo", tmp_path)
    assert scripts.distance(scripts.weights(tmp_path, "gloo"), scripts.weights(tmp_path, "syncline")) < 1e-6


@pytest.mark.deep
def test_ray_starts_workers_again_that_go_on_at_their_checkpoint(tmp_path: Path) -> None:
    """The step that broke is repeated. Ray itself has no elastic run to offer."""
    run_ray(Path(__file__).with_name("ray_restarted.py"), tmp_path)
    assert (tmp_path / "lost").exists()
    assert (tmp_path / "steps").read_text().splitlines() == [f"{step} syncline" for step in range(5)]
    assert "lets no run go on when a worker is lost: start it with syncline run" in (tmp_path / "refused").read_text()


def with_ray(backend: str, folder: Path) -> str:
    """What the example prints."""
    return run_ray(scripts.EXAMPLES / "with_ray.py", backend, folder, SYNCLINE_STRATEGY="tree")


def run_ray(*arguments: Any, **environment: str) -> str:
    """What a script prints; where it does not end, what Ray's processes have said, which only its own files know."""
    with tempfile.TemporaryDirectory(prefix="ray-") as short:  # a socket's path may not be long
        try:
            return scripts.run(
                *arguments,
                RAY_TMPDIR=short,
                RAY_AUTH_TOKEN=uuid.uuid4().hex,  # none is left in the user's home
                RAY_USAGE_STATS_ENABLED="0",
                RAY_worker_niceness="0",  # not behind the other tests, for minutes
                RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # everything at 127.0.0.1
                **environment,
            )
        except (subprocess.TimeoutExpired, AssertionError) as error:
            raise AssertionError(f"{error}\n{_logs(Path(short))}") from error


def _logs(folder: Path) -> str:
    files = sorted((folder / "ray" / "session_latest" / "logs").rglob("*"), key=lambda file: file.stat().st_mtime)
    ends = {file.name: file.read_text(errors="replace")[-1000:] for file in files if file.is_file()}
    return "\n".join(f"--- {name}\n{end}" for name, end in ends.items() if end)
