"""Starts and watches one process of a run, and ends a process whose launcher has ended.

A child has a terminal session of its own and gets no Ctrl-C from the terminal: each signal comes from the launcher,
once. The kernel kills it when the launcher dies, even by SIGKILL (prctl(2), PR_SET_PDEATHSIG). A stub in the new
process requests that and then becomes the command; unlike code between fork and exec this is safe in a launcher with
threads. The kernel watches the *thread* that started the process, so that thread must not end. An ended child remains a
zombie until ``close``, so no other process gets its number and its signals.

``end_with_launcher`` covers other launchers, and a shell script in between: the process finds its launcher among its
ancestors and waits for its end through a descriptor (pidfd_open(2)).
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from .environment import Environment

_STUB = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(137)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"syncline: cannot start {sys.argv[2]}: {error.strerror}")
"""


class Child:
    """A started process. ``status`` is None while it runs, then its exit status as in shells (128 + signal)."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        pass_fds: Sequence[int],
        capture: bool,
    ) -> None:
        self.rank = rank
        self.status: int | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _STUB, str(os.getpid()), *command],
            env=dict(environ),
            pass_fds=tuple(pass_fds),
            # Only rank 0 reads the terminal; the others get the end of input, not a part of it.
            stdin=None if rank == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else None,
            stderr=subprocess.STDOUT if capture else None,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    @property
    def pid(self) -> int:
        """The process number, which is also the number of its session and process group."""
        return self._process.pid

    @property
    def output(self) -> IO[bytes] | None:
        """The stream of its output, if that is captured."""
        return self._process.stdout

    def look(self) -> int | None:
        """The exit status if the process has ended. Does not wait."""
        if self.status is None:
            result = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if result is not None:
                killed = result.si_code != os.CLD_EXITED
                self.status = 128 + result.si_status if killed else result.si_status
        return self.status

    def signal(self, number: int) -> None:
        """Send a signal. SIGKILL goes to the whole process group, including processes that the child has started."""
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            elif self.look() is None:
                signal.pidfd_send_signal(self.pidfd, number)

    def close(self) -> None:
        """Kill the process if it still runs, and free its resources."""
        if self.look() is None:
            self.signal(signal.SIGKILL)
        self._process.wait()
        os.close(self.pidfd)
        if self._process.stdout is not None:
            self._process.stdout.close()


def end_with_launcher(environment: Environment) -> None:
    """Let this process end when the ``syncline run`` or torchrun that has started it ends. Called once."""
    pid = _launcher(environment)
    if pid is None:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    threading.Thread(target=_end_after, args=(descriptor,), name="syncline-guard", daemon=True).start()


def _end_after(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll():
        pass
    with suppress(OSError):
        os.write(2, b"syncline: the launcher is gone, ending\n")
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(1)


def _launcher(environment: Environment) -> int | None:
    """The launcher among this process's ancestors. None if it is neither ``syncline run`` nor torchrun."""
    if environment.launcher == "syncline":
        told = os.environ.get("SYNCLINE_LAUNCHER", "")
        return next((pid for pid in _ancestors() if str(pid) == told), None)
    if environment.launcher == "torchrun":
        # torchrun sets this variable for its workers, so its agent is the first ancestor without it.
        mark = os.fsencode(f"TORCHELASTIC_RUN_ID={os.environ.get('TORCHELASTIC_RUN_ID', '')}")
        return next((pid for pid in _ancestors() if mark not in _variables_of(pid)), None)
    return None


def _ancestors() -> Iterator[int]:
    pid = os.getppid()
    while pid > 0:
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return
        pid = int(stat[stat.rindex(b")") + 2 :].split()[1])


def _variables_of(pid: int) -> list[bytes]:
    """The environment with which a process was started. Empty if this process may not read it."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
