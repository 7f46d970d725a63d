"""``benchmarks/same`` finds a change of the mathematics and nothing else, and lists what a side's words allow for."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import syncline
from syncline import registry

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(next(iter(syncline.__path__))).parent
Program = Callable[[str], ModuleType]


def walked(there: Path, only: str) -> tuple[int, str]:
    """The exit status and the summary of a walk of some combinations against a tree."""
    command = [sys.executable, str(ROOT / "benchmarks" / "same"), str(there), "--only", only]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout, done.stderr
    return done.returncode, done.stdout


@pytest.mark.deep
def test_a_codec_that_rounds_otherwise_differs_and_others_do_not(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    path = Path(inspect.getsourcefile(registry.get("codecs", "int8").target) or "").relative_to(SOURCE)
    text = (tmp_path / "src" / path).read_text()
    planted = text.replace("block: int = 1024", "block: int = 512")
    assert planted != text
    (tmp_path / "src" / path).write_text(planted)
    status, found = walked(tmp_path, "numpy descent: ring codec=int")
    assert status == 1
    assert "1 equal" in found
    assert "1 DIFFER" in found
    assert "DIFFER:\n  numpy descent: ring codec=int8\n      weights of ranks 0, 1, 2;" in found


@pytest.mark.deep
def test_a_tree_does_not_differ_from_itself() -> None:
    status, found = walked(ROOT, "numpy resumed: sync=asp")
    assert status == 0, found
    assert "1 equal" in found


LISTING = """architecture
  ring
      Around.
  ps(servers=1, on=ranks)
      Servers.
sync
  asp(rate=shared)
      By itself.
codec
  strange(how=...)
      An argument that nobody has heard of.
  topk(ratio=...)
      Some.
schedule
  fifo
      Late.
transport
  tcp(rate=none, delay=0s)
      Far.
  not built yet: ucx
presets
  old
      ps(servers=3) schedule=fifo; as it was
      Words.
"""


def test_words_are_spelled_with_what_they_need_and_with_other_arguments(program: Program) -> None:
    program("same")
    words = sys.modules["combinations"].Words.read(LISTING)
    assert words.plain["architecture"] == ["ring", "ps(servers=2)"]
    assert words.others["architecture"] == ["ps(servers=2, on=workers)"]
    assert words.plain["codec"] == ["strange(how=?)", "topk(ratio=0.1)"]
    assert words.plain["transport"] == ["tcp"]
    assert words.presets == {"old": "ps(servers=3) schedule=fifo"}


def test_every_pair_of_words_is_in_a_combination_and_one_that_is_gone_changes_no_other(program: Program) -> None:
    program("same")
    module = sys.modules["combinations"]
    scenarios = {key: ["plain", "resumed"] for key in ("torch", "numpy", "jax", "tensorflow", "distributed")}

    def listed(listing: str) -> dict[str, Any]:
        return {str(made): made for made in module.combinations(module.Words.read(listing), scenarios)}

    found = listed(LISTING)
    words = ["ring", "ps(servers=2)", "sync=asp", "codec=topk(ratio=0.1)", "schedule=fifo"]
    for one in words:
        for two in words[2:]:
            assert any(one in name.split(": ")[1] and two in name for name in found), (one, two)
    assert found["torch plain: old"].servers == 3
    assert found["torch plain: ps(servers=2)"].servers == 2
    assert found["torch plain: ps(servers=2, on=workers)"].servers == 0
    assert found["torch plain: ps(servers=2) sync=asp"].turns
    assert not found["torch plain: ps(servers=2)"].turns
    less = listed(LISTING.replace("  topk(ratio=...)\n      Some.\n", ""))
    assert set(less) == {name for name in found if "topk" not in name}


STEADY = {"kind": "trained", "digests": [{"weights": "a"}, {"weights": "a"}]}
OTHER = {"kind": "trained", "digests": [{"weights": "a"}, {"weights": "b"}]}
REFUSED = {"kind": "refused", "text": "UsageError: no"}
DEAD = {"kind": "failed", "text": "ranks [1] died"}


@pytest.mark.parametrize(
    ("here", "there", "kind", "text"),
    [
        ([STEADY] * 3, [OTHER] * 3, "differs", "weights of ranks 1"),
        ([STEADY] * 3, [OTHER, STEADY, OTHER], "unsteady", "there, from one run to the next: weights of ranks 1"),
        ([STEADY, STEADY, OTHER], [STEADY] * 3, "differs", "here from one run to the next: weights of ranks 1"),
        ([REFUSED] * 3, [STEADY] * 3, "lost", "here refused: UsageError: no"),
        ([STEADY] * 3, [REFUSED] * 3, "new", "there refused: UsageError: no"),
        ([DEAD] * 3, [DEAD] * 3, "failed", "ranks [1] died"),
        ([DEAD] * 3, [REFUSED] * 3, "differs", "failed ranks [1] died; refused UsageError: no"),
    ],
)
def test_ends_that_are_not_alike(program: Program, here: Any, there: Any, kind: str, text: str) -> None:
    same = program("same")
    made = sys.modules["combinations"].Combination("torch", "plain", "ring")
    verdict = same.weigh(made, here, there)
    assert (verdict.kind, verdict.text) == (kind, text)
