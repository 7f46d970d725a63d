"""The course of a bench with pretended sets of ranks: what is kept, what is given up, what is not measured again."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from syncline.errors import UsageError
from syncline.launch.mpi_library import MpiLibrary
from syncline.nouns import Rate
from syncline_bench.collectives import collective_bench, contenders
from syncline_bench.collectives import request as requests
from syncline_bench.collectives.request import TURNS, Request, Work, request_of, turns_of
from syncline_bench.display import Display
from syncline_bench.peers.mpi import SETTINGS
from syncline_bench.ranks import OnThisMachine, RanksFailed
from syncline_bench.report.bench import BenchResult, Measured, collectives, render, title

Play = Callable[[Work, dict[str, Any]], None]


def nothing(work: Work, order: dict[str, Any]) -> None:
    """A set of ranks in which nothing happens but what has to."""


class Sets:
    """Stands in for sets of ranks, in which ``play`` says what goes wrong; notes what every set was told."""

    def __init__(self, play: Play = nothing) -> None:
        self.play = play
        self.times: Callable[[OnThisMachine, int], float] = lambda place, nbytes: 0.002  # noqa: ARG005 - the signature of all
        self.works: list[tuple[Work, str]] = []
        self.silences_s: list[float] = []
        self.orders: list[tuple[str, dict[str, Any]]] = []
        self.open: list[str] = []
        self.correct = True

    def __call__(self, text: str, ranks: int, place: OnThisMachine, script: Any) -> Pretended:  # noqa: ARG002
        work = Work.from_json(text)
        self.works.append((work, "" if place.library is None else place.library.name))
        self.play(work, {})
        return Pretended(self, work, place)

    @property
    def timed(self) -> list[tuple[str, int, int]]:
        """Contender, size and repetitions of every turn in which something was timed."""
        return [
            (name, order["nbytes"], order["repetitions"]) for name, order in self.orders if order.get("repetitions")
        ]


class Pretended:
    def __init__(self, sets: Sets, work: Work, place: OnThisMachine) -> None:
        self._sets, self._work, self._place = sets, work, place

    def __enter__(self) -> Pretended:
        self._sets.open.append(self._work.contender)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._work.contender in self._sets.open:
            self._sets.open.remove(self._work.contender)

    def order(self, heard: Any, silence_s: float = 0.0, **order: Any) -> None:
        self._sets.orders.append((self._work.contender, order))
        self._sets.silences_s.append(silence_s)
        self._sets.play(self._work, order)
        count = order.get("repetitions", 0)
        if not self._work.contender:
            heard({"kind": "limits", "memory": [8e9] * count, "link": [1e9] * count})
            return
        heard(
            {
                "kind": "measured",
                "times_s": [self._sets.times(self._place, order["nbytes"])] * count,
                "cpu_s": [0.004] * count,
                "correct": self._sets.correct,
                "chosen": None,
                "memory_bytes": 1 << 20 if order.get("memory") else None,
            }
        )

    def end(self) -> None:
        return None


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Sets:
    played = Sets()
    monkeypatch.setattr(collective_bench, "Ranks", played)
    monkeypatch.setattr(requests, "available_memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(requests.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 40}))
    monkeypatch.setattr(contenders, "library_of", find_library)
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
        return collective_bench.measure([request], result or empty, save, display).rows


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


def test_every_contender_has_ranks_of_its_own_and_they_take_turns(ranks: Sets) -> None:
    saved: list[BenchResult] = []
    names = ["shm:auto", "gloo:native(threads=1)", "mpi:native(yield=on)", "mpich:native(yield=on)"]
    rows = measured(asked(*names), saved=saved)
    limits = (Work("allreduce", "", 4000, link=True), "")
    libraries = ("", "", "openmpi", "mpich")
    started = [(Work("allreduce", name, 4000), lib) for name, lib in zip(names, libraries, strict=True)]
    assert ranks.works == [*started, limits, *started]  # and again for what they take of memory
    turns = [(name, size) for name, size, _ in ranks.timed]
    for size in (1000, 4000):
        rounds = [turns[at : at + 5] for at in range(0, len(turns), 5) if turns[at][1] == size]
        assert len(rounds) == 3
        assert all({name for name, _ in one} == {*names, ""} for one in rounds)
        assert len({one[0] for one in rounds}) == 3  # who begins changes
    assert [len(result.rows) for result in saved[:8]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row.memory_bytes for row in rows] == [None] * 4 + [1 << 20] * 4
    assert not ranks.open


@pytest.mark.parametrize("repetitions", [1, 2, 5, 6, 7, 9, 20, 60])
def test_repetitions_are_done_in_some_turns_as_equal_as_can_be(repetitions: int) -> None:
    turns = turns_of(repetitions)
    assert sum(turns) == repetitions
    assert len(turns) == min(repetitions, TURNS)
    assert max(turns) - min(turns) <= 1


def test_results_are_checked_before_and_after_the_timed_turns(ranks: Sets) -> None:
    measured(asked("shm:auto", sizes=(1000,)))
    mine = [(order["seeds"], order["repetitions"]) for name, order in ranks.orders if name and "seeds" in order]
    assert mine == [([0, 1], 0), ([], 1), ([], 1), ([], 1), ([2], 0)]


def test_a_contender_whose_ranks_fail_is_given_up_and_the_others_go_on(ranks: Sets) -> None:
    def die(work: Work, order: dict[str, Any]) -> None:
        if work.contender == "tcp:ring" and order.get("nbytes") == 4000 and order.get("repetitions"):
            raise RanksFailed("rank 1 was killed by SIGKILL")

    ranks.play = die
    rows = measured(asked("shm:auto", "tcp:ring", "gloo:native", sizes=(1000, 4000, 8000)))
    errors = {(row.contender, row.bytes): row.error for row in rows if row.error}
    assert errors == {
        ("tcp:ring", 4000): "during tcp:ring of 4 KB: rank 1 was killed by SIGKILL",
        ("tcp:ring", 8000): "not measured after the failure at 4 KB: during tcp:ring of 4 KB: rank 1 was killed by"
        " SIGKILL",
    }
    assert sum(row.finished for row in rows) == 7
    assert [row.bytes for row in rows] == [1000] * 3 + [4000] * 3 + [8000] * 3
    assert [work.contender for work, _ in ranks.works].count("shm:auto") == 2  # for times and for memory: none again


def test_a_launcher_that_does_not_start_costs_its_contenders_only(ranks: Sets) -> None:
    def refuse(work: Work, order: dict[str, Any]) -> None:  # noqa: ARG001
        if work.contender == "mpi:native":
            raise RanksFailed("mpirun was not in the mood")

    ranks.play = refuse
    rows = measured(asked("shm:auto", "mpi:native", sizes=(1000,)))
    assert [(row.contender, row.error) for row in rows] == [
        ("shm:auto", None),
        ("mpi:native", "while mpi:native was connecting: mpirun was not in the mood"),
    ]


def test_limits_that_fail_leave_rows_without_them(ranks: Sets) -> None:
    def fail(work: Work, order: dict[str, Any]) -> None:
        if not work.contender and order.get("nbytes") == 4000:
            raise RanksFailed("rank 0 died")

    ranks.play = fail
    rows = measured(asked("shm:auto"))
    assert all(row.finished for row in rows)
    assert [row.of_limit is None for row in rows] == [False, True]


def test_limits_end_with_the_last_contender(ranks: Sets) -> None:
    """In the turn in which it fails: nothing is left that a limit could be compared with."""

    def die(work: Work, order: dict[str, Any]) -> None:
        if work.contender and order.get("repetitions"):
            assert "" in ranks.open
            raise RanksFailed("rank 1 was killed by SIGKILL")

    ranks.play = die
    assert not any(row.finished for row in measured(asked("shm:auto", sizes=(1000, 4000))))
    assert "" not in [name for name, _ in ranks.orders]


def test_finished_rows_are_not_measured_again_and_others_are(ranks: Sets) -> None:
    request = asked("shm:auto", "tcp:ring")
    rows = measured(request)
    ranks.orders.clear()
    broken = (rows[0], Measured("tcp", "ring", 2, 1000, error="x"))
    again = measured(request, BenchResult("here", 2, {}, None, rows=broken))
    turns = {(name, size) for name, size, _ in ranks.timed if name}
    assert turns == {("tcp:ring", 1000), ("shm:auto", 4000), ("tcp:ring", 4000)}
    assert [row.key for row in again] == list(request.keys)
    ranks.works.clear()
    assert measured(request, BenchResult("here", 2, {}, None, rows=again)) == again
    assert not ranks.works


def test_each_size_has_the_fastest_setting_of_its_library_and_the_row_names_it(ranks: Sets) -> None:
    off = SETTINGS["openmpi"]["yield=off"].items()

    def times(place: OnThisMachine, nbytes: int) -> float:
        return 0.001 if (place.settings.items() >= off) == (nbytes == 1000) else 0.002

    ranks.times = times
    request = asked("openmpi:native", "openmpi:ring(yield=on)")
    rows = {(row.contender, row.bytes): row for row in measured(request)}
    assert [rows["openmpi:native", nbytes].setting for nbytes in (1000, 4000)] == ["yield=off", "yield=on"]
    assert {row.median_s for row in rows.values() if row.algorithm == "native"} == {0.001}
    assert rows["openmpi:ring(yield=on)", 1000].median_s == 0.002  # what is asked for is not chosen
    assert [row.key for row in rows.values()] == list(request.keys)
    # The trials come first, of one setting after the other; then each of the two that won has ranks, the first of them
    # with no more memory than its greatest size.
    trials = len(SETTINGS["openmpi"])
    started = [work.most_bytes for work, _ in ranks.works if work.contender == "openmpi:native"]
    assert started[: trials + 2] == [4000] * trials + [1000, 4000]
    console = Console(file=io.StringIO(), width=200)
    console.print(render(BenchResult("here", 2, {}, None, rows=tuple(rows.values()))))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "openmpi:native (yield=off)" in shown
    assert "openmpi:ring(yield=on) " in shown
    (table,) = collectives(BenchResult("here", 2, {}, None, rows=tuple(rows.values())))
    assert "setting" in [column.headed for column in table.on_page]  # a page names its rows by the contender alone


def test_a_setting_that_fails_or_takes_too_long_is_left_out(ranks: Sets) -> None:
    def times(place: OnThisMachine, nbytes: int) -> float:  # noqa: ARG001 - the signature of all
        if place.settings == SETTINGS["openmpi"]["yield=on"]:
            raise RanksFailed("no report for 3 s")
        return 0.002

    ranks.times = times
    rows = measured(asked("openmpi:native"))
    assert {row.setting for row in rows} == {"yield=off"}
    assert not any(row.error for row in rows)
    assert ranks.silences_s[0] < 10


def test_where_no_setting_works_the_row_says_why(ranks: Sets) -> None:
    def die(work: Work, order: dict[str, Any]) -> None:
        if work.contender and order:
            raise RanksFailed("rank 0 died")

    ranks.play = die
    (row,) = measured(asked("openmpi:native", sizes=(1000,)))
    assert (row.setting, row.error) == ("yield=on", "during openmpi:native of 1 KB: rank 0 died")


def test_what_is_not_installed_is_a_row_and_no_process(ranks: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "library_of", lambda _: "Open MPI is not installed: pip install it")
    rows = measured(asked("mpi:native", "shm:auto", sizes=(1000,)))
    assert [(row.contender, row.missing, row.error is None) for row in rows] == [
        ("mpi:native", True, False),
        ("shm:auto", False, True),
    ]
    assert {work.contender for work, _ in ranks.works} == {"shm:auto", ""}


def test_an_interrupt_leaves_a_file_that_a_later_run_takes_up(ranks: Sets, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    console = Console(file=io.StringIO(), width=100)

    def interrupt(work: Work, order: dict[str, Any]) -> None:  # noqa: ARG001
        if order.get("nbytes") == 4000:
            raise KeyboardInterrupt

    ranks.play = interrupt
    with pytest.raises(KeyboardInterrupt):
        collective_bench.run([asked("shm:auto", "tcp:ring")], json_path=path, console=console)
    assert [row.contender for row in BenchResult.from_json(path.read_text()).rows] == ["shm:auto", "tcp:ring"]
    assert not ranks.open
    ranks.play = nothing
    ranks.orders.clear()
    assert collective_bench.run([asked("shm:auto", "tcp:ring")], json_path=path, console=console) == 0
    assert {size for _, size, _ in ranks.timed} == {4000}
    assert len(BenchResult.from_json(path.read_text()).rows) == 4
    # Asked for less, the file holds less; resumed by name, it keeps everything.
    assert collective_bench.run([asked("tcp:ring", sizes=(1000,))], resume_path=path, console=console) == 0
    assert len(BenchResult.from_json(path.read_text()).rows) == 4
    assert collective_bench.run([asked("tcp:ring", sizes=(1000,))], json_path=path, console=console) == 0
    assert len(BenchResult.from_json(path.read_text()).rows) == 1


def test_rows_of_another_code_are_never_mixed_in(ranks: Sets, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    console = Console(file=io.StringIO())
    collective_bench.run([asked("shm:auto")], json_path=path, console=console)
    path.write_text(path.read_text().replace('"source_sha256": "', '"source_sha256": "other'))
    with pytest.raises(UsageError, match="is of another"):
        collective_bench.run([asked("shm:auto")], resume_path=path, console=console)
    ranks.orders.clear()
    collective_bench.run([asked("shm:auto")], json_path=path, console=console)
    assert ranks.timed
    path.write_text("[]")
    with pytest.raises(UsageError, match="not a result file"):
        collective_bench.run([asked("shm:auto")], resume_path=path, console=console)


def test_a_wrong_result_fails_the_bench(ranks: Sets) -> None:
    ranks.correct = False
    out = io.StringIO()
    assert collective_bench.run([asked("shm:auto", sizes=(1000,))], console=Console(file=out, width=100)) == 1
    assert "NO" in out.getvalue()


class FakeLab:
    """A lab as the bench sees it."""

    made: ClassVar[list[tuple[int, float]]] = []

    def __init__(self, hosts: int, rate: float) -> None:
        self.made.append((hosts, rate))

    def __enter__(self) -> FakeLab:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def goodput(self, seconds: float) -> float:
        return 1e8 * seconds / seconds


def test_in_a_lab_the_limit_is_its_goodput(ranks: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("Module", (), {"Lab": FakeLab})
    monkeypatch.setitem(sys.modules, "syncline_bench.lab", module)
    row, *_ = measured(asked("tcp:auto", "mpi:native", lab_rate=Rate(1e9), ranks=(4,)))
    assert FakeLab.made[-1] == (4, 1e9)
    assert (row.limit, row.limit_s, row.lab_bit_per_s) == ("link", pytest.approx(1.5 * 1000 / 1e8), 1e9)
    assert not any(work.link for work, _ in ranks.works)
    assert not any(order.get("memory") for _, order in ranks.orders)


@pytest.mark.usefixtures("ranks")
def test_several_ranks_share_a_host_of_the_lab_and_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type("Module", (), {"Lab": FakeLab})
    monkeypatch.setitem(sys.modules, "syncline_bench.lab", module)
    text = "auto:hierarchical codec=int8"
    row, *_ = measured(asked(text, lab_rate=Rate(1e9), ranks=(4,), per_host=2))
    assert FakeLab.made[-1] == (2, 1e9)
    assert (row.contender, row.ranks, row.per_host) == (text, 4, 2)
    assert row.limit_s == pytest.approx(1000 / 1e8)
    assert "4 ranks, 2 on each host, on a lab" in title([row], 2)


def test_work_survives_its_way_down() -> None:
    work = Work("allreduce", "a:b", 4000, link=True)
    assert Work.from_json(work.to_json()) == work
