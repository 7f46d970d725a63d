"""The ranks of a benchmark: how they are started, receive orders, synchronise, report and end.

``Ranks`` is the starter's side. When a set of ranks fails, it names the rank to blame; the benchmark decides what is
measured and what happens after a failure. ``Here``, ``InLab`` and ``Launched`` are the places where ranks run.

``Line`` is a rank's side. Between two orders a rank is blocked in a read, and it ends at once if its starter is gone.
Ranks synchronise through the starter, which favours no contender's own barrier and costs nothing while ranks are timed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from syncline.errors import SynclineError
from syncline.launch.environment import Environment
from syncline.launch.local import LocalRun, Outcome, Output
from syncline.launch.mpi_library import MpiLibrary, find_library

from .launchers import Launcher
from .messages import Connection, Mailbox, Message
from .site import HERE, LabLike, Site

SILENCE_S = 300.0
"""A set of ranks of which nothing is heard for so long while it is at work is given up."""

_END_S = 30.0
"""From a rank's last word to the end of its process."""

_GRACE_S = 4.0
_POLL_S = 0.5
_KEPT_LINES = 6

Heard = Callable[[Message], None]


class RankPlace(Protocol):
    """Where ranks run."""

    def mailbox(self, ranks: int) -> Mailbox:
        """The connections to the ranks, which the ranks open."""
        ...

    def run(
        self, command: Sequence[str], ranks: int, library: str, env: Mapping[str, str], on_output: Output
    ) -> LocalRun:
        """The processes of a set, which are not started yet; under an MPI library's launcher if a library is named."""
        ...


class Here:
    """All ranks on this machine, over its loopback interface where they use one."""

    def mailbox(self, ranks: int) -> Mailbox:
        """Pipes."""
        return Mailbox(ranks)

    def run(
        self, command: Sequence[str], ranks: int, library: str, env: Mapping[str, str], on_output: Output
    ) -> LocalRun:
        """Raises SynclineError if the MPI library is not installed."""
        if not library:
            env = {"GLOO_SOCKET_IFNAME": "lo", **env}  # or Gloo takes the address that the host's name resolves to
            return LocalRun(command, ranks, env=env, on_output=on_output, grace_s=_GRACE_S)
        found = find_library(library)
        if not isinstance(found, MpiLibrary):
            raise SynclineError(found)
        arguments, added = found.command(ranks, command)
        return LocalRun(arguments, 1, env={**added, **env}, ranked=False, on_output=on_output, grace_s=_GRACE_S)


class InLab:
    """``per_host`` ranks on each host of a lab."""

    def __init__(self, lab: LabLike, per_host: int = 1) -> None:
        self._lab, self._per_host = lab, per_host

    def mailbox(self, ranks: int) -> Mailbox:
        """Pipes: the lab's hosts are namespaces of this machine."""
        return Mailbox(ranks)

    def run(
        self, command: Sequence[str], ranks: int, library: str, env: Mapping[str, str], on_output: Output
    ) -> LocalRun:
        """Each rank starts inside the namespaces of its host."""
        if not library:
            place = partial(self._lab.placement, per_host=self._per_host)
            return LocalRun(command, ranks, env=env, on_output=on_output, grace_s=_GRACE_S, place=place)
        argv, added = self._lab.mpi_command(ranks, command, library=library, per_host=self._per_host)
        return LocalRun(argv, 1, env={**added, **env}, ranked=False, on_output=on_output, grace_s=_GRACE_S)


@dataclass(frozen=True)
class Launched:
    """Ranks that ``launcher`` starts, possibly on other hosts, with ``added`` in their environment."""

    launcher: Launcher
    added: Mapping[str, str]
    site: Site = HERE

    def mailbox(self, ranks: int) -> Mailbox:
        """Pipes for local ranks, else TCP."""
        return self.site.mailbox(self.launcher, ranks)

    def run(
        self,
        command: Sequence[str],
        ranks: int,
        library: str,  # noqa: ARG002 - the launcher is chosen
        env: Mapping[str, str],
        on_output: Output,
    ) -> LocalRun:
        """The user's launcher starts all ranks."""
        return self.site.run(self.launcher, command, ranks, env={**self.added, **env}, on_output=on_output)


class RanksFailed(SynclineError):
    """A set of ranks did not do what it was told to."""


class Ranks:
    """A set of ranks as a context: its processes are ready on entry, and none is left on exit.

    Python runs ``script`` in every rank, with ``work`` and the addresses of all lines as arguments. ``library`` names
    the launcher under which the ranks run, if any: its exit status tells less than a rank's. Raises RanksFailed.
    """

    def __init__(
        self,
        work: str,
        ranks: int,
        place: RankPlace,
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
            self._mailbox = stack.enter_context(self._place.mailbox(self._ranks))
            command = [sys.executable, *self._script, self._work, json.dumps(self._mailbox.addresses)]
            run = self._place.run(command, self._ranks, self._library, self._mailbox.environ, self._print)
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
            if outcome is not None:  # over TCP, reports may come after the end of the launcher
                messages += [one for some in self._mailbox.rest() for one in some]
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


Table = NDArray[np.float64]


class Line:
    """A rank's connection to its starter. All ranks call its methods in the same order.

    ``lines`` is the JSON list of all ranks' addresses.
    """

    def __init__(self, lines: str, place: Environment) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing here is worth waiting for a tidy end
        self.rank, self.world = place.rank, place.world
        addresses = json.loads(lines)
        address = addresses[min(place.rank, len(addresses) - 1)]
        self._connection = Connection(address, place, len(addresses))
        if not address.startswith("/"):  # over TCP: the starter cannot end ranks on other hosts
            self._connection.end_with_starter()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error inside is told to the starter, and ends the process: a group's other ranks may never come."""
        try:
            yield
        except Exception as error:
            with suppress(OSError):  # the starter may be gone
                self._connection.fail(error)
            traceback.print_exc()
            # At once: MPI would wait for all ranks at this one's exit.
            os._exit(1)

    def orders(self) -> Iterator[dict[str, Any]]:
        """The starter's orders, one after the other, until it orders the end."""
        self.send("done")  # with what comes before the first one
        while order := self._hear():
            yield order
            self.send("done")

    def finish(self) -> None:
        """Tell the starter that this rank has finished."""
        self.send("done")

    def send(self, kind: str, **content: Any) -> None:
        """Send the starter a report. If the starter is gone, end this process."""
        try:
            self._connection.send(kind, **content)
        except OSError:
            os._exit(1)  # nobody listens any more

    def wait(self) -> None:
        """Return when all ranks have called."""
        self.gather()

    def gather(self, *mine: float) -> Table:
        """Every rank's numbers, a line per rank. Cost: a message to the starter and one back for each rank."""
        return np.array(self._meet(mine), np.float64)

    def share(self, mine: str) -> list[str]:
        """Every rank's text, in rank order."""
        found: list[str] = self._meet(mine)
        return found

    def _meet(self, mine: object) -> Any:
        self.send("meet", mine=mine)
        return self._hear()

    def _hear(self) -> Any:
        told = self._connection.hear()
        if told is None:
            os._exit(1)  # the starter is gone
        return told
