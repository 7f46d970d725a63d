"""Comparisons in real processes whose modules are seen: what tests of frameworks share."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.bench import compare, processes

TEST_IMAGES = 360
FRAMEWORKS = {"torch", "tensorflow", "keras", "jax", "optax"}
OWN = {"torch": {"torch"}, "tensorflow": {"tensorflow", "keras"}, "jax": {"jax", "optax"}, "numpy": set()}

SEEN = """
import atexit, os, sys
from pathlib import Path

def tell():
    names = sorted({name.partition(".")[0] for name in sys.modules})
    Path(FOLDER, str(os.getpid())).write_text(" ".join(names))

atexit.register(tell)
from syncline.bench.train import main
main(sys.argv[1])
"""


def compared(
    folder: Path, frameworks: Sequence[str], strategies: Sequence[str], workers: int, **options: Any
) -> tuple[dict[str, Any], list[set[str]], str]:
    """The result file, the top-level modules of every process that a row started, and the page."""
    seen = folder / "seen"
    seen.mkdir()
    script = ("-c", SEEN.replace("FOLDER", repr(str(seen))))
    console = Console(file=io.StringIO(), force_terminal=False, width=120)

    def measured(*arguments: Any, **named: Any) -> Any:
        return processes.measure(*arguments, script=script, **named)

    paths = {"json_path": folder / "r.json", "report_path": folder / "r.html"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "measure", measured)
        options = {"timeout": 200, "console": console, **paths, "framework": list(frameworks), **options}
        status = compare.run("digits", workers, strategies, **options)
    data = json.loads(paths["json_path"].read_text())
    assert [row["error"] for row in data["rows"]] == [None] * len(data["rows"])
    assert status == 0
    return data, modules_of(seen), paths["report_path"].read_text()


def modules_of(folder: Path) -> list[set[str]]:
    """What each process has told."""
    return [set(path.read_text().split()) for path in folder.iterdir()]


def foreign(modules: Sequence[set[str]], framework: str) -> set[str]:
    """What of other frameworks has been imported."""
    return set().union(*modules) & (FRAMEWORKS - OWN[framework])


def check_rows(data: dict[str, Any], framework: str, version: str) -> None:
    """Replicas are equal bit for bit, and within one test image of the single worker."""
    single = data["rows"][0]
    assert single["accuracy"] > 0.97
    for row in data["rows"]:
        assert (row["framework"], row["framework_version"]) == (framework, version)
        assert row["replicas_equal"] is True
        assert row["replica_sha256"] is not None
        assert abs(row["accuracy"] - single["accuracy"]) * TEST_IMAGES <= 1 + 1e-9
