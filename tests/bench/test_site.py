"""Rows whose processes a launcher starts: what it is told, how ranks report from any host, and what is left of them."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syncline.errors import HandshakeError, SynclineError, UsageError
from syncline.launch.mpi_library import LIBRARIES, MpiLibrary, find_library
from syncline.nouns import Rate, Spec
from syncline.wire.handshake import HELLO_BYTES, run_id
from syncline.wire.listener import CALLERS, dial
from syncline_bench import compare, ranks, site
from syncline_bench.cases import Case, Comparison
from syncline_bench.display import RowDisplay
from syncline_bench.messages import Mailbox, RemoteMailbox
from syncline_bench.processes import measure
from syncline_bench.report.comparison import Row
from syncline_bench.site import AUTO, HERE, LOCAL, Launcher, Site, check_site, launcher_of, read_launcher, site_of
from syncline_bench.workloads._trace import Trace, TracedLayer

SRUN = """#!{python}
import os, signal, subprocess, sys
words = sys.argv[1:]
at = words.index("--ntasks")
options, tasks, command = words[:at], int(words[at + 1]), words[at + 2:]
assert {{"--export=ALL", "--kill-on-bad-exit=1", "--nodes=2"}} <= set(options), options
if "--fail" in options:
    sys.exit("srun: error: Unable to allocate resources: Invalid partition")
tasks = next((int(word.partition("=")[2]) for word in options if word.startswith("--start=")), tasks)
says = next((word.partition("=")[2] for word in options if word.startswith("--say=")), str(tasks))
step = {{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": says, "SLURM_NTASKS": says,
        "SLURM_STEP_NODELIST": "nowhere[1-2]", "SLURM_STEP_TASKS_PER_NODE": says, "SLURM_NODEID": "0"}}
