"""This process's part in a run: the one session that it has, and how that begins and ends.

The only place that knows of *the* session of a process; everything below takes one as an argument, and ``api`` has the
calls that scripts make. A session ends by itself when the interpreter ends; an exception that ends the script is told
to the other ranks with its text.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .errors import ClosedError, PeerError, SynclineError, UsageError
from .launch.child import end_with_launcher
from .launch.connecting import alone, connect_session
from .launch.environment import Environment, Variables
from .launch.meeting import MeetingPoint, secret_bytes
from .session.groups import WorkerGroup, found_group
from .session.printing import end_failed, end_quickly, watch_exceptions
from .session.session import Session
from .strategy.strategy import Strategy
from .timeline.recording import SessionSpans, begin_recording
from .wire import reports

if TYPE_CHECKING:
    from .frameworks.torch import Prepared


class Process:
    """What a process has of the run that it is in; ``process`` below is this one's."""

    def __init__(self) -> None:
        self.joined: Session | None = None
        self.prepared: list[Prepared] = []
        """The models of PyTorch that are part of the run, with their optimizers."""
        self._of_torch: dict[tuple[int, ...], WorkerGroup] = {}  # by ranks
        self._founding = threading.Lock()  # held while one of them is made: two threads may give it first
        self._point: MeetingPoint | None = None
        self._variables = Variables()
        self._inits = 0
        self._recording: SessionSpans | None = None
        self._recordings = 0
        self._watching = False
        self._hooked = False
        self._failed = False

    @property
    def session(self) -> Session:
        """The session; raises ClosedError where there is none."""
        if self.joined is None:
            raise ClosedError("call syncline.init() first")
        self.joined.check_usable()
        return self.joined

    def within(self, group: Any) -> Session:
        """The session of a group: ours, or one that its ranks have in torch; of all workers where there is none.

        Raises UsageError for what is no group, and for a worker that is not in it.
        """
        here = self.session
        if group is None:
            return here
        if isinstance(group, WorkerGroup):
            if not group.is_of(here):
                raise UsageError(f"the {group!r} is of a run that has ended: make it anew after syncline.init()")
            return group.session
        if all(kind.__module__.partition(".")[0] != "torch" for kind in type(group).__mro__):
            raise UsageError(
                "group= takes what syncline.new_group() gives, one dimension of a DeviceMesh, or a ProcessGroup of"
                f" torch, not {type(group).__name__}; torch gives ranks that are not in a group another object in place"
                " of one"
            )
        from .frameworks.torch.meshes import ranks_of

        ranks = ranks_of(here, group)
        with self._founding:
            if ranks not in self._of_torch:
                self._of_torch[ranks] = found_group(here, ranks)
            return self._of_torch[ranks].session

    def begin(
        self,
        strategy: str | None,
        *,
        rank: int | None,
        world_size: int | None,
        address: str | None,
        interface: str | None,
        secret: str | bytes | None,
        timeout: float,
        liveness: float,
        progress: float,
    ) -> None:
        """Join the run's processes, as ``syncline.init`` says it."""
        if self.joined is not None:
            raise UsageError("syncline.init() was called before: call syncline.shutdown() first")
        self._watch_exceptions()
        secret_bytes(secret)
        environment = self._variables.recognise(rank=rank, world_size=world_size, address=address)
        interface = interface or os.environ.get("SYNCLINE_INTERFACE")
        chosen = _choose(strategy, environment)
        with self._recorded(environment.rank) as recording:
            if environment.world == 1 and chosen.servers == 0:
                self.joined = alone(chosen, recording)
            else:
                run = f"{environment.run_id}/{environment.restart}/{self._inits}"
                self._inits += 1  # even if this one fails: who comes late to it must not come to the next
                self.joined = connect_session(
                    chosen,
                    self._meeting_point(environment),
                    run,
                    secret=secret,
                    interface=interface,
                    timeout=timeout,
                    liveness_s=liveness,
                    limit_s=progress,
                    recording=recording,
                )
                self._variables.count_workers(environment, chosen.servers)
        self._watch_the_end(environment)  # the first to be called at the end: what was loaded on the way ends after it

    @contextlib.contextmanager
    def _recorded(self, number: int) -> Iterator[SessionSpans | None]:
        """Record the session that begins inside, where that is asked for; nothing stays of one that does not."""
        recording = begin_recording(number, self._recordings)
        try:
            yield recording
        except BaseException:
            if recording is not None:
                recording.remove()
            raise
        self._recording, self._recordings = recording, self._recordings + 1

    def _meeting_point(self, environment: Environment) -> MeetingPoint:
        """Where this process meets the others: made once, since a later session meets where the first one did."""
        if self._point is not None and self._point.asked != environment:
            self._point.close()
            self._point = None
        if self._point is None:
            self._point = MeetingPoint(environment)
        return self._point

    def end(self, fetch: bool) -> None:
        """Leave the run, if this process is in one; with ``fetch`` owners give optimizers their state back.

        A failure of the run that no call has raised yet is raised here, when all is closed.
        """
        if self.joined is None:
            return
        ending, passing = self.joined, sys.exc_info()[1]
        ending.ending.begin()
        try:
            for made in self.prepared:
                made.release(fetch and passing is None, settle=passing is None)
        finally:
            self.prepared.clear()
            self._of_torch.clear()
            self.joined = None
            failure = _close(ending, sys.exc_info()[1])
            self._failed |= ending.ending.failed
        if failure is not None and passing is None:
            raise failure

    def _end_at_exit(self) -> None:
        """The end of the interpreter, where an exception would be printed and the status would stay 0."""
        try:
            self.end(fetch=False)
        except SynclineError as error:
            end_failed(error)
        if self._failed:
            end_quickly()

    def _watch_the_end(self, environment: Environment) -> None:
        """Say goodbye at exit, let go in forked children, and end with the launcher."""
        reports.join()
        if self._watching:
            return
        self._watching = True
        end_with_launcher(environment)
        atexit.register(self._end_at_exit)
        os.register_at_fork(after_in_child=self._forget)

    def _watch_exceptions(self) -> None:
        """Print an exception that ends the script so that it can be read among those of other ranks, and tell them."""
        if not self._hooked:
            self._hooked = True
            watch_exceptions(lambda: self.joined)

    def _forget(self) -> None:
        """In a forked child (a data loader's worker): the connections are the parent's."""
        if self.joined is not None:
            self.joined.member.process.forget_in_child()
        if self._recording is not None:
            self._recording.file.forget()


def _choose(strategy: str | None, environment: Environment) -> Strategy:
    """The strategy asked for by the script or else by the launcher; servers that were started must be in it."""
    text = strategy if strategy is not None else environment.strategy
    started = environment.servers
    if text is None:
        return Strategy.parse(f"ps(servers={started})" if started else "")
    chosen = Strategy.parse(text)
    if started is not None and started != chosen.servers and environment.world > 1:
        raise UsageError(
            f"{str(chosen)!r} has {chosen.servers} server processes, {started} were started: use syncline run"
            f" --servers {chosen.servers}"
        )
    return chosen


def _close(ending: Session, passing: BaseException | None) -> Exception | None:
    """End a session while an exception passes through, or none does; the failure that nobody has seen yet."""
    if isinstance(passing, Exception) and not isinstance(passing, PeerError):
        ending.fail(passing)  # the others shall read it, not a goodbye
    failure = ending.shutdown()
    if not ending.forked:
        reports.leave()
    return failure


process = Process()
