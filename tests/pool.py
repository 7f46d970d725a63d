"""Real processes for tests, ready at once: a server that has imported what is slow to import and forks ranks off.

Started as a program this file is the server. It is asked over a UNIX socket for a rank: one message of JSON with the
function to call, its arguments and environment variables, and two descriptors: where the rank prints, and where it
sends what it finds. A rank is a fork of the server and ends as a script would: its exception goes to the hook for it,
exit functions are called, and it has its own exit status. Only the interpreter's taking apart of every module, which
costs more than all else, is left out where a pool does not ask for it.

The server imports and never computes: a fork of a process whose framework has threads may hang. It refuses to serve
where an import has started one.

Imported, it is the client: ``Pool`` starts groups of ranks, ``Group`` waits for what they say and how they end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import IO, Any, NoReturn

LIMIT_S = 120.0
KERNELS = ("streams", "onesided", "cast", "linear", "sparse", "signs", "stochastic", "ternary", "low_rank")
PARTS = (
    "api", "checkpoint", "compression.updates", "kernels.streams", "launch.child", "sampling", "serving.server",
    "session.groups", "session.printing", "training.model", "training.owners",
)  # fmt: skip
"""What a rank would load when it joins a group and prepares a model: a third of its time."""
_MESSAGE_BYTES = 1 << 16


# The client.


@dataclass
class Rank:
    """One process: what it prints goes to ``output``, what it sends comes over ``line``."""

    index: int
    pid: int
    line: Connection
    output: IO[bytes]
    said: list[Any] = field(default_factory=list)
    status: int | None = None  # minus the signal when it was killed

    def printed(self) -> str:
        """Its output and errors so far."""
        self.output.seek(0)
        return self.output.read().decode(errors="replace")

    def __str__(self) -> str:
        return f"process {self.index} (status {self.status}, said {self.said})\n{self.printed()}"


class Pool:
    """Ranks on demand. One server, started once, serves all tests.

    ``modules`` of a folder are imported by the server: those whose functions ranks call, and what is slow to import.
    ``environ`` is the server's, and so all ranks'. With ``whole`` the interpreters of ranks take themselves apart.
    ``scratch`` is a variable that names a folder, which no other user can write to: the server removes it when it ends,
    also where this process has been killed.
    """

    def __init__(
        self,
        folder: Path,
        *modules: str,
        environ: Mapping[str, str] | None = None,
        whole: bool = False,
        scratch: str = "",
    ) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        here.settimeout(LIMIT_S)
        how = "whole" if whole else "quick"
        with there:
            self._server = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno()), how, scratch, str(folder), *modules],
                pass_fds=[there.fileno()],
                env=os.environ | {"OMP_NUM_THREADS": "1"} | (environ or {}),
                start_new_session=True,
            )
        self._line = here
        self._endings: dict[int, int] = {}

    def start(
        self, function: Callable[..., Any], each: Sequence[Sequence[Any]], environ: Mapping[str, str] | None = None
    ) -> Group:
        """One process for every element of ``each``, calling ``function(line, *element)``.

        The function is one at the top level of a module in the pool's folder, the arguments are what JSON can hold.
        """
        ranks = [self._fork(index, function, arguments, environ or {}) for index, arguments in enumerate(each)]
        return Group(self, ranks)

    def _fork(self, index: int, function: Callable[..., Any], arguments: Any, environ: Mapping[str, str]) -> Rank:
        mine, theirs = Pipe()
        output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the rank
        request = [function.__module__, function.__qualname__, list(arguments), dict(environ)]
        try:
            with theirs:
                socket.send_fds(self._line, [json.dumps(request).encode()], [output.fileno(), theirs.fileno()])
            return Rank(index, self._hear("pid"), mine, output)
        except BaseException:
            mine.close()
            output.close()
            raise

    def _hear(self, kind: str) -> int:
        """The next message of that kind; endings are kept for later."""
        while (message := self._next())[0] != kind:
            self._endings[message[1]] = message[2]
        return int(message[1])

    def _next(self) -> list[Any]:
        try:
            text = self._line.recv(_MESSAGE_BYTES)
        except ConnectionResetError:
            text = b""
        if not text:
            raise RuntimeError("the server of this pool has ended: the errors of the tests have what it says")
        found: list[Any] = json.loads(text)
        return found

    def ending(self, pid: int, timeout_s: float) -> int | None:
        """How a process has ended, once it has."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._line, selectors.EVENT_READ)
            while pid not in self._endings:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                message = self._next()
                self._endings[message[1]] = message[2]
        return self._endings.pop(pid)

    def close(self) -> None:
        """End the server, and with it whatever still runs."""
        self._line.close()
        try:
            self._server.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


