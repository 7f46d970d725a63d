"""Follows an iteration back from its end to its begin, through all ranks: its critical path.

The way back goes along the training thread. Where that waited for an exchange, it goes on in the exchange: to the
receive that ended last before, over its link to the sender, there to the receive before the send, and so on. Where a
process had received nothing that its send could have waited for, the way leads to the rank that submitted the exchange
last before it began, and so to a training thread. Over shared memory there are no messages: there the rank that
submitted the exchange last is always the one. So the path names the spans that the iteration's length depends on; all
other spans could be longer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from syncline.timeline.spans import TRAINING

from ..report.explanation import Leg
from .activity import Activity, ExchangeSpan, Message, Side, Stretch

_MOST_LEGS = 10_000
ANY = -2
"""The key of no exchange: the next message may be any."""
PROGRESS = "progress"


class _Way:
    """The way back through an activity."""

    def __init__(self, activity: Activity) -> None:
        self._sides = {side.number: side for side in activity.sides}
        self._ends = {side.number: [stretch.end_s for stretch in side.thread] for side in activity.workers}
        self._received: dict[int, list[Message]] = defaultdict(list)
        for (_, dst), link in activity.links.items():
            self._received[dst] += link.messages
        for messages in self._received.values():
            messages.sort(key=lambda message: message.end_s)
        self._received_s = {
            number: [message.end_s for message in messages] for number, messages in self._received.items()
        }
        self.legs: list[Leg] = []

    def back(self, number: int, now: float, begin_s: float) -> None:
        """Go from a worker's time ``now`` back to ``begin_s``."""
        arrived = False  # from another process, or from an exchange
        while now > begin_s and len(self.legs) < _MOST_LEGS:
            side = self._sides[number]
            place = bisect_left(self._ends.get(number, []), now)
            stretch = side.thread[place] if place < len(side.thread) else None
            if stretch is None or stretch.begin_s >= now:
                return  # a server's thread, or before the first span
            if stretch.stage == "wait" and not arrived:
                there, then = self._through(side, stretch, now, begin_s)
                arrived = then < now
                number, now = there, then
                if arrived:
                    continue
            # A thread that waits sends what it has submitted just before: nothing else has kept it.
            what = "exchange" if stretch.stage == "wait" else stretch.stage
            self._add(what, stretch.begin_s, now, number, begin_s, thread=TRAINING)
            now, arrived = stretch.begin_s, False

    def _through(self, side: Side, wait: Stretch, now: float, begin_s: float) -> tuple[int, float]:
        """Through the exchange that a thread waited for, to a training thread: its process and time."""
        exchange = self._awaited(side, wait.label, wait.begin_s, now)
        number, key = side.number, ANY if exchange is None else exchange.key
        while now > begin_s and len(self.legs) < _MOST_LEGS:
            own = self._own(number, key, now) if number in self._ends else None
            if own is None and number in self._ends and key != ANY:
                break  # a single message, which the training thread has sent
            message = self._before(number, now, key if own is not None else ANY)
            if message is None or (own is not None and message.end_s < own.begin_s):
                return self._last(number, own, now, begin_s)
            until = min(now, message.end_s)
            self._add("exchange", until, now, number, begin_s)
            self._add("message", message.ready_s, until, message.src, begin_s, (message.src, message.dst))
            if message.ready_s > message.sent_s:  # the receiver came last
                key = message.key if key == ANY else key
            else:
                number, key = message.src, message.key
            if message.ready_s >= now:
                break
            now = message.ready_s
        return number, now

    def _add(
        self,
        what: str,
        then: float,
        now: float,
        number: int,
        begin_s: float,
        link: tuple[int, int] | None = None,
        thread: str = PROGRESS,
    ) -> None:
        then = max(then, begin_s)
        if then < now:
            self.legs.append(Leg(what, now - then, number, thread, link))

    def _awaited(self, side: Side, label: str, waits_s: float, now: float) -> ExchangeSpan | None:
        """The exchange that a thread waited for; of several the one that ended last."""
        several = label.endswith(" more")
        ended = [
            one for one in side.exchanges if waits_s <= one.end_s <= now and (several or one.label.startswith(label))
        ]
        return max(ended, key=lambda one: one.end_s, default=None)

    def _before(self, number: int, now: float, key: int) -> Message | None:
        """The last message that a process had received, of the exchange with this key."""
        its = self._received[number]
        for place in range(bisect_right(self._received_s.get(number, []), now) - 1, -1, -1):
            if key in (ANY, its[place].key) and its[place].ready_s < now:
                return its[place]
        return None

    def _own(self, number: int, key: int, now: float) -> ExchangeSpan | None:
        """The exchange with that key on a process."""
        its = [one for one in self._sides[number].exchanges if one.key == key and one.begin_s <= now]
        return its[-1] if its else None

    def _last(self, number: int, own: ExchangeSpan | None, now: float, begin_s: float) -> tuple[int, float]:
        """From a process's exchange to the training thread that it waited for: its own, or that of the rank that
        submitted last before it began. Over shared memory ranks that submitted later count, too."""
        if own is None:
            return number, now
        late, there, until = own, number, own.begin_s if self._received[number] else now
        for other in self._ends:
            theirs = self._own(other, own.key, now)
            if theirs is not None and theirs.end_s >= own.begin_s and late.submit_s < theirs.submit_s <= until:
                late, there = theirs, other
        self._add("exchange", late.submit_s, now, there, begin_s)
        return there, min(now, late.submit_s)


def critical_path(activity: Activity) -> tuple[Leg, ...]:
    """The critical path of an iteration of median length, its parts summed by what they are, the longest first.

    It ends where the last worker ends the iteration, and begins one median iteration before.
    """
    lasted = (activity.steps[:, :, 1] - activity.steps[:, :, 0]).max(axis=0)
    ends = activity.steps[:, int(np.abs(lasted - np.median(lasted)).argmin()), 1]
    last = int(ends.argmax())
    way = _Way(activity)
    end_s = float(ends[last])
    way.back(activity.workers[last].number, end_s, end_s - activity.step_s)
    return summed(way.legs)


def summed(legs: Sequence[Leg]) -> tuple[Leg, ...]:
    """Legs that agree in all but their seconds as one, the longest first."""
    seconds: dict[tuple[object, ...], float] = defaultdict(float)
    first: dict[tuple[object, ...], Leg] = {}
    for leg in legs:
        alike = leg.what, leg.rank, leg.thread, leg.link
        seconds[alike] += leg.seconds
        first.setdefault(alike, leg)
    found = [Leg(one.what, seconds[alike], one.rank, one.thread, one.link) for alike, one in first.items()]
    return tuple(sorted(found, key=lambda leg: -leg.seconds))
