"""This process in a run: its engine, how it calls the others, and its end.

One process is one member, whatever groups it communicates in (``communicator``). Made where a run begins, ended where
it ends; what the end says and hears of others is in ``ending``. Without a transport there is nobody to talk to: a world
of one worker needs neither connections nor threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from ..engine.driver import LIMIT_S
from ..engine.engine import Engine
from ..engine.trace import Observer
from ..errors import ClosedError, PeerError, SynclineError
from ..nouns import Group
from ..transports import Transport
from ..wire.member import Roll
from .ending import Ending


class Member:
    """Process ``index`` of ``group``, which counts workers first and servers of their own after them.

    An ``observer`` is told all that begins and ends in it.
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
    ) -> None:
        self.group, self.index, self.observer = group, index, observer
        self.process: Member = self
        """What is one for a process, whatever groups it is in: it fails, and it ends."""
        self.roll, self.local_rank = roll, local_rank
        self.communicators = 1
        """The least number that no communicator of this process has had; that of all workers is 0."""
        self.given_back: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        """Numbers of groups that have ended, and how many calls were made in each where that counts.

        By the processes that were in them, who alone may use them again.
        """
        self.splitting = threading.Lock()
        """Held while a group's number is agreed on."""
        self.before_calls: dict[int, Callable[[], None]] = {}
        """What a model still has to do with the others before they come to another call, by its first key."""
        self.before_end: list[Callable[[], None]] = []
        """What this process does for the others before it leaves a run in which nothing went wrong."""
        self._at_end: Callable[[bool], None] = lambda _: None
        ending = self.ending = Ending(group, index, self.name)
        self._pid = os.getpid()
        self._closed = False
        self.unchecked: Engine | None = None
        """The engine, None in a world of one worker; for a call that has seen that this session can be used."""
        if transport is not None:
            self.unchecked = Engine(
                transport,
                limit_s=limit_s,
                explain=ending.explain,
                has_left=ending.has_left,
                on_raise=ending.came_back,
                find_culprit=ending.find_culprit,
                observer=observer,
            )
            ending.answer = self.unchecked.answer

    @property
    def title(self) -> str:
        """How messages call the group of processes, where these are some of the run's (``grouped``)."""
        return ""

    @property
    def alone(self) -> bool:
        """True when there is nobody to exchange with."""
        return self.unchecked is None

    @property
    def engine(self) -> Engine:
        """The engine; raises ClosedError after the end and in forked children."""
        if self._closed or os.getpid() != self._pid:
            self.check_usable()  # raises
        if self.unchecked is None:
            raise ClosedError("a world of one worker has no engine")
        return self.unchecked

    def name(self, index: int) -> str:
        """How messages call a process."""
        role = "" if index < self.group.workers else "server "
        return role + (self.roll.name(index) if self.roll is not None else f"rank {index}")

    def number(self, index: int) -> int:
        """The number in the run of a process, which is its own unless these are some of them (``grouped``)."""
        return index

    def left_already(self) -> frozenset[int]:
        """The processes that have said goodbye, as far as that is known here."""
        return self.ending.left_already()

    @property
    def forked(self) -> bool:
        """True in a process that was forked from this one."""
        return os.getpid() != self._pid

    def call_at_end(self, call: Callable[[bool], None]) -> None:
        """After the goodbye, while connections still stand; it is told whether nothing has gone wrong in the run."""
        self._at_end = call

    @property
    def usable(self) -> bool:
        """Whether something can be communicated."""
        return not (self.forked or self._closed)

    def check_usable(self) -> None:
        """Raise ClosedError when nothing can be communicated (any more, or here)."""
        if not (self._closed or os.getpid() != self._pid):
            return
        if self.forked:
            raise ClosedError(
                "this process was forked from one that uses Syncline; only the parent can communicate: call"
                " syncline.init() after starting processes, or start them with the spawn method"
            )
        raise ClosedError("this session has been shut down")

    def fail(self, error: Exception) -> None:
        """This process gives up: tell everyone and end the engine. In a forked child it is none of its business."""
        if self.forked:
            return
        if self.unchecked is not None:
            self.unchecked.fail(error)
        self.ending.tell(error)
        self.ending.came_back()

    def interrupted(self, error: BaseException) -> None:
        """A call of several exchanges was left between two of them, by a signal's exception rather than one of ours."""
        if self.unchecked is not None and self.unchecked.error is None and not isinstance(error, SynclineError):
            self.unchecked.interrupted(error)

    def on_peer_failure(self, verdict: PeerError) -> None:
        """The watcher has found the first culprit: whoever waits here learns of it, with what it was waiting for."""
        engine = self.unchecked
        if engine is not None:
            doing = f"{self.name(self.index)}: during {engine.doing}: {verdict}"
            engine.fail(type(verdict)(doing, rank=verdict.rank, host=verdict.host))

    def shutdown(self) -> Exception | None:
        """End this process's part: finish what is under way, say goodbye, free everything. May be called again.

        Returns the failure that ended the run, if no call has raised it and this process did not cause it.
        """
        if self._closed or self.forked:
            return None
        self.ending.begin()
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
                self.ending.close()
        return unseen or (None if self.ending.known else fault or self.ending.verdict)

    def _part(self) -> None:
        """Say goodbye, and do what is to be done while the others can still be reached."""
        self.ending.say_goodbye()
        self._at_end(self.unchecked is None or self.unchecked.error is None)

    def _take_leave(self) -> Exception | None:
        """Call what comes before the end; what went wrong in it, which nobody has seen."""
        while self.before_end and self.unchecked is not None and self.unchecked.error is None:
            try:
                self.before_end.pop()()
            except SynclineError as error:
                return error
        return None

    def forget_in_child(self) -> None:
        """In a forked child: close the parent's descriptors without a word."""
        self.ending.forget_in_child()
        if self.unchecked is not None:
            self.unchecked.transport.close()
