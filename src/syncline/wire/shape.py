"""A slow line in user space: how much may pass when, and what is held until when. Arithmetic only: no I/O, no clock.

``Shape`` says what the line is like, ``Pacer`` limits one direction of one port to a rate, ``DelayLine`` keeps what has
arrived until its time. ``shaped`` puts them between sockets and links. Times are seconds of any monotonic clock.

Theory. A pacer is a virtual clock (Zhang, "VirtualClock", SIGCOMM 1990; the same as a token bucket with a debt): it
remembers when all that has passed would have gone through at the rate. Something may pass as long as that time lies
less than a quantum ahead. Who wakes late catches up, to a limit, so that a coarse timer does not cost rate; who had
nothing to send has no credit, so that a burst after a pause is no longer than a quantum. In any interval of t seconds
at most ``rate * t + burst_bytes`` pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import UsageError
from ..nouns import Rate, Seconds

QUANTUM_S = 0.002
"""How far ahead of its rate a port may be: what is sent at a wake-up."""

LATE_S = 0.02
"""How much of a late wake-up is made up for."""

PACKET_BYTES = 1500
"""Less than this is not worth a call: small rests wait for the next quantum."""

WINDOW_BYTES = 256 * 1024 * 1024
"""What one connection may have in flight: over a line that holds more (rate x delay) it is slower, as TCP is."""

NO_DELAY = Seconds(0.0)

_LEAST_RATE, _GREATEST_RATE = 1e3, 1e12
_GREATEST_DELAY_S = 10.0


@dataclass(frozen=True)
class Shape:
    """A line's ``rate`` in bits per second (None: as fast as it is) and its one-way ``delay`` in seconds.

    Raises UsageError for values that no line has.
    """

    rate: Rate | None = None
    delay: Seconds = NO_DELAY

    def __post_init__(self) -> None:
        if self.rate is not None and not _LEAST_RATE <= self.rate <= _GREATEST_RATE:
            raise UsageError(f"a rate of {self.rate:g} bit/s cannot be shaped: give one from 1Kbit to 1Tbit")
        if not 0 <= self.delay <= _GREATEST_DELAY_S:
            raise UsageError(f"a delay of {self.delay:g} s cannot be shaped: give one from 0s to 10s, one way")

    @property
    def plain(self) -> bool:
        """True when there is nothing to shape."""
        return self.rate is None and not self.delay > 0

    @property
    def bytes_per_s(self) -> float | None:
        """The rate in bytes per second."""
        return None if self.rate is None else self.rate / 8


class Pacer:
    """One direction of a port: ask for the ``allowance``, pass that much or less, and tell by ``spend``."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._ahead_s = QUANTUM_S if bytes_per_s is None else max(QUANTUM_S, PACKET_BYTES / bytes_per_s)
        self._free_at = float("-inf")  # when all that has passed would have gone through

    @property
    def burst_bytes(self) -> float:
        """What may pass beyond rate x time in any interval."""
        return float("inf") if self._rate is None else self._rate * (self._ahead_s + LATE_S)

    def allowance(self, now: float) -> int:
        """Bytes that may pass at ``now``: 0, or at least a packet."""
        if self._rate is None:
            return WINDOW_BYTES
        self._free_at = max(self._free_at, now - LATE_S)
        # Half a byte more, or a quantum of exactly one packet would round down to none.
        count = int((now + self._ahead_s - self._free_at) * self._rate + 0.5)
        return count if count >= PACKET_BYTES else 0

    def spend(self, nbytes: int) -> None:
        """So much has passed."""
        if self._rate is not None:
            self._free_at += nbytes / self._rate

    def rest(self, now: float) -> None:
        """Nobody wants to pass at ``now``: the time until somebody does is not owed."""
        if self._rate is not None:
            self._free_at = max(self._free_at, now)

    @property
    def opens_at(self) -> float:
        """When a whole quantum may pass again: the time to wake who waits."""
        return self._free_at


class DelayLine:
    """Bytes in flight towards one receiver: put in when they arrive, taken out ``delay_s`` later, in order."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._parts: deque[tuple[float, memoryview]] = deque()  # the end of the stream is an empty part
        self.nbytes = 0

    def put(self, data: bytes, now: float) -> None:
        """Bytes have arrived; none at all is the end of the stream."""
        self._parts.append((now + self._delay_s, memoryview(data)))
        self.nbytes += len(data)

    @property
    def full(self) -> bool:
        """True when no more fits: the sender has to wait."""
        return self.nbytes >= WINDOW_BYTES

    @property
    def due_at(self) -> float:
        """When the next bytes, or the end, may be taken; infinite when nothing is in flight."""
        return self._parts[0][0] if self._parts else float("inf")

    def take(self, into: Sequence[memoryview], now: float) -> int | None:
        """Move what is due into the views, one after the other; its size, 0 at the end, None when nothing is due."""
        if self.due_at > now:
            return None
        taken = 0
        for view in into:
            at = 0
            while at < view.nbytes and self.due_at <= now:
                due, part = self._parts[0]
                if not part.nbytes:
                    self.nbytes -= taken
                    return taken  # the end stays, to be found again
                count = min(part.nbytes, view.nbytes - at)
                view[at : at + count] = part[:count]
                at += count
                taken += count
                if count == part.nbytes:
                    self._parts.popleft()
                else:
                    self._parts[0] = due, part[count:]
        self.nbytes -= taken
        return taken
