"""The wheel, built from the sdist, has all files of the sources, and works from any folder without them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from syncline import torch_backend
from syncline.frameworks import torch as of_torch

ROOT = Path(__file__).resolve().parent.parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since a build leaves files beside the sources."""
    folder = tmp_path_factory.mktemp("sdist")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    for name in ("src", "docs", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True, capture_output=True, timeout=120)
    (found,) = (folder / "dist").iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist alone, as pip does for those who install from it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", str(sdist), "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run(build, check=True, timeout=120)
    (found,) = folder.iterdir()
    return found


def test_every_extra_is_explained() -> None:
    """In the table for those who install."""
    extras = re.search(
        r"^\[project.optional-dependencies\]\n(.*?)^\[", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    table = (
        (ROOT / "docs/how-to/running.md").read_text().partition("| extra | for |\n|---|---|\n")[2].partition("\n\n")[0]
    )
    assert extras
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row)]
    assert set(re.findall(r"^(\w+) = ", extras[1], re.M)) <= set(named)


def test_changes_are_told_as_a_release_collects_them() -> None:
    """Each file has a name of its own and a known type, which towncrier would else leave out, and is one list item."""
    types = re.findall(r"^    \{ directory = \"(\w+)\"", (ROOT / "pyproject.toml").read_text(), re.M)
    assert types == ["added", "changed", "fixed", "removed"]
    for path in (ROOT / "changes").iterdir():
        if path.name != "README.md":
            assert re.fullmatch(rf"\+[\w-]+\.({'|'.join(types)})\.md", path.name), path.name
            assert re.fullmatch(r"[^*#\s-][^\n]*(\n[^\n]+)*\n", path.read_text()), path.name


def test_there_is_one_oldest_pytorch() -> None:
    """In the requirements, and in both checks."""
    required = re.findall(r"\btorch>=([\d.]+)", (ROOT / "pyproject.toml").read_text())
    assert {*required} == {".".join(map(str, oldest)) for oldest in (of_torch.OLDEST, torch_backend.OLDEST)}


@pytest.mark.slow
def test_the_sdist_has_what_readme_leads_to(sdist: Path) -> None:
    """Pages, examples and licence, and no test alone without the others."""
    with tarfile.open(sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    links = re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", (ROOT / "README.md").read_text())
    assert {"LICENSE", "SECURITY.md", "docs/index.md", "benchmarks/performance.md"} <= set(links)
    assert {*links, "examples/train.py", "src/syncline/py.typed"} <= found
    assert not [name for name in found if name.startswith("tests") or name.endswith(".pyc")]


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
