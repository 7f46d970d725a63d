"""A collective under way: a meeting, and after it steps that each wait for some works; or a single exchange.

Where ranks share memory they see in an exchange itself for which call the others have come: so a collective that is one
exchange, whose result needs all ranks, has no meeting before it.

``rest`` is a generator: it computes, yields the works that it needs, and goes on when they are done. Whoever calls a
collective and waits drives it in its own thread; otherwise the thread that drives the engine does, step by step. Keys
and numbers are taken when the call begins, in the order of the script, which is that of all ranks, and as many by every
call: so ranks that call different things meet, and find out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....engine.order import Order, Work
from ....errors import PeerTimeout, within
from ....session.communicator import Communicator
from ....session.tickets import Meeting

Steps = Iterator[Sequence[Work]]


class Single(NamedTuple):
    """The one exchange that a collective is, shown to all ranks by its sign; ``done`` is called after it."""

    order: Order
    done: Callable[[], None]


@dataclass(eq=False)
class Call:
    """One collective of a communicator; ``key`` is for what is exchanged after its meeting, ``number`` counts calls."""

    us: Communicator
    label: str
    meeting: Meeting | Single
    key: int
    number: int
    rest: Steps

    @property
    def brought(self) -> NDArray[np.uint8]:
        """What all have brought along to the meeting."""
        assert isinstance(self.meeting, Meeting)
        return self.meeting.brought

    def finish(self, timeout_s: float) -> None:
        """Wait for everything here; PeerTimeout names who has not come, or the limit, after ``timeout_s``."""
        if isinstance(self.meeting, Single):
            run_single(self.us, self.meeting, timeout_s)
            return
        deadline = time.monotonic() + timeout_s
        try:
            self.us.await_all(self.meeting, self.label, timeout_s)
            self.meeting.tickets()
            for works in self.rest:
                await_works(self.us, works, self.label, max(0.0, deadline - time.monotonic()), timeout_s)
        except BaseException as error:
            self.us.member.process.interrupted(error)
            raise

    def begin(self) -> Work:
        """Let it go on behind the script; the work is done when the call is."""
        engine, meeting = self.us.engine, self.meeting
        if isinstance(meeting, Single):
            work = engine.start(meeting.order._replace(after=meeting.done))
            self.us.hold(meeting.order.key, work)
            return work
        promised = engine.promise(self.label)
        self.us.hold(self.key, promised)

        def check() -> None:
            meeting.tickets()
            go_on()

        def go_on() -> None:
            works = next(self.rest, None)
            if works is None:
                engine.fulfil(promised)
            else:
                engine.then(self.label, works, go_on)

        engine.then(self.label, [] if meeting.work is None else [meeting.work], check)
        return promised


def run_single(us: Communicator, single: Single, timeout_s: float) -> None:
    """Make an exchange here; PeerTimeout names who has not come, or the limit, after ``timeout_s``."""
    engine = us.member.process.engine
    try:
        engine.run(single.order, timeout_s)
    except PeerTimeout:
        if engine.error is not None:
            raise
        raise us.late(single.order.label, sorted(engine.absent(single.order.key, us.ranks)), timeout_s) from None
    single.done()


def await_works(
    us: Communicator, works: Sequence[Work], label: str, timeout_s: float, limit_s: float | None = None
) -> None:
    """Wait for works; after ``timeout_s`` an error that ends the run, and names those that are waited for.

    ``limit_s`` is the limit of the whole call, of which so much is left.
    """
    if not works:
        return
    engine = us.member.process.engine
    try:
        engine.wait(*works, timeout=timeout_s)
    except PeerTimeout:
        if engine.error is not None:
            raise
        keys = [work.key for work in works if not work.done]
        awaited = sorted(engine.absent(keys[0] if keys else -1, us.ranks))
        names = ", ".join(us.member.name(index) for index in awaited) or "a rank of the group"
        late = PeerTimeout(
            f"{label}: not done {within(timeout_s if limit_s is None else limit_s)}, waiting for {names}",
            rank=awaited[0] if awaited else -1,
        )
        us.member.process.fail(late)
        raise late from None
