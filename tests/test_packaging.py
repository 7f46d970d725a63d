"""The wheel has all files of the sources, and works from any folder without them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [*PIP, "wheel", ".", "--no-deps", "--no-build-isolation", "-w", "dist"]
    subprocess.run(build, cwd=folder, check=True, timeout=120)
    (found,) = (folder / "dist").iterdir()
    return found


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_sources(wheel: Path) -> None:
    sources = {path.relative_to(ROOT / "src") for path in (ROOT / "src").rglob("*") if path.is_file()}
    wanted = {path.as_posix() for path in sources if not {"__pycache__", "syncline.egg-info"} & {*path.parts}}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted


@pytest.mark.slow
def test_the_demo_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(installed), str(wheel)], check=True, timeout=120)
    environ = os.environ | {"PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import syncline, syncline_bench; print(syncline.__file__, syncline_bench.__file__)"]
    printed = subprocess.run(where, cwd=empty, env=environ, check=True, capture_output=True, text=True, timeout=60)
    assert all(Path(path).is_relative_to(installed) for path in printed.stdout.split())
    demo = [str(installed / "bin" / "syncline"), "compare", "--workload", "digits", "--workers", "2", "--epochs", "1"]
    demo += ["--strategies", "ring", "--report", "demo.html"]
    ran = subprocess.run(demo, cwd=empty, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "ring" in ran.stdout
    assert "<svg" in (empty / "demo.html").read_text()
