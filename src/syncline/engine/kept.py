"""A plan that is prepared for many runs over arrays of one size and type, each carried out by the thread that calls.

Most of the time of a small collective goes into what is done around it. So the calling thread carries the run out
itself, without handing it over; where all other ranks have come it does so in one go, and nothing has to be remembered
of the run. Where it cannot finish at once, the run goes on as any other does. Where another thread drives, or anything
is under way already, an earlier run of the same plan included, nothing is begun: the caller then uses ``Engine.run`` or
``Engine.exchange`` instead. To the other ranks that makes no difference.
"""

from __future__ import annotations

import time

from ..plans.messages import Program
from .driver import SPINS_HERE, Driver
from .exchange import Exchange
from .messages import Run, Sign
from .order import Work
from .scripts import ScriptedRun

LOOK_ONLY = -1
"""For a thread that does not wait: looking again for a moment, without offering its core."""


class Kept:
    """What is prepared, until it is dropped. While a run of it is under way, ``run`` and ``begin`` begin no other."""

    def __init__(self, driver: Driver, exchange: Exchange, program: Program, scripted: ScriptedRun) -> None:
        self.program, self.scripted = program, scripted
        self._driver, self._exchange = driver, exchange
        self._monitor, self._motion = driver.monitor, driver.motion

    def run(self, address: int, key: int, label: str, sign: Sign, timeout: float) -> bool:
        """Run it over the array at ``address`` and return when that is done; False where it could not be begun.

        Raises PeerTimeout after ``timeout`` seconds; the run is still under way then.
        """
        if not self._monitor.claim(first=True):
            return False
        begun, work = time.perf_counter(), Work(label)
        try:
            code = self._exchange.prompt(self.scripted, address, key, sign, SPINS_HERE)
            work.done = code == 0  # nobody else knows the work yet: no lock
            if code:
                self._take_up(work, key, sign, None)
                deadline = begun + timeout
                self._driver.drive((work,), deadline, None, SPINS_HERE)
            self._motion.moved()
            self._monitor.hand_over()
            if code and not work.done:
                self._monitor.wait((work,), deadline)
        except BaseException as error:
            self._driver.left(error)
            raise
        finally:
            self._driver.blocked.count(begun)
        if code is None:
            return False
        if self._monitor.error is not None or not work.done:
            raise self._driver.unfinished(work, timeout)
        return True

    def begin(self, address: int, key: int, label: str, sign: Sign, memory: object) -> Work | None:
        """Begin what ``run`` runs; the work, which may be done. None where it could not be begun.

        Where all others have come this thread does it all; else it goes on behind the script. ``memory`` is kept alive.
        """
        if not self._monitor.claim(first=True):
            return None
        work = Work(label)
        work.key = key
        try:
            code = self._exchange.prompt(self.scripted, address, key, sign, LOOK_ONLY)
            work.done = code == 0  # nobody else knows the work yet: no lock
            if code:
                self._take_up(work, key, sign, memory)
            self._motion.moved()
            self._monitor.hand_over()
        except BaseException as error:
            self._driver.left(error)
            raise
        return None if code is None else work

    def _take_up(self, work: Work, key: int, sign: Sign, memory: object) -> None:
        """A run was begun and is not done: it goes on as any other."""
        self._monitor.expect(tolerant=False)

        def done(_: object = memory) -> None:
            self._driver.finish(work)

        run = Run(self.program, self.scripted.array, key, work.label, on_done=done, sign=sign)
        self._exchange.take_up(self.scripted, run)
