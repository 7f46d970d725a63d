"""Moves the bodies of messages between sockets and memory: the turns of an event loop without the interpreter.

Each socket has a row (``rows``) that says where the next bytes of a body are written or added, and which bytes are sent
next. ``turn`` waits for sockets, serves their rows, and returns for everything else: a header, a complete body, the end
of a connection, a descriptor without a row. So the interpreter runs once per message instead of once for each piece
that the network delivers. ``beat`` sends heartbeats while another thread holds the interpreter lock.

The owner of a row changes it only between two calls, and has checked its addresses and lengths.
"""

from __future__ import annotations

import platform
from typing import Final

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import clock_gettime, epoll_wait, memcpy, poll, read, send, view
from .checksums import STATE_WORDS, finish, more, start
from .passes import add_block
from .rows import (
    AS_IS,
    CARRY,
    CODE,
    COMPLETE,
    FD,
    INTO,
    ITEM,
    LEFT,
    NOTHING,
    OPEN,
    OUT,
    OUT_LEFT,
    PIECE_BYTES,
    RECEIVED,
    SCRATCH,
    SUM_IN,
    SUM_OUT,
    WORDS,
)

_BACK_AFTER_MS: Final = 50  # then a turn that has moved bytes lets the interpreter handle signals
_BUDGET_BYTES: Final = 2 * 1024 * 1024  # that one socket may read before the next socket's turn
_READABLE: Final = 0x1
_WRITABLE: Final = 0x4
_TROUBLE: Final = 0x8 | 0x10  # EPOLLERR, EPOLLHUP
_FLAGS: Final = 0x40 | 0x4000  # MSG_DONTWAIT, MSG_NOSIGNAL
_MONOTONIC: Final = 1

# struct epoll_event: 32 bits of events, then 64 bits of data that begin with the descriptor. On x86-64 it is packed.
_PACKED: Final = platform.machine() in ("x86_64", "i686")  # a 64-bit process may see the name of the 32-bit machine
EVENT_WORDS: Final = 3 if _PACKED else 4
"""The 32-bit words of an event."""
_EVENT_FD: Final = 1 if _PACKED else 2


