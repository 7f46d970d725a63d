"""Laws of priorities: urgent messages overtake waiting ones, and messages that are held back block no others.

They test the order of events, not times.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import numpy as np

from ...transports import INLINE_BYTES
from ..laws import Laws, require, same
from ..network import numbers
from .cases import Case, Subject, between, each

_MESSAGES = 40
_SIZES = 60_000, 100_000
assert _SIZES[0] < INLINE_BYTES < _SIZES[1]


def waiting(subject: Subject, seed: int, count: int) -> Iterator[Case]:  # noqa: ARG001
    """Messages of both kinds: those sent at once and those that wait for their receives.

    A library gets the latter only once their receives are posted; waiting inside it is not visible here.
    """
    for size in _SIZES if subject.ahead_bytes == 0 else _SIZES[:1]:
        yield Case(subject, sizes=(size,), seed=seed)


LAWS: Laws[Subject, Case] = Laws()


@LAWS.law(waiting, lambda case: case.subject.ahead_bytes < inf)
def an_urgent_message_overtakes_those_that_wait(case: Case) -> None:
    """All except those that may be sent ahead; the others keep their order."""
    (nbytes,) = case.sizes
    urgent, ahead = _MESSAGES, case.subject.ahead_bytes
    with case.open() as net:
        received = [net.ends[1].recv(0, tag, np.zeros(nbytes, np.uint8)) for tag in range(_MESSAGES + 1)]
        net.turn(2)  # the sender knows the posted receives
        data = [numbers(nbytes, tag) for tag in range(_MESSAGES + 1)]
        for tag in range(_MESSAGES):
            net.ends[0].send(1, tag, data[tag], 5.0)
        net.ends[0].send(1, urgent, data[urgent], 2.0)
        net.wait(*received)
        order = [handle.tag for handle in net.told if handle in received]
    before = order.index(urgent)
    most = 0 if ahead == 0 else int(ahead // nbytes) + 2
    require(before <= most, f"{before} messages came before the urgent one, and {most} may")
    order.remove(urgent)
    require(order == sorted(order), f"messages of one priority came in the order {order}")


@LAWS.law(each(3, _SIZES[1]))
def what_is_not_asked_for_holds_up_nothing(case: Case) -> None:
    """Waiting receives posted one by one, the least urgent first, all complete: no message waits behind another."""
    (nbytes,) = case.sizes
    priorities = [1.0, 7.0, 0.0, -3.0, 7.0, 2.0]
    with case.open() as net:
        data = [numbers(nbytes, seed) for seed in range(len(priorities))]
        first = [net.ends[0].send(1, 100 + tag, numbers(1_000_000)) for tag in range(3)]  # before any priorities differ
        sent = [net.ends[0].send(1, tag, item, priorities[tag]) for tag, item in enumerate(data)]
        for tag in (4, 0, 3, 1, 5, 2):
            into = np.zeros(nbytes, np.uint8)
            net.wait(net.ends[1].recv(0, tag, into))
            same(into, data[tag], f"what came with priority {priorities[tag]}")
        net.wait(*sent)
        net.wait(*[net.ends[1].recv(0, 100 + tag, np.zeros(1_000_000, np.uint8)) for tag in range(3)], *first)


@LAWS.law(between(2))
def one_tag_keeps_its_order_among_urgent_ones(case: Case) -> None:
    """Messages of many sizes that overtake others do not overtake each other."""
    sizes = [10, 200_000, 0, 70_000, 3, 90_000]
    with case.open() as net:
        data = [numbers(size, seed) for seed, size in enumerate(sizes)]
        others = [net.ends[0].send(1, 1, numbers(100_000), 9.0) for _ in range(15)]
        sent = [net.ends[0].send(1, 9, item, 4.0) for item in data]
        into = [np.zeros(200_000, np.uint8) for _ in sizes]
        received = [net.ends[1].recv(0, 9, place) for place in into]
        net.wait(*received, *sent)
        for number, (place, item) in enumerate(zip(into, data, strict=True)):
            same(place[: item.nbytes], item, f"message {number}")
        net.wait(*[net.ends[1].recv(0, 1, np.zeros(100_000, np.uint8)) for _ in others], *others)


@LAWS.law(between(2))
def what_waits_at_the_end_is_still_sent(case: Case) -> None:
    """Many non-urgent messages arrive from a rank that ends once it is idle."""
    nbytes = _SIZES[0]
    with case.open() as net:
        data = [numbers(nbytes, tag) for tag in range(_MESSAGES)]
        into = [np.zeros(nbytes, np.uint8) for _ in data]
        received = [net.ends[1].recv(0, tag, place) for tag, place in enumerate(into)]
        for tag, item in enumerate(data):
            net.ends[0].send(1, tag, item, 3.0)
        sender = net.ends[0]
        net.until(lambda: sender.idle, lambda: "the sender has something left to write")
        net.close(0)
        net.wait(*received)
        for tag, (found, item) in enumerate(zip(into, data, strict=True)):
            same(found, item, f"what came under tag {tag}")
