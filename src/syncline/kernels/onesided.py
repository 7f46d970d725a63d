"""Runs scripts over shared memory: the loop that waits for conditions, runs passes, and wakes other ranks.

A condition is that a word in a slot of another rank's board (``board``) has reached a value. The other rank can change
what it has written there at any time. So a word that gives the place of memory is read once, and checked against the
memory that the other rank has shared, before it becomes an address.

``advance`` runs a limited number of operations and returns when it is blocked; the caller decides how to wait and what
to do first. A rank that is about to sleep announces this on its board, checks its condition once more, and is then
woken through its eventfd (Dekker's pattern: store, fence, load on both sides). Other threads of its own process ring
the same eventfd when the sleeper has other work to do. A ring that did not fulfil the condition stays in the eventfd,
where the caller's own wait finds it.

All tables are int64 arrays with the columns below. ``engine.memory`` has checked their types, addresses and lengths.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .aot.compiled import compiled, inner
from .aot.native import add, fence, load, memcpy, poll, read, sched_getcpu, sched_yield, store, write
from .board import (
    ASLEEP,
    AWAKE,
    BOARD_HEAD,
    CORE,
    MORE_TABLES,
    MOST_SEGMENTS,
    SIGN_WORDS,
    SLOT_BYTES,
    SLOT_DONE_WITH,
    SLOT_ID,
    SLOT_NBYTES,
    SLOT_OFFSET,
    SLOT_PROGRESS,
    SLOT_SEGMENT,
    SLOT_SIGN,
    SLOT_STRIDE,
    SLOTS,
    SPREAD,
    TABLES,
    WAYS,
)  # fmt: skip
from .passes import sum_pass

# Columns of the table of members.
BOARD: Final = 0
BELL: Final = 1

# Columns of a run's table of peers.
SLOT: Final = 0
BASE: Final = 1
STRIDE: Final = 2

# Columns of a script's table of operations: ranges in ``operands``, then chunks.
WAITS: Final = 0
SOURCES: Final = 2
TARGETS: Final = 4
RING: Final = 6
CHUNKS: Final = 8
PRIVATE: Final = 10
COLUMNS: Final = 11

# Columns of the table of staged chunks: chunks, and whether they are copied in and out.
FIRST: Final = 0
LAST: Final = 1
IN: Final = 2
OUT: Final = 3
STAGES: Final = 4

# A run's state.
ID: Final = 0
AT: Final = 1
SEGMENT: Final = 2
SEGMENTS: Final = 3
CODE: Final = 4
ITEM: Final = 5
PER_SEGMENT: Final = 6
ELEMENTS: Final = 7
RANK: Final = 8
OWN_SLOT: Final = 9
STAGED: Final = 10
USER: Final = 11
SCRATCH: Final = 12
SCRATCH_STRIDE: Final = 13
CHUNK_COUNT: Final = 14
WAITS_FOR: Final = 15
BUFFER: Final = 16
OWN_SEGMENT: Final = 17
OWN_OFFSET: Final = 18
OWN_ADDRESS: Final = 19
OWN_STRIDE: Final = 20
SIGN: Final = 21
THEIRS: Final = SIGN + SIGN_WORDS
STATE: Final = THEIRS + SIGN_WORDS

# Words of the buffer: arguments of system calls, and how many waits in a row were for a rank on this one's core.
ONE: Final = 0
RUNG: Final = 1
POLLED: Final = 2
CROWDED: Final = 3
BUFFER_WORDS: Final = 4

# What ``advance`` returns.
DONE: Final = 0
BLOCKED: Final = 1
UNMAPPED: Final = 2
UNLIKE: Final = 3
BROKEN: Final = 4
PAUSED: Final = 5
OTHER: Final = 6

LOOKS: Final = 200
"""How often a condition is tested before the core is yielded: this takes about as long as yielding."""


NOWHERE: Final = 0
UNSEEN: Final = -1
FORGED: Final = -2
"""Results of ``find_slot`` without an address.

