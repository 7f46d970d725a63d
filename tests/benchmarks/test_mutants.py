"""``benchmarks/mutants`` puts one fault at a time into a copy of a tree, and says which tests were lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOY = '''
def more(one: int = 3) -> int:
    """Words stay, 1 < 2."""
    if one < 2 and one:
        raise ValueError(f"{one} < 2")
    print(one + 5)
    return one
'''


def test_each_fault_replaces_one_text_of_a_function(program: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(f"LEFT = 1 < 2\n{TOY}")
    found = program("mutants").faults_of(tmp_path, "toy.py")
    assert [(fault.before, fault.after) for fault in found] == [
        ("3", "(4)"),
        ("one < 2 and one", "(not (one < 2 and one))"),
        ("one < 2 and one", "(one < 2 or one)"),
        ("one < 2", "(one <= 2)"),
        ("2", "(3)"),
        ('raise ValueError(f"{one} < 2")', "pass"),
        ("print(one + 5)", "pass"),
        ("one + 5", "(one - 5)"),
        ("5", "(6)"),
        ("return one", "return None"),
    ]
    assert {fault.function for fault in found} == {"more"}
    assert [line for line, _, _ in found.values()] == [3, 5, 5, 5, 5, 6, 7, 7, 7, 8]


@pytest.mark.slow
def test_a_fault_that_a_weaker_test_misses_is_named(tmp_path: Path) -> None:
    for folder in ("src/syncline/toy", "tests/toy"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src/syncline/__init__.py").touch()
    (tmp_path / "src/syncline/toy/sum.py").write_text("def add(one, two):\n    return one + two\n")
    test = tmp_path / "tests/toy/test_sum.py"

    def run(claim: str, *arguments: str) -> tuple[int, str]:
        test.write_text(f"from syncline.toy.sum import add\ndef test_sum():\n    assert {claim}\n")
        command = [sys.executable, str(ROOT / "benchmarks" / "mutants"), "--tree", ".", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stdout + done.stderr

    status, said = run("add(1, 2) == 3", "toy")
    assert (status, said.splitlines()[-1]) == (0, "2 faults: 2 caught")
    (tmp_path / "src/syncline/toy/sum.py").write_text("# Other code moves.\ndef add(one, two):\n    return one + two\n")
    status, said = run("add(1, 2)", "--again", "mutants.json")
    assert status == 1
    assert "was caught, survives: syncline/toy/sum.py add: one + two -> (one - two)" in said

    def verdicts(result: str) -> dict[str, str]:
        return {one["fault"][3]: one["verdict"] for one in json.loads((tmp_path / result).read_text())["faults"]}

    assert verdicts("mutants.json") == {"return None": "caught", "(one - two)": "caught"}
    assert verdicts("mutants-again.json") == {"return None": "caught", "(one - two)": "survived"}
    status, said = run("add(1, 2)", "--again", "mutants.json", "--json", "mutants.json")
    assert status == 2
    assert "choose another file" in said
