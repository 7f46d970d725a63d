"""Real ranks at small sizes: every collective beside the peers, under MPI where it is installed; ranks that die."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.bench.collectives import command, request, run, start
from syncline.bench.collectives.kinds import COLLECTIVES
from syncline.bench.collectives.start import Here, RanksFailed, run_ranks
from syncline.bench.collectives.work import Work
from syncline.launch.mpi_library import MpiLibrary, find_library

MEASURE_MEMORY = run._Set._measure_memory


@pytest.fixture(autouse=True)
def times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Growth of memory needs processes of its own and is measured once only."""
    monkeypatch.setattr(run._Set, "_measure_memory", lambda *_: None)


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
    command.run([asked], json_path=path, console=console)
    rows: list[Any] = json.loads(path.read_text())["rows"]
    return rows


LIBRARY_OF = {"allreduce": "mpich", "reduce-scatter": "openmpi"}
"""With whose ranks a collective is seen, where that is installed; only one library can be loaded into a process."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_collective_is_right_on_every_contender(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And memory is measured at the greatest size, which is seen once, for the first contender of one collective."""
    contenders = ["shm:auto", "tcp:auto"] if kind == "broadcast" else ["shm:direct", "tcp:ring"]
    # 251 elements have no equal halves; three ranks have parts of different sizes where the collective lets them.
    ranks, sizes = 2, (1004,)
    if kind == "allreduce":
        monkeypatch.setattr(
            run._Set, "_measure_memory", lambda self, cells: MEASURE_MEMORY(self, cells[:: len(cells) // 2])
        )
    if library := LIBRARY_OF.get(kind):
        contenders.append("shm:auto")
        ranks, sizes = 3, (1004, 4_000_000 if kind == "allreduce" else 2_000_000)
        if isinstance(find_library(library), MpiLibrary):
            contenders += [f"{library}:native", f"{library}:ring"]
    contenders += ["gloo:native", "torch:syncline"]
    rows = bench(tmp_path, kind, *contenders, ranks=ranks, sizes=sizes)
    assert len(rows) == len(sizes) * len(contenders)
    for row in rows:
        assert row["error"] is None
        assert row["correct"] is True
        assert 0 < row["median_s"] <= row["p99_s"]
        assert row["of_limit"] == pytest.approx(row["limit_s"] / row["median_s"])
        assert row["cpu_s_per_gb"] > 0
        if row["transport"] == library:
            assert row["algorithm"] != "native" or ("Open MPI" if library == "openmpi" else "MPICH") in row["chosen"]
        if (row["transport"], row["algorithm"]) == ("shm", "auto") and library:
            assert row["chosen"] == "direct transport=shm"
    measured = [(row["transport"], row["bytes"]) for row in rows if row["memory_bytes"] is not None]
    assert measured == ([("shm", 4_000_000)] if kind == "allreduce" else [])
    assert all(row["memory_bytes"] > 3_500_000 for row in rows if row["memory_bytes"] is not None)


def play(script: str, folder: Path, ranks: int = 2, silence_s: float = 60.0) -> list[Any]:
    """Ranks that run a script of this test instead of a bench."""
    path = folder / "rank.py"
    path.write_text(textwrap.dedent(PROLOGUE) + textwrap.dedent(script))
    heard: list[Any] = []
    work = Work("allreduce", ("shm:auto", "tcp:ring"), ((1000, (0, 1)),), "")
    run_ranks(work, ranks, Here(), heard.append, lambda _: None, silence_s, script=(str(path),))
    return heard


PROLOGUE = """
    import os, signal, sys
    from syncline.bench.collectives.work import Turn, Work
    from syncline.bench.messages import Sender, reports_path
    work = Work.from_json(sys.argv[1])
    rank = int(os.environ["RANK"])
    sender = Sender(os.open(reports_path(work.folder, rank), os.O_WRONLY))
    turn = Turn(work.folder)
"""


def test_what_ranks_say_arrives(tmp_path: Path) -> None:
    heard = play("sender.send('measured', contender=rank)\nsender.send('finished')", tmp_path)
    assert sorted(message["contender"] for message in heard) == [0, 1]


def test_a_rank_that_is_killed_is_named_with_whose_turn_it_was(tmp_path: Path) -> None:
    script = """
        if rank == 0:
            turn.begin(1, 1000)
            sender.send("measured", contender=0)
            signal.pause()
        while turn.read().contender is None:
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    """
    with pytest.raises(RanksFailed, match="rank 1 was killed by SIGKILL") as caught:
        play(script, tmp_path)
    assert (caught.value.position.contender, caught.value.position.nbytes) == (1, 1000)


def test_the_first_error_explains_a_failure(tmp_path: Path) -> None:
    script = """
        if rank == 1:
            sender.send("error", at=1.0, text="the cause")
            sys.exit(1)
        sender.send("error", at=2.0, text="its consequence")
        sys.exit(1)
    """
    with pytest.raises(RanksFailed, match="rank 1: the cause"):
        play(script, tmp_path)


def test_a_rank_that_ends_early_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="rank 0 died"):
        play("if rank: sender.send('finished')", tmp_path)


def test_ranks_that_do_nothing_are_given_up(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="nothing has moved"):
        play("signal.pause()", tmp_path, silence_s=0.1)


@pytest.mark.slow
def test_a_rank_that_dies_under_mpi_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_library("openmpi")
    if not isinstance(found, MpiLibrary):
        pytest.skip(found)
    victims: list[int] = []
    follow = start.Turn.read

    def read(self: Any) -> Any:
        position = follow(self)
        if position.contender == 0 and position.nbytes and not victims:
            victims.append(last_rank())
            os.kill(victims[0], signal.SIGKILL)
        return position

    monkeypatch.setattr(start.Turn, "read", read)
    out = io.StringIO()
    rows = bench(tmp_path, "allreduce", "tcp:ring", "openmpi:native", repetitions=200, out=out)
    # The signal may arrive in a turn, whose contender is then given up, or between two, and then it is said only.
    failed = [row for row in rows if row["error"]]
    assert re.search(r"rank [01]( .*)? died", " ".join(out.getvalue().split()))
    assert all(re.search(r"rank [01]( .*)? died", row["error"]) for row in failed)
    assert sum(row["correct"] is True for row in rows) == 2 - len(failed) >= 1


def last_rank() -> int:
    """The process number of a rank that a launcher of this process has started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and parent_of(parent_of(int(entry.name))) == os.getpid():
            words = Path(f"/proc/{entry.name}/cmdline").read_bytes().split(b"\0")
            if b"syncline.bench.collectives.rank" in words:
                return int(entry.name)
    raise AssertionError("there is no rank")


def parent_of(pid: int) -> int:
    """The parent's number; 0 for a process that is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    except OSError:
        return 0


@pytest.mark.parametrize("kind", ["allreduce", "all-gather"])
def test_the_ring_on_pyzmq_is_right(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("zmq")
    for row in bench(tmp_path, kind, "pyzmq:ring", "zmq:ring", ranks=3, sizes=(1004, 12_000_000), repetitions=1):
        assert row["error"] is None
        assert row["correct"]