class Group:
    """Processes that were started together; leaving the context kills what is left of them."""

    def __init__(self, pool: Pool, ranks: list[Rank]) -> None:
        self._pool = pool
        self.ranks = ranks

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            if rank.status is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and its end was not asked for
                    os.kill(rank.pid, signal.SIGKILL)
        self.end()
        for rank in self.ranks:
            rank.line.close()
            rank.output.close()

    def add(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Rank:
        """Start one more process, with the next index."""
        self.ranks.append(self._pool._fork(len(self.ranks), function, arguments, {}))
        return self.ranks[-1]

    def hear(self, count: int, *, among: Sequence[int] | None = None, timeout_s: float = LIMIT_S) -> None:
        """Wait until every rank (of those ``among``) has said ``count`` things."""
        deadline = time.monotonic() + timeout_s
        chosen = [rank for rank in self.ranks if among is None or rank.index in among]
        while silent := [rank for rank in chosen if len(rank.said) < count]:
            ready = wait([rank.line for rank in silent], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("\n".join(["these have not come far enough:", *map(str, silent)]))
            for rank in silent:
                if rank.line in ready:
                    try:
                        rank.said.append(rank.line.recv())
                    except EOFError:
                        raise AssertionError(f"ended too early: {rank}") from None

    def end(self, timeout_s: float = LIMIT_S, among: Sequence[int] | None = None) -> list[int | None]:
        """Wait until all (of those ``among``) have ended; their exit statuses."""
        deadline = time.monotonic() + timeout_s
        for rank in self.ranks:
            if rank.status is None and (among is None or rank.index in among):
                rank.status = self._pool.ending(rank.pid, max(0.0, deadline - time.monotonic()))
                if rank.status is None:
                    raise TimeoutError(f"still there after {timeout_s:.0f} s: {rank}")
        return [rank.status for rank in self.ranks]

    def results(self, timeout_s: float = LIMIT_S) -> list[Any]:
        """What each sent last, once all have ended with status 0."""
        found = []
        for rank in self.ranks:
            # Read before waiting for the end: one that sends much cannot end before.
            while wait([rank.line], timeout_s):
                try:
                    rank.said.append(rank.line.recv())
                except EOFError:
                    break
            else:
                raise TimeoutError(f"nothing heard for {timeout_s:.0f} s: {rank}")
        self.end(timeout_s)
        for rank in self.ranks:
            if rank.status != 0:
                raise AssertionError("\n".join(map(str, self.ranks)))
            found.append(rank.said[-1] if rank.said else None)
        return found


# The server.

_PR_SET_PDEATHSIG = 1


def serve(line: socket.socket, modules: Sequence[str]) -> list[Any] | None:
    """Fork ranks until the other side hangs up; in a rank, return what it has to do.

    What ranks need is loaded once, here: all parts, and kernels, which load no framework, and what is asked for.
    """
    from syncline import registry

    for kind in registry.KINDS:
        registry.names(kind)
    needed = (*(f"kernels.{name}" for name in KERNELS), *PARTS)
    for module in (*modules, *(f"syncline.{name}" for name in needed)):
        importlib.import_module(module)
    importlib.import_module("encodings.idna")  # which names of hosts are made of
    if torch := sys.modules.get("torch"):
        importlib.import_module("syncline.frameworks.torch")
        torch.set_num_threads(1)
    if threads := other_threads():
        raise RuntimeError(f"importing {', '.join(modules)} has started {threads}: a fork may hang")
    gc.collect()
    gc.freeze()  # a collection in a rank would otherwise touch, and so copy, every page with an object of the server's
    server = os.getpid()
    selector = selectors.DefaultSelector()
    selector.register(line, selectors.EVENT_READ)
    running: dict[int, int] = {}  # pidfd -> pid
    while True:
        for key, _ in selector.select():
            if key.fd != line.fileno():
                pid = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                line.send(json.dumps(["end", pid, os.waitstatus_to_exitcode(status)]).encode())
                continue
            text, fds, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 8)
            if not text:
                for pid in running.values():
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                return None
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != server:
                    os._exit(1)
                selector.close()
                for fd in running:
                    os.close(fd)
                line.close()
                return [*json.loads(text), *fds]
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid
            selector.register(pidfd, selectors.EVENT_READ)
            line.send(json.dumps(["pid", pid]).encode())


def other_threads() -> list[str]:
    """What the kernel calls the threads of this process beside its first, but for one that gets over a fork."""
    tasks = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    return [name for task in tasks if (name := (task / "comm").read_text().strip()) != "jemalloc_bg_thd"]


def work(module: str, name: str, arguments: list[Any], environ: dict[str, str], output: int, said: int) -> int:
    """Be a rank, in a process group of its own, as a launcher's children are; its exit status."""
    status = 0
    os.setpgid(0, 0)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ.update(environ)
    try:
        with Connection(said) as line:
            getattr(importlib.import_module(module), name)(line, *arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    return status


def end_quickly(status: int) -> NoReturn:
    """End as the interpreter would, without taking it apart."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def main(number: str, how: str, scratch: str, folder: str, *modules: str) -> None:
    """Be the server until the other side hangs up, or a rank that it has forked."""
    sys.path.insert(0, folder)
    server = os.getpid()
    if scratch:
        os.environ[scratch] = tempfile.mkdtemp(prefix="pool-")
    try:
        task = serve(socket.socket(fileno=int(number)), modules)
    finally:
        if scratch and os.getpid() == server:
            shutil.rmtree(os.environ[scratch])
    if task is not None:
        status = work(*task)
        if how == "whole":
            sys.exit(status)
        end_quickly(status)


if __name__ == "__main__":
    main(*sys.argv[1:])