NOWHERE: the rank has not begun the run. UNSEEN: the run may be in a table that is not mapped here yet. FORGED: the rank
lists memory that cannot be a table.
"""

_POLLIN = 1
_FACTOR = np.uint64(SPREAD)


@inner
def _ring(members, buffer, ranks, first, last):
    """Wake the ranks that sleep."""
    fence()  # the progress stored before must be visible before ASLEEP is read, or a sleeper would miss it
    for i in range(first, last):
        rank = ranks[i]
        if load(members[rank, BOARD]) == ASLEEP:
            write(np.int32(members[rank, BELL]), buffer + 8 * ONE, 8)


@compiled("(int64, int64) -> int64")
def first_slot(wanted, sets):
    """The first slot where a run may be in a table of ``sets`` sets of slots, a power of two."""
    scattered = (np.uint64(wanted) * _FACTOR) >> np.uint64(32)
    return np.int64(scattered & np.uint64(sets - 1)) * WAYS


@inner
def _in_table(table, sets, wanted):
    slot = table + first_slot(wanted, sets) * SLOT_BYTES
    for _ in range(WAYS):
        if load(slot + SLOT_ID) == wanted:
            return slot
        slot += SLOT_BYTES
    return NOWHERE


@compiled("(int64[,], int64[,], int64, int64) -> int64")
def find_slot(members, maps, rank, wanted):
    """The address of another rank's slot for a run, or NOWHERE, UNSEEN or FORGED."""
    board, sets = members[rank, BOARD], SLOTS // WAYS
    found = _in_table(board + BOARD_HEAD, sets, wanted)
    for table in range(MORE_TABLES):
        if found != NOWHERE:
            return found
        segment = load(board + TABLES + 8 * table)
        if segment == 0:
            return NOWHERE
        sets *= 2
        if segment < 0 or segment >= MOST_SEGMENTS:
            return FORGED
        if 2 * segment >= maps.shape[1] or maps[rank, 2 * segment] == 0:
            return UNSEEN
        if maps[rank, 2 * segment + 1] < sets * WAYS * SLOT_BYTES:
            return FORGED
        found = _in_table(maps[rank, 2 * segment], sets, wanted)
    return found


@inner
def _resolve(rank, state, peers, members, maps):
    """Find a peer's slot and memory, if not known yet; DONE, BLOCKED, UNMAPPED, UNLIKE, BROKEN or OTHER."""
    if peers[rank, SLOT] == 0:
        if members[rank, BOARD] == 0:
            return UNMAPPED
        slot = find_slot(members, maps, rank, state[ID])
        if slot == NOWHERE:
            return BLOCKED
        if slot == UNSEEN:
            return UNMAPPED
        if slot == FORGED:
            return BROKEN
        for i in range(SIGN_WORDS):
            state[THEIRS + i] = load(slot + SLOT_SIGN + 8 * i)
        differs = state[SIGN] != state[THEIRS] or state[SIGN + 1] != state[THEIRS + 1]
        if differs and state[SIGN] != 0 and state[THEIRS] != 0:
            return OTHER
        peers[rank, SLOT] = slot
    if peers[rank, BASE] == 0:
        slot = peers[rank, SLOT]
        if load(slot + SLOT_NBYTES) != state[ELEMENTS] * state[ITEM]:
            return UNLIKE
        segment, offset, stride = load(slot + SLOT_SEGMENT), load(slot + SLOT_OFFSET), load(slot + SLOT_STRIDE)
        if segment < 0 or segment >= MOST_SEGMENTS:
            return BROKEN
        if 2 * segment >= maps.shape[1] or maps[rank, 2 * segment] == 0:
            return UNMAPPED
        nbytes, step = state[ELEMENTS] * state[ITEM], state[PER_SEGMENT] * state[ITEM]
        if stride == 0:  # staged: all segments of the array share one place
            nbytes = min(nbytes, step)
        elif stride != step:
            return BROKEN
        if offset < 0 or offset > maps[rank, 2 * segment + 1] - nbytes:
            return BROKEN
        peers[rank, STRIDE] = stride
        peers[rank, BASE] = maps[rank, 2 * segment] + offset
    return DONE


@inner
def _met(operation, state, peers, members, maps, operations, operands, lengths):
    """DONE if all conditions of an operation hold; otherwise the reason, with the rank in ``state[WAITS_FOR]``."""
    for i in range(operations[operation, WAITS], operations[operation, WAITS + 1], 2):
        rank = operands[i]
        state[WAITS_FOR] = rank
        found = _resolve(rank, state, peers, members, maps)
        if found != DONE:
            return found
        if load(peers[rank, SLOT] + SLOT_PROGRESS) < state[SEGMENT] * lengths[rank] + operands[i + 1]:
            return BLOCKED
    return DONE