@inner
def _took(row, size):
    """Add the whole elements among the carried bytes and the ``size`` bytes after them; carry the rest."""
    have = row[CARRY] + size
    whole = have // row[ITEM] * row[ITEM]
    add_block(row[CODE], row[INTO], row[SCRATCH], whole // row[ITEM])
    if whole < have:
        memcpy(row[SCRATCH], row[SCRATCH] + whole, have - whole)
    row[INTO] += whole
    row[CARRY] = have - whole
    row[LEFT] -= size


@compiled("(int64[], int64)")
def took(row, size):
    """Account for ``size`` bytes that the caller has read into the scratch memory, after the carried ones."""
    _took(row, size)


@compiled("(int64[], int64, int64, int64, int64, int64, int64, int64)")
def begin(row, code, item, into, size, scratch, source, nbytes):
    """Begin a body of ``size`` bytes that is added at ``into``; its first ``nbytes`` have arrived at ``source``."""
    row[CODE] = code
    row[ITEM] = item
    row[INTO] = into
    row[LEFT] = size
    row[SCRATCH] = scratch
    row[CARRY] = 0
    while nbytes > 0:
        part = min(nbytes, PIECE_BYTES - row[CARRY])
        memcpy(scratch + row[CARRY], source, part)
        _took(row, part)
        source += part
        nbytes -= part


@inner
def _fill(row):
    """Read the available bytes of a body, up to a budget."""
    begun = row[RECEIVED]
    while row[LEFT] > 0 and row[RECEIVED] - begun < _BUDGET_BYTES:
        wanted, into = row[LEFT], row[INTO]
        if row[CODE] != AS_IS:
            wanted, into = min(wanted, PIECE_BYTES - row[CARRY]), row[SCRATCH] + row[CARRY]
        elif row[SUM_IN] != 0:
            wanted = min(wanted, PIECE_BYTES)  # which stay in the cache until they are summed
        got = read(np.int32(row[FD]), into, wanted)
        if got <= 0:  # a later turn finds the error or the end again, by itself
            return OPEN if row[RECEIVED] > begun else NOTHING
        row[RECEIVED] += got
        if row[SUM_IN] != 0:
            more(view(row[SUM_IN], np.int64(0), STATE_WORDS), into, got)
        if row[CODE] == AS_IS:
            row[INTO] += got
            row[LEFT] -= got
        else:
            _took(row, got)
        if got < wanted:
            return OPEN
    return COMPLETE if row[LEFT] == 0 else OPEN


@compiled("(int64[]) -> int64")
def fill(row):
    """Read the available bytes of a body, up to a budget; COMPLETE, OPEN or NOTHING."""
    return _fill(row)


@inner
def _flush(row):
    """Write as many bytes as the kernel accepts."""
    begun = row[OUT_LEFT]
    while row[OUT_LEFT] > 0:
        size = row[OUT_LEFT] if row[SUM_OUT] == 0 else min(row[OUT_LEFT], PIECE_BYTES)
        sent = send(np.int32(row[FD]), row[OUT], size, np.int32(_FLAGS))
        if sent <= 0:
            return OPEN if row[OUT_LEFT] < begun else NOTHING
        if row[SUM_OUT] != 0:
            more(view(row[SUM_OUT], np.int64(0), STATE_WORDS), row[OUT], sent)
        row[OUT] += sent
        row[OUT_LEFT] -= sent
    return COMPLETE


@compiled("(int64[], int64, int64)")
def sum_more(state, address, nbytes):
    """Go on with a checksum."""
    more(state, address, nbytes)


@compiled("(int64[]) -> int64")
def sum_end(state):
    """The checksum of all bytes so far."""
    return finish(state)


@compiled("(int64[], int64, int64, int64) -> int64")
def sum_all(state, address, nbytes, first):
    """A whole checksum."""
    start(state, first)
    more(state, address, nbytes)
    return finish(state)


@inner
def _left_over(row, events):
    """Serve a row; return the events that are left for the caller."""
    if events & _TROUBLE:
        return events
    if events & _READABLE and row[LEFT] > 0 and _fill(row) == OPEN:
        events &= ~_READABLE
    if events & _WRITABLE and row[OUT_LEFT] > 0 and _flush(row) == OPEN:
        events &= ~_WRITABLE
    return events


@inner
def _now_ms(clock_at):
    clock_gettime(np.int32(_MONOTONIC), clock_at)
    clock = view(clock_at, np.int64(0), 2)
    return clock[0] * 1000 + clock[1] // 1000000


@compiled("(int64[], int64[], int32[], int64, int64, int64, int64) -> int64")
def turn(rows, found, events, events_at, clock_at, epoll, wait_ms):
    """Wait up to ``wait_ms`` for sockets, without limit if negative; return the number of events left for the caller.

    ``rows`` has the address of the row for each descriptor, 0 for none; ``found`` receives pairs of descriptor and
    events. Returns 0 when the time is over, and now and then while bodies arrive, and a negative number when a signal
    interrupted the wait or the wait failed. ``events_at`` is the address of ``events``, ``clock_at`` that of a struct
    timespec.
    """
    most = np.int32(events.size // EVENT_WORDS)
    begun, left_ms = _now_ms(clock_at), wait_ms
    while True:
        count = epoll_wait(np.int32(epoll), events_at, most, np.int32(left_ms))
        if count <= 0:
            return count
        left = 0
        for i in range(count):
            what, fd = np.int64(events[i * EVENT_WORDS]), np.int64(events[i * EVENT_WORDS + _EVENT_FD])
            if 0 <= fd < rows.size and rows[fd] != 0:
                what = _left_over(view(rows[fd], np.int64(0), WORDS), what)
            if what != 0:
                found[2 * left] = fd
                found[2 * left + 1] = what
                left += 1
        passed_ms = _now_ms(clock_at) - begun
        if left > 0 or passed_ms >= _BACK_AFTER_MS or 0 <= wait_ms <= passed_ms:
            return left
        if wait_ms >= 0:
            left_ms = wait_ms - passed_ms


@compiled("(int64[], int64[], int64[], int64, int64, int64, int64)")
def beat(descriptors, begun, running, frame, nbytes, bell, period_ms):
    """Send ``nbytes`` at address ``frame`` to every socket once per period, until the bell rings.

    No thread that holds the interpreter lock can delay this loop. ``bell`` is the address of a struct pollfd. A socket
    that accepts nothing is skipped; if it accepts part of a frame, ``begun`` counts these bytes and the next period
    sends the rest. The loop sets ``running`` once it no longer needs the interpreter.
    """
    running[0] = 1
    rung = np.int32(0)
    while rung <= 0:  # negative: interrupted by a signal
        for i in range(descriptors.size):
            rest = nbytes - begun[i]
            sent = send(np.int32(descriptors[i]), frame + begun[i], rest, np.int32(_FLAGS))
            if sent > 0:
                begun[i] = (begun[i] + sent) % nbytes
        rung = poll(bell, 1, np.int32(period_ms))
