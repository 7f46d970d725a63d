"""What calibrate's options mean, and what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import Recorder, call

from syncline_bench.predict.networks import load_network


@pytest.fixture
def calibrated(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    from syncline_bench.calibration import command

    recorder = Recorder()
    monkeypatch.setattr(command, "run", recorder)
    return recorder


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline_bench.calibration import command

    monkeypatch.setattr(command, "launch", Recorder(AssertionError("ranks were started")))


def test_options_become_a_request(calibrated: Recorder) -> None:
    result = call("calibrate", "--lab", "1gbit", "--nodes", "2x2", "--codecs", "int8", "-o", "net.json")
    assert result.exit_code == 0, result.output
    (request,) = calibrated.args
    assert (request.ranks, request.per_host, request.lab_rate, request.output) == (4, 2, 1e9, "net.json")
    assert request.ways == (("int8", False), ("int8", True))


def test_a_rank_is_told_all_at_once(calibrated: Recorder) -> None:
    call("calibrate", "--codecs", "none", "--seconds", "0.5")
    (asked,) = calibrated.args
    call("calibrate", "--request", asked.to_json())
    assert calibrated.args == (asked,)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--codecs", "itn8"], "did you mean 'int8'"),
        (["--ranks", "0"], "--ranks has to be 1"),
        (["--nodes", "2x2"], "give the rate of its links"),
        (["--nodes", "two", "--lab", "1gbit"], "must look like 2x4"),
        (["--nodes", "2x2", "--lab", "1gbit", "--ranks", "3"], "disagree"),
        (["--lab", "1gbit", "--ranks", "1"], "one rank has none"),
        (["--lab", "0bit"], "rate of its links"),
        (["--lab", "fast"], "number with a unit"),
        (["--lab", "1gbit", "--transport", "shm"], "a lab has several"),
        (["--transport", "inproc"], "does not reach other processes"),
        (["--transport", "tpc"], "did you mean 'tcp'"),
        (["--codecs", "none", "-o", "/nowhere/at/all.json"], "there is no folder"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options: list[str], says: str) -> None:
    result = call("calibrate", *options)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert says in result.output


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("options", [("--ranks", "4"), ("--lab", "1gbit")])
def test_under_a_launcher_the_ranks_are_there_already(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, str]
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = call("calibrate", "--codecs", "none", *options)
    assert result.exit_code == 2
    assert "leave --ranks, --lab and --nodes out" in result.output


@pytest.mark.usefixtures("nothing_starts")
def test_one_rank_measures_all_but_links(tmp_path: Path) -> None:
    result = call("calibrate", "--ranks", "1", "--codecs", "none", "-o", str(tmp_path / "net.json"))
    assert result.exit_code == 0, result.output
    assert "Links were not measured" in result.output
    constants = load_network(str(tmp_path / "net.json")).constants
    assert constants["gamma"].measured
    assert not constants["between.alpha"].measured
