"""Priority on every transport: what is urgent overtakes what waits, and what is held back waits for nobody else.

Shown by the order in which things are done, not by clocks. How far ahead of time a message library is given messages
(``AHEAD_BYTES``) is as much as can still go before what is urgent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from ends import KINDS, Net, network, numbers

from mpi_launch import LIBRARIES
from syncline import registry
from syncline.engine.messages import Exchange, Run
from syncline.engine.trace import Recorder
from syncline.nouns import Group
from syncline.plans.messages import compile_program
from syncline.transports import INLINE_BYTES
from syncline.transports._outbox import AHEAD_BYTES

LIMIT = 20_000
"""Turns."""

MESSAGES = 40
SIZES = [60_000, 100_000]
assert SIZES[0] < INLINE_BYTES < SIZES[1]
OWN = [kind for kind in KINDS if kind not in ("torch", *LIBRARIES)]


def ahead(kind: str, nbytes: int) -> int:
    """How many messages may go before a more urgent one that was sent after them."""
    return 0 if kind in OWN else AHEAD_BYTES // nbytes + 2


def completed(net: Net, rank: int, of: int) -> list[int]:
    """The tags of so many receives of a rank, in the order in which they are complete."""
    found: list[int] = []
    for _ in range(LIMIT):
        for end in net.ends:
            handles = end.poll(0.0005)
            if end is net.ends[rank]:
                found += [handle.tag for handle in handles if handle.kind == "recv"]
        if len(found) == of:
            return found
    raise AssertionError(f"{len(found)} of {of} have come")


@pytest.mark.parametrize(
    ("kind", "nbytes"), [(kind, nbytes) for kind in KINDS for nbytes in SIZES if kind in OWN or nbytes == SIZES[0]]
)
def test_an_urgent_message_overtakes_those_that_wait(kind: str, nbytes: int) -> None:
    """Bodies go over a library when they are asked for: what waits then is for ``transports/test_envelope`` to show."""
    with network(kind, 2) as net:
        for tag in range(MESSAGES + 1):
            net.ends[1].recv(0, tag, np.zeros(nbytes, np.uint8))
        net.turn(2)  # the sender knows what is asked for
        data = [numbers(nbytes, tag) for tag in range(MESSAGES + 1)]
        for tag in range(MESSAGES):
            net.ends[0].send(1, tag, data[tag], 5.0)
        net.ends[0].send(1, MESSAGES, data[MESSAGES], 2.0)
        found = completed(net, 1, MESSAGES + 1)
    assert found.index(MESSAGES) <= ahead(kind, nbytes)
    assert [tag for tag in found if tag != MESSAGES] == list(range(MESSAGES))


@pytest.mark.parametrize("nbytes", [3, SIZES[1]])
def test_what_is_not_asked_for_holds_up_nothing(kind: str, nbytes: int) -> None:
    """Receives one by one, the least urgent first and in between, each waited for: nothing waits behind another."""
    priorities = [1.0, 7.0, 0.0, -3.0, 7.0, 2.0]
    with network(kind, 2) as net:
        data = [numbers(nbytes, seed) for seed in range(len(priorities))]
        first = [net.ends[0].send(1, 100 + tag, numbers(1_000_000)) for tag in range(3)]  # before any differs
        sent = [net.ends[0].send(1, tag, item, priorities[tag]) for tag, item in enumerate(data)]
        for tag in (4, 0, 3, 1, 5, 2):
            into = np.zeros(nbytes, np.uint8)
            net.wait(net.ends[1].recv(0, tag, into))
            np.testing.assert_array_equal(into, data[tag])
        net.wait(*sent)
        net.wait(*[net.ends[1].recv(0, 100 + tag, np.zeros(1_000_000, np.uint8)) for tag in range(3)], *first)


def test_one_tag_keeps_its_order_among_urgent_ones(kind: str) -> None:
    sizes = [10, 200_000, 0, 70_000, 3, 90_000]
    with network(kind, 2) as net:
        data = [numbers(size, seed) for seed, size in enumerate(sizes)]
        others = [net.ends[0].send(1, 1, numbers(100_000), 9.0) for _ in range(15)]
        sent = [net.ends[0].send(1, 9, item, 4.0) for item in data]
        into = [np.zeros(200_000, np.uint8) for _ in sizes]
        received = [net.ends[1].recv(0, 9, place) for place in into]
        net.wait(*received, *sent)
        for place, item in zip(into, data, strict=True):
            np.testing.assert_array_equal(place[: item.nbytes], item)
        net.wait(*[net.ends[1].recv(0, 1, np.zeros(100_000, np.uint8)) for _ in others], *others)


def test_what_waits_at_the_end_is_still_sent(kind: str) -> None:
    """The last messages of a rank that ends when it has nothing left to send, many of them and none of them urgent."""
    with network(kind, 2) as net:
        data = [numbers(SIZES[0], tag) for tag in range(MESSAGES)]
        into = [np.zeros(SIZES[0], np.uint8) for _ in data]
        received = [net.ends[1].recv(0, tag, place) for tag, place in enumerate(into)]
        for tag, item in enumerate(data):
            net.ends[0].send(1, tag, item, 3.0)
        for _ in range(LIMIT):
            net.turn(1)
            if net.ends[0].idle:
                break
        net.ends.pop(0).close()
        net.wait(*received)
        assert all(np.array_equal(*pair) for pair in zip(into, data, strict=True))


SEGMENTS, ELEMENTS = 16, 50_000
"""Of the large run, and of eight bytes in a segment; the urgent one has a single segment."""


def race(kind: str, priorities: Sequence[float]) -> list[list[int]]:
    """Start a large run on two ranks, and then a small one; whose segments have ended on each rank, in order."""
    plan = registry.get("algorithms", "ring").target(Group(2))
    ticks = count()
    recorders = [Recorder(lambda: float(next(ticks))) for _ in range(2)]
    with network(kind, 2) as net:
        exchanges = [
            Exchange(end, ELEMENTS * 8, SEGMENTS, observer=recorder)
            for end, recorder in zip(net.ends, recorders, strict=True)
        ]
        runs = [
            Run(compile_program(plan, rank), np.full(segments * ELEMENTS, rank + 1.0), key, f"{key}", priorities[key])
            for key, segments in enumerate((SEGMENTS, 1))
            for rank in range(2)
        ]
        for run in runs:
            exchanges[run.program.rank].start(run)
        for _ in range(LIMIT):
            if all(run.done for run in runs):
                break
            for exchange in exchanges:
                exchange.progress(0.0005)
        assert all(run.done and (run.array == 3.0).all() for run in runs)
    return [
        [int(event.span.label) for event in recorder.events if event.ends and event.span.kind == "segment"]
        for recorder in recorders
    ]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shm"])  # in mapped memory: engine/test_urgency
def test_an_urgent_run_overtakes_a_large_one_that_is_under_way(kind: str) -> None:
    """Its segment, which stands behind all those of the large one where priorities are equal."""
    for ended in race(kind, (5.0, 2.0)):
        assert sorted(ended) == [0] * SEGMENTS + [1]
        if kind in OWN:  # what a library moves fast enough has nothing to overtake
            assert ended.index(1) <= SEGMENTS // 2


@pytest.mark.parametrize("kind", ["inproc", "auto-near", "tcp"])
@pytest.mark.parametrize("priority", [0.0, 5.0, -2.0])
def test_equal_priorities_keep_the_order_of_handing_over(kind: str, priority: float) -> None:
    for ended in race(kind, (priority, priority)):
        assert ended == [0] * SEGMENTS + [1]
