"""Two launchers with real workers in one run: it ends with the weights of its log, whoever joins and is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_elastic import members_of_steps, repeated

from syncline.errors import UsageError
from syncline_bench.lab import Lab

LIMIT_S = 60.0
PROMISED_S = 10.0
"""From the loss of a machine to the next step of the others."""
HERE = Path(__file__).parent


class Launcher:
    """A ``syncline run`` of ``joined_script`` with the lines that it and its workers print.

    ``host`` is the beginning of a command that runs it on another host.
    """

    def __init__(
        self, arguments: list[str], plan: Mapping[str, Any], secret: str = "of the run", host: Sequence[str] = ()
    ) -> None:
        command = [*host, sys.executable, "-c", "from syncline_bench.cli import main; main()", "run", *arguments]
        paths = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [*command, str(HERE / "joined_script.py"), json.dumps(plan)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, "SYNCLINE_SECRET": secret, "SYNCLINE_FLIGHT": "off"},
        )  # fmt: skip
        self.lines: list[str] = []
        self._ended = False  # it prints no more
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._came:
                self.lines.append(line)
                self._came.notify_all()
        with self._came:
            self._ended = True
            self._came.notify_all()

    def await_line(self, pattern: str, within_s: float = LIMIT_S) -> re.Match[str]:
        """Wait until it prints a line with this pattern."""

        def found() -> re.Match[str] | None:
            return next(filter(None, (re.search(pattern, line) for line in self.lines)), None)

        with self._came:
            self._came.wait_for(lambda: found() or self._ended, within_s)
            match = found()
        assert match, self.text
        return match

    @property
    def address(self) -> str:
        return self.await_line(r"--join (\S+) ")[1]

    def end(self) -> int:
        """Its exit status, once all that it prints was read."""
        status = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return status

    @property
    def learnt(self) -> list[list[Any]]:
        """What its workers have printed at their ends."""
        return [json.loads(line.removeprefix("learnt ")) for line in self.lines if line.startswith("learnt ")]

    @property
    def text(self) -> str:
        return "".join(self.lines)


@contextmanager
def launched(*arguments: str, plan: Mapping[str, Any], **more: Any) -> Iterator[Launcher]:
    found = Launcher([*arguments], plan, **more)
    try:
        yield found
    finally:
        if found.process.poll() is None:
            found.process.terminate()
        found.end()
        assert found.process.stdout is not None
        found.process.stdout.close()


def check(log: Path, *launchers: Launcher) -> dict[int, list[Any]]:
    """All that have trained to the end have the weights of the log. What they say, by number."""
    again = repeated(log)
    learnt = {number: rest for launcher in launchers for number, *rest in launcher.learnt}
    assert learnt
    for number, (rank, members, _, weights, *_) in learnt.items():
        assert weights == again
        assert members[rank] == number
    return learnt


def gone(pid: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_workers_of_another_launcher_join_one_that_is_alone(tmp_path: Path) -> None:
    """Two more than at the start."""
    log, plan = tmp_path / "samples.jsonl", {"wanted": [[3, 3]]}
    arguments = ("-n", "1", "--elastic", "1:3", "--samples", str(log))
    with launched(*arguments, plan=plan) as first:
        first.await_line("waits at 3")
        with launched("--join", first.address, "-n", "2", plan=plan) as second:
            assert (first.end(), second.end()) == (0, 0), first.text + second.text
    learnt = check(log, first, second)
    assert {number: said[:3] for number, said in learnt.items()} == {
        number: [rank, learnt[0][1], [str(rank), "3"]] for rank, number in enumerate(learnt[0][1])
    }
    assert sorted(learnt) == [0, 1, 2]
    members = members_of_steps(log)
    assert members[:3] == [[0]] * 3
    assert len(members[-1]) == 3


@pytest.mark.slow
def test_the_run_goes_on_where_others_have_joined_when_all_its_first_workers_are_lost(tmp_path: Path) -> None:
    """Rank 0 is then a worker of the second launcher, at whose port the view meets; its log has the later steps."""
    logs = [tmp_path / f"{number}.jsonl" for number in range(2)]
    plan = {"wanted": [[2, 3]], "until": 5, "die": [[0, 5]]}
    with launched("-n", "1", "--elastic", "1:3", "--samples", str(logs[0]), plan=plan) as first:
        first.await_line("waits at 2")
        arguments = ("--join", first.address, "-n", "2", "--samples", str(logs[1]))
        with launched(*arguments, plan=plan) as second:
            assert (first.end(), second.end()) == (0, 0), first.text + second.text
    both = tmp_path / "both.jsonl"
    both.write_text(logs[1].read_text() + logs[0].read_text())
    check(both, first, second)
    assert json.loads(logs[0].read_text().splitlines()[-1])["members"][0] == 0
    assert 0 not in json.loads(logs[1].read_text().splitlines()[-1])["members"]


@pytest.mark.slow
def test_several_launchers_join_at_once(tmp_path: Path) -> None:
    log, plan = tmp_path / "samples.jsonl", {"wanted": [[1, 4]]}
    with launched("-n", "1", "--elastic", "1:4", "--samples", str(log), plan=plan) as first:
        address = first.address
        with (
            launched("--join", address, plan=plan) as second,
            launched("--join", address, plan=plan) as third,
            launched("--join", address, plan=plan) as fourth,
        ):
            ends = [launcher.end() for launcher in (first, second, third, fourth)]
    assert ends == [0] * 4, first.text + second.text + third.text + fourth.text
    assert sorted(check(log, first, second, third, fourth)) == [0, 1, 2, 3]


REFUSED: list[tuple[list[str], str, int, str]] = [
    ([], "of the run", 1, "RollCallError: this worker cannot join the run: this run has model"),
    (["--strategy", "tree"], "of the run", 1, "this run has strategy 'auto', but the process that joins has 'tree"),
    ([], "another", 1, "has another secret: set SYNCLINE_SECRET to that of its run"),
    (["-n", "2"], "of the run", 1, "it has 1 of at most 2 workers: ask for 1 at most (-n)"),
]


@pytest.mark.slow
def test_others_are_refused_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    log, plan = tmp_path / "samples.jsonl", {"wanted": [[3, 2]], "other": [1]}
    with launched("-n", "1", "--elastic", "1:2", "--samples", str(log), plan=plan) as first:
        first.await_line("waits at 3")
        for arguments, secret, status, why in REFUSED:
            with launched("--join", first.address, *arguments, plan=plan, secret=secret) as refused:
                assert refused.end() == status, refused.text
                assert why in refused.text
        with launched("--join", first.address, plan=plan) as second:
            assert (first.end(), second.end()) == (0, 0), first.text + second.text
    check(log, first, second)


@pytest.mark.slow
def test_the_run_goes_on_without_a_launcher_that_has_joined_and_its_workers_end_with_it(tmp_path: Path) -> None:
    """Two of five workers end at once, while the others wait for their gradients."""
    log, plan = tmp_path / "samples.jsonl", {"wanted": [[2, 5]], "until": 4, "hold": [[3, 5], [4, 5]]}
    with launched("-n", "3", "--elastic", "1:5", "--samples", str(log), plan=plan) as first:
        first.await_line("waits at 2")
        with launched("--join", first.address, "-n", "2", plan=plan) as second:
            second.await_line("3 holds")
            second.await_line("4 holds")
            workers = children(second.process.pid)
            second.process.kill()
            assert second.end() == -signal.SIGKILL
            assert all(map(gone, workers))
        assert first.end() == 0, first.text
    check(log, first)


@pytest.mark.slow
def test_the_loss_of_the_first_launcher_ends_the_others_with_an_error() -> None:
    plan = {"wanted": [[2, 2], [4, 3]]}
    with launched("-n", "1", "--elastic", "1:3", plan=plan) as first:
        first.await_line("waits at 2")
        with launched("--join", first.address, plan=plan) as second:
            first.await_line("waits at 4")
            workers = children(second.process.pid)
            first.process.kill()
            assert second.end() == 1
            assert all(map(gone, workers))
    assert (
        f"the launcher at {first.address}, whose run these workers have joined, has ended or cannot be" in second.text
    )


@pytest.mark.slow
def test_over_tls_a_worker_is_lost_and_others_join(tmp_path: Path) -> None:
    """The first launcher starts one in its place, another launcher adds one. All connections are encrypted."""
    pytest.importorskip("cryptography")
    log, plan = tmp_path / "samples.jsonl", {"wanted": [[4, 3]], "die": [[1, 2]]}
    how = ("--elastic", "1:3", "--tls", "on", "--strategy", "ring transport=tcp", "--samples", str(log))
    with launched("-n", "2", *how, plan=plan) as first:
        first.await_line("waits at 4")
        with launched("--join", first.address, "--tls", "on", plan=plan) as second:
            assert (first.end(), second.end()) == (0, 0), first.text + second.text
    assert 0 in check(log, first, second)
    assert len(members_of_steps(log)[-1]) == 3


@pytest.fixture
def hosts() -> Iterator[Lab]:
    """Two of them."""
    lab = Lab(2)
    try:
        lab.__enter__()
    except UsageError as error:
        pytest.skip(str(error))
    yield lab
    lab.close()


def set_link(lab: Lab, host: int, state: str) -> None:
    """Switch the link of a host on or off, at the switch: nobody is told."""
    assert lab._switch is not None
    words = [*lab._switch.enter(), "ip", "link", "set", f"p{host}", state]
    subprocess.run(words, check=True, timeout=LIMIT_S)


@pytest.mark.slow
def test_the_run_goes_on_without_a_machine_that_falls_silent(hosts: Lab, tmp_path: Path) -> None:
    """Its worker is missed within ``liveness``. Its launcher ends its worker; another one joins from there later."""
    log, plan = tmp_path / "samples.jsonl", {"wanted": [[2, 3]], "hold": [[2, 5]], "init": {"liveness": 2.0}}
    arguments = ("-n", "2", "--elastic", "1:3", "--interface", hosts.address(0), "--samples", str(log))
    with launched(*arguments, plan=plan, host=hosts.enter(0)) as first:
        first.await_line("waits at 2")
        with launched("--join", first.address, plan=plan, host=hosts.enter(1)) as second:
            second.await_line("2 holds")
            set_link(hosts, 1, "down")
            first.await_line(r"2 workers go on \(view 3\)", PROMISED_S)
            assert second.end() == 1
        first.await_line("lost the launcher at .* with workers 2")
        set_link(hosts, 1, "up")
        with launched("--join", first.address, plan=plan, host=hosts.enter(1)) as third:
            assert (first.end(), third.end()) == (0, 0), first.text + third.text
    check(log, first, third)
    assert "whose run these workers have joined, has ended or cannot be reached" in second.text
