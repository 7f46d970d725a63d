"""Owns the Linux namespaces of a lab's hosts: their creation, how commands enter them, and the end of all processes.

Does not know links, addresses or labs.

A host is an idle process (like a container's pause process) in network, mount, UTS and IPC namespaces of its own
(namespaces(7)). Namespaces live as long as a process is in them. The idle process ends when the pipe on its standard
input closes, and the kernel closes the pipe however the owner dies. Namespaces have no names that must be removed.

A process in a host is recognised by the tmpfs on /dev/shm, whose source is the lab's mark: the mark is in the mountinfo
of every process of the lab and of no other. Inode numbers of namespaces cannot identify a lab: the kernel reuses them.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from syncline.errors import SynclineError, UsageError

T = TypeVar("T")

TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "env": "coreutils",
}
"""The programs that create a lab, and the Debian packages that contain them."""

USER_SPACE = (
    "a slow network can be had without a lab, in user space:"
    " syncline run -n 4 --strategy 'transport=tcp(rate=1Gbit, delay=5ms)' SCRIPT"
)

_CLONE_NEWNET = 0x40000000
_START_S = 20.0
_END_S = 10.0

# The mark comes first, so that the process can be found if a later command fails. /sys shows the network namespace of
# the process that mounted it, so it is mounted anew; the control groups are moved there, because programs read their
# limits from them.
_HOLD = """
set -e
mount -t tmpfs -o mode=1777,nosuid,nodev "$1" /dev/shm
echo "$2" > /proc/sys/kernel/hostname
if [ -e /etc/hosts ]; then mount --bind "$3" /etc/hosts; fi
mkdir /dev/shm/cgroup
mount --rbind /sys/fs/cgroup /dev/shm/cgroup
mount -t sysfs sysfs /sys
mount --move /dev/shm/cgroup /sys/fs/cgroup
rmdir /dev/shm/cgroup
ip link set lo up
echo ready
exec cat
"""


def check_able(euid: int | None = None, find: Callable[[str], str | None] | None = None) -> None:
    """Raise UsageError if this user or machine cannot create namespaces, with the cause and an alternative."""
    missing = [name for name in TOOLS if (find or _find)(name) is None]
    if missing:
        packages = sorted({TOOLS[name] for name in missing})
        raise UsageError(
            f"a lab needs the program{'s' * (len(missing) > 1)} {', '.join(missing)} (Debian:"
            f" apt-get install {' '.join(packages)}); {USER_SPACE}"
        )
    if (os.geteuid() if euid is None else euid) != 0:
        raise UsageError(f"a lab makes network namespaces, which needs root (sudo); {USER_SPACE}")


def run_tool(*argv: str, feed: str = "") -> None:
    """Run a tool with ``feed`` on its standard input. Raises UsageError with its output if it fails."""
    try:
        done = subprocess.run(
            argv, input=feed, text=True, capture_output=True, timeout=_START_S, check=False, env=_environ()
        )
    except subprocess.TimeoutExpired:
        raise SynclineError(f"{argv[0]} did not end within {_START_S:.0f} s: {' '.join(argv)}") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise UsageError(f"this machine cannot make the lab: {' '.join(argv)}: {said}; {USER_SPACE}")


class Host:
    """A set of namespaces and the process that holds it, from the constructor until ``end``.

    ``name`` is its UTS name, ``mark`` the source of its /dev/shm and ``hosts_file`` its /etc/hosts. Raises UsageError
    if this user or kernel cannot create it. Costs two processes and the time of a few mounts.
    """

    def __init__(self, name: str, mark: str, hosts_file: Path) -> None:
        self.name = name
        script = ("sh", "-c", _HOLD, "sh", mark, name, str(hosts_file))
        self._process = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", "--ipc", "--propagation", "private", "--", *script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_environ(),
            start_new_session=True,  # Ctrl-C is for the commands in the hosts; the hosts end after them
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The process that holds the namespaces."""
        return self._process.pid

    def enter(self) -> list[str]:
        """The command prefix that runs a command in this host, in the caller's working directory."""
        return enter(self.pid)

    def end(self) -> None:
        """End the process that holds the namespaces. They vanish with the last process in them."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()

    def _wait_until_ready(self) -> None:
        output = self._process.stdout
        if output is None:  # never: the process was started with a pipe
            return
        said, deadline = b"", time.monotonic() + _START_S
        while not said.endswith(b"ready\n"):
            if not _readable(output.fileno(), deadline):
                raise SynclineError(
                    f"host {self.name} of the lab was not ready within {_START_S:.0f} s: see whether the machine is"
                    " overloaded, and try again"
                )
            data = os.read(output.fileno(), 1 << 12)
            if not data:
                text = " ".join(said.decode(errors="replace").split())
                raise UsageError(
                    f"this machine cannot make a lab's host: {text}; a container needs the right to create namespaces"
                    f" (docker run --privileged); {USER_SPACE}"
                )
            said += data


def enter(pid: int) -> list[str]:
    """The command prefix that runs a command in the namespaces of ``pid``, in the caller's working directory."""
    # Entering a mount namespace moves to its root. Both programs become the command, so that signals reach it.
    return [
        _find("nsenter") or "nsenter",
        f"--target={pid}",
        "--net",
        "--mount",
        "--uts",
        "--ipc",
        "--",
        "env",
        f"--chdir={Path.cwd()}",
    ]