@inner
def _addresses(found, operands, first, last, state, peers, offset, private):
    """Write the addresses of a list of ranks' arrays, or scratch, at ``offset`` bytes into this segment.

    With ``private`` this rank's array is the user's instead of the staged copy, since no other rank reads these chunks.
    """
    for i in range(first, last):
        rank = operands[i]
        if rank < 0:
            found[i - first] = state[SCRATCH] + (-1 - rank) * state[SCRATCH_STRIDE] + offset
        elif private and rank == state[RANK] and state[STAGED]:
            found[i - first] = state[USER] + state[SEGMENT] * state[PER_SEGMENT] * state[ITEM] + offset
        else:
            found[i - first] = peers[rank, BASE] + state[SEGMENT] * peers[rank, STRIDE] + offset


@inner
def _perform(operation, state, peers, operations, operands, room):
    """Run the pass of an operation over its chunks of this segment."""
    first, last = operations[operation, SOURCES], operations[operation, SOURCES + 1]
    if first == last:
        return
    length = min(state[PER_SEGMENT], state[ELEMENTS] - state[SEGMENT] * state[PER_SEGMENT])
    start = length * operations[operation, CHUNKS] // state[CHUNK_COUNT]
    stop = length * operations[operation, CHUNKS + 1] // state[CHUNK_COUNT]
    if start == stop:
        return
    sources, targets, private = room[0, : last - first], room[1], operations[operation, PRIVATE]
    _addresses(sources, operands, first, last, state, peers, start * state[ITEM], private)
    first, last = operations[operation, TARGETS], operations[operation, TARGETS + 1]
    targets = targets[: last - first]
    _addresses(targets, operands, first, last, state, peers, start * state[ITEM], private)
    sum_pass(state[CODE], state[ITEM], sources, targets, stop - start)


@inner
def _stage(state, peers, staged, direction):
    """Copy the chunks that other ranks access from the user's array to shared memory (IN) or back (OUT)."""
    start = state[SEGMENT] * state[PER_SEGMENT]
    length = min(state[PER_SEGMENT], state[ELEMENTS] - start)
    user, shown = state[USER] + start * state[ITEM], peers[state[RANK], BASE]
    for i in range(staged.shape[0]):
        if staged[i, direction]:
            first = length * staged[i, FIRST] // state[CHUNK_COUNT] * state[ITEM]
            nbytes = length * staged[i, LAST] // state[CHUNK_COUNT] * state[ITEM] - first
            if direction == IN:
                memcpy(shown + first, user + first, nbytes)
            else:
                memcpy(user + first, shown + first, nbytes)


@inner
def _show(state, peers, members):
    """Fill in this run's slot, publish it, and note on which core this rank begins the run."""
    store(members[state[RANK], BOARD] + CORE, np.int64(sched_getcpu()) + 1)
    slot = state[OWN_SLOT]
    store(slot + SLOT_SEGMENT, state[OWN_SEGMENT])
    store(slot + SLOT_OFFSET, state[OWN_OFFSET])
    store(slot + SLOT_STRIDE, state[OWN_STRIDE])
    store(slot + SLOT_NBYTES, state[ELEMENTS] * state[ITEM])
    store(slot + SLOT_PROGRESS, 0)
    store(slot + SLOT_DONE_WITH, 0)
    for i in range(SIGN_WORDS):
        store(slot + SLOT_SIGN + 8 * i, state[SIGN + i])
    peers[:] = 0
    peers[state[RANK], SLOT] = slot
    peers[state[RANK], BASE] = state[OWN_ADDRESS]
    peers[state[RANK], STRIDE] = state[OWN_STRIDE]
    # The identity comes last: it publishes the slot, whose other words must be complete by then.
    store(slot + SLOT_ID, state[ID])


@inner
def _sleep(state, members, patience_ms):
    """Sleep until woken, for at most ``patience_ms``. The caller has set ASLEEP and tested its condition again."""
    store(state[BUFFER] + 8 * POLLED, members[state[RANK], BELL] | (_POLLIN << 32))
    poll(state[BUFFER] + 8 * POLLED, 1, np.int32(patience_ms))


@inner
def _note_core(state, members):
    """Publish the core on which this rank waits, and count waits in a row for a rank on the same core."""
    core, counted = np.int64(sched_getcpu()) + 1, state[BUFFER] + 8 * CROWDED
    store(members[state[RANK], BOARD] + CORE, core)
    peer = members[state[WAITS_FOR], BOARD]
    if peer != 0 and load(peer + CORE) == core:
        store(counted, load(counted) + 1)
    else:
        store(counted, 0)


