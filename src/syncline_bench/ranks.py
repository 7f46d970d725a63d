"""The ranks of a measurement: how they are started, receive orders, synchronise, report and end.

``Ranks`` is the starter's side. When a set of ranks fails, it names the rank to blame; its user decides what is
measured and what happens after a failure. ``OnThisMachine`` and ``Launched`` are the places where ranks run.

``Line`` is a rank's side. Between two orders a rank is blocked in a read, and it ends at once if its starter is gone.
Ranks synchronise through the starter, which favours no contender's own barrier and costs nothing while ranks are timed.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from syncline.errors import SynclineError
from syncline.launch.environment import Environment
from syncline.launch.local import GRACE_S, LocalRun, Outcome, Output
from syncline.launch.mpi_library import MpiLibrary

from .messages import Connection, Mailbox, Message
from .site import HERE, LOCAL, Launcher, Site, launcher_of

if TYPE_CHECKING:
    from .lab.lab import Lab

SILENCE_S = 300.0
"""A set of ranks that reports nothing for this time while it works is given up."""

_END_S = 30.0
"""From a rank's last report to the end of its process."""

_GRACE_S = 4.0
_LAST_WORDS_S = GRACE_S + 2.0
"""After the end of a rank or its first error: how long the others may be silent before the set is given up."""

_POLL_S = 0.5
_KEPT_LINES = 12

Heard = Callable[[Message], None]
"""Receives a rank's report, with the rank's number as ``rank``."""


