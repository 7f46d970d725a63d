"""Real ranks at small sizes: every collective beside the peers, under MPI where it is installed; ranks that die.

And a contender's processes sleep between its turns.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.launch.mpi_library import MpiLibrary
from syncline_bench import ranks
from syncline_bench.collectives import collective_bench, request
from syncline_bench.collectives.kinds import COLLECTIVES
from syncline_bench.collectives.request import Work
from syncline_bench.peers import library_of
from syncline_bench.peers.mpi import SETTINGS
from syncline_bench.ranks import OnThisMachine, Ranks, RanksFailed

MEASURE_MEMORY = collective_bench._Stage._measure_memory


@pytest.fixture(autouse=True)
def times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth of memory needs processes of its own and is measured once only."""
    monkeypatch.setattr(collective_bench._Stage, "_measure_memory", lambda *_: None)


def bench(
    tmp_path: Path,
    kind: str,
    *contenders: str,
    ranks: int = 2,
    sizes: tuple[int, ...] = (1004,),
    repetitions: int = 3,
    out: io.StringIO | None = None,
) -> list[Any]:
    path = tmp_path / "rows.json"
    asked = request.request_of(sizes=sizes, ranks=[ranks], contenders=contenders, kind=kind, repetitions=repetitions)
    console = Console(file=out or io.StringIO(), width=120)
    collective_bench.run([asked], json_path=path, console=console)
    rows: list[Any] = json.loads(path.read_text())["rows"]
    return rows


KINDS = ["allreduce", "broadcast", *(kind for kind in COLLECTIVES if kind not in ("allreduce", "broadcast"))]
LIBRARY_OF = {"allreduce": "mpich", "reduce-scatter": "openmpi", "all-gather": "intelmpi"}
"""Which MPI library takes part where it is installed; all of them work, and one of them is enough each time."""
TITLES = {"openmpi": "Open MPI", "mpich": "MPICH", "intelmpi": "Intel(R) MPI"}


