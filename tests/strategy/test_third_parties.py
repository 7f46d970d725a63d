"""Parts that other packages bring: they come through entry points, and a broken one keeps nothing from working."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from syncline import registry
from syncline.errors import StrategyError
from syncline.strategy.strategy import Strategy


def install(folder: Path, module: str, source: str | None, points: str) -> None:
    """A package as pip leaves it behind; without its module where ``source`` is None."""
    if source is not None:
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    name = module.replace("_", "-")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)


def python(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with what is installed in a folder."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    return subprocess.run(
        [sys.executable, *command],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_parts_of_third_parties_come_through_entry_points_in_all_threads(tmp_path: Path) -> None:
    source = (
        "import time; time.sleep(0.1)\n"
        "from dataclasses import dataclass\n"
        "from syncline.registry import register\n"
        "@register('codecs', 'half')\n"
        "@dataclass(frozen=True)\n"
        "class Half:\n"
        "    '''Half of everything.'''\n"
        "    biased = False\n"
        "    share: float = 0.5\n"
    )
    install(tmp_path, "their_codec", source, "[syncline.codecs]\nhalf = their_codec\n")
    script = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from syncline.strategy.strategy import Strategy\n"
        "def share(text):\n"
        "    s = Strategy.parse(text)\n"
        "    return f'{s} {s.codec_object().share}'\n"
        "with ThreadPoolExecutor(3) as pool:\n"
        "    print(*pool.map(share, ['ring codec=half(share=0.25)'] * 3), sep=', ')\n"
    )
    done = python(tmp_path, "-c", script)
    assert (done.stdout, done.stderr) == (", ".join(["ring codec=half(share=0.25) 0.25"] * 3) + "\n", "")


def test_a_broken_package_that_asks_for_other_kinds_first_leaves_them_whole(tmp_path: Path) -> None:
    source = "from syncline.strategy.strategy import Strategy\nStrategy.parse('ring')\n1 / 0\n"
    install(tmp_path, "their_late", source, "[syncline.codecs]\nlate = their_late\n")
    script = (
        "from syncline import registry\nfrom syncline.strategy.strategy import Strategy\n"
        "registry.names('codecs')\nprint(Strategy.parse('ring codec=fp16'))\n"
    )
    done = python(tmp_path, "-c", script)
    assert done.stdout.startswith("ring codec=fp16"), done.stderr
    assert "codec 'late' of the package their-late 1.0 cannot be loaded" in done.stderr


def test_an_algorithm_without_a_goal_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.Entry("algorithms", "aimless", registry.get("algorithms", "ring").target)
    monkeypatch.setitem(registry._entries["algorithms"], "aimless", entry)
    with pytest.raises(StrategyError, match=r'@register\("algorithms", "aimless", goal="allreduce"\)'):
        Strategy.parse("aimless")


def test_a_broken_package_is_named_and_keeps_nothing_else_from_working(tmp_path: Path) -> None:
    """Its module is missing, raises, ends the process, or registers what exists or cannot be read: whole or not."""
    register = "from syncline.registry import register\n@register('algorithms', '{0}', goal='allreduce')\n"
    part = register + "def {0}({1}): ...\n"
    broken = {
        "gone": None,
        "raises": part.format("half_there", "group") + "1 / 0\n",
        "exits": "raise SystemExit(3)\n",
        "taken": part.format("ring", "group"),
        "untyped": part.format("untyped", "group, *, x: 'Nowhere' = 1"),
    }
    for name, source in broken.items():
        install(tmp_path, f"their_{name}", source, f"[syncline.algorithms]\n{name} = their_{name}\n")
    install(tmp_path, "their_good", part.format("good", "group"), "[syncline.algorithms]\ngood = their_good\n")
    done = python(tmp_path, "-m", "syncline", "strategies")
    assert done.returncode == 0, done.stderr
    warnings = done.stderr.splitlines()
    assert len(warnings) == len(broken)
    for name, line in zip(sorted(broken), warnings, strict=True):
        assert re.match(f"syncline: algorithm '{name}' of the package their-{name} 1.0 cannot be loaded", line)
    assert "\n  good\n" in done.stdout
    assert "\n  ring\n      " in done.stdout  # the one that has a summary
    assert "half_there" not in done.stdout
    script = (
        "from syncline.strategy.strategy import Strategy\n"
        "try: Strategy.parse('raises')\n"
        "except ValueError as error: print(error)\n"
    )
    said = python(tmp_path, "-c", script).stdout
    assert "of the package their-raises 1.0 cannot be loaded (ZeroDivisionError: division by zero)" in said
