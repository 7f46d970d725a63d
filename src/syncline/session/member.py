"""One process in a run: its engine, its end, and its membership in groups of workers.

``Process`` is created and ended with the run and shared by all groups. Without a transport it is a run of one worker.
``Membership`` is the process as a member of the whole run, or of a group.

The process interprets the watcher's news. A closed connection is a failure unless its peer has said goodbye. A fault in
the progress thread becomes the error that names the first culprit, and a fault of this process is reported to all.
Processes that are threads of one process have no watcher: they say goodbye to each other directly.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ..engine.driver import LIMIT_S
from ..engine.engine import Engine
from ..engine.flight import Flight
from ..engine.scope import BLOCK_BITS, Scope
from ..engine.trace import Observer
from ..errors import (
    ClosedError,
    MismatchError,
    PeerError,
    PeerLeft,
    ProtocolError,
    SynclineError,
    ViewEnds,
    labelled,
)
from ..nouns import Group
from ..transports import Transport
from ..wire.culprit import Answer, find_culprit
from ..wire.meeting import Roll
from ..wire.reports import FAILED
from ..wire.watch import Watcher

AnyError = TypeVar("AnyError", bound=Exception)

VERDICT_S = 2.0
"""The time to wait, after a connection breaks, for the news of the process that failed first."""

OWN_THREADS = "syncline-"
"""The prefix of the names of Syncline's own threads."""


