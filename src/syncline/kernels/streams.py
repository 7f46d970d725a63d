"""Moves the large parts of frames between sockets and memory, compiled: an event loop's turn without the interpreter.

Each socket has a row (``rows``) that says where the next bytes of a body go, or are added, and what is written next.
``turn`` waits for sockets, does what their rows ask for, and comes back for everything else: a header, a body that is
complete, a connection that ends, a descriptor without a row. So the interpreter runs once per message, and not once for
each piece of it that the network brings.

A row is changed by its owner between two calls. Addresses and lengths were checked where they were written there.
"""

from __future__ import annotations

import platform
from typing import Final

import numpy as np

from .compiled import compiled, inner
from .native import clock_gettime, epoll_wait, memcpy, read, send, view
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
    WORDS,
)

_BACK_AFTER_MS: Final = 50  # from which on a turn that has moved bytes lets the interpreter look after signals
_BUDGET_BYTES: Final = 2 * 1024 * 1024  # of one socket, before it is another one's turn
_READABLE: Final = 0x1
_WRITABLE: Final = 0x4
_TROUBLE: Final = 0x8 | 0x10  # an error; an end in both directions
_FLAGS: Final = 0x40 | 0x4000  # do not wait, no signal
_MONOTONIC: Final = 1

# struct epoll_event: 32 bits of what has happened, and 64 of which the first are the descriptor; x86-64 leaves no gap.
_PACKED: Final = platform.machine() in ("x86_64", "i686")  # a 64-bit program may be told of the smaller one
EVENT_WORDS: Final = 3 if _PACKED else 4
"""The words, of 32 bits, of an event."""
_EVENT_FD: Final = 1 if _PACKED else 2


@inner
def _took(row, size):
    """Add the whole elements among those carried and ``size`` bytes behind them; the rest is carried."""
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
    """So many bytes of a body that is added were read into the scratch memory, behind those that are carried."""
    _took(row, size)


@compiled("(int64[], int64, int64, int64, int64, int64, int64, int64)")
def begin(row, code, item, into, size, scratch, source, nbytes):
    """A body of ``size`` bytes is added to what lies at ``into``; ``nbytes`` of it have come, and lie at ``source``."""
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
    """Read what has come of a body, up to a budget."""
    begun = row[RECEIVED]
    while row[LEFT] > 0 and row[RECEIVED] - begun < _BUDGET_BYTES:
        wanted, into = row[LEFT], row[INTO]
        if row[CODE] != AS_IS:
            wanted, into = min(wanted, PIECE_BYTES - row[CARRY]), row[SCRATCH] + row[CARRY]
        got = read(np.int32(row[FD]), into, wanted)
        if got <= 0:  # an error, or the end, is found again when that is all there is
            return OPEN if row[RECEIVED] > begun else NOTHING
        row[RECEIVED] += got
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
    """Read what has come of a body, up to a budget."""
    return _fill(row)


@inner
def _flush(row):
    """Write what the kernel takes."""
    begun = row[OUT_LEFT]
    while row[OUT_LEFT] > 0:
        sent = send(np.int32(row[FD]), row[OUT], row[OUT_LEFT], np.int32(_FLAGS))
        if sent <= 0:
            return OPEN if row[OUT_LEFT] < begun else NOTHING
        row[OUT] += sent
        row[OUT_LEFT] -= sent
    return COMPLETE


@inner
def _left_over(row, events):
    """Do what a row asks for; what of its events is left to be looked at."""
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
    """Wait up to ``wait_ms`` for sockets, without end where it is negative; how many are left to be looked at.

    ``rows`` has the addresses of rows by descriptor, 0 where there is none; ``found`` is filled with pairs, a
    descriptor and its events. 0 when the time is over, and now and then while bodies come; negative when a signal came,
    or the wait failed. ``events_at`` is where ``events`` lies, and at ``clock_at`` is room for a struct timespec.
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