ranks = [
    subprocess.Popen(command, env={{**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in range(tasks)
]
def end(*_):
    for rank in ranks:
        rank.kill()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
status = 0
for rank in [] if "--careless" in options else ranks:
    status = status or (137 if rank.wait() < 0 else rank.returncode)
    if status:
        end()
for rank in ranks:
    rank.wait()
sys.exit(status)
"""
"""As much of Slurm's launcher as a row needs, on this machine: it starts tasks and tells each which it is."""

PROLOGUE = """
import os, signal, sys, time
from syncline.launch.environment import recognise
from syncline_bench.ranks import Line
line = Line(sys.argv[2], recognise(), watched=True)
place = recognise()  # with the meeting point that the starter has told
rank = place.rank
open(f"{folder}/{os.getpid()}", "w").write(f"{rank} {place.launcher} {place.address}:{place.port}")
def result():
    names = ("loading_s h2d_s forward_s backward_s update_s step_s exposed_comm_s iteration_s compute_s "
             "images_per_s bytes_sent_per_step").split()
    line.send("result", iterations=10, warmup=2, measures=dict.fromkeys(names, 1.0 + rank), chosen="ring transport=tcp",
         curve=[], sent={}, received={}, sha256="a", start_s=0.5, peak_bytes=1 << 28,
         staleness={}, version_lag={}, waited_s={}, mean_compute_s=1.0, cpu_s=1.0)
    line.send("done")
def forever():
    while True:
        signal.pause()
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def srun(tmp_path: Path) -> str:
    return f"{executable(tmp_path / 'srun', SRUN.format(python=sys.executable))} --nodes=2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ranks").mkdir()
    return tmp_path / "ranks"


def row_of(launcher: str, folder: Path, script: str, workers: int = 3, servers: int = 0, **more: Any) -> Row:
    case = Case("ring", workers, servers, 64, 10)
    site = Site(launcher=read_launcher(launcher))
    text = f"folder = {str(folder)!r}\n{PROLOGUE}{script}"
    display = more.pop("display", None) or RowDisplay(Console(file=io.StringIO(), force_terminal=False, width=200))
    return measure(case, "digits", 0, more.pop("limit_s", 60.0), display, site, script=("-c", text), **more)


def all_gone(folder: Path, limit_s: float = 20.0) -> bool:
    """Whether all ranks that have noted themselves end within a while."""
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit:
        if not any(_runs(int(path.name)) for path in folder.iterdir()):
            return True
        threading.Event().wait(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# What is asked for.


def test_launchers_are_found_by_name_or_path(tmp_path: Path, srun: str) -> None:
    assert (read_launcher("auto"), read_launcher(" local ")) == (AUTO, LOCAL)
    found = read_launcher(f" {srun} ")
    assert found == read_launcher(srun)
    assert (found.kind, found.words[1:], found.name) == ("srun", ("--nodes=2",), "srun")
    for said, kind in (("mpirun (Open MPI) 4.1.2", "openmpi"), ("HYDRA build details:", "mpich")):
        own = executable(tmp_path / "mpiexec", f"#!/bin/sh\necho '{said}'\n")
        found = read_launcher(f"{own} --hostfile 'my hosts'")
        assert (found.kind, found.words, found.settings) == (kind, (str(own), "--hostfile", "my hosts"), None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("local -x", "takes no arguments"),
        ("'mpirun", "cannot be read"),
        ("aprun", "is unknown: choose"),
        ("/nowhere/srun", "was not found"),
        ("/nowhere/mpirun", "was not found"),
        ("srun -n 4", "leave -n out"),
        ("srun -n4", "leave -n4 out"),
        ("srun --ntasks=4", "leave --ntasks=4 out"),
        ("mpirun -np 4", "leave -np out"),
    ],
)
def test_a_launcher_that_cannot_be_is_refused_before_anything_starts(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read_launcher(text)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "find_library", lambda name: f"{name} is not installed: pip install it")
    monkeypatch.setattr("shutil.which", lambda _: None)
    for name in ("mpirun", "mpich"):
        with pytest.raises(UsageError, match=f"--launcher {name}: .* is not installed: pip install it"):
            read_launcher(name)
    with pytest.raises(SynclineError, match=r"transport=mpi needs .*mpi is not installed"):
        Site().launcher_of("ring transport=mpi")


def test_every_launcher_is_told_the_number_and_passes_the_variables_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNCLINE_INTERFACE", "eth7")
    library = MpiLibrary("openmpi", "/lib/libmpi.so.40", ("/bin/prterun",))
    env = {"SYNCLINE_SECRET": "s"}
    argv, added = Launcher("mpirun", "openmpi", ("/bin/prterun", "--hostfile", "h"), library).command(3, ["x"], env)
    assert argv[:3] == ["/bin/prterun", "--hostfile", "h"]
    assert argv[-3:] == ["-n", "3", "x"]
    named = {name for flag, name in pairwise(argv) if flag == "-x"}
    assert {"SYNCLINE_SECRET", "SYNCLINE_INTERFACE", "MPI4PY_LIBMPI", "OMP_NUM_THREADS"} <= named
    assert (added["SYNCLINE_SECRET"], added["MPI4PY_LIBMPI"]) == ("s", "/lib/libmpi.so.40")
    assert Launcher("m", "mpich", ("/m",)).command(2, ["x"], env) == (["/m", "-n", "2", "x"], env)
    argv, _ = Launcher("srun", "srun", ("srun", "--mpi=pmix")).command(2, ["x"], env)
    assert argv[-4:] == ["--mpi=pmix", "--ntasks", "2", "x"]


def test_auto_is_mpirun_for_what_talks_over_mpi_and_nothing_else() -> None:
    site = Site()
    for strategy in ("single", "ddp", "ring", "ps(servers=1) transport=grpc"):
        assert site.launcher_of(strategy) == LOCAL
    library = find_library("mpi")
    if isinstance(library, str):
        pytest.skip(library)
    assert site.launcher_of("ring transport=mpi(onesided=on)") == launcher_of(library)


def test_a_lab_takes_the_libraries_launchers_only(srun: str) -> None:
    check_site(AUTO, in_lab=True)
    check_site(LOCAL, in_lab=True)
    check_site(read_launcher(srun), in_lab=False)
    library = MpiLibrary("mpich", "l", ("/bin/mpiexec.hydra", "-bind-to", "none"))
    check_site(Launcher("mpich", "mpich", library.launcher, library), in_lab=True)
    refused = read_launcher(srun), Launcher("mpich -f h", "mpich", (*library.launcher, "-f", "h"), library)
    for launcher in (*refused, Launcher("/own/mpirun", "mpich", ("/own/mpirun",))):
        with pytest.raises(UsageError, match="exclude each other"):
            check_site(launcher, in_lab=True)


class OneLab:
    """Notes which MPI jobs it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str]] = []

    def placement(self, rank: int, per_host: int = 1) -> Any:
        raise NotImplementedError

    def goodput(self, seconds: float = 2.0) -> float:
        raise NotImplementedError

    def mpi_command(
        self, ranks: int, command: Any, library: MpiLibrary, per_host: int = 1
    ) -> tuple[list[str], dict[str, str]]:
        assert per_host == 1
        self.asked.append((ranks, library.name))
        return list(command), {}


def test_in_a_lab_its_own_job_starts_the_ranks_and_pipes_bring_the_results() -> None:
    lab = OneLab()
    site, launcher = Site(lab), Launcher("mpich", "mpich", ("/m",), MpiLibrary("mpich", "l", ("/m",)))
    with site.mailbox(launcher, 3) as mailbox:
        assert type(mailbox) is Mailbox
        site.run(launcher, ["true"], 3, env={}, on_output=lambda *_: None)
    assert lab.asked == [(3, "mpich")]


# Rows.


def test_processes_of_srun_find_each_other_and_make_a_row(srun: str, folder: Path) -> None:
    row = row_of(srun, folder, "result()\nif rank == 0: print('hello')", workers=2, servers=1)
    assert row.error is None
    assert row.finished
    assert (row.workers, row.servers, row.launcher, row.images_per_s) == (2, 1, srun, 1.0 + 2.0)
    said = sorted(path.read_text() for path in folder.iterdir())
    assert [text.split()[:2] for text in said] == [["0", "srun"], ["1", "srun"], ["2", "srun"]]
    (where,) = {text.split()[2] for text in said}  # told by rank 0, on one host
    assert where.startswith("127.0.0.1:")
    assert not where.endswith(":0")


@pytest.mark.every(2)
@pytest.mark.parametrize("library", LIBRARIES)
def test_processes_of_mpirun_make_a_row(library: str, folder: Path) -> None:
    if not isinstance(found := find_library(library), MpiLibrary):
        pytest.skip(found)
    row = row_of(library, folder, "result()")
    assert row.error is None
    assert sorted(path.read_text().split()[1] for path in folder.iterdir()) == ["mpirun"] * 3


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--fail", "srun --nodes=2 --fail -n 2 hostname\nsrun: error: Unable to allocate"),
        ("--fail", "srun ended with status 1 before rank 0 had a result; see whether it works alone: /"),
        ("--start=2", "UsageError: the row needs 3 processes, and srun has started 2"),
        ("--start=4", "UsageError: the row needs 3 processes, and srun has started 4"),
    ],
)
def test_a_launcher_that_fails_or_starts_another_number_is_told(
    srun: str, folder: Path, options: str, said: str
) -> None:
    row = row_of(f"{srun} {options}", folder, "result()")
    assert row.error is not None
    assert said in row.error
    assert not list(folder.iterdir())  # nobody has begun


