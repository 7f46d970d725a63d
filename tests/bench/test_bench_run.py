"""The course of a bench with pretended sets of ranks: what is kept, what is given up, what is not measured again."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from syncline.bench.collectives import command, run
from syncline.bench.collectives import request as requests
from syncline.bench.collectives.display import Display
from syncline.bench.collectives.request import Request, request_of
from syncline.bench.collectives.start import RanksFailed, where_text
from syncline.bench.collectives.work import Position, Turn, Work
from syncline.errors import UsageError
from syncline.launch.mpi_library import MpiLibrary
from syncline.nouns import Rate
from syncline.report.bench_rows import BenchResult, Measured
from syncline.report.bench_table import title

Play = Callable[[Work, Callable[[dict[str, Any]], None]], None]


def nothing(work: Work, heard: Callable[[dict[str, Any]], None]) -> None:
    """A set of ranks in which nothing happens but what has to."""


class Ranks:
    """Stands in for ``run_ranks``: reports every cell, or what ``play`` does first."""

    def __init__(self, play: Play = nothing) -> None:
        self.play = play
        self.works: list[Work] = []

    def __call__(self, work: Work, ranks: int, place: Any, heard: Any, moved: Any, silence_s: float) -> None:  # noqa: ARG002
        self.works.append(work)
        moved(Position(0, work.cells[0][0], 5))
        if work.memory:
            heard({"kind": "memory", "contender": 0, "memory_bytes": 1 << 20})
            return
        self.play(work, heard)
        for size, numbers in work.cells:
            for number in numbers:
                heard(report(number, size))

    @property
    def timed(self) -> list[Work]:
        return [work for work in self.works if not work.memory]


def report(number: int, size: int) -> dict[str, Any]:
    return {
        "kind": "measured",
        "contender": number,
        "bytes": size,
        "times_s": [0.001, 0.002, 0.009],  # as many as ``asked`` asks for
        "cpu_s": 0.004,
        "correct": True,
        "chosen": None,
        "speeds": {"memory": 8e9, "link": 1e9},
    }


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    played = Ranks()
    monkeypatch.setattr(run, "run_ranks", played)
    monkeypatch.setattr(requests, "available_memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(requests.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 40}))
    for module in (run, requests):
        monkeypatch.setattr(module, "find_library", find_library)
    return played


def find_library(name: str) -> MpiLibrary | str:
    return MpiLibrary("openmpi" if name == "mpi" else name, "libmpi.so", ("mpirun",))


def asked(*contenders: str, sizes: tuple[int, ...] = (1000, 4000), **more: Any) -> Request:
    return request_of(sizes=sizes, ranks=more.pop("ranks", (2,)), contenders=contenders, repetitions=3, **more)


def measured(
    request: Request, result: BenchResult | None = None, saved: list[BenchResult] | None = None
) -> tuple[Measured, ...]:
    empty = BenchResult("here", 2, {}, None)
    save = (saved if saved is not None else []).append
    with Display(Console(file=io.StringIO())) as display:
        return run.measure([request], result or empty, save, display).rows


@pytest.mark.usefixtures("ranks")
def test_figures_follow_from_the_times() -> None:
    row, *_ = measured(asked("shm:auto", "tcp:ring", ranks=(4,)))
    assert (row.median_s, row.repetitions, row.correct) == (0.002, 3, True)
    assert row.algbw_bytes_per_s == pytest.approx(1000 / 0.002)
    assert row.busbw_bytes_per_s == pytest.approx(1.5 * 1000 / 0.002)
    assert row.cpu_s_per_gb == pytest.approx(0.004 / 1e-6)
    assert row.limit == "memory"
    assert row.limit_s == pytest.approx(2 * 4 * 1000 / 8e9)
    tcp = measured(asked("tcp:ring", ranks=(4,)))[0]
    assert (tcp.limit, tcp.limit_s) == ("link", pytest.approx(1.5 * 1000 / 1e9))
    assert tcp.of_limit == pytest.approx((tcp.limit_s or 0) / 0.002)


def test_all_contenders_share_processes_and_every_size_is_kept(ranks: Ranks) -> None:
    saved: list[BenchResult] = []
    rows = measured(asked("shm:auto", "gloo:native", "mpi:native"), saved=saved)
    (work,) = ranks.timed
    assert work.contenders == ("shm:auto", "gloo:native", "mpi:native")
    assert (work.library, work.link) == ("openmpi", True)
    assert [len(result.rows) for result in saved[:6]] == [1, 2, 3, 4, 5, 6]
    assert [row.memory_bytes for row in rows] == [None] * 3 + [1 << 20] * 3


def test_two_mpi_libraries_are_two_sets_of_processes(ranks: Ranks) -> None:
    measured(asked("mpich:native", "shm:auto", "openmpi:native", "mpi:ring"))
    assert [(work.library, work.contenders) for work in ranks.timed] == [
        ("openmpi", ("shm:auto", "openmpi:native", "mpi:ring")),
        ("mpich", ("mpich:native",)),
    ]


def test_the_contender_whose_turn_it_was_is_given_up_and_the_rest_starts_again(ranks: Ranks) -> None:
    def die(work: Work, heard: Callable[[dict[str, Any]], None]) -> None:
        if "tcp:ring" in work.contenders:
            for number in range(3):
                heard(report(number, 1000))
            raise RanksFailed("rank 1 was killed by SIGKILL", Position(1, 4000, 70))

    ranks.play = die
    rows = measured(asked("shm:auto", "tcp:ring", "gloo:native", sizes=(1000, 4000, 8000)))
    again = ranks.timed[1]
    assert again.contenders == ("shm:auto", "gloo:native")
    assert [size for size, _ in again.cells] == [4000, 8000]
    errors = {(row.contender, row.bytes): row.error for row in rows if row.error}
    assert errors == {
        ("tcp:ring", 4000): "rank 1 was killed by SIGKILL during tcp:ring of 4 KB",
        ("tcp:ring", 8000): "not measured after the failure at 4 KB: rank 1 was killed by SIGKILL during tcp:ring"
        " of 4 KB",
    }
    assert sum(row.finished for row in rows) == 7
    assert [row.bytes for row in rows] == [1000] * 3 + [4000] * 3 + [8000] * 3


def test_a_launcher_that_does_not_start_costs_its_contenders_only(ranks: Ranks) -> None:
    def refuse(work: Work, heard: Callable[[dict[str, Any]], None]) -> None:  # noqa: ARG001
        if work.library:
            raise RanksFailed("mpirun was not in the mood", Position(None, 0, 0))

    ranks.play = refuse
    rows = measured(asked("shm:auto", "mpi:native", sizes=(1000,)))
    assert [(row.contender, row.error) for row in rows] == [
        ("shm:auto", None),
        ("mpi:native", "mpirun was not in the mood"),
    ]


def test_a_death_between_turns_is_nobodys_fault_once(ranks: Ranks) -> None:
    def die(work: Work, heard: Callable[[dict[str, Any]], None]) -> None:  # noqa: ARG001
        raise RanksFailed("rank 0 died", Position(None, 1000, 9))

    ranks.play = die
    rows = measured(asked("shm:auto", sizes=(1000,)))
    assert len(ranks.timed) == 2
    assert [row.error for row in rows] == ["rank 0 died"]


def test_finished_rows_are_not_measured_again_and_others_are(ranks: Ranks) -> None:
    request = asked("shm:auto", "tcp:ring")
    rows = measured(request)
    ranks.works.clear()
    broken = (rows[0], Measured("tcp", "ring", 2, 1000, error="x"))
    again = measured(request, BenchResult("here", 2, {}, None, rows=broken))
    (work,) = ranks.timed
    assert [(size, [work.contenders[number] for number in numbers]) for size, numbers in work.cells] == [
        (1000, ["tcp:ring"]),
        (4000, ["shm:auto", "tcp:ring"]),
    ]
    assert [row.key for row in again] == list(request.keys)
    ranks.works.clear()
    assert measured(request, BenchResult("here", 2, {}, None, rows=again)) == again
    assert not ranks.works


def test_what_is_not_installed_is_a_row_and_no_process(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (run, requests):
        monkeypatch.setattr(module, "find_library", lambda _: "Open MPI is not installed: pip install it")
    rows = measured(asked("mpi:native", "shm:auto", sizes=(1000,)))
    assert [(row.contender, row.missing, row.error is None) for row in rows] == [
        ("mpi:native", True, False),
        ("shm:auto", False, True),
    ]
    assert [work.contenders for work in ranks.timed] == [("shm:auto",)]


def test_an_interrupt_leaves_a_file_that_a_later_run_takes_up(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    console = Console(file=io.StringIO(), width=100)

    def interrupt(work: Work, heard: Callable[[dict[str, Any]], None]) -> None:  # noqa: ARG001
        heard(report(0, 1000))
        raise KeyboardInterrupt

    ranks.play = interrupt
    with pytest.raises(KeyboardInterrupt):
        command.run([asked("shm:auto", "tcp:ring")], json_path=path, console=console)
    assert [row.contender for row in BenchResult.from_json(path.read_text()).rows] == ["shm:auto"]
    ranks.play = nothing
    ranks.works.clear()
    assert command.run([asked("shm:auto", "tcp:ring")], json_path=path, console=console) == 0
    assert sum(len(numbers) for _, numbers in ranks.timed[0].cells) == 3
    assert len(BenchResult.from_json(path.read_text()).rows) == 4
    # Asked for less, the file holds less; resumed by name, it keeps everything.
    assert command.run([asked("tcp:ring", sizes=(1000,))], resume_path=path, console=console) == 0
    assert len(BenchResult.from_json(path.read_text()).rows) == 4
    assert command.run([asked("tcp:ring", sizes=(1000,))], json_path=path, console=console) == 0
    assert len(BenchResult.from_json(path.read_text()).rows) == 1


def test_rows_of_another_code_are_never_mixed_in(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    console = Console(file=io.StringIO())
    command.run([asked("shm:auto")], json_path=path, console=console)
    path.write_text(path.read_text().replace('"source_sha256": "', '"source_sha256": "other'))
    with pytest.raises(UsageError, match="another machine or with another version"):
        command.run([asked("shm:auto")], resume_path=path, console=console)
    ranks.works.clear()
    command.run([asked("shm:auto")], json_path=path, console=console)
    assert ranks.timed
    path.write_text("[]")
    with pytest.raises(UsageError, match="not a result file"):
        command.run([asked("shm:auto")], resume_path=path, console=console)


def test_a_wrong_result_fails_the_bench(ranks: Ranks) -> None:
    def wrong(work: Work, heard: Callable[[dict[str, Any]], None]) -> None:  # noqa: ARG001
        heard({**report(0, 1000), "correct": False})
        raise RanksFailed("over", Position(0, 1000, 1))

    ranks.play = wrong
    out = io.StringIO()
    assert command.run([asked("shm:auto", sizes=(1000,))], console=Console(file=out, width=100)) == 1
    assert "NO" in out.getvalue()


class FakeLab:
    """A lab as the bench sees it."""

    interface = "eth0"
    made: ClassVar[list[tuple[int, float]]] = []

    def __init__(self, hosts: int, rate: float) -> None:
        self.made.append((hosts, rate))

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def address(self, host: int) -> str:
        return f"10.0.0.{host + 1}"

    def goodput(self, seconds: float) -> float:
        return 1e8 * seconds / seconds


def test_in_a_lab_the_limit_is_its_goodput(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("Module", (), {"Lab": FakeLab})
    monkeypatch.setattr(run.importlib, "import_module", lambda _: module)
    row, *_ = measured(asked("tcp:auto", "mpi:native", lab_rate=Rate(1e9), ranks=(4,)))
    assert FakeLab.made[-1] == (4, 1e9)
    assert (row.limit, row.limit_s, row.lab_bit_per_s) == ("link", pytest.approx(1.5 * 1000 / 1e8), 1e9)
    assert not any(work.memory or work.link for work in ranks.works)


@pytest.mark.usefixtures("ranks")
def test_several_ranks_share_a_host_of_the_lab_and_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("Module", (), {"Lab": FakeLab})
    monkeypatch.setattr(run.importlib, "import_module", lambda _: module)
    text = "auto:hierarchical codec=int8"
    row, *_ = measured(asked(text, lab_rate=Rate(1e9), ranks=(4,), per_host=2))
    assert FakeLab.made[-1] == (2, 1e9)
    assert (row.contender, row.ranks, row.per_host) == (text, 4, 2)
    assert row.limit_s == pytest.approx(1000 / 1e8)
    assert "4 ranks, 2 on each host, on a lab" in title([row], 2)


def test_the_record_of_turns_is_read_by_another_mapping(tmp_path: Path) -> None:
    reader, writer = Turn(tmp_path, create=True), Turn(tmp_path)
    assert reader.read() == Position(None, 0, 0)
    writer.begin(0, 4000)
    assert reader.read() == Position(0, 4000, 0)
    writer.end()
    assert reader.read() == Position(None, 4000, 1)
    assert where_text(["shm:auto"], Position(0, 4000, 0)) == "during shm:auto of 4 KB"
    assert where_text(["shm:auto"], Position(0, 0, 0)) == "while shm:auto was connecting"


def test_work_survives_its_way_down() -> None:
    work = Work("allreduce", ("a:b", "c:d"), ((1000, (0, 1)), (4000, (1,))), "/f", library="mpich", link=True)
    assert Work.from_json(work.to_json()) == work