@pytest.mark.beyond(2)
@pytest.mark.parametrize("kind", KINDS)
def test_every_collective_is_right_on_every_contender(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And memory is measured at the greatest size, which is seen once, for the first contender of one collective."""
    contenders = ["shm:auto", "tcp:auto"] if kind == "broadcast" else ["shm:direct", "tcp:ring"]
    # 251 elements have no equal halves; three ranks have parts of different sizes where the collective lets them.
    ranks = 2
    sizes: tuple[int, ...] = (1004,)
    if kind == "allreduce":
        monkeypatch.setattr(
            collective_bench._Stage,
            "_measure_memory",
            lambda self, cells: MEASURE_MEMORY(self, cells[:: len(cells) // 2]),
        )
    if library := LIBRARY_OF.get(kind):
        contenders.append("shm:auto")
        ranks, sizes = 3, (1004, 4_000_000 if kind == "allreduce" else 2_000_000)
        if isinstance(library_of(library), MpiLibrary):
            contenders += [f"{library}:native(yield=on)", f"{library}:ring(yield=on)"]
    contenders += ["gloo:native(threads=1)", "torch:syncline"]
    rows = bench(tmp_path, kind, *contenders, ranks=ranks, sizes=sizes)
    assert len(rows) == len(sizes) * len(contenders)
    for row in rows:
        assert row["error"] is None
        assert row["correct"] is True
        assert 0 < row["median_s"] <= row["p99_s"]
        assert row["of_limit"] == pytest.approx(row["limit_s"] / row["median_s"])
        assert row["cpu_s_per_gb"] > 0
        if row["transport"] == library:
            assert row["setting"] == "yield=on"
            assert "native" not in row["algorithm"] or TITLES[library] in row["chosen"]
        if (row["transport"], row["algorithm"]) == ("shm", "auto") and kind == "allreduce":
            assert row["chosen"] == "direct transport=shm"
    measured = [(row["transport"], row["bytes"]) for row in rows if row["memory_bytes"] is not None]
    assert measured == ([("shm", 4_000_000)] if kind == "allreduce" else [])
    assert all(row["memory_bytes"] > 3_500_000 for row in rows if row["memory_bytes"] is not None)


@pytest.mark.slow
def test_the_best_setting_of_a_library_is_measured(tmp_path: Path) -> None:
    if not isinstance(found := library_of("mpich"), MpiLibrary):
        pytest.skip(found)
    (row,) = bench(tmp_path, "allreduce", "mpich:native", repetitions=1)
    assert (row["error"], row["correct"]) == (None, True)
    assert row["setting"] in SETTINGS["mpich"]
    assert "MPICH" in row["chosen"]


def play(script: str, folder: Path, limit_s: float = 60.0, prologue: str | None = None) -> list[Any]:
    """Ranks that run a script of this test instead of a bench, are given one order, and end."""
    path = folder / "rank.py"
    path.write_text((PROLOGUE if prologue is None else prologue) + script)
    heard: list[Any] = []
    with Ranks("{}", 2, OnThisMachine(), (str(path),)) as started:
        started.order(heard.append, limit_s, number=7)
        started.end()
    return heard


PROLOGUE = """
import os, signal, sys
from syncline.launch.environment import recognise
from syncline_bench.ranks import Line
line = Line(sys.argv[2], recognise())
rank = line.rank
"""
ORDERS = """
with line.telling():
    for order in line.orders():
        {}
"""


def test_what_ranks_say_arrives_and_they_meet(tmp_path: Path) -> None:
    heard = play(ORDERS.format("line.send('x', order=order, all=line.gather(rank, 0.5).tolist())"), tmp_path)
    said = {"kind": "x", "order": {"number": 7}, "all": [[0.0, 0.5], [1.0, 0.5]]}
    assert sorted(heard, key=lambda message: int(message["rank"])) == [{**said, "rank": 0}, {**said, "rank": 1}]


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1 was killed by SIGKILL"):
        play(ORDERS.format("os.kill(os.getpid(), signal.SIGKILL) if rank else line.wait()"), tmp_path)


@pytest.mark.slow
def test_the_error_of_a_rank_explains_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 1: ZeroDivisionError: division by zero"):
        play(ORDERS.format("1 / (1 - rank); line.wait()"), tmp_path)


def test_a_rank_that_ends_early_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LAST_WORDS_S", 0.4)  # the other one would wait for it
    with pytest.raises(RanksFailed, match="rank 0 ended without a result"):
        play(ORDERS.format("rank or os._exit(0)"), tmp_path)


def test_ranks_that_never_come_are_a_failure_with_their_last_words(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="No module named 'nowhere'"):
        play("import nowhere", tmp_path, prologue="")


def test_ranks_that_do_nothing_are_given_up(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"no report for . s"):
        play(ORDERS.format("signal.pause()"), tmp_path, limit_s=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("with_mpi", [False, True])
def test_a_bench_that_is_killed_leaves_neither_files_nor_processes(tmp_path: Path, with_mpi: bool) -> None:
    """Whatever its ranks do then: here one contender after the other is at work all the time."""
    contenders = "shm:auto,tcp:ring"
    if with_mpi:
        if not isinstance(library_of("openmpi"), MpiLibrary):
            pytest.skip("Open MPI is not installed")
        contenders = "openmpi:native(yield=on)"
    words = ["bench", "--sizes", "1MB", "--ranks", "2", "--with", contenders, "--repetitions", "100000"]
    started = subprocess.Popen(
        [sys.executable, "-m", "syncline", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("2 ranks: 1 MB"):
            break
    mine = ranks_of(started.pid)
    assert len(mine) == 2 * (1 + len(contenders.split(",")))  # the limits have ranks too
    started.kill()
    started.wait()
    # They hold its output: it ends when the last of them has.
    started.stdout.read()
    started.stdout.close()
    for pid in mine:
        wait_for_the_end(pid)
    assert not list(tmp_path.glob("syncline*"))


def wait_for_the_end(pid: int) -> None:
    """Return when a process, which may be no child, has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(fd) as file:
        assert select.select([file], [], [], 30.0)[0], f"process {pid} still runs"


def ranks_of(starter: int) -> list[int]:
    """The process numbers of the ranks that a process has started, or launchers for it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and starter in ancestors(int(entry.name)):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{entry.name}/cmdline").read_bytes().split(b"\0")
                # Not the stub that becomes a rank, and no launcher.
                if words[1:3] == [b"-m", b"syncline_bench.collectives.collective_ranks"]:
                    found.append(int(entry.name))
    return found


def ancestors(pid: int) -> list[int]:
    """The nearest ones: a launcher has two processes at most."""
    found = [parent_of(pid)]
    while found[-1] > 1 and len(found) < 3:
        found.append(parent_of(found[-1]))
    return found


@pytest.mark.slow
def test_a_set_whose_turn_it_is_not_sleeps() -> None:
    """All of it: its processor time while another set works is that of some heartbeats."""
    contenders = ["shm:auto", "tcp:auto", "gloo:native", "torch:syncline"]
    libraries: dict[str, MpiLibrary | None] = dict.fromkeys(contenders)
    if isinstance(found := library_of("openmpi"), MpiLibrary):
        libraries["openmpi:native"] = found
    with contextlib.ExitStack() as all_of_them:
        parked: dict[str, tuple[Ranks, list[int]]] = {}
        for contender, library in libraries.items():
            others = set(ranks_of(os.getpid()))
            work = Work("allreduce", contender, 1_000_000).to_json()
            started = all_of_them.enter_context(Ranks(work, 2, OnThisMachine(library=library), collective_bench.RANK))
            started.order(nbytes=1_000_000, repetitions=2)
            parked[contender] = started, [pid for pid in ranks_of(os.getpid()) if pid not in others]
            assert len(parked[contender][1]) == 2
        work = Work("allreduce", "shm:ring", 1_000_000).to_json()
        busy = all_of_them.enter_context(Ranks(work, 2, OnThisMachine(), collective_bench.RANK))
        busy.order(nbytes=1_000_000, repetitions=2)
        before, begun = {contender: used_s(pids) for contender, (_, pids) in parked.items()}, time.monotonic()
        busy.order(nbytes=1_000_000, repetitions=200)
        lasted = time.monotonic() - begun
        for contender, (_, pids) in parked.items():
            assert used_s(pids) - before[contender] <= 0.02 + 0.02 * lasted, contender
        for started, _ in parked.values():
            started.order(nbytes=1_000_000, repetitions=2)
            started.end()
        busy.end()


def used_s(pids: list[int]) -> float:
    """Processor seconds of processes, all of their threads."""
    return sum(
        int(path.read_text().split()[0]) / 1e9 for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


@pytest.mark.slow
def test_a_rank_that_dies_under_mpi_is_named_and_costs_its_contender_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = library_of("openmpi")
    if not isinstance(found, MpiLibrary):
        pytest.skip(found)
    turn = collective_bench._Stage._turn

    def killing(self: Any, name: Any, size: int, taken: Any, seeds: list[int], count: int) -> None:
        if name.library and count and not taken.times_s:
            launcher = next(iter(self._sets[name].values())).pids[0]
            os.kill(next(pid for pid in ranks_of(os.getpid()) if parent_of(pid) == launcher), signal.SIGKILL)
        turn(self, name, size, taken, seeds, count)

    monkeypatch.setattr(collective_bench._Stage, "_turn", killing)
    ours, theirs = bench(tmp_path, "allreduce", "tcp:ring", "openmpi:native(yield=on)")
    assert ours["error"] is None
    assert re.search(r"during openmpi:native\(yield=on\) of 1.*: rank [01] ended without a result", theirs["error"])


def parent_of(pid: int) -> int:
    """The parent's number; 0 for a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["allreduce", "all-gather"])
def test_the_ring_on_pyzmq_is_right(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("zmq")
    for row in bench(tmp_path, kind, "pyzmq:ring", "zmq:ring", ranks=3, sizes=(1004, 12_000_000), repetitions=1):
        assert row["error"] is None
        assert row["correct"]
