"""A process whose launcher is gone ends: nobody would end it any more, and it would train on for nobody.

Owns how the launcher's process is found, and the thread that waits for its end. A launcher that is killed by SIGKILL
tells nobody; its processes are then others' children. The kernel's parent-death signal (prctl(2)) follows the *thread*
that has started a process, which a launcher may end; a descriptor of the whole process (pidfd_open(2)) does not, and
works too where something stands in between, such as a shell script.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from .environment import Environment

_STATUS = 1


def end_with_launcher(environment: Environment) -> None:
    """End this process when the ``syncline run`` or the torchrun that has started it is gone. Called once."""
    pid = _launcher(environment)
    if pid is None:
        return
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return
    threading.Thread(target=_wait, args=(descriptor,), name="syncline-guard", daemon=True).start()


def _wait(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not poll.poll():
        pass
    with contextlib.suppress(OSError):
        os.write(2, b"syncline: the launcher is gone, ending\n")
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    os._exit(_STATUS)


def _launcher(environment: Environment) -> int | None:
    """The launcher among this process's ancestors; None where it is none that is looked after here."""
    if environment.launcher == "syncline":
        told = os.environ.get("SYNCLINE_LAUNCHER", "")
        return next((pid for pid in _ancestors() if str(pid) == told), None)
    if environment.launcher == "torchrun":
        # Its agent is the first that has not been given what it gives to all that it starts.
        mark = os.fsencode(f"TORCHELASTIC_RUN_ID={os.environ.get('TORCHELASTIC_RUN_ID', '')}")
        return next((pid for pid in _ancestors() if mark not in _variables(pid)), None)
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


def _variables(pid: int) -> list[bytes]:
    """What a process was started with; nothing where that may not be read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
