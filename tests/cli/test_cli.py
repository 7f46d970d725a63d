"""The command line as a whole: how it reports mistakes and faults."""

from __future__ import annotations

from typing import Any

import pytest
from calling import Recorder, call
from click.testing import CliRunner

from syncline.errors import PeerLost
from syncline_bench.cli import cli


@pytest.mark.parametrize(
    "line",
    [
        "compare --workers 0",
        "compare --iterations none",
        "compare --timeout 0",
        "compare ring",
        "run -n 2",
        "run -n 0 x.py",
        "bench --goals --ranks 2",
        "frobnicate",
    ],
)
def test_wrong_arguments_are_usage_errors(line: str) -> None:
    result = call(*line.split())
    assert result.exit_code == 2
    assert "Usage: syncline" in result.output


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("show rnig", "did you mean 'ring'"),
        ("show ps(server=1)", "did you mean 'servers'"),
        ("show ring --servers 2", "no argument 'servers'"),
        ("show auto", "by measuring at its start"),
        ("show transport=tcp", "auto has no plan of its own"),
        ("show native", "native has no plan: its library chooses the messages itself; show one of direct, "),
        ("show sync=async", "unknown sync 'async'; did you mean 'asp' or 'bsp'?"),
        ("show ring --nodes 2y4", "2x4"),
        ("show ring --nodes 2x4 --ranks 7", "disagree"),
        ("show ring --nodes 0x4", "2x4"),
        ("run -n 1 no-such-file.py", "no file 'no-such-file.py'"),
        ("run -n 1 --strategy rnig x.py", "did you mean 'ring'"),
        ("run -n 2 --servers 2 --strategy ps(servers=1) x.py", "needs 1 servers"),
        ("run -n 2 --strategy ps(servers=3,on=workers) x.py", "servers=2"),
    ],
)
def test_a_users_mistake_has_status_2_and_one_line(line: str, says: str) -> None:
    result = call(*line.split())
    assert result.exit_code == 2
    assert says in result.output
    assert result.output.startswith("syncline: ")
    assert result.output.count("\n") == 1


@pytest.mark.parametrize(("error", "status"), [(PeerLost("rank 2 is gone", rank=2), 1), (KeyboardInterrupt(), 130)])
def test_errors_are_one_message_without_a_traceback(compared: Recorder, error: BaseException, status: int) -> None:
    compared.result = error
    result = call("compare")
    assert result.exit_code == status
    assert result.output == f"syncline: {error if status == 1 else 'interrupted'}\n"


def test_a_fault_of_our_own_keeps_its_traceback(compared: Recorder) -> None:
    compared.result = ZeroDivisionError()
    assert isinstance(call("compare").exception, ZeroDivisionError)


@pytest.mark.parametrize("line", ["", "bench"])
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_has_whole_sentences(line: str, columns: int) -> None:
    said = CliRunner().invoke(cli, [*line.split(), "--help"], prog_name="syncline", terminal_width=columns).output
    assert "..." not in said.replace("[ARGS]...", "")
    assert max(map(len, said.splitlines())) <= columns


@pytest.mark.parametrize("line", ["bench", "bench --sizes 1KB --ranks 2", "bench collectives --sizes 1KB --ranks 2"])
def test_bench_without_a_command_is_collectives(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []
    monkeypatch.setattr(
        "syncline_bench.collectives.collective_bench.run", lambda asked, **_: measured.extend(asked) or 0
    )
    assert call(*line.split()).exit_code == 0
    assert [one.collective.name for one in measured] == ["allreduce"]


def test_bench_has_no_other_commands() -> None:
    result = call("bench", "nonsense")
    assert result.exit_code == 2
    assert "No such command 'nonsense'" in result.output
