"""One set of ranks: started, listened to, and ended; what it measured, and who is to blame when it fails.

Owns where ranks run (``Here`` or ``InLab``), the folder through which they report, and the reading of a failure. A set
whose contenders include an MPI library's is started by that library's own launcher, with everything else in the same
processes. Does not decide what is measured, or what happens after a failure.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from ...errors import SynclineError
from ...launch.local import LocalRun, Outcome, Output
from ...launch.mpi_library import MpiLibrary, find_library
from ...report.units import decimal_size as size_text
from ..messages import Mailbox, Message
from .work import Position, Turn

RANK = ("-m", "syncline.bench.collectives.rank")
SILENCE_S = 300.0
"""A set of ranks in which no turn ends for so long, or a multiple of what a turn should take, is given up."""

_GRACE_S = 4.0
_POLL_S = 0.5
_KEPT_LINES = 6

Heard = Callable[[Message], None]
Moved = Callable[[Position], None]


class Errand(Protocol):
    """What every rank of a set gets as its argument: a dataclass with the fields that only the starter knows."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def folder(self) -> str:
        """Where the ranks report."""
        ...

    @property
    def address(self) -> str:
        """Where rank 0's store listens."""
        ...

    @property
    def interface(self) -> str:
        """What Gloo is bound to."""
        ...

    @property
    def library(self) -> str:
        """The MPI library under whose launcher the ranks run, if any."""
        ...

    def to_json(self) -> str:
        """As text in a command line."""
        ...


class LabLike(Protocol):
    """What a bench needs of ``syncline.lab.Lab``: hosts that are joined by links of one rate."""

    @property
    def interface(self) -> str:
        """The hosts' network interface."""
        ...

    def address(self, host: int) -> str:
        """The address of a host inside the lab."""
        ...

    def placement(self, rank: int, per_host: int = 1) -> Any:
        """What LocalRun needs to start a rank inside its host."""
        ...

    def mpi_command(
        self, ranks: int, command: Sequence[str], library: str, per_host: int = 1
    ) -> tuple[list[str], dict[str, str]]:
        """What starts an MPI job in the lab: arguments, and additions to the environment."""
        ...

    def goodput(self, seconds: float = 2.0) -> float:
        """What one TCP stream between two hosts gets, in bytes per second."""
        ...


class Testbed(Protocol):
    """Where ranks run: the address of rank 0's store, and the interface they talk over."""

    @property
    def address(self) -> str:
        """Where rank 0's store listens."""
        ...

    @property
    def interface(self) -> str:
        """What Gloo is bound to."""
        ...

    def run(self, command: Sequence[str], ranks: int, library: str, on_output: Output) -> LocalRun:
        """The processes of a set, not started yet; under the launcher of an MPI library if one is named."""
        ...


@dataclass(frozen=True)
class Here:
    """All ranks on this machine, over its loopback interface where they use one."""

    address: str = "127.0.0.1"
    interface: str = "lo"

    def run(self, command: Sequence[str], ranks: int, library: str, on_output: Output) -> LocalRun:
        """See ``Testbed``."""
        if not library:
            return LocalRun(command, ranks, on_output=on_output, grace_s=_GRACE_S)
        found = find_library(library)
        if not isinstance(found, MpiLibrary):
            raise SynclineError(found)
        arguments, env = found.command(ranks, command)
        return LocalRun(arguments, 1, env=env, ranked=False, on_output=on_output, grace_s=_GRACE_S)


class InLab:
    """So many ranks on each host of a lab."""

    def __init__(self, lab: LabLike, per_host: int = 1) -> None:
        self._lab, self._per_host = lab, per_host
        self.address = lab.address(0)
        self.interface = lab.interface

    def run(self, command: Sequence[str], ranks: int, library: str, on_output: Output) -> LocalRun:
        """See ``Testbed``."""
        options: Mapping[str, Any] = {"place": partial(self._lab.placement, per_host=self._per_host)}
        processes = ranks
        if library:
            argv, env = self._lab.mpi_command(ranks, command, library=library, per_host=self._per_host)
            command, processes, options = argv, 1, {"env": env, "ranked": False}
        return LocalRun(command, processes, on_output=on_output, grace_s=_GRACE_S, **options)