@dataclass(frozen=True)
class OnThisMachine:
    """All ranks on this machine, or ``per_host`` on each host of a ``lab``; started by an MPI ``library`` if set.

    ``settings`` is added to the environment and precedes what the library or the lab sets.
    """

    lab: Lab | None = None
    per_host: int = 1
    library: MpiLibrary | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def launcher(self) -> Launcher:
        """The MPI library's, or none."""
        return LOCAL if self.library is None else launcher_of(self.library)

    @property
    def python(self) -> str:
        """The interpreter of the MPI library's environment, else this one."""
        return sys.executable if self.library is None else self.library.python

    def mailbox(self, ranks: int) -> Mailbox:
        """Pipes: a lab's hosts are namespaces of this machine."""
        return Mailbox(ranks)

    def run(self, command: Sequence[str], ranks: int, env: Mapping[str, str], on_output: Output) -> LocalRun:
        """Each rank starts inside the namespaces of its host."""
        started = partial(LocalRun, on_output=on_output, grace_s=_GRACE_S)
        env = {**self.settings, **env}
        if self.library is not None:
            if self.python != sys.executable:  # Syncline itself is not installed there
                paths = (str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")]))
                env["PYTHONPATH"] = os.pathsep.join(paths)
            if self.lab is None:
                argv, added = self.launcher.command(ranks, command, {})
            else:
                argv, added = self.lab.mpi_command(ranks, command, self.library, self.per_host)
            return started(argv, 1, env={**added, **env}, ranked=False)
        if self.lab is not None:
            return started(command, ranks, env=env, place=partial(self.lab.placement, per_host=self.per_host))
        # Without this, Gloo takes the address that the host's name resolves to.
        return started(command, ranks, env={"GLOO_SOCKET_IFNAME": "lo", **env})


@dataclass(frozen=True)
class Launched:
    """Ranks that ``launcher`` starts at ``site``, with ``added`` in their environment; the last are ``servers``."""

    launcher: Launcher
    added: Mapping[str, str]
    site: Site = HERE
    servers: int = 0

    @property
    def python(self) -> str:
        """This one, which a launcher finds at the same path on other hosts."""
        return sys.executable

    def mailbox(self, ranks: int) -> Mailbox:
        """Pipes for local ranks, else TCP."""
        return self.site.mailbox(self.launcher, ranks)

    def run(self, command: Sequence[str], ranks: int, env: Mapping[str, str], on_output: Output) -> LocalRun:
        """The launcher starts all ranks."""
        env = {**self.added, **env}
        return self.site.run(self.launcher, command, ranks, servers=self.servers, env=env, on_output=on_output)


RankPlace = OnThisMachine | Launched
"""Where ranks run: their ``launcher`` and interpreter, the ``mailbox`` that they connect to, and their processes, which
``run`` makes and does not start. ``run`` raises SynclineError if the launcher is missing."""


class RanksFailed(SynclineError):
    """A set of ranks did not carry out an order."""


class RanksSilent(RanksFailed):
    """A set of ranks has not reported anything for too long."""


class Ranks:
    """A set of ranks as a context: its processes are ready on entry, and none is left on exit.

    Python runs ``script`` in every rank, with ``work`` and the addresses of all lines as arguments. On entry ``heard``
    gets the reports of ranks until all are ready, and ``silence_s`` is the longest time without a report. Raises
    RanksFailed.
    """

    def __init__(
        self,
        work: str,
        ranks: int,
        place: RankPlace,
        script: Sequence[str],
        silence_s: float = SILENCE_S,
        heard: Heard | None = None,
        last_words_s: float | None = None,
    ) -> None:
        self._work, self._ranks, self._place, self._script = work, ranks, place, script
        self._silence_s, self._heard, self._last_words_s = silence_s, heard, last_words_s
        self._workers = ranks - getattr(place, "servers", 0)
        self._printed: dict[int, deque[str]] = {}
        self._errors: list[tuple[float, int, str]] = []
        self._lost: int | None = None  # the first rank whose line ended before it had done its work

    def __enter__(self) -> Ranks:
        with ExitStack() as stack:
            self._mailbox = stack.enter_context(self._place.mailbox(self._ranks))
            command = [self._place.python, *self._script, self._work, json.dumps(self._mailbox.addresses)]
            self._run = stack.enter_context(self._place.run(command, self._ranks, self._mailbox.environ, self._print))
            self._follow(self._heard, self._silence_s)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def close(self) -> None:
        """End the remaining processes; may be called again."""
        self._stack.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that were started: the ranks, or their launcher."""
        return self._run.pids

    def order(self, heard: Heard | None = None, silence_s: float = SILENCE_S, **what: Any) -> None:
        """Give all ranks an order, and return when all have carried it out; ``heard`` gets their reports.

        Raises RanksFailed if a rank fails, or if no rank reports anything for ``silence_s`` seconds; the set is
        unusable then.
        """
        self._mailbox.tell(what)
        self._follow(heard, silence_s)

    def end(self, silence_s: float = SILENCE_S) -> None:
        """Let the ranks close their resources and end. Raises RanksFailed if they fail, or do not end in time."""
        self.order(silence_s=silence_s)
        self.join(min(silence_s, _END_S))

    def join(self, limit_s: float = _END_S) -> None:
        """Wait for the end of ranks that have finished. Raises RanksFailed if they do not end with status 0 in time."""
        outcome = self._run.wait(limit_s)
        if outcome.status:
            raise RanksFailed(self._failure(outcome, set()))

    def _follow(self, heard: Heard | None, silence_s: float) -> None:
        """Listen until all ranks have carried out the order, and let them meet meanwhile."""
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
                        heard({**message, "rank": rank})
            if len(meeting) == self._ranks:
                self._mailbox.tell([meeting[rank] for rank in range(self._ranks)])
                meeting.clear()
            if self._lost is None:
                self._lost = next((rank for rank in self._mailbox.ended if rank in busy), None)
            silent_s = time.monotonic() - since
            if messages:
                since = time.monotonic()
            elif outcome is not None:
                raise RanksFailed(self._failure(outcome, busy))
            elif (self._lost is not None or self._errors) and silent_s > (self._last_words_s or _LAST_WORDS_S):
                raise RanksFailed(self._failure(Outcome(0, ()), busy))  # the others would wait for it
            elif silent_s > silence_s:
                raise RanksSilent(f"no report for {silent_s:.0f} s")

    def _print(self, rank: int, line: str) -> None:
        """Keep a line that a process printed. The last lines explain an error without a report."""
        if line.strip():
            self._printed.setdefault(rank, deque(maxlen=_KEPT_LINES)).append(line)

    def _name(self, rank: int) -> str:
        return f"rank {rank}" if rank < self._workers else f"rank {rank} (server {rank - self._workers})"

    def _failure(self, outcome: Outcome, busy: set[int]) -> str:
        """Why the set failed: a killed rank, else a rank that was lost without an error, else the first reported error.

        The last lines of a process follow if it has reported no error.
        """
        told = [f"{self._name(rank)}: {text}" for _, rank, text in sorted(self._errors)]
        lost = None if any(rank == self._lost for _, rank, _ in self._errors) else self._lost
        if self._place.launcher != LOCAL:
            return self._launched_failure(outcome, busy, told, lost)
        failed = [ending for ending in outcome.endings if ending.status and not ending.told]
        culprit = min(failed, key=lambda ending: ending.status <= 128, default=None)  # the first that was killed
        if culprit is not None and (culprit.status > 128 or not told):
            return "\n".join((culprit.text, *self._printed.get(culprit.rank, ()), *told[:1]))
        if lost is not None:
            return "\n".join((f"{self._name(lost)} ended without a result", *self._printed.get(lost, ()), *told[:1]))
        if told:
            return told[0]
        return outcome.text if outcome.status else f"{self._name(min(busy))} ended with status 0 but without a result"

    def _launched_failure(self, outcome: Outcome, busy: set[int], told: Sequence[str], lost: int | None) -> str:
        """The same for ranks under a launcher: its exit status says less, and its process prints all lines."""
        launcher = self._place.launcher
        ended = "; ".join(f"{launcher.name} {ending.how}" for ending in outcome.endings)
        if lost is not None:
            first = f"{self._name(lost)} ended without a result"
            return "\n".join((f"{first}; {ended}" if ended else first, *self._printed.get(0, ()), *told[:1]))
        if told:
            return told[0]
        which = f" before {self._name(min(busy))} had a result" if busy else ""
        remedy = (
            f"; see whether it works alone: {shlex.join(launcher.words)} -n 2 hostname" if self._lost is None else ""
        )
        return "\n".join((f"{ended or launcher.name}{which}{remedy}", *self._printed.get(0, ())))


Table = NDArray[np.float64]


class Line:
    """A rank's connection to its starter. All ranks call its methods in the same order.

    ``lines`` is the JSON list of all ranks' addresses. With ``watched``, and always over TCP, the rank ends with its
    starter even while it waits elsewhere: the starter cannot end what a launcher has started.
    """

    def __init__(self, lines: str, place: Environment, watched: bool = False) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing here needs an orderly end
        self.rank, self.world = place.rank, place.world
        addresses = json.loads(lines)
        address = addresses[min(place.rank, len(addresses) - 1)]
        self.connection = Connection(address, place, len(addresses))
        if watched or not address.startswith("/"):
            self.connection.end_with_starter()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the starter that what is inside has ended, or report its error and end the process at once.

        It cannot go on after an error, because a group's other ranks may never come.
        """
        try:
            yield
        except SystemExit as end:  # of a server, when all workers have left
            if not end.code:
                self.send("done")
            raise
        except Exception as error:
            with suppress(OSError):  # the starter may be gone
                self.connection.fail(error)
            traceback.print_exc()
            os._exit(1)  # MPI would wait for all ranks at this one's exit
        self.send("done")

    def orders(self) -> Iterator[dict[str, Any]]:
        """The starter's orders, one after the other, until it orders the end."""
        self.send("done")  # with what comes before the first one
        while order := self._hear():
            yield order
            self.send("done")

    def send(self, kind: str, **content: Any) -> None:
        """Send the starter a report. If the starter is gone, end this process."""
        try:
            self.connection.send(kind, **content)
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
        told = self.connection.hear()
        if told is None:
            os._exit(1)  # the starter is gone
        return told
