"""Moves the bodies of large messages between memory and TCP sockets, compiled: no interpreter between two pieces.

A body to send goes from its buffer to the kernel; one to receive goes to its place, or is added to what is there piece
by piece, while the piece is still in the second-level cache. ``pump`` serves all connections of a process until
something needs Python: a message is complete, a header has come, the bell rings, a connection has broken.

The table has a row per connection; columns are named below. Addresses are int64, lengths are bytes. A piece may end
within an element: the rest of it is carried over at the beginning of the scratch memory.
"""

from __future__ import annotations

from typing import Final

from numba import int64, njit

from .compiled import compiled
from .native import errno_location, load32, memcpy, poll, recv, sched_yield, send, store
from .passes import add_block

FD: Final = 0
OUT: Final = 1
OUT_LEFT: Final = 2
IN: Final = 3
IN_LEFT: Final = 4
CODE: Final = 5
"""Element type of an addition (``passes.CODES``), or COPY."""
ITEM: Final = 6
SCRATCH: Final = 7
CARRY: Final = 8
STATUS: Final = 9
COLUMNS: Final = 10

COPY: Final = -1

OPEN: Final = 0
BROKEN: Final = 1

PIECE_BYTES: Final = 128 * 1024
"""What is received at a time where it is added: it has to stay in the cache until it is."""

_TURN_BYTES = 256 * 1024
_SPINS = 40
_EAGAIN, _EINTR = 11, 4
_POLLIN, _POLLOUT = 1, 4
_DONTWAIT_NOSIGNAL = 0x40 | 0x4000


@njit(nogil=True)
def _absorb(code, item, into, scratch, have):
    """Add the whole elements among ``have`` bytes of scratch, keep the rest at its beginning; the bytes added."""
    whole = have // item * item
    add_block(code, into, scratch, whole // item)
    if whole < have:
        memcpy(scratch, scratch + whole, have - whole)
    return whole


@compiled(int64(int64, int64, int64, int64, int64))
def absorb(code, item, into, scratch, have):
    """``_absorb`` for pieces that Python has read."""
    return _absorb(code, item, into, scratch, have)


@njit(nogil=True)
def _again(result):
    """Whether a call moved nothing for now only."""
    if result >= 0:
        return False
    error = load32(errno_location())
    return error in (_EAGAIN, _EINTR)


@njit(nogil=True)
def _send(row):
    """Write what the kernel takes of this turn's share; whether anything moved."""
    moved = send(row[FD], row[OUT], min(row[OUT_LEFT], _TURN_BYTES), _DONTWAIT_NOSIGNAL)
    if moved < 0:
        if not _again(moved):
            row[STATUS] = BROKEN
        return False
    row[OUT] += moved
    row[OUT_LEFT] -= moved
    return moved > 0


@njit(nogil=True)
def _receive(row):
    """Read what has come of a body, up to this turn's share; whether anything moved."""
    if row[CODE] == COPY:
        moved = recv(row[FD], row[IN], min(row[IN_LEFT], _TURN_BYTES), _DONTWAIT_NOSIGNAL)
    else:
        room = min(row[IN_LEFT], PIECE_BYTES - row[CARRY])
        moved = recv(row[FD], row[SCRATCH] + row[CARRY], room, _DONTWAIT_NOSIGNAL)
    if moved <= 0:
        if not _again(moved):
            row[STATUS] = BROKEN
        return False
    row[IN_LEFT] -= moved
    if row[CODE] == COPY:
        row[IN] += moved
    else:
        have = row[CARRY] + moved
        added = _absorb(row[CODE], row[ITEM], row[IN], row[SCRATCH], have)
        row[IN] += added
        row[CARRY] = have - added
    return True


@njit(nogil=True)
def _wait(rows, bell, polled, timeout_ms):
    """Sleep until a connection can move something; whether that is nothing but bodies under way."""
    count = rows.shape[0]
    for i in range(count):
        events = _POLLIN | (_POLLOUT if rows[i, OUT_LEFT] > 0 else 0)
        store(polled + 8 * i, rows[i, FD] | (events << 32))
    store(polled + 8 * count, bell | (_POLLIN << 32))
    if poll(polled, count + 1, timeout_ms) <= 0:
        return False
    if load32(polled + 8 * count + 4) >> 16:
        return False
    for i in range(count):
        found = load32(polled + 8 * i + 4) >> 16
        if found & ~_POLLOUT and rows[i, IN_LEFT] == 0:
            return False
    return True


@compiled(int64(int64[:, ::1], int64, int64, int64))
def pump(rows, bell, polled, timeout_ms):
    """Move bodies until one is complete or something else is to be done, at most ``timeout_ms`` without any movement.

    ``polled`` is the address of 8 bytes per row and 8 more. Returns the number of bodies that are complete.
    """
    spins = 0
    while True:
        moved, complete = False, 0
        for i in range(rows.shape[0]):
            row = rows[i]
            if row[OUT_LEFT] > 0:
                moved |= _send(row)
                complete += row[OUT_LEFT] == 0
            if row[IN_LEFT] > 0:
                moved |= _receive(row)
                complete += row[IN_LEFT] == 0
            if row[STATUS] != OPEN:
                return complete
        if complete > 0:
            return complete
        if moved:
            spins = 0
        elif spins < _SPINS:
            spins += 1
            sched_yield()
        elif _wait(rows, bell, polled, timeout_ms):
            spins = 0
        else:
            return 0
