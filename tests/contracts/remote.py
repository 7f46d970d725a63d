"""Ends of a transport that live in other processes, for a suite that drives all ends from one.

A ``World`` is a set of ranks under mpirun, started once; each ``RemoteEnd`` passes the calls on to one of them.
"""

from __future__ import annotations

import itertools
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import numpy as np

from mpi_launch import mpi_command
from syncline import errors
from syncline.transports import Bytes, Handle

LIMIT_S = 60.0
SCRIPT = Path(__file__).with_name("mpi_rank.py")


class World:
    """So many ranks under a library's mpirun, each with a line to it."""

    def __init__(self, library: str, ranks: int) -> None:
        command, environ = mpi_command(library, ranks)
        key = secrets.token_hex(16)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the ranks
        with tempfile.TemporaryDirectory() as folder, Listener(f"{folder}/door", authkey=key.encode()) as door:
            self._process = subprocess.Popen(
                [*command, sys.executable, str(SCRIPT), f"{folder}/door"],
                env=environ | {"TEST_KEY": key},
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.lines = self._meet(door, ranks)

    def _meet(self, door: Listener, ranks: int) -> list[Connection]:
        """The line to every rank; fails with what was printed when they do not come."""
        found: dict[int, Connection] = {}

        def accept() -> None:
            while len(found) < ranks:
                line = door.accept()
                found[line.recv()] = line

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        thread.join(LIMIT_S)
        if thread.is_alive():
            self._process.kill()
            self._output.seek(0)
            raise TimeoutError(self._output.read().decode(errors="replace"))
        return [found[rank] for rank in range(ranks)]

    def ends(self, onesided: str, near: bool = False) -> list[RemoteEnd]:
        """A new transport on all ranks; ``near`` gives them a communicator as the ranks of one host."""
        ends = [RemoteEnd(rank, line) for rank, line in enumerate(self.lines)]
        for line in self.lines:
            line.send(("open", onesided, 20.0, None, near))
        for end in ends:
            end.answer()
        return ends

    def alone(self, rank: int, timeout_s: float, onesided: str = "off", says: int | None = None) -> RemoteEnd:
        """An end of one rank (which ``says`` it is another), whose start may take so long; its ``answer`` says more."""
        self.lines[rank].send(("open", onesided, timeout_s, says))
        return RemoteEnd(rank, self.lines[rank])

    def close(self) -> int:
        """End the ranks; the launcher's exit status."""
        for line in self.lines:
            line.close()
        try:
            return self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            self._output.close()


class RemoteEnd:
    """One rank's transport, seen from here; memory is copied both ways."""

    name = "mpi"

    def __init__(self, rank: int, line: Connection) -> None:
        self.rank = rank
        self.world = -1
        self.handles: dict[int, tuple[Handle, Any]] = {}
        self._line = line
        self._numbers = itertools.count()
        self._sending = threading.Lock()

    def ask(self, name: str, *arguments: Any) -> Any:
        with self._sending:
            self._line.send((name, *arguments))
        return self.answer()

    def answer(self) -> Any:
        if not self._line.poll(LIMIT_S):
            raise TimeoutError(f"rank {self.rank} does not answer")
        good, value = self._line.recv()
        if not good:
            raise error_from(value)
        return value

    def lends_from(self, src: int) -> bool:  # noqa: ARG002
        return False

    def allocate(self, nbytes: int) -> Bytes:
        return np.zeros(nbytes, np.uint8)

    def _start(self, handle: Handle, into: np.ndarray | list[np.ndarray] | None, *arguments: Any) -> Handle:
        handle.note = next(self._numbers)
        self.ask(handle.kind, handle.note, *arguments)
        self.handles[handle.note] = handle, into
        return handle

    def send(self, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        return self._start(Handle("send", dst, tag, data.nbytes, owner), None, dst, tag, data.tobytes(), priority)

    def recv(self, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        return self._start(Handle("recv", src, tag, into.nbytes, owner), into, src, tag, into.nbytes)

    def borrow(self, src: int, tag: int, nbytes: int, owner: Any = None) -> Handle:
        return self._start(Handle("borrow", src, tag, nbytes, owner), None, src, tag, nbytes)

    def adds_from(self, src: int, dtype: np.dtype[Any]) -> bool:
        return bool(self.ask("adds_from", src, dtype.name))

    def add(self, src: int, tag: int, into: np.ndarray, owner: Any = None) -> Handle:
        return self._start(Handle("add", src, tag, into.nbytes, owner), into.view(np.uint8), src, tag, into)

    def allreduce(self, key: int, array: np.ndarray, owner: Any = None) -> Handle:
        return self._start(Handle("allreduce", -1, key, array.nbytes, owner), array, key, array)

    def reduce_scatter(self, key: int, parts: list[np.ndarray], owner: Any = None) -> Handle:
        return self._start(Handle("reduce_scatter", -1, key, 0, owner), parts, key, parts)

    def all_gather(self, key: int, parts: list[np.ndarray], owner: Any = None) -> Handle:
        return self._start(Handle("all_gather", -1, key, 0, owner), parts, key, parts)

    @property
    def together(self) -> tuple[int, ...]:
        return tuple(self.ask("together"))

    def release(self, handle: Handle) -> None:
        handle.payload = None
        self.ask("release", handle.note)

    def poll(self, timeout: float) -> list[Handle]:
        return [self._ended(*told) for told in self.ask("poll", timeout)]

    def _ended(self, number: int, nbytes: int, data: Any, error: Any) -> Handle:
        handle, into = self.handles.pop(number)
        handle.done, handle.nbytes = True, nbytes
        if error is not None:
            handle.error = error_from(error)
        elif handle.kind == "borrow":
            handle.payload = data
        elif isinstance(into, list):
            for part, come in zip(into, data, strict=True):
                part[:] = come
        elif into is not None:
            into[: data.size] = data
        return handle

    @property
    def idle(self) -> bool:
        return bool(self.ask("idle"))

    def wake(self) -> None:
        with self._sending:
            self._line.send(("wake",))

    def traffic(self) -> tuple[Mapping[int, int], Mapping[int, int]]:
        sent, received = self.ask("traffic")
        return sent, received

    @property
    def moved_bytes(self) -> int:
        return int(self.ask("moved_bytes"))

    def close(self) -> None:
        self.ask("close")


def error_from(told: tuple[str, str, int]) -> Exception:
    name, text, rank = told
    kind = getattr(errors, name, RuntimeError)
    found: Exception = kind(text, rank=rank) if issubclass(kind, errors.PeerError) else kind(text)
    return found
