"""One set of ranks: started, given orders, listened to, and ended; who is to blame when it fails.

Owns where ranks run (``Here`` or ``InLab``), the ranks' meetings, and the reading of a failure. A set sleeps between
two orders: its ranks are blocked in a read, and find their orders at an end when their starter is gone. Does not decide
what is measured, or what happens after a failure.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from syncline.errors import SynclineError
from syncline.launch.local import LocalRun, Outcome, Output
from syncline.launch.mpi_library import MpiLibrary, find_library

from ..messages import Mailbox, Message
from ..site import LabLike

SILENCE_S = 300.0
"""A set of ranks of which nothing is heard for so long while it is at work is given up."""

_END_S = 30.0
"""From a rank's last word to the end of its process."""

_GRACE_S = 4.0
_POLL_S = 0.5
_KEPT_LINES = 6

Heard = Callable[[Message], None]


class Testbed(Protocol):
    """Where ranks run."""

    def run(self, command: Sequence[str], ranks: int, library: str, on_output: Output) -> LocalRun:
        """The processes of a set, not started yet; under the launcher of an MPI library if one is named."""
        ...


class Here:
    """All ranks on this machine, over its loopback interface where they use one."""

    def run(self, command: Sequence[str], ranks: int, library: str, on_output: Output) -> LocalRun:
        """See ``Testbed``."""
        if not library:
            env = {"GLOO_SOCKET_IFNAME": "lo"}  # or Gloo takes what the host's name resolves to
            return LocalRun(command, ranks, env=env, on_output=on_output, grace_s=_GRACE_S)
        found = find_library(library)
        if not isinstance(found, MpiLibrary):
            raise SynclineError(found)
        arguments, env = found.command(ranks, command)
        return LocalRun(arguments, 1, env=env, ranked=False, on_output=on_output, grace_s=_GRACE_S)


class InLab:
    """So many ranks on each host of a lab."""

    def __init__(self, lab: LabLike, per_host: int = 1) -> None:
        self._lab, self._per_host = lab, per_host

    def run(self, command: Sequence[str], ranks: int, library: str, on_output: Output) -> LocalRun:
        """See ``Testbed``."""
        options: Mapping[str, Any] = {"place": partial(self._lab.placement, per_host=self._per_host)}
        processes = ranks
        if library:
            argv, env = self._lab.mpi_command(ranks, command, library=library, per_host=self._per_host)
            command, processes, options = argv, 1, {"env": env, "ranked": False}
        return LocalRun(command, processes, on_output=on_output, grace_s=_GRACE_S, **options)


class RanksFailed(SynclineError):
    """A set of ranks did not do what it was told to."""


class Ranks:
    """A set of ranks as a context: its processes are ready on entry, and none is left on exit.

    ``script`` is what Python runs in every rank, with ``work`` and the addresses of all lines as arguments; ``library``
    names the MPI library under whose launcher the ranks run, if any. Raises RanksFailed.
    """

    def __init__(
        self,
        work: str,
        ranks: int,
        place: Testbed,
        script: Sequence[str],
        library: str = "",
        limit_s: float = SILENCE_S,
    ) -> None:
        self._work, self._ranks, self._place = work, ranks, place
        self._script, self._library, self._limit_s = script, library, limit_s
        self._printed: deque[str] = deque(maxlen=_KEPT_LINES)
        self._errors: list[tuple[float, int, str]] = []
        self._first: int | None = None  # to close its pipe without having done what it was told to

    def __enter__(self) -> Ranks:
        with ExitStack() as stack:
            self._mailbox = stack.enter_context(Mailbox(self._ranks))
            command = [sys.executable, *self._script, self._work, json.dumps(self._mailbox.addresses)]
            run = self._place.run(command, self._ranks, self._library, self._print)
            self._run = stack.enter_context(run)
            self._follow(None, self._limit_s)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def close(self) -> None:
        """End what still runs; may be called again."""
        self._stack.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that were started: the ranks, or the launcher of an MPI library."""
        return self._run.pids

    def order(self, heard: Heard | None = None, limit_s: float = SILENCE_S, **what: Any) -> None:
        """Have all ranks do something, and return when all have; ``heard`` gets what they report.

        Raises RanksFailed, after which the set can only be left, when a rank fails, or when nothing is heard of any for
        ``limit_s`` seconds.
        """
        self._mailbox.tell(what)
        self._follow(heard, limit_s)

    def end(self) -> None:
        """Let the ranks close what they have and end; raises RanksFailed when they do not end well."""
        self.order()
        outcome = self._run.wait(_END_S)
        if outcome.status:
            raise RanksFailed(self._failure(outcome, set()))

    def _follow(self, heard: Heard | None, limit_s: float) -> None:
        """Listen until all ranks have done what they were told to, and let them meet meanwhile."""
        busy, meeting = set(range(self._ranks)), dict[int, Any]()
        since = time.monotonic()
        while busy:
            outcome = self._run.poll()
            messages = self._mailbox.receive(_POLL_S if outcome is None else 0.0)
            for rank, message in messages:
                match message["kind"]:
                    case "done":
                        busy.discard(rank)
                    case "meet":
                        meeting[rank] = message["mine"]
                    case "error":
                        self._errors.append((message["at"], rank, message["text"]))
                    case _ if heard is not None:
                        heard(message)
            if len(meeting) == self._ranks:
                self._mailbox.tell([meeting[rank] for rank in range(self._ranks)])
                meeting.clear()
            if self._first is None:
                self._first = next((rank for rank in self._mailbox.ended if rank in busy), None)
            if messages:
                since = time.monotonic()
            elif outcome is not None:
                raise RanksFailed(self._failure(outcome, busy))
            elif self._first is not None and time.monotonic() - since > 2 * _GRACE_S:
                raise RanksFailed(self._failure(Outcome(0, ()), busy))  # the others would wait for it
            elif time.monotonic() - since > limit_s:
                raise RanksFailed(f"nothing has moved for {limit_s:.0f} s")

    def _print(self, rank: int, line: str) -> None:  # noqa: ARG002 - under mpirun there is one process for all
        """A process printed a line; the last ones explain a failure that nothing else does."""
        if line.strip():
            self._printed.append(line)

    def _failure(self, outcome: Outcome, busy: set[int]) -> str:
        """Why the set failed: who was killed, else the first to go without a word, else the first error told."""
        launched = bool(self._library)
        killed = next((ending for ending in outcome.endings if ending.status > 128 and not ending.told), None)
        told = [f"rank {rank}: {text}" for _, rank, text in sorted(self._errors)]
        silent = self._first is not None and all(rank != self._first for _, rank, _ in self._errors)
        if killed is not None and not launched:
            return "; ".join((killed.text, *told[:1]))
        if silent:
            return "; ".join((f"rank {self._first} died", *(told[:1] or (() if launched else self._printed))))
        ended = "; ".join(f"the MPI launcher {ending.how}" for ending in outcome.endings) if launched else outcome.text
        if not outcome.status and busy:
            ended = f"rank {min(busy)} ended before its work was done"
        return told[0] if told else "; ".join((ended, *self._printed))