def within(pid: int, make: Callable[[], T]) -> T:
    """Call ``make`` in the network namespace of ``pid``; its sockets stay in that namespace. Returns its result.

    ``make`` runs in a thread of its own: a failed return to the old namespace would affect the caller's later sockets.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_within, pid, make).result()


def _within(pid: int, make: Callable[[], T]) -> T:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:  # noqa: PTH123 - setns takes its descriptor
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"cannot enter the network namespace of process {pid}: {os.strerror(number)}")
    return make()


def end_marked(mark: str) -> None:
    """Kill all processes with the mark and wait for their end. Raises SynclineError if some do not end in time."""
    deadline = time.monotonic() + _END_S
    while found := list(_marked(mark)):
        if time.monotonic() > deadline:
            pids = ", ".join(map(str, found))
            raise SynclineError(f"processes {pids} of a lab do not end within {_END_S:.0f} s of SIGKILL")
        with _pidfds(found) as fds:
            for pid, fd in fds.items():
                if _has_mark(pid, mark):  # the number may have gone to another process before it was held
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(fd, signal.SIGKILL)
            for fd in fds.values():
                _readable(fd, deadline)


def _marked(mark: str) -> Iterator[int]:
    """The processes with the mark, except this one."""
    mine = Path("/proc/self/ns/mnt").readlink()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                # Most processes share our mount namespace; one link tells, without their mountinfo.
                if (entry / "ns" / "mnt").readlink() != mine and _has_mark(int(entry.name), mark):
                    yield int(entry.name)


def _has_mark(pid: int, mark: str) -> bool:
    try:
        mounts = Path(f"/proc/{pid}/mountinfo").read_text(errors="replace")
    except OSError:  # it has ended, or is a zombie
        return False
    return f" - tmpfs {mark} " in mounts


def _readable(fd: int, deadline: float) -> bool:
    """Wait for data, or for the end of a pidfd's process. Returns False if the deadline passes first."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(1e3 * max(0.0, deadline - time.monotonic())))


@contextmanager
def _pidfds(pids: list[int]) -> Iterator[dict[int, int]]:
    fds: dict[int, int] = {}
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                fds[pid] = os.pidfd_open(pid)
        yield fds
    finally:
        for fd in fds.values():
            os.close(fd)


def _path() -> str:
    """The search path of the tools, including the sbin folders that some users' PATH lacks."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def _find(name: str) -> str | None:
    return shutil.which(name, path=_path())


def _environ() -> dict[str, str]:
    """The tools' environment, which excludes user settings that could change their behaviour or output."""
    return {"PATH": _path(), "LC_ALL": "C"}
