"""What the process that starts a measured run and the processes that run it tell each other.

Owns the ``Job`` that goes down as an argument, and the pipes on which one JSON object per line comes up: a pipe per
process keeps lines whole however long they are. Does not know what the objects mean. There is no pickle, and a line
that is not JSON is an error of the run, not of the reader.
"""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ..errors import SynclineError
from ..report.result_file import finite

_READ_BYTES = 1 << 16

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Job:
    """What one process has to do. ``batch`` is the global batch, ``iterations`` the length of the whole run.

    ``report_fds`` holds the pipe of every process, workers first. ``evaluate_every`` is how many steps lie between two
    looks at how accurate the model is, 0 for an epoch; ``target`` is the accuracy whose time is asked for;
    ``framework`` is what trains. Medians leave out ``warmup`` first iterations, by default a fifth, at most ten.
    Without ``scored`` no look is taken at how accurate the model is.
    """

    workload: str
    strategy: str
    batch: int
    iterations: int
    seed: int
    report_fds: tuple[int, ...]
    evaluate_every: int = 0
    target: float | None = None
    framework: str = "torch"
    warmup: int | None = None
    scored: bool = True

    def to_json(self) -> str:
        """The job as the argument of the script."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Read the script's argument back."""
        data = json.loads(text)
        return cls(**{**data, "report_fds": tuple(data["report_fds"])})


class Sender:
    """The writing end in a measured process; writes block while the pipe is full."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "wb", buffering=0)
        # A grandchild (a data loading process) must not keep the pipe open.
        os.set_inheritable(fd, False)

    def send(self, kind: str, **content: Any) -> None:
        """Send one message; numbers that are not finite become null, since JSON has none."""
        line = json.dumps({"kind": kind, **finite(content)}, allow_nan=False).encode() + b"\n"
        view = memoryview(line)
        while view:
            view = view[self._file.write(view) or 0 :]

    def close(self) -> None:
        """Close the pipe."""
        self._file.close()


class Mailbox:
    """The reading ends of a run's pipes, one per process.

    ``fds`` are the writing ends, for the processes to inherit or to open; ``release`` closes this process's copies once
    they have. ``ended`` lists the processes whose pipes have closed, in that order. Used as a context manager, which
    closes everything.
    """

    def __init__(self, processes: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._rest: dict[int, bytes] = {}
        self._writing: dict[int, int] = {}
        self.ended: list[int] = []
        for rank in range(processes):
            reading, self._writing[rank] = os.pipe()
            os.set_blocking(reading, False)
            self._selector.register(reading, selectors.EVENT_READ, rank)
            self._rest[reading] = b""

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        for fd in list(self._rest):
            self._forget(fd)
        self._selector.close()

    @property
    def open(self) -> bool:
        """True while a process may still send."""
        return bool(self._rest)

    @property
    def fds(self) -> list[int]:
        """The writing ends that are still open here, in the order of processes."""
        return list(self._writing.values())

    def release(self, *ranks: int) -> None:
        """Close this process's copies of the writing ends, or of these ones: then a process's end ends its pipe."""
        for rank in ranks or tuple(self._writing):
            if rank in self._writing:
                os.close(self._writing.pop(rank))

    def receive(self, timeout: float) -> list[tuple[int, Message]]:
        """The messages that have come, as (process index, message); waits up to ``timeout`` seconds for the first.

        Raises SynclineError for a line that is not a JSON object with a kind.
        """
        found: list[tuple[int, Message]] = []
        for key, _ in self._selector.select(timeout):
            data = os.read(key.fd, _READ_BYTES)
            if not data:
                self.ended.append(key.data)
                self._forget(key.fd)
                continue
            *lines, self._rest[key.fd] = (self._rest[key.fd] + data).split(b"\n")
            found += [(key.data, _parse(key.data, line)) for line in lines]
        return found

    def _forget(self, fd: int) -> None:
        self._selector.unregister(fd)
        del self._rest[fd]
        os.close(fd)


def _parse(rank: int, line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError:
        message = None
    if not isinstance(message, dict) or "kind" not in message:
        raise SynclineError(f"process {rank} sent a report that cannot be read: {line[:200]!r}")
    return message
