"""The command line: what its options mean, and how it reports mistakes."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from syncline.cli import cli, spread
from syncline.errors import PeerLost


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="syncline")


class Recorder:
    """Stands for a verb's work and keeps what it was called with."""

    def __init__(self, result: Any = 0) -> None:
        self.result = result
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return stand_in(monkeypatch, "compare")


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Recorder:
    recorder = Recorder()
    module: Any = types.ModuleType(f"syncline.bench.{name}")
    module.run = recorder
    import syncline.bench

    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(syncline.bench, name, module, raising=False)
    return recorder


def test_a_list_takes_all_values_up_to_the_next_option(compared: Recorder) -> None:
    result = call(
        "compare", "--strategies", "ring", "ps(servers=1) schedule=fifo", "tree", "--workers", "3", "--json", "r.json"
    )
    assert result.exit_code == 0, result.output
    assert compared.args == ("digits", 3, ("ring", "ps(servers=1) schedule=fifo", "tree"))
    assert compared.kwargs["json_path"] == Path("r.json")
    assert compared.kwargs["report_path"] is None


def test_compare_passes_everything_on(compared: Recorder) -> None:
    compared.result = 130
    line = "compare --workload cifar10:/data --epochs 3 --batch 64 --seed 5 --report p.html --timeout 9.5 --lab 1gbit"
    assert call(*line.split()).exit_code == 130
    assert compared.args == ("cifar10:/data", 4, ("ring", "ps(servers=1)"))
    assert compared.kwargs == {
        "epochs": 3,
        "iterations": None,
        "batch": 64,
        "seed": 5,
        "json_path": None,
        "report_path": Path("p.html"),
        "timeout": 9.5,
        "lab": "1gbit",
    }


