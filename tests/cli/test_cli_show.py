"""What show draws, and what strategies lists."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from calling import call

from syncline.nouns import Group
from syncline.strategy.grammar import read_part
from syncline.strategy.words import PRESETS, build

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nccl", "did you mean 'native transport=torch(backend=nccl)'?"),
        ("ddp", "did you mean 'auto'?"),
        ("bsp", "it is a sync, write sync=bsp"),
    ],
)
def test_show_understands_what_others_call_it(name: str, says: str) -> None:
    result = call("show", name)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize(
    ("line", "group"),
    [
        ("show ring", (4, 0, ())),
        ("show ring --ranks 3", (3, 0, ())),
        ("show hierarchical --nodes 2x2", (4, 0, (0, 0, 1, 1))),
        ("show hierarchical --nodes 1,2", (3, 0, (0, 1, 1))),
        ("show ps --servers 2 --ranks 3", (3, 2, ())),
        ("show ps(servers=2,on=workers) --ranks 3", (3, 0, ())),
        ("show broadcast --ranks 5", (5, 0, ())),
        ("show reduce-scatter --ranks 3", (3, 0, ())),
        ("show ring,transport=tcp --ranks 3", (3, 0, ())),
    ],
)
def test_show_draws_the_plan_for_the_group(
    monkeypatch: pytest.MonkeyPatch, line: str, group: tuple[int, int, tuple[int, ...]]
) -> None:
    module: Any = types.ModuleType("syncline_bench.report.plan_drawing")
    module.draw_plan = lambda plan: f"{plan.name} of {plan.world} in {plan.steps} steps"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    from syncline import registry
    from syncline.nouns import Group

    result = call(*(word.replace(",t", " t") for word in line.split()))
    assert result.exit_code == 0, result.output
    name = line.split()[1].partition("(")[0].partition(",")[0].replace("-", "_")
    assert result.output.startswith(f"{name} of {group[0] + group[1]} in ")
    assert registry.get("algorithms", name).target(Group(*group)).steps if name != "ps" else True


def test_a_preset_is_drawn_as_what_it_stands_for() -> None:
    assert call("show", "mxnet", "--ranks", "3").output == call("show", "ps(servers=1)", "--ranks", "3").output


def test_strategies_lists_the_presets_with_what_they_stand_for() -> None:
    _, _, listed = call("strategies").output.partition("\npresets\n")
    for preset in PRESETS.values():
        noted = f"; {preset.note}" if preset.note else ""
        assert f"  {preset.name}\n      {preset.text}{noted}\n      {preset.summary} [" in listed


def test_strategies_lists_every_word() -> None:
    result = call("strategies")
    assert result.exit_code == 0
    for word in ("architecture", "sync", "codec", "schedule", "transport"):
        assert f"\n{word}\n" in f"\n{result.output}"
    assert "fixed(bucket=25MiB)" in result.output
    for block in re.split(r"^(?=\w)", result.output, flags=re.MULTILINE)[1:]:
        words = [line.strip() for line in block.splitlines() if re.match(r"  \S", line)]
        names = [word.partition("(")[0] for word in words]
        assert len(names) == len(set(names)), block


@pytest.mark.parametrize(("algorithm", "options"), [("ring", ["--ranks", "4"]), ("ps(servers=2)", ["--ranks", "3"])])
def test_a_picture_has_an_arrow_and_a_label_for_every_transfer(
    tmp_path: Path, algorithm: str, options: list[str]
) -> None:
    """Equal ones to one rank in one step share a label. Copies are dashed, and no label is cut. What was there is
    replaced.
    """
    target = tmp_path / "plan.svg"
    target.write_text("old")
    assert call("show", algorithm, *options, "--svg", str(target)).output == ""
    picture = ElementTree.parse(target).getroot()
    lines = [path for path in picture.iter(f"{SVG}path") if path.get("stroke-width")]
    texts = [text for text in picture.iter(f"{SVG}text") if str(text.text)[0] in "+="]
    found = [re.findall(r"([+=]\S+)(?: x(\d+))?", str(text.text)) for text in texts]
    labels = [label for one in found for label, count in one for _ in range(int(count or 1))]
    assert all(int(text.get("x", 0)) + 7 * len(str(text.text)) < int(picture.get("width", 0)) for text in texts)
    group = Group(4) if algorithm == "ring" else Group(3, 2)
    plan = build("algorithms", read_part(algorithm), group)
    assert len(lines) == len(labels) == len(plan)
    copies = sum(transfer.op == "copy" for transfer in plan)
    assert sum(line.get("stroke-dasharray") is not None for line in lines) == copies
    assert sum(label.startswith("=") for label in labels) == copies


def test_a_picture_that_nobody_could_read_is_refused(tmp_path: Path) -> None:
    found = call("show", "ring", "--ranks", "64", "--svg", str(tmp_path / "plan.svg"))
    assert found.exit_code == 2
    assert "too dense to read" in found.output
    assert not list(tmp_path.iterdir())
