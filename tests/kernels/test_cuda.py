"""What Triton makes of the kernels for a GPU: seen in their PTX, compiled without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 300
pytestmark = pytest.mark.deep
# Packing, sums, division, roots, counting, settling, and conditions on arguments: what the others are made of too.
CODECS = ["onebit", "qsgd", "ternary", "randomk(ratio=0.01)"]
SCATTERED = {"_clear", "_take", "_spread"}
"""Kernels that touch elements here and there."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """How often each instruction occurs in each kernel."""
    if find_spec("triton") is None:
        pytest.skip("kernels for GPUs need Triton")
    environment: dict[str, Any] = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    environment.pop("TRITON_INTERPRET", None)
    program = Path(__file__).with_name("compile_cuda.py")
    done = subprocess.run(
        [sys.executable, str(program), *CODECS], env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {row["kernel"]: row["ptx"] for row in rows}


def test_every_codec_has_both_directions(kernels: dict[str, dict[str, int]]) -> None:
    for direction in (("_encode", "_take"), ("_decode", "_spread")):
        assert {name.split()[0] for name in kernels if name.split()[1] in direction} == set(CODECS)


def test_floating_point_arithmetic_is_that_of_the_host(kernels: dict[str, dict[str, int]]) -> None:
    """Nothing fused, approximate or flushed to zero: each operation says that it rounds to nearest."""
    for name, counts in kernels.items():
        for instruction in counts:
            operation, *modifiers = instruction.split(".")
            assert operation != "fma", name
            assert not {"approx", "full", "ftz"} & set(modifiers), (name, instruction)
            if operation in ("add", "sub", "mul", "div", "sqrt") and "f32" in modifiers:
                assert "rn" in modifiers, (name, instruction)


def test_whole_blocks_are_read_and_written_several_elements_at_once(kernels: dict[str, dict[str, int]]) -> None:
    for name, counts in kernels.items():
        kernel = name.split()[1]
        if kernel in SCATTERED:
            continue
        for access in ("ld.global",) if kernel == "_count" else ("ld.global", "st.global"):
            assert any(instruction.startswith(f"{access}.v") for instruction in counts), (name, access)
