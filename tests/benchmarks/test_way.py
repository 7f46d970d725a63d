"""``benchmarks/way`` counts what it says it counts, and names files that are there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import syncline

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(next(iter(syncline.__path__)))
Program = Callable[[str], ModuleType]

TOY = '''"""A head of
two lines."""

import os  # beside code


class Thing:
    """One."""

    def act(self):
        # why
        return [self.twice(number) for number in self.numbers()]

    def numbers(self):
        yield from (1, 2)

    @staticmethod
    def twice(number):
        """Two
        lines."""

        text = """no
        documentation"""
        return 2 * number, text
'''


def test_lines_classes_and_functions_of_a_toy(program: Program, tmp_path: Path) -> None:
    (tmp_path / "toy.py").write_text(TOY)
    found = program("way").read(tmp_path / "toy.py")
    assert dict(found.lines) == {"code": 11, "documentation": 5, "comment": 1, "blank": 7}
    assert found.classes == 1
    assert found.functions == [2, 2, 4]


def test_calls_of_a_toy_and_of_nothing_else(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    names: dict[str, type] = {"__name__": "toy"}
    exec(compile(TOY, str(path), "exec"), names)
    thing = names["Thing"]()
    recorder = program("way").Recorder(tmp_path)
    thing.act()  # before it is on
    (calls,) = recorder.of(lambda: (thing.act(), len(list(map(str, range(3)))))).values()
    # The generator is entered once and goes on twice.
    wanted = {("toy.py", "Thing.act"): 1, ("toy.py", "Thing.numbers"): 3, ("toy.py", "Thing.twice"): 2}
    assert {key: count for key, count in calls.items() if "comp" not in key[1]} == wanted


def test_circles_with_and_without_imports_for_types(program: Program, tmp_path: Path) -> None:
    package = tmp_path / "toy"
    package.mkdir()
    for name, text in {
        "__init__": "from .one import a\n",  # a package hands on what its files define
        "one": "from . import two\na = 1\n",
        "two": "def later():\n    from toy.one import a\n",
        "three": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .four import b\n",
        "four": "from . import three\nb = 1\n",
    }.items():
        (package / f"{name}.py").write_text(text)
    circles = program("way").circles
    assert circles(tmp_path) == [["toy.one", "toy.two"]]
    assert circles(tmp_path, True) == [["toy.four", "toy.three"], ["toy.one", "toy.two"]]


@pytest.mark.deep
def test_the_way_of_a_ring_goes_through_files_that_are_there() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "way"), "ring transport=tcp", "--framework", "numpy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    files = re.findall(r"^ +\d+ +(\d+)  (\S+\.py)$", done.stdout, re.MULTILINE)
    assert {"frameworks/numpy.py", "transports/tcp.py"} <= {name for _, name in files}
    assert all((PACKAGE / name).is_file() for _, name in files)
    total = re.search(r"^all threads: (\d+) files, \d+ functions, (\d+) calls$", done.stdout, re.MULTILINE)
    assert total is not None
    assert int(total[1]) == len({name for _, name in files})
    assert int(total[2]) == sum(int(count) for count, _ in files)
    assert "circles of imports" in done.stdout
