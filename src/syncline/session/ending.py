"""How a run ends, seen from one process: who has said goodbye, who has failed, and what is told of it.

Owns what the watcher's news mean here: a connection that closes is a failure unless its peer had said goodbye, a fault
in the progress thread becomes the error that names the first culprit, and what goes wrong in this process is told to
all. Does not know the engine or any operation: ``session`` does. Who failed first is found by ``wire.watch``; between
the threads of one process there is no watcher, and goodbyes go to the neighbours.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ..errors import PeerError, PeerLeft, ProtocolError, SynclineError
from ..nouns import Group
from ..wire.culprit import Answer, Found, Waits, find_culprit
from ..wire.saying import FAILED
from ..wire.watch import Watcher

VERDICT_S = 2.0
"""How long a broken connection waits for the news of who really failed."""


OWN_THREADS = "syncline-"
"""How the names of threads begin that Syncline has started."""


class Ending:
    """The end of process ``index`` and of its peers; ``name`` is how messages call a process.

    ``watcher`` and ``neighbours`` are set once the group stands.
    """

    def __init__(self, group: Group, index: int, name: Callable[[int], str]) -> None:
        self.watcher: Watcher | None = None
        self.neighbours: Sequence[Ending] = ()  # of the other sessions of a group in one process
        self.answer: Callable[[], Answer] = lambda: Answer({})
        """For whom this process waits; asked from any thread."""
        self._group, self._index, self._name = group, index, name
        self.known = False
        """Whether the user's thread has seen what went wrong, before its end began."""
        self._begun = False
        self._left: set[int] = set()
        self._all_left = threading.Event()

    def begin(self) -> None:
        """The user's thread has come to the end: what is raised from here on is for the end to tell.

        Parts of the end may fail and be passed over, as nobody is left to raise to; the run has failed all the same.
        """
        self._begun = True

    # News of peers.

    def left(self, index: int) -> None:
        """A peer has said goodbye (called by the watcher)."""
        self._left.add(index)
        if all(worker in self._left for worker in range(self._group.workers) if worker != self._index):
            self._all_left.set()

    def has_left(self, peer: int) -> bool:
        """Whether a peer whose connection has closed had said goodbye; waits for that news a little."""
        if self.watcher is None:
            return peer in self._left
        deadline = time.monotonic() + VERDICT_S
        while time.monotonic() < deadline and self.watcher.failure is None:
            if peer in self._left:
                return True
            time.sleep(0.005)
        return False

    def left_already(self) -> frozenset[int]:
        """The peers that have said goodbye, as far as that is known here."""
        return frozenset(self._left)

    def workers_left(self) -> bool:
        """True when every worker has said goodbye."""
        return self._all_left.is_set()

    def find_culprit(self, waits: Waits) -> Found:
        """Who seems to be to blame when nothing moves and this process waits for ``waits``: one search."""
        return find_culprit(self._index, waits, self._ask)

    def _ask(self, peer: int) -> Answer | None:
        if self.watcher is not None:
            return self.watcher.ask(peer)
        if peer in self._left:
            return Answer({})
        return next((other.answer() for other in self.neighbours if other._index == peer), None)

    def explain(self, error: Exception) -> Exception:
        """What the user sees of a fault in the progress thread: the first culprit, if it was somebody else."""
        here = self._name(self._index)
        if self.watcher is None:
            return error
        verdict = self.watcher.verdict(VERDICT_S) if isinstance(error, PeerError) else self.watcher.failure
        if verdict is not None:
            return type(verdict)(f"{here}: {error}: {verdict}", rank=verdict.rank, host=verdict.host)
        if isinstance(error, PeerError) and error.rank in self.watcher.left:
            why = (
                "left the run (shutdown, or the end of its script) while others needed it; if ranks have different"
                " numbers of batches, wrap the loop in `with syncline.join():`"
            )
            self.watcher.abort(why, error.rank)
            return PeerLeft(f"{here}: {error}: {self._name(error.rank)} {why}", rank=error.rank, host=error.host)
        explained: Exception = error
        if isinstance(error, ProtocolError):
            culprit = f" (that is {self._name(error.rank)})" if error.rank >= 0 else ""  # or nobody's alone
            text = f"{here}: {error}{culprit}"
            explained = ProtocolError(text, rank=error.rank, host=error.host)
        if not isinstance(error, SynclineError):
            explained = SynclineError(f"{here}: {type(error).__name__} in the progress thread: {error}")
            explained.__cause__ = error
        self.tell(explained)
        return explained

    # News for peers, and the end of the connections.

    def tell(self, error: Exception) -> None:
        """Tell everyone that this process ends with an error, and whose fault it is."""
        if self.watcher is not None and self.watcher.failure is None:
            blames_other = isinstance(error, PeerError) and error.rank not in (-1, self._index)
            if blames_other:
                assert isinstance(error, PeerError)
                self.watcher.abort(f"is to blame for an error of {self._name(self._index)}: {error}", error.rank)
            else:
                self.watcher.abort(f"{FAILED}{type(error).__name__}: {error}")

    def say_goodbye(self) -> None:
        """Tell everyone that this process has ended its part; after a failure they know already."""
        if self.watcher is not None and self.watcher.failure is None:
            self.watcher.goodbye()
        for peer in self.neighbours:
            peer.left(self._index)

    def came_back(self) -> None:
        """An error is about to be raised: where that reaches the user's thread the process need not be ended for it."""
        if threading.current_thread().name.startswith(OWN_THREADS):
            return  # whoever serves or completes futures there tells nobody
        self.known |= not self._begun
        if self.watcher is not None and self.watcher.over:
            self.watcher.came_back()

    def reached_nobody(self) -> None:
        """An error has reached a thread that is no user's, and is raised at the end if not before."""
        self.known = False

    @property
    def failed(self) -> bool:
        """Whether the run has failed, here or elsewhere, as far as is known."""
        return self.known or (self.watcher is not None and self.watcher.over)

    @property
    def verdict(self) -> Exception | None:
        """Who failed first, as far as is known here."""
        failure = None if self.watcher is None else self.watcher.failure
        if failure is None:
            return None
        return type(failure)(f"{self._name(self._index)}: at its end: {failure}", rank=failure.rank, host=failure.host)

    def close(self) -> None:
        """Watch no longer."""
        if self.watcher is not None:
            self.watcher.came_back()
            self.watcher.close()

    def forget_in_child(self) -> None:
        """In a forked child: close the parent's descriptors without a word."""
        if self.watcher is not None:
            self.watcher.close_descriptors()
