"""How a group's calls run: at once where torch waits for them, else behind the script, each with its time limit.

Knows nothing of what a call does to tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ....engine.order import Work
from ....session.communicator import Communicator
from .calls import Call
from .works import Completer, GroupWork


class Running:
    """The calls of the ranks ``us``, which may take ``timeout`` where they say nothing else."""

    def __init__(self, us: Communicator, timeout: timedelta) -> None:
        self.us = us
        self.lock = threading.RLock()
        """Whoever begins a call holds it: all ranks begin theirs in one order."""
        self._completer = Completer()
        self._allowed_s = 0.0
        self.limit_to(timeout)

    @property
    def alone(self) -> bool:
        """Whether there is no other rank in the run."""
        return self.us.member.alone

    @property
    def timeout_s(self) -> float:
        """The time limit of calls that give none."""
        return self.timeout.total_seconds()

    def limit_to(self, timeout: timedelta) -> None:
        """Let this be the time limit of calls that give none."""
        self.timeout = timeout
        self._allow(timeout.total_seconds())

    def limit_s(self, opts: Any) -> float:
        """The time limit of a call with these options."""
        found = getattr(opts, "timeout", None)
        given_s = found.total_seconds() if isinstance(found, timedelta) else 0.0
        if given_s > self._allowed_s:
            self._allow(given_s)
        return given_s if given_s > 0 else self.timeout_s

    def run(self, begin: Callable[[], Call], opts: Any, outputs: Any) -> GroupWork:
        """Make a call: here, where torch waits for it, else behind the script."""
        limit_s = self.limit_s(opts)
        with self.lock:
            call = begin()
            if not self.alone and getattr(opts, "asyncOp", True):
                return self.under_way(call.begin(), call.label, outputs, limit_s)
        call.finish(limit_s)
        return self.over(outputs)

    def under_way(self, work: Work | None, label: str, outputs: Any, limit_s: float | None = None) -> GroupWork:
        """What torch is given for a call that goes on behind the script."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        return GroupWork(self.us, work, label, outputs, limit_s, self._completer)

    def over(self, outputs: Any) -> GroupWork:
        """What torch is given for a call that is over."""
        return GroupWork(self.us, None, "", outputs, self.timeout_s, self._completer)

    def _allow(self, limit_s: float) -> None:
        """Calls may take so long, also where nothing else in the run may."""
        self._allowed_s = limit_s
        if not self.alone:
            self.us.member.process.engine.allow(limit_s)
