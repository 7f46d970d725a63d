"""The package and its command line start without a framework: seen in a fresh interpreter's modules."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

HEAVY = {
    "torch",
    "triton",
    "tensorflow",
    "jax",
    "numba",
    "llvmlite",
    "matplotlib",
    "sklearn",
    "scipy",
    "pandas",
    "jinja2",
    "mpi4py",
    "grpc",
}


def loaded_by(script: str, limit_s: float = 60) -> set[str]:
    """The top-level modules after running a script."""
    script += "\nimport sys; print('modules:', *{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=limit_s, check=True, env=environment()
    )
    return set(done.stdout.rpartition("modules:")[2].split())


def environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_importing_the_package_loads_no_framework() -> None:
    loaded = loaded_by("import syncline, sys; assert 'syncline.testing' not in sys.modules")
    assert "syncline" in loaded
    assert not loaded & HEAVY


def test_a_training_loads_nothing_of_the_laboratory() -> None:
    """Nor what only the laboratory needs, to print tables and pages."""
    loaded = loaded_by(
        "import syncline, numpy as np\n"
        "class Rule:\n    def update(self, weights, gradient, state): weights -= gradient\n"
        "syncline.init('ring')\n"
        "_, optimizer = syncline.prepare({'w': np.zeros(3, np.float32)}, Rule())\n"
        "optimizer.step({'w': np.ones(3, np.float32)})\nsyncline.shutdown()"
    )
    assert not loaded & {"syncline_bench", "click", "rich", "matplotlib", "jinja2"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["run", "--help"], ["compare", "--help"], ["bench", "--help"]]
)
def test_asking_for_help_loads_not_even_numpy(arguments: list[str]) -> None:
    loaded = loaded_by(
        "import sys\n"
        "from syncline_bench.cli import cli\n"
        f"try: cli({arguments!r}, prog_name='syncline')\n"
        "except SystemExit as end: assert end.code == 0\n"
    )
    assert "click" in loaded
    assert not loaded & (HEAVY | {"numpy", "ml_dtypes", "rich"})


def test_parsing_a_strategy_loads_no_framework() -> None:
    loaded = loaded_by(
        "from syncline.strategy.strategy import Strategy; Strategy.parse('ring')\n"
        "from syncline.strategy.words import vocabulary; vocabulary()\n"
    )
    assert not loaded & HEAVY


def test_every_kind_can_be_listed_without_a_framework() -> None:
    loaded = loaded_by("from syncline import registry\nfor kind in registry.KINDS: registry.entries(kind)")
    assert not loaded & HEAVY


def test_authors_of_parts_need_no_test_framework() -> None:
    loaded = loaded_by("from syncline.testing import check_sync; check_sync('bsp', examples=1)")
    assert not loaded & (HEAVY | {"pytest", "hypothesis"})


@pytest.mark.slow
def test_replayed_networks_are_counted_without_torchs_compiler() -> None:
    """Which takes seconds to import, in every rank."""
    names = "alexnet", "googlenet", "resnet50"
    script = (
        "import sys\nfrom syncline_bench.workloads.replay import replay\n"
        f"for name in {names!r}: assert replay(name).trace.layers\n"
        "assert 'torch._dynamo' not in sys.modules and 'torch.onnx' not in sys.modules"
    )
    assert "torch" in loaded_by(script)


def test_the_local_launcher_loads_no_numpy() -> None:
    assert not loaded_by("import syncline.launch.local") & (HEAVY | {"numpy"})


@pytest.mark.skipif(shutil.which("ld") is None, reason="without a linker llvmlite opens machine code")
def test_compiled_kernels_are_opened_without_a_compiler() -> None:
    script = (
        "import importlib, pkgutil\n"
        "import syncline.kernels as kernels\n"
        "for module in pkgutil.walk_packages(kernels.__path__, f'{kernels.__name__}.'):\n"
        "    if '.cuda' not in module.name and not module.name.endswith('.compiler'):\n"
        "        importlib.import_module(module.name)\n"
    )
    for _ in range(2):  # the first of a machine has them compiled, by another process
        loaded = loaded_by(script, limit_s=600)
        assert not loaded & HEAVY