class Process:
    """Process ``index`` of ``group``, which counts workers, then servers. ``observer`` receives all spans, and
    ``flight`` keeps the last operations.

    ``watcher`` and ``neighbours`` are set once the group has formed.
    """

    def __init__(
        self,
        group: Group,
        index: int,
        transport: Transport | None,
        *,
        roll: Roll | None = None,
        local_rank: int = 0,
        limit_s: float = LIMIT_S,
        observer: Observer | None = None,
        flight: Flight | None = None,
    ) -> None:
        self.group, self.index, self.observer, self.flight = group, index, observer, flight
        self.roll, self.local_rank = roll, local_rank
        self.watcher: Watcher | None = None
        self.neighbours: Sequence[Process] = ()
        """The other processes of a group whose processes are threads of this one."""
        self.communicators = 1
        """The least communicator number that this process has not used. Number 0 belongs to all workers."""
        self.given_back: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        """The numbers of ended groups, with the number of calls made in each if that matters, by the group's processes.

        Only the same processes may use these numbers again.
        """
        self.splitting = threading.Lock()
        """Held while a group's number is agreed on."""
        self.before_end: list[Callable[[], None]] = []
        """The calls that this process makes for others before it leaves a run without a failure."""
        self.at_end: Callable[[bool], None] = lambda _: None
        """Called after the goodbye, while connections still stand, with whether the run had no failure."""
        self.known = False
        """Whether the script has seen the fault before its end began."""
        self._begun = False
        self._left: set[int] = set()
        self._all_left = threading.Event()
        self._pid = os.getpid()
        self._closed = False
        self.unchecked: Engine | None = None
        """The engine, None in a world of one worker. For calls that have checked that the session is usable."""
        if transport is not None:
            self.unchecked = Engine(
                transport,
                limit_s=limit_s,
                explain=self.explain,
                has_left=self.has_left,
                on_raise=self.came_back,
                find_culprit=lambda waits: find_culprit(index, waits, self._ask),
                observer=observer,
                flight=flight,
            )

    @property
    def engine(self) -> Engine:
        """The engine. Raises ClosedError after the end, in forked children and in a world of one worker."""
        if self._closed or os.getpid() != self._pid:
            self.check_usable()  # raises
        if self.unchecked is None:
            raise ClosedError("a world of one worker has no engine")
        return self.unchecked

    def name(self, index: int) -> str:
        """The name of a process in messages."""
        role = "" if index < self.group.workers else "server "
        return role + (self.roll.name(index) if self.roll is not None else f"rank {index}")

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the session's own."""
        return os.getpid() != self._pid

    @property
    def usable(self) -> bool:
        """Whether this process can communicate."""
        return not (self.forked or self._closed)

    def check_usable(self) -> None:
        """Raise ClosedError unless this process can communicate."""
        if self.forked:
            raise ClosedError(
                "this process was forked from one that uses Syncline; only the parent can communicate: call"
                " syncline.init() after starting processes, or start them with the spawn method"
            )
        if self._closed:
            raise ClosedError("this session has been shut down")

    # News of peers.

    def left(self, index: int) -> None:
        """Note that a peer has said goodbye. The watcher calls it."""
        self._left.add(index)
        if all(worker in self._left for worker in range(self.group.workers) if worker != self.index):
            self._all_left.set()

    def has_left(self, peer: int) -> bool:
        """Whether a peer whose connection has closed had said goodbye. Waits briefly for that news."""
        if self.watcher is None:
            return peer in self._left
        deadline = time.monotonic() + VERDICT_S
        while time.monotonic() < deadline and self.watcher.failure is None:
            if peer in self._left:
                return True
            time.sleep(0.005)
        return False

    def left_already(self) -> frozenset[int]:
        """The peers that are known here to have said goodbye."""
        return frozenset(self._left)

    def workers_left(self) -> bool:
        """Whether every worker has said goodbye."""
        return self._all_left.is_set()

    def answer(self) -> Answer:
        """The processes that this one waits for. Callable from any thread."""
        return Answer({}) if self.unchecked is None else self.unchecked.answer()

    def _ask(self, peer: int) -> Answer | None:
        if self.watcher is not None:
            return self.watcher.ask(peer)
        if peer in self._left:
            return Answer({})
        return next((other.answer() for other in self.neighbours if other.index == peer), None)

    def explain(self, error: Exception) -> Exception:
        """The error that the user sees for a fault in the progress thread. It names the process that failed first."""
        explained = self._explained(error)
        self._keep(explained)
        return explained

    def _explained(self, error: Exception) -> Exception:
        here = self.name(self.index)
        if self.watcher is None:
            return error
        verdict = self.watcher.verdict(VERDICT_S) if isinstance(error, PeerError) else self.watcher.failure
        if verdict is not None:
            return labelled(f"{here}: {error}", verdict)
        if isinstance(error, PeerError) and error.rank in self.watcher.left:
            why = (
                "left the run (shutdown, or the end of its script) while others needed it; if ranks have different"
                " numbers of batches, wrap the loop in `with syncline.join():`"
            )
            self.watcher.abort(why, error.rank)
            return PeerLeft(f"{here}: {error}: {self.name(error.rank)} {why}", rank=error.rank, host=error.host)
        explained: Exception = error
        if isinstance(error, ProtocolError):
            culprit = f" (that is {self.name(error.rank)})" if error.rank >= 0 else ""  # -1: no single process
            text = f"{here}: {error}{culprit}"
            explained = type(error)(text, rank=error.rank, host=error.host)
        if not isinstance(error, SynclineError):
            explained = SynclineError(f"{here}: {type(error).__name__} in the progress thread: {error}")
            explained.__cause__ = error
        self._tell(explained)
        return explained

    def on_peer_failure(self, verdict: SynclineError) -> None:
        """Fail all waits of this process with the watcher's verdict on the first culprit, and what they waited for."""
        engine = self.unchecked
        self._keep(verdict)
        if engine is not None:
            engine.fail(labelled(f"{self.name(self.index)}: during {engine.doing}", verdict))

    # Failures of this process.

    def fail(self, error: AnyError) -> AnyError:
        """Fail for all processes: tell them and end the engine. Does nothing in a forked child. Returns the error."""
        if not self.forked:
            self._keep(error)
            if self.unchecked is not None:
                self.unchecked.fail(error)
            self._tell(error)
            self.came_back()
        return error

    def interrupted(self, error: BaseException) -> None:
        """Fail because an exception from a signal handler has ended a call between two of its exchanges."""
        if self.unchecked is not None and self.unchecked.error is None and not isinstance(error, SynclineError):
            self.unchecked.interrupted(error)

    def _keep(self, error: Exception) -> None:
        """Keep the first fault in the flight record, with whom this process waits for."""
        if self.flight is not None and self.unchecked is not None:
            with contextlib.suppress(Exception):  # a fault of the record must not hide the run's own
                own = -1 if isinstance(error, ClosedError | MismatchError) else self.index
                culprit = error.rank if isinstance(error, PeerError) else own
                self.flight.fault(error, culprit, self.unchecked.waits())

    def _tell(self, error: Exception) -> None:
        """Report to all processes that this one ends with an error, and which process is at fault.

        An error that ends the view is nobody's fault, and ends it on all of them.
        """
        if self.watcher is None or self.watcher.failure is not None:
            return
        if isinstance(error, ViewEnds):
            self.watcher.abort(str(error))
            return
        if isinstance(error, PeerError) and error.rank not in (-1, self.index):
            self.watcher.abort(f"is to blame for an error of {self.name(self.index)}: {error}", error.rank)
        else:
            self.watcher.abort(f"{FAILED}{type(error).__name__}: {error}")

    def came_back(self) -> None:
        """Note that an error is about to be raised. In the user's thread it makes ending the process unnecessary."""
        if threading.current_thread().name.startswith(OWN_THREADS):
            return  # an error in one of Syncline's own threads does not reach the user
        self.known |= not self._begun
        if self.watcher is not None and self.watcher.over:
            self.watcher.came_back()

    def reached_nobody(self) -> None:
        """Note that an error was raised in a thread that is not the user's. It is raised at the end if not before."""
        self.known = False

    @property
    def failed(self) -> bool:
        """Whether the run is known to have failed, here or elsewhere."""
        return self.known or (self.watcher is not None and self.watcher.over)

    # The end.

    def begin_end(self) -> None:
        """Note that the script has reached its end: it will not see later faults."""
        self._begun = True

    def shutdown(self) -> Exception | None:
        """Finish the exchanges in flight, say goodbye and free everything. Callable repeatedly.

        Returns the failure that ended the run, if no call has raised it and this process did not cause it.
        """
        if self._closed or self.forked:
            return None
        self.begin_end()
        try:
            unseen = self._take_leave()
        finally:
            try:
                fault = None
                if self.unchecked is None:
                    self._part()
                else:
                    fault = self.unchecked.close(before_end=self._part)
            finally:
                self._closed = True
                if self.flight is not None:
                    self.flight.close()
                if self.watcher is not None:
                    self.watcher.came_back()
                    self.watcher.close()
        return unseen or (None if self.known else fault or self._verdict())

    def _take_leave(self) -> Exception | None:
        """Run the callbacks before the end. Returns the error of one of them, which no call has raised."""
        while self.before_end and self.unchecked is not None and self.unchecked.error is None:
            try:
                self.before_end.pop()()
            except SynclineError as error:
                return error
        return None

    def _part(self) -> None:
        """Say goodbye, and make the last call that needs the connections. After a failure all processes know of it."""
        if self.watcher is not None and self.watcher.failure is None:
            self.watcher.goodbye()
        for peer in self.neighbours:
            peer.left(self.index)
        self.at_end(self.unchecked is None or self.unchecked.error is None)

    def _verdict(self) -> Exception | None:
        """The error that names the process that failed first, as far as this process knows."""
        failure = None if self.watcher is None else self.watcher.failure
        if failure is None:
            return None
        return labelled(f"{self.name(self.index)}: at its end", failure)

    def forget_in_child(self) -> None:
        """In a forked child: close the parent's descriptors without a goodbye."""
        if self.watcher is not None:
            self.watcher.close_descriptors()
        if self.unchecked is not None:
            self.unchecked.transport.close()


