"""What bench's options mean, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import Recorder, call


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    from syncline_bench.collectives import collective_bench

    recorder = Recorder()
    monkeypatch.setattr(collective_bench, "run", recorder)
    return recorder


@pytest.mark.parametrize(
    "line",
    [
        "bench --ranks 2 3 --sizes 1KiB 25MB --with shm:ring tcp:double_tree(pieces=2) gloo:native",
        "bench --ranks 2,3 --sizes 1KiB,25MB --with shm:ring,tcp:double_tree(pieces=2),gloo:native",
    ],
)
def test_bench_takes_lists_with_commas_or_spaces(benched: Recorder, line: str) -> None:
    benched.result = 0
    result = call(*line.split(), "--json", "rows.json")
    assert result.exit_code == 0, result.output
    ((request,),) = benched.args
    assert (request.ranks, request.sizes, request.lab_rate) == ((2, 3), (1024, 25_000_000), None)
    assert [name.text for name in request.contenders] == ["shm:ring", "tcp:double_tree(pieces=2)", "gloo:native"]
    assert benched.kwargs["json_path"] == Path("rows.json")


def test_the_status_of_bench_is_that_of_its_rows(benched: Recorder) -> None:
    benched.result = 1
    assert call("bench", "--lab", "1gbit", "--sizes", "1KB", "--with", "tcp:auto").exit_code == 1
    ((request,),) = benched.args
    assert (request.lab_rate, request.ranks) == (1e9, (4,))


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--sizes", "many", "number with a unit"),
        ("--sizes", "0B", "multiples of 4"),
        ("--sizes", "-4KB", "negative"),
        ("--ranks", "two", "whole number"),
        ("--ranks", "1", "too few to exchange"),
        ("--lab", "0bit", "rate of its links"),
        ("--lab", "fast", "number with a unit"),
        ("--with", "glo:native", "'gloo:native'"),
        ("--collective", "allredcue", "did you mean 'allreduce'"),
    ],
)
def test_bench_refuses_what_makes_no_sense_in_one_line(option: str, value: str, says: str) -> None:
    result = call("bench", f"{option}={value}")
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert says in result.output
