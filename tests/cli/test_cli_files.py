"""Files that a verb shall write: a verb that cannot write them says so before it does any of its work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from calling import call
from click.testing import Result

from syncline_bench.cli import cli

WORK = {
    "run": (["-n", "2", "{script}"], "syncline.launch.local.launch"),
    "compare": (["--workers", "2", "--strategies", "ring"], "syncline_bench.compare.carry_out"),
    "accuracy": (["--workers", "2", "--strategies", "ring"], "syncline_bench.accuracy.carry_out"),
    "bench collectives": (["--ranks", "2"], "syncline_bench.collectives.collective_bench.measure"),
    "bench codecs": ([], "syncline_bench.codecs.codec_bench.measure"),
    "bench gradients": ([], "syncline_bench.gradients.gradient_bench.measure"),
    "bench steps": ([], "syncline_bench.steps.step_bench.measure"),
    "calibrate": ([], "syncline_bench.calibration.command._start"),
    "doctor": ([], "syncline_bench.doctor.command.examined"),
    "predict": (
        ["--workload", "googlenet", "--workers", "2", "--network", "ethernet_1g"],
        "syncline_bench.predict.rows.predict",
    ),
    "record": (["{script}"], "syncline.frameworks.torch.timing.Recording.__enter__"),
    "reproduce": ([], "syncline_bench.reproduction.page.page"),
    "tune": (["--workers", "2"], "syncline_bench.tuner.search.Course"),
    "timeline": (["{folder}"], "syncline.timeline.folder.write_all"),
    "flight": (["{script}"], "syncline.timeline.flight.load"),
    "explain": (["{script}"], "syncline_bench.explain.command.explain"),
    "show": (["ring"], "syncline.strategy.words.build"),
}
"""Of every verb that writes files: arguments with which it works, and what does the work."""


def outputs() -> list[tuple[str, str]]:
    """Every option of every verb that names a file, but those that are read."""
    found = []
    commands = {verb: command for verb, command in cli.commands.items() if not isinstance(command, click.Group)}
    for group, command in cli.commands.items():
        if isinstance(command, click.Group):
            commands |= {f"{group} {verb}": command for verb, command in command.commands.items()}
    for verb, command in commands.items():
        for option in command.params:
            is_file = isinstance(option, click.Option) and isinstance(option.type, click.Path)
            if (is_file and not option.type.exists and option.type.file_okay) or "--output" in option.opts:
                found.append((verb, option.opts[-1]))
    return [one for one in found if one != ("reproduce", "--data")]


def test_every_verb_that_writes_files_is_here() -> None:
    assert {verb for verb, _ in outputs()} == WORK.keys()


def trying(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verb: str, option: str, path: Path) -> Result:
    """The verb called with everything right but that path, which may not work."""

    def work(*args: Any, **kwargs: Any) -> None:  # noqa: ARG001
        raise AssertionError("it has begun to work")

    (tmp_path / "script.py").write_text("")
    arguments, doing = WORK[verb]
    monkeypatch.setattr(doing, work)
    said = [one.format(script=tmp_path / "script.py", folder=tmp_path) for one in arguments]
    result = call(*verb.split(), option, str(path), *said)
    assert result.exit_code == 2, result.output
    return result


@pytest.mark.parametrize(("verb", "option"), outputs())
def test_what_cannot_be_written_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, option: str
) -> None:
    (tmp_path / "folder.json").mkdir()
    for path, says in (
        (tmp_path / "nowhere" / "found.json", "there is no folder"),
        (Path("/proc/self/found.json"), "cannot"),
        (tmp_path / "folder.json", "is a (folder|directory)"),
    ):
        assert re.search(says, trying(monkeypatch, tmp_path, verb, option, path).output)


@pytest.mark.parametrize("verb", [verb for verb, option in outputs() if option == "--report"])
def test_a_page_that_cannot_be_drawn_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr("syncline_bench.report.files.find_spec", lambda name: None)  # noqa: ARG005
    said = trying(monkeypatch, tmp_path, verb, "--report", tmp_path / "page.html").output
    assert "--report needs jinja2 and matplotlib" in said