class Membership:
    """A process as one of the ``ranks`` of its run, counted from 0: all of them, or the group with that number."""

    def __init__(self, process: Process, ranks: Sequence[int] | None = None, number: int = 0) -> None:
        self.process = process
        """The process itself, which all its groups share, with its failure and its end."""
        self.ranks = tuple(range(process.group.processes) if ranks is None else ranks)
        self.index, self.group, self.title = self.ranks.index(process.index), process.group, ""
        self.unchecked = process.unchecked
        """The engine within the scope, or None for a single worker. Only for calls that have checked that the
        session is usable."""
        self.before_calls: dict[int, Callable[[], None]] = {}
        """By a model's first key: work that the model must do with the other workers before their next joint call."""
        if ranks is not None:
            nodes, scope = process.group.nodes, Scope(self.ranks, self.index, number)
            self.group = Group(len(ranks), nodes=tuple(nodes[rank] for rank in ranks) if nodes else ())
            self.title = scope.title
            self.unchecked = process.engine.within(scope) if len(ranks) > 1 else None
            if process.flight is not None:
                process.flight.group(scope.first_key, 1 << BLOCK_BITS, self.ranks)
        self.alone = self.unchecked is None
        """Whether there is no other process to exchange with."""
        self.roll = process.roll
        """The records of the processes. None if they are threads of one process."""
        if ranks is not None and self.roll is not None:
            members = tuple(self.roll.members[rank] for rank in ranks)
            self.roll = replace(self.roll, index=self.index, members=members)

    @property
    def engine(self) -> Engine:
        """The engine within the scope. ClosedError after the end, in forked children, and for a single worker."""
        process = self.process
        if process._closed or os.getpid() != process._pid:
            process.check_usable()  # raises
        if self.unchecked is None:
            raise ClosedError(f"a {'group' if self.title else 'world'} of one worker has no engine")
        return self.unchecked

    def name(self, index: int) -> str:
        """The name of a process in messages, with its number in the run."""
        return self.process.name(self.ranks[index])

    def number(self, index: int) -> int:
        """A process's number in the run."""
        return self.ranks[index] if index >= 0 else index

    def left_already(self) -> frozenset[int]:
        """The processes that are known here to have said goodbye."""
        left = self.process.left_already()
        return frozenset(position for position, process in enumerate(self.ranks) if process in left)