@inner
def _wait(operation, state, peers, members, maps, operations, operands, lengths, spins, patience_ms):
    """Wait for an operation's conditions: test them repeatedly, then yield the core in between, then sleep."""
    found = _met(operation, state, peers, members, maps, operations, operands, lengths)
    looks = LOOKS if spins != 0 else 0
    while found == BLOCKED and looks > 0:
        looks -= 1
        found = _met(operation, state, peers, members, maps, operations, operands, lengths)
    if found == BLOCKED:
        _note_core(state, members)
    while found == BLOCKED and spins > 0:
        sched_yield()
        spins -= 1
        found = _met(operation, state, peers, members, maps, operations, operands, lengths)
    if found != BLOCKED or patience_ms == 0:
        return found
    board = members[state[RANK], BOARD]
    store(board, ASLEEP)
    fence()
    found = _met(operation, state, peers, members, maps, operations, operands, lengths)
    if found == BLOCKED:
        _sleep(state, members, patience_ms)
        found = _met(operation, state, peers, members, maps, operations, operands, lengths)
        if found == DONE:  # otherwise the transport's loop reads the ring
            read(np.int32(members[state[RANK], BELL]), state[BUFFER] + 8 * RUNG, 8)
    store(board, AWAKE)
    return found


@compiled(
    "(int64[], int64[,], int64[,], int64[,], int64[,], int64[], int64[], int64[], int64[,], int64[,],"
    " int64, int64, int64)"
    " -> int64"
)
def advance(
    state, peers, members, maps, operations, operands, lengths, touched, staged, room, spins, patience_ms, most
):  # fmt: skip
    """Run as much of a script as possible; DONE, or why not: BLOCKED, UNMAPPED, UNLIKE, BROKEN, PAUSED, OTHER.

    ``state[WAITS_FOR]`` is the rank that this one waits for, or that has exchanged an array of another size (UNLIKE),
    broken the protocol (BROKEN) or begun another collective (OTHER, with its sign in ``state[THEIRS]``).

    A condition that does not hold is tested ``LOOKS`` times, then ``spins`` times with the core yielded in between, and
    then slept for, each time for at most ``patience_ms``: 0 if the caller has other work. With ``spins`` of 0 it is
    tested once, with -1 only ``LOOKS`` times more. The run pauses after ``most`` operations, and after one whose wait a
    ring has ended, because threads of this process ring too when there is other work.
    """
    count = operations.shape[0]
    store(state[BUFFER] + 8 * RUNG, 0)
    while state[SEGMENT] < state[SEGMENTS]:
        if most <= 0:
            return PAUSED
        most -= 1
        operation = state[AT]
        if operation == 0:
            if state[SEGMENT] == 0:
                _show(state, peers, members)
            if state[STAGED]:
                _stage(state, peers, staged, IN)
        else:
            found = _wait(
                operation, state, peers, members, maps, operations, operands, lengths, spins, patience_ms
            )  # fmt: skip
            if found != DONE:
                return found
            if load(state[BUFFER] + 8 * RUNG) != 0:
                most = 0
            for i in range(operations[operation, SOURCES], operations[operation, TARGETS + 1]):
                if operands[i] >= 0:
                    state[WAITS_FOR] = operands[i]
                    found = _resolve(operands[i], state, peers, members, maps)
                    if found != DONE:
                        return found
            _perform(operation, state, peers, operations, operands, room)
            if operation == count - 1 and state[STAGED]:
                _stage(state, peers, staged, OUT)
        state[AT] = operation + 1
        store(state[OWN_SLOT] + SLOT_PROGRESS, state[SEGMENT] * count + operation + 1)
        _ring(members, state[BUFFER], operands, operations[operation, RING], operations[operation, RING + 1])
        if operation == count - 1:
            state[AT] = 0
            state[SEGMENT] += 1
    for rank in touched:
        add(peers[rank, SLOT] + SLOT_DONE_WITH, 1)
    return DONE


@compiled("(int64)")
def sleep_soon(board):
    """Announce that this rank is about to sleep. Afterwards it has to test its condition once more."""
    store(board, ASLEEP)
    fence()


@compiled("(int64)")
def awake(board):
    """Announce that this rank need not be woken."""
    store(board, AWAKE)