class RanksFailed(SynclineError):
    """A set of ranks did not come to its end; ``position`` says whose turn it was."""

    def __init__(self, message: str, position: Position) -> None:
        super().__init__(message)
        self.position = position


def run_ranks(
    work: Errand, ranks: int, place: Testbed, heard: Heard, moved: Moved, silence_s: float, script: Sequence[str] = RANK
) -> None:
    """Run one set of ranks to its end; ``work.folder`` and what the place knows are filled in.

    ``heard`` gets what is measured as it comes, ``moved`` the position about twice a second. Raises RanksFailed.
    """
    with tempfile.TemporaryDirectory(prefix="syncline-bench-") as folder, Mailbox(ranks, folder) as mailbox:
        turn = Turn(folder, create=True)
        told = replace(work, folder=folder, address=place.address, interface=place.interface)
        watch = _Watch(ranks, heard)
        command = [sys.executable, *script, told.to_json()]
        with place.run(command, ranks, work.library, watch.output) as started:
            last, since = turn.read(), time.monotonic()
            while (outcome := started.poll()) is None:
                watch.take(mailbox.receive(_POLL_S), mailbox.ended)
                now = turn.read()
                moved(now)
                if now != last:
                    last, since = now, time.monotonic()
                elif time.monotonic() - since > silence_s:
                    raise RanksFailed(f"nothing has moved for {silence_s:.0f} s", now)
        while found := mailbox.receive(0.0):
            watch.take(found, mailbox.ended)
        failure = watch.failure(outcome, bool(work.library))
        if failure is not None:
            raise RanksFailed(failure, turn.read())


class _Watch:
    """What is known of a set while it runs."""

    def __init__(self, ranks: int, heard: Heard) -> None:
        self._heard = heard
        self._unfinished = set(range(ranks))
        self._first: int | None = None
        self._errors: list[tuple[float, int, str]] = []
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)

    def output(self, rank: int, line: str) -> None:  # noqa: ARG002 - under mpirun there is one process for all
        """A process printed a line; the last ones explain a failure that nothing else does."""
        if line.strip():
            self._printed.append(line)

    def take(self, messages: Sequence[tuple[int, Message]], ended: Sequence[int]) -> None:
        """Reports, and whose pipes have closed so far: the first to close without a last word died first."""
        for rank, message in messages:
            if message["kind"] == "finished":
                self._unfinished.discard(rank)
            elif message["kind"] == "error":
                self._errors.append((message["at"], rank, message["text"]))
            else:
                self._heard(message)
        if self._first is None:
            self._first = next((rank for rank in ended if rank in self._unfinished), None)

    def failure(self, outcome: Outcome, launched: bool) -> str | None:
        """Why the set failed, None when it did not; ``launched`` says that mpirun stood between."""
        if not outcome.status and not self._unfinished:
            return None
        killed = next((ending for ending in outcome.endings if ending.status > 128 and not ending.told), None)
        told = [f"rank {rank}: {text}" for _, rank, text in sorted(self._errors)]
        silent = self._first is not None and all(rank != self._first for _, rank, _ in self._errors)
        if killed is not None and not launched:
            return "; ".join((killed.text, *told[:1]))
        if silent and self._first is not None:
            return "; ".join((f"rank {self._first} died", *told[:1]))
        ended = "; ".join(f"the MPI launcher {ending.how}" for ending in outcome.endings) if launched else outcome.text
        return told[0] if told else "; ".join((ended, *self._printed))


def where_text(names: Sequence[str], at: Position) -> str:
    """``during tcp:ring of 1 KB``: whose turn it was; empty when it was nobody's."""
    if at.contender is None:
        return ""
    name = names[at.contender]
    return f"during {name} of {size_text(at.nbytes)}" if at.nbytes else f"while {name} was connecting"