def test_ranks_that_do_not_come_are_named(srun: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Site, "mailbox", lambda _self, _launcher, number: RemoteMailbox(number, 3.0))
    row = row_of(f"{srun} --start=2 --say=3", folder, "result()")
    assert row.error is not None
    assert "rank 2 of 3 did not call" in row.error
    assert all_gone(folder)


def test_a_rank_that_raises_is_named(srun: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_LAST_WORDS_S", 0.4)
    script = "if rank == 1:\n    line.connection.fail(RuntimeError('out of cheese'))\n    sys.exit(3)\nforever()"
    row = row_of(srun, folder, script)
    assert row.error == "rank 1: RuntimeError: out of cheese"
    assert all_gone(folder)


@pytest.mark.parametrize("options", ["", "--careless"])
def test_a_rank_that_is_killed_is_named_and_ends_all(
    srun: str, folder: Path, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the launcher lets the others be."""
    monkeypatch.setattr(ranks, "_LAST_WORDS_S", 0.4)
    row = row_of(f"{srun} {options}", folder, "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\nforever()")
    assert row.error is not None
    assert row.error.startswith("rank 2 ended without a result")
    assert "\n" not in row.error
    assert all_gone(folder)


class Interrupted(RowDisplay):
    def advance(self, *_: Any) -> None:
        raise KeyboardInterrupt


def test_an_interrupt_ends_all(srun: str, folder: Path) -> None:
    display = Interrupted(Console(file=io.StringIO(), force_terminal=False))
    script = "line.send('progress', iteration=1, loss=None, images_per_s=None)\nforever()"
    with pytest.raises(KeyboardInterrupt):
        row_of(srun, folder, script, display=display)
    assert all_gone(folder)


def test_ranks_whose_starter_is_killed_end(srun: str, folder: Path, tmp_path: Path) -> None:
    """The launcher is killed with it, and a careless one leaves its tasks, as one on another host would."""
    here = Path(__file__)
    script = executable(
        tmp_path / "starter",
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(here.parent)!r})\nfrom pathlib import Path\n"
        f"from {here.stem} import row_of\nrow_of({srun!r}, Path({str(folder)!r}), 'forever()')\n",
    )
    with subprocess.Popen([script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}) as starter:
        limit = time.monotonic() + 60
        while len(list(folder.iterdir())) < 3 and time.monotonic() < limit:
            threading.Event().wait(0.05)
        starter.send_signal(signal.SIGKILL)
    assert len(list(folder.iterdir())) == 3
    assert all_gone(folder)


# Lines over TCP.


def call(mailbox: RemoteMailbox, rank: int, secret: str | None = None, purpose: str = "report") -> Any:
    host, _, port = mailbox.addresses[0].rpartition(":")
    known = (secret or mailbox.environ["SYNCLINE_SECRET"]).encode()
    return dial((host, int(port)), run_id("measured"), known, rank, len(mailbox.addresses), purpose, 10.0)


def heard(mailbox: Mailbox, enough: Callable[[], Any]) -> None:
    limit = time.monotonic() + 10
    while not enough() and time.monotonic() < limit:
        mailbox.receive(0.05)
    assert enough()


def test_who_cannot_prove_itself_has_no_line() -> None:
    with RemoteMailbox(2) as mailbox:
        with pytest.raises(HandshakeError):
            call(mailbox, 0, "another")
        for rank, purpose in ((2, "report"), (0, "data")):
            with pytest.raises(HandshakeError):
                call(mailbox, rank, purpose=purpose)
        first = call(mailbox, 0)
        with pytest.raises(HandshakeError):  # it is there
            call(mailbox, 0)
        first.close()
        assert mailbox.receive(0.1) == []


def test_a_process_that_does_not_say_where_it_is_ends_the_run() -> None:
    with RemoteMailbox(1) as mailbox, call(mailbox, 0) as line:
        line.sendall(b'{"kind": "here"}\n')
        with pytest.raises(SynclineError, match="process 0 did not send its address: its host has another version"):
            heard(mailbox, lambda: False)


def test_a_process_that_says_twice_that_it_is_here_ends_the_run() -> None:
    here = b'{"kind": "here", "network": "a", "address": "10.1.2.3", "port": 5}\n'
    with RemoteMailbox(2) as mailbox, call(mailbox, 0) as line:
        line.sendall(2 * here)
        with pytest.raises(SynclineError, match="process 0 has reported its arrival twice"):
            heard(mailbox, lambda: False)
    with Mailbox(1) as mailbox:
        Path(mailbox.addresses[0].split()[0]).write_bytes(2 * b'{"kind": "here"}\n')
        with pytest.raises(SynclineError, match="process 0 has reported its arrival twice"):
            mailbox.receive(5.0)


def test_what_a_process_had_sent_before_its_end_is_all_read() -> None:
    """It comes in parts, the last of them after the end has been seen."""
    report = b'{"kind": "result", "long": "' + bytes([ord("x")]) * 300_000 + b'"}\n'
    with RemoteMailbox(1) as mailbox, call(mailbox, 0) as line:
        line.sendall(b'{"kind": "here", "network": "a", "address": "10.1.2.3", "port": 5}\n')
        heard(mailbox, lambda: mailbox._places)
        late = threading.Thread(target=line.sendall, args=(report,))
        late.start()
        assert [len(message["long"]) for some in mailbox.rest() for _, message in some] == [300_000]
        late.join()


def test_strangers_keep_no_rank_out() -> None:
    """Whether they are silent, stop in the middle, or talk nonsense: more than are kept waiting."""
    said = b"", bytes(HELLO_BYTES - 1), bytes(range(256)) * 4
    with RemoteMailbox(1) as mailbox, ExitStack() as strangers:
        host, _, port = mailbox.addresses[0].rpartition(":")
        for number in range(CALLERS + 10):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(said[number % 3])
        with call(mailbox, 0) as line:
            line.sendall(b'{"kind": "here", "network": "a", "address": "10.1.2.3", "port": 5}\n')
            heard(mailbox, lambda: mailbox._places)
            assert line.makefile().readline() == '{"address": "127.0.0.1", "port": 5}\n'


@pytest.mark.parametrize(("networks", "address"), [(("a", "a"), "127.0.0.1"), (("a", "b"), "10.1.2.3")])
def test_all_are_told_where_rank_0_is_and_the_doors_close(networks: tuple[str, str], address: str) -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with RemoteMailbox(2) as mailbox:
        lines = [call(mailbox, rank) for rank in (0, 1)]
        for rank, line in enumerate(lines):
            place = f'"network": "{networks[rank]}", "address": "10.1.2.{3 + rank}", "port": {5 * (rank == 0)}'
            line.sendall(f'{{"kind": "here", {place}}}\n'.encode())
        heard(mailbox, lambda: len(mailbox._places) == 2)
        for line in lines:
            assert line.makefile().readline() == f'{{"address": "{address}", "port": 5}}\n'
        with pytest.raises(ConnectionRefusedError):
            call(mailbox, 1)
        lines[1].close()
        heard(mailbox, lambda: mailbox.ended == [1])
        lines[0].close()
    assert set(Path("/proc/self/fd").iterdir()) == before


TRACE = Trace("t", (TracedLayer("a", (Spec("weight", (1_000_000,)),), 0.001, 0.001),))


class FakeLab:
    """Notes what is asked of it; its hosts are this machine."""

    made: list[FakeLab]

    def __init__(self, hosts: int, rate: Rate, name: str | None = None) -> None:
        self.hosts, self.rate, self.name = hosts, rate, name
        self.open = False
        FakeLab.made.append(self)

    def __enter__(self) -> FakeLab:
        self.open = True
        return self

    def __exit__(self, *_: object) -> None:
        self.open = False

    def placement(self, rank: int, per_host: int = 1) -> Any:
        raise NotImplementedError

    def goodput(self) -> float:
        assert self.open
        return 11e6


@pytest.fixture
def labs(monkeypatch: pytest.MonkeyPatch) -> list[FakeLab]:
    module: Any = types.ModuleType("syncline_bench.lab")
    module.Lab = FakeLab
    monkeypatch.setitem(sys.modules, "syncline_bench.lab", module)
    FakeLab.made = []
    return FakeLab.made


def test_without_a_rate_there_is_no_lab(labs: list[FakeLab]) -> None:
    with site_of(4, None, print) as site:
        assert site == HERE
    assert labs == []
    assert (HERE.lab, HERE.rate, HERE.name) == (None, None, None)


def test_a_lab_lives_as_long_as_the_comparison(labs: list[FakeLab]) -> None:
    said: list[str] = []
    with site_of(3, Rate(1e8), said.append) as site:
        (lab,) = labs
        assert (lab.hosts, lab.rate, lab.open) == (3, 1e8, True)
        assert (site.name, site.goodput_bytes_per_s) == ("100Mbit", 11e6)
        assert id(site.lab) == id(lab)
    assert not lab.open
    assert said == ["lab: 3 hosts, links of 100Mbit, goodput 88 Mbit/s"]


def test_one_host_has_no_link_to_measure(labs: list[FakeLab]) -> None:
    with site_of(1, Rate(1e8), print) as site:
        assert site.goodput_bytes_per_s is None
    assert len(labs) == 1


def test_rows_in_a_lab_get_the_bound_of_its_link(
    labs: list[FakeLab], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Site] = []

    def measure(case: Case, *arguments: Any, **_: Any) -> Row:
        seen.append(arguments[-1])
        return Row(case.strategy, case.workers, iteration_s=1.0, replicas_equal=True)

    monkeypatch.setattr(compare, "measure", measure)
    cases = (Case("single", 1, 0, 1, 5), Case("ring", 2, 0, 2, 5), Case("ps(servers=1)", 2, 1, 2, 5, rate=8e6))
    comparison = Comparison("trace:x", cases, 0, None, 5, tmp_path / "r.json", None, Rate(1e8), TRACE)
    quiet = Console(file=io.StringIO(), force_terminal=False, width=80)
    assert compare.carry_out(comparison, 10.0, quiet, quiet) == 0
    assert [lab.hosts for lab in labs] == [3]
    assert [id(site.lab) for site in seen] == [id(lab) for lab in labs] * 3
    data = json.loads((tmp_path / "r.json").read_text())
    assert (data["lab"], data["goodput_bytes_per_s"]) == ("100Mbit", 11e6)
    payload = 1e8 / 8 * 1448 / 1514
    bounds = [row["bound_s"] for row in data["rows"]]
    assert bounds == pytest.approx([0.002, 4e6 / payload, 4e6 / (8e6 / 8 * 1448 / 1514)])
    assert [row["of_bound"] for row in data["rows"]] == pytest.approx(bounds)


def test_a_lab_that_cannot_be_made_leaves_no_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class NoLab(FakeLab):
        def __enter__(self) -> FakeLab:
            raise UsageError("a lab needs root")

    module: Any = types.ModuleType("syncline_bench.lab")
    module.Lab = NoLab
    monkeypatch.setitem(sys.modules, "syncline_bench.lab", module)
    FakeLab.made = []
    comparison = Comparison(
        "trace:x", (Case("single", 1, 0, 1, 5),), 0, None, 5, tmp_path / "r.json", None, Rate(1e8), TRACE
    )
    quiet = Console(file=io.StringIO(), force_terminal=False)
    with pytest.raises(UsageError, match="needs root"):
        compare.carry_out(comparison, 10.0, quiet, quiet)
    assert not (tmp_path / "r.json").exists()
