"""Verbs that start processes, interrupted and killed: what the command says, and what is left of it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

LIMIT_S = 120.0

SCRIPT = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
SCRIPT += "from syncline_bench.cli import main; sys.exit(main())"
"""The installed script. Under -m Python may end by SIGINT, where it came inside an exec(), whatever main says.

A job in the background, as the tests may be, ignores SIGINT.
"""

VERBS: dict[str, tuple[tuple[str, ...], str]] = {
    "compare": (("--workers", "2", "--strategies", "ring", "--iterations", "100000"), "single: starting"),
    "accuracy": (("--workers", "2", "--codecs", "int8", "--seeds", "0", "--epochs", "1000"), "none seed 0"),
    "bench": (("--ranks", "2", "--with", "shm:auto,tcp:ring", "--sizes", "1KB", "--repetitions", "1000000"), "2 ranks"),
    "bench steps": (("--frameworks", "numpy", "--repetitions", "1000000"), ""),
    "tune": (("--workers", "2", "--budget", "100s"), "auto: done"),
    "reproduce": ((), ""),
    "calibrate": (("--transport", "tcp", "--codecs", "none", "--seconds", "600"), "messages of up to"),
}
"""Arguments, and what a verb has printed when it is in the middle of its work, in which most of them have children."""


class Command:
    """A verb, in the middle of its work, in a session of its own, with a folder for temporary files of its own."""

    def __init__(self, verb: str, folder: Path) -> None:
        arguments, says = VERBS[verb]
        self.temporary, self._mark, self._printed = folder / "temporary", secrets.token_hex(8), folder / "printed"
        self.temporary.mkdir()
        environment = {"TMPDIR": str(self.temporary), "TEST_MARK": self._mark, "PYTHONUNBUFFERED": "1"}
        with self._printed.open("wb") as printed:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SCRIPT, *verb.split(), *arguments],
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._works = self._has_loaded_numpy if verb == "reproduce" else lambda: len(self.alive) > 1
        self._says = says

    @property
    def printed(self) -> str:
        """All so far."""
        return self._printed.read_text()

    @property
    def alive(self) -> list[psutil.Process]:
        """The processes that it consists of."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TEST_MARK") == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    @property
    def left(self) -> list[str]:
        """Files of ours; torch has a cache of its own beside them."""
        return [file.name for file in self.temporary.iterdir() if file.name.startswith("syncline")]

    def _has_loaded_numpy(self) -> bool:
        return "numpy" in Path(f"/proc/{self.process.pid}/maps").read_text()

    def until_in_the_middle(self) -> None:
        """Wait for what it says, and for its processes."""
        limit = time.monotonic() + LIMIT_S
        while not (self._says in self.printed and self._works()):
            assert time.monotonic() < limit, self.printed
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                pytest.fail(f"it ended by itself: {self.printed}")

    def until_nothing_is_alive(self) -> None:
        """Wait for the processes that the first one has left."""
        assert not psutil.wait_procs(self.alive, LIMIT_S)[1]
        assert not self.alive

    def end(self) -> None:
        """Whatever the test has found."""
        for process in self.alive:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait(LIMIT_S)


@pytest.fixture
def command(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Command]:
    made = Command(request.param, tmp_path)
    try:
        made.until_in_the_middle()
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("command", VERBS, indirect=True)
def test_an_interrupt_ends_all_and_is_no_failure(command: Command) -> None:
    os.killpg(command.process.pid, signal.SIGINT)
    assert command.process.wait(LIMIT_S) == 130, command.printed
    assert "interrupted" in command.printed
    assert "Traceback" not in command.printed
    assert not command.alive
    assert not command.left


@pytest.mark.parametrize("command", [verb for verb in VERBS if verb != "reproduce"], indirect=True)
def test_of_a_verb_that_is_killed_no_process_and_no_folder_stays(command: Command) -> None:
    command.process.kill()
    command.until_nothing_is_alive()
    assert not command.left
