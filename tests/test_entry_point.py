"""What ``import torch`` does in an environment that has the package: it never fails, whatever is broken of ours.

A torch of a few lines loads entry points as torch does, so that every case is a fresh interpreter in a fraction of a
second. Without the folders of installed packages (``-S``) nothing else can be found: no NumPy, no Numba.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import syncline

SOURCE = Path(next(iter(syncline.__path__)))
ROOT = Path(__file__).resolve().parent.parent

TORCH = """
from importlib.metadata import entry_points

for extension in entry_points(group="torch.backends"):
    try:
        extension.load()()
    except Exception as error:
        raise RuntimeError(f"Failed to load the backend extension: {extension.name}") from error
"""

DISTRIBUTED = """
def is_available():
    return True

class Backend:
    backend_list = ["gloo"]

    @classmethod
    def register_backend(cls, name, func, extended_api=False, devices=None):
        cls.backend_list.append(name)
"""

TOO_OLD = DISTRIBUTED.replace(", extended_api=False, devices=None", "")


def declared() -> str:
    """The entry points that an installation of this source gets."""
    found = re.search(r'entry-points\."torch\.backends"\]\nsyncline = "(.+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return f"[torch.backends]\nsyncline = {found[1]}\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder of installed packages: ours, whole, and a torch."""
    shutil.copytree(SOURCE, tmp_path / "syncline", ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    for module in SOURCE.parent.glob("*.py"):
        shutil.copy(module, tmp_path)
    package = tmp_path / "syncline-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: syncline\nVersion: 1\n")
    (package / "entry_points.txt").write_text(declared())
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "distributed.py").write_text(DISTRIBUTED)
    return tmp_path


def imported(installed: Path, *options: str, script: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run what imports torch and then says which backends it knows."""
    program = "import torch, torch.distributed as dist; print(*dist.Backend.backend_list)"
    return subprocess.run(
        [sys.executable, "-S", *options, *(["-c", program] if script is None else [str(script)])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=installed,
        env=os.environ | {"PYTHONPATH": str(installed)},
    )


def written(name: str, text: str) -> Callable[[Path], None]:
    def write(installed: Path) -> None:
        (installed / name).write_text(text)

    return write


def gone(name: str) -> Callable[[Path], None]:
    def remove(installed: Path) -> None:
        path = installed / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


def unreadable(installed: Path) -> None:
    """A folder where a file should be, which not even the root user can read."""
    gone("syncline/version.py")(installed)
    (installed / "syncline" / "version.py").mkdir()


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no package": (gone("syncline"), "syncline"),
    "no module": (gone("syncline/torch_backend"), "torch_backend"),
    "no version": (gone("syncline/version.py"), "version"),
    "unreadable": (unreadable, "version"),
    "a package that is no Python": (written("syncline/__init__.py", "import ("), "SyntaxError"),
    "a module that is no Python": (written("syncline/torch_backend/__init__.py", "\0"), "null bytes"),
    "a torch that is too old": (written("torch/distributed.py", TOO_OLD), "TypeError"),
    "a torch without groups": (gone("torch/distributed.py"), "torch.distributed"),
}
"""What can be wrong, and a word of what is said of it."""


@pytest.mark.parametrize("options", [(), ("-W", "error")], ids=["warns", "warnings are errors"])
@pytest.mark.parametrize("case", BROKEN)
def test_torch_can_be_imported_whatever_is_broken(installed: Path, case: str, options: tuple[str, ...]) -> None:
    spoil, word = BROKEN[case]
    spoil(installed)
    script = written("script.py", "import torch\nprint('imported')\n")
    script(installed)
    done = imported(installed, *options, script=installed / "script.py")
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
    assert done.stderr.count("the backend syncline of torch.distributed is not there: ") == 1, done.stderr
    assert word in done.stderr


def test_a_script_of_the_same_name_is_not_run_again(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its folder comes first where modules are looked for."""
    script = tmp_path_factory.mktemp("scripts") / "syncline.py"
    script.write_text("import torch\nprint('run')\n")
    done = imported(installed, script=script)
    assert (done.returncode, done.stdout) == (0, "run\n"), done.stderr
    assert f"{script}" in done.stderr


def test_nothing_that_the_package_needs_is_needed_here(installed: Path) -> None:
    for name in ("numpy", "numba", "ml_dtypes", "click", "rich"):
        written(f"{name}.py", "raise ImportError('it is broken')\n")(installed)
    done = imported(installed)
    assert (done.returncode, done.stdout, done.stderr) == (0, "gloo syncline\n", "")


def test_an_interpreter_that_imports_the_package_after_torch_is_told_too(installed: Path) -> None:
    """Without the entry point, as where torch's loading of them is switched off."""
    gone("syncline-1.dist-info")(installed)
    written("torch/distributed.py", TOO_OLD)(installed)
    written("script.py", "import torch, syncline\nprint(syncline.__version__)\n")(installed)
    done = imported(installed, script=installed / "script.py")
    assert (done.returncode, done.stdout.strip()) == (0, syncline.__version__), done.stderr
    assert "is not there: TypeError" in done.stderr
