"""A process whose launcher is gone ends, whatever stands in between."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

LIMIT_S = 30.0

CHILD = (
    "import os, signal\n"
    "from syncline.launch.environment import Environment\n"
    "from syncline.launch.child import end_with_launcher\n"
    "end_with_launcher(Environment(os.environ['HOW']))\n"
    "print(os.getpid(), flush=True)\n"
    "signal.pause()\n"
)
LAUNCHER = (
    "import os, subprocess, sys\n"
    "own = {'SYNCLINE_LAUNCHER': str(os.getpid()), 'TORCHELASTIC_RUN_ID': 'one'}\n"
    "subprocess.run([*sys.argv[1:]], env=os.environ | own)\n"
)


@pytest.mark.parametrize("between", [[], ["sh", "-c", '"$@"; true', "sh"]], ids=["direct", "shell"])
@pytest.mark.parametrize("launcher", ["syncline", "torchrun"])
def test_a_killed_launcher_takes_its_processes_along(launcher: str, between: list[str]) -> None:
    command = [sys.executable, "-I", "-S", "-c", LAUNCHER, *between, sys.executable, "-c", CHILD]
    environ = os.environ | {"HOW": launcher}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        assert process.stdout is not None
        child = os.pidfd_open(int(process.stdout.readline()))
        try:
            process.kill()
            assert select.select([child], [], [], LIMIT_S)[0]
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)
        assert "the launcher is gone, ending" in process.stdout.read()


def test_without_such_a_launcher_nobody_is_watched() -> None:
    script = CHILD.replace("signal.pause()", "import threading; print(threading.active_count())")
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"HOW": "variables"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[1] == "1"