@pytest.mark.parametrize(
    "line",
    [
        "compare --workers 0",
        "compare --iterations none",
        "compare --epochs 1 --iterations 2",
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


@pytest.mark.parametrize(("error", "status"), [(PeerLost("rank 2 is gone", rank=2), 1), (KeyboardInterrupt(), 130)])
def test_errors_are_one_message_without_a_traceback(compared: Recorder, error: BaseException, status: int) -> None:
    compared.result = error
    result = call("compare")
    assert result.exit_code == status
    assert result.output == f"syncline: {error if status == 1 else 'interrupted'}\n"


def test_a_fault_of_our_own_keeps_its_traceback(compared: Recorder) -> None:
    compared.result = ZeroDivisionError()
    assert isinstance(call("compare").exception, ZeroDivisionError)


@pytest.fixture
def benched(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    from syncline.bench.collectives import command

    recorder = Recorder()
    monkeypatch.setattr(command, "run", recorder)
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
        ("--ranks", "1", "nobody to exchange with"),
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


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("show rnig", "did you mean 'ring'"),
        ("show ps(server=1)", "did you mean 'servers'"),
        ("show ring --servers 2", "no argument 'servers'"),
        ("show auto", "measured when a run starts"),
        ("show transport=tcp", "auto has no plan of its own"),
        ("show native", "native has no plan: what the library sends is its own affair; show one of direct, "),
        ("show sync=async", "unknown sync 'async'; did you mean 'asp' (not built yet) or 'bsp'?"),
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
    module: Any = types.ModuleType("syncline.report.draw")
    module.draw_plan = lambda plan: f"{plan.name} of {plan.world} in {plan.steps} steps"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    from syncline import registry
    from syncline.nouns import Group

    result = call(*(word.replace(",t", " t") for word in line.split()))
    assert result.exit_code == 0, result.output
    name = line.split()[1].partition("(")[0].partition(",")[0].replace("-", "_")
    assert result.output.startswith(f"{name} of {group[0] + group[1]} in ")
    assert registry.get("algorithms", name).target(Group(*group)).steps if name != "ps" else True


def test_strategies_lists_every_word() -> None:
    result = call("strategies")
    assert result.exit_code == 0
    for word in ("architecture", "sync", "codec", "schedule", "transport"):
        assert f"\n{word}\n" in f"\n{result.output}"
    assert "fixed(bucket=25MiB)" in result.output
    for block in re.split(r"^(?=\w)", result.output, flags=re.MULTILINE)[1:]:
        words = [line.strip() for line in block.splitlines() if re.match(r"  \S", line)]
        *built, later = [*words, ""] if "not built yet" not in words[-1] else words
        names = [word.partition("(")[0] for word in built] + later.removeprefix("not built yet: ").split(", ")
        assert len(names) == len(set(names)), block
    assert "not built yet" in result.output


def test_run_starts_the_script_and_takes_over_its_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "names = ('SYNCLINE_PROCESS', 'RANK', 'WORLD_SIZE', 'SYNCLINE_SERVERS', 'SYNCLINE_STRATEGY')\n"
        "line = ' '.join([os.environ[name] for name in names] + sys.argv[1:])\n"
        "os.write(1, (line + '\\n').encode())\n"  # in one piece: all processes write to one file
        "sys.exit(int(sys.argv[1]) if os.environ['SYNCLINE_PROCESS'] == '1' else 0)\n"
    )
    result = call("run", "-n", "2", "--strategy", "ps", str(script), "5", "--lr", "-n", "3")
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == [
        f"{process} {min(process, 1)} 2 1 ps(servers=1) 5 --lr -n 3" for process in range(3)
    ]
    assert result.exit_code == 5
    assert result.output == "syncline: rank 1 ended with status 5\n"


def test_run_takes_a_module(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("run", "-n", "1", "-m", "calendar", "2020", "2").exit_code == 0
    assert "February 2020" in capfd.readouterr().out


def test_lab_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(3)
    monkeypatch.setattr("syncline.lab.job.run", recorder)
    line = "lab --hosts 3 --rate 500Mbit --per-host 2 --strategy ps --name n --timeout 9 -- train.py --hosts 7"
    assert call(*line.split()).exit_code == 3
    assert recorder.args == (("train.py", "--hosts", "7"),)
    assert recorder.kwargs == {
        "hosts": 3,
        "rate": 500e6,
        "per_host": 2,
        "servers": 1,
        "name": "n",
        "mpi": None,
        "env": {"SYNCLINE_STRATEGY": "ps(servers=1)"},
        "timeout_s": 9.0,
    }


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lab --hosts 4", "no command"),
        ("lab --list -- true", "take no command"),
        ("lab --hosts 0 -- true", "0 is not in the range"),
        ("lab --rate fast -- true", "--rate must be a number with a unit"),
        ("lab --rate 5 -- true", "1Mbit to 100Gbit"),
        ("lab --hosts 500 -- true", "1 to 200 hosts"),
        ("lab --name A_B -- true", "cannot be a lab's name"),
        ("lab --hosts 1 --strategy ps -- true", "leave no worker"),
        ("lab --strategy sp -- true", "sp"),
        ("lab --mpi openmpi --strategy ps -- true", "no place in an MPI job"),
        ("lab --mpi lam -- true", "lam"),
    ],
)
def test_lab_refuses_what_makes_no_sense(line: str, says: str) -> None:
    result = call(*line.split())
    assert result.exit_code == 2
    assert says in result.output


@given(st.lists(st.sampled_from(["--o", "--o=a", "-x", "b", "c", "--"]), max_size=8))
def test_spreading_keeps_every_word_in_order(args: list[str]) -> None:
    found = spread(args, {"--o"})
    assert [arg for arg in found if arg != "--o"] == [arg for arg in args if arg != "--o"]
    assert spread(args, set()) == args


def test_spreading_repeats_the_option() -> None:
    assert spread(["v", "--o", "a", "b", "--p", "c", "--o=d", "e", "--", "f"], {"--o"}) == [
        "v", "--o", "a", "--o", "b", "--p", "c", "--o=d", "--o", "e", "--", "f",
    ]  # fmt: skip
