"""Laws of transports: messages arrive once, whole and in order; priorities, ends and faults follow the protocol.

The ends' classes (``Adds``, ``HasAllreduce``) and the declarations determine the laws that apply. A law drives all ends
of a few networks, which are in this process unless the caller provides others. Laws about priorities test the order of
events, not times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any

import numpy as np

from .. import registry
from ..errors import UsageError
from ..strategy.grammar import read_part
from ..transports import INLINE_BYTES, Adds, Handle, Transport
from . import transport_ends
from .laws import Laws, require, same
from .network import SIZES, Case, Ends, Network, Subject, between, drawn, each, network_of, numbers, raised, together

_TAGS = (0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1)


_MESSAGES: Laws[Subject, Case] = Laws()


@_MESSAGES.law(each(*SIZES, shared=(False, True)))
def a_message_arrives_unchanged(case: Case) -> None:
    """For any size and memory. The receive reports the length."""
    (nbytes,) = case.sizes
    with case.open() as net:
        data = net.ends[0].allocate(nbytes) if case.shared else np.ones(nbytes, np.uint8)
        require(data.shape == (nbytes,) and data.dtype == np.uint8, f"allocate({nbytes}) gave {data.dtype}{data.shape}")
        require(not (case.shared and data.any()), "allocated memory is not zero")
        data[:] = case.messages()[0]
        into = np.zeros(nbytes, np.uint8)
        received, sent = net.ends[1].recv(0, 5, into), net.ends[0].send(1, 5, data)
        net.wait(sent, received)
        require(received.nbytes == nbytes, f"the receive reports {received.nbytes} bytes")
        same(into, data, "what was received")


@_MESSAGES.law(each(*SIZES))
def a_borrowed_message_is_readable_until_released(case: Case) -> None:
    """If memory is lent, the sender of a large message waits for the release; otherwise it does not."""
    (nbytes,) = case.sizes
    with case.open() as net:
        data = net.ends[0].allocate(nbytes)
        data[:] = case.messages()[0]
        handle, sent = net.ends[1].borrow(0, 1, nbytes), net.ends[0].send(1, 1, data)
        net.wait(handle)
        if not net.ends[1].lends_from(0):
            net.wait(sent)
        elif nbytes > INLINE_BYTES:
            net.turn()
            require(
                not sent.done,
                "lends_from declares that the sender waits for the release, but the send completes before it",
            )
        require(handle.payload is not None, "the borrowed message has no payload")
        assert handle.payload is not None
        same(handle.payload, data, "what was borrowed")
        net.ends[1].release(handle)
        net.wait(sent)


@_MESSAGES.law(each(3, 100_000))
def receives_may_come_in_any_order_of_tags(case: Case) -> None:
    """Each waits only for its own message."""
    (nbytes,) = case.sizes
    with case.open() as net:
        data = [numbers(nbytes, seed) for seed in range(6)]
        sent = [net.ends[0].send(1, tag, item) for tag, item in enumerate(data)]
        net.turn()
        for tag in (3, 0, 5, 1, 4, 2):
            into = np.zeros(nbytes, np.uint8)
            net.wait(net.ends[1].recv(0, tag, into))
            same(into, data[tag], f"the data received under tag {tag}")
        net.wait(*sent)


@_MESSAGES.law(each(3, INLINE_BYTES + 1))
def tags_are_numbers_of_64_bits(case: Case) -> None:
    """All bits distinguish messages."""
    (nbytes,) = case.sizes
    with case.open() as net:
        into = [np.zeros(nbytes, np.uint8) for _ in _TAGS]
        received = [net.ends[1].recv(0, tag, place) for tag, place in zip(_TAGS, into, strict=True)]
        data = [numbers(nbytes, seed) for seed in range(len(_TAGS))]
        sent = [net.ends[0].send(1, tag, item) for tag, item in reversed([*zip(_TAGS, data, strict=True)])]
        net.wait(*received, *sent)
        for tag, found, item in zip(_TAGS, into, data, strict=True):
            same(found, item, f"the data received under tag {tag}")


@_MESSAGES.law(drawn(0, 1, 5000, INLINE_BYTES, INLINE_BYTES + 1, 300_000, most=6))
def one_tag_keeps_its_order_whatever_the_sizes(case: Case) -> None:
    """Even if receives are larger than the messages, are posted before or after them, and some borrow the message."""
    draw = case.draw()
    late, capacity = bool(draw.integers(2)), int(draw.choice([300_000, 400_000]))
    with case.open() as net:
        data = case.messages()
        sent = [net.ends[0].send(1, 9, item) for item in data] if late else []
        if late:
            net.turn(2)
        into = [np.zeros(capacity, np.uint8) if item.nbytes == 0 or draw.integers(2) else None for item in data]
        received = [
            net.ends[1].borrow(0, 9, capacity) if place is None else net.ends[1].recv(0, 9, place) for place in into
        ]
        sent = sent or [net.ends[0].send(1, 9, item) for item in data]
        net.wait(*received)
        for number, (handle, place, item) in enumerate(zip(received, into, data, strict=True)):
            require(handle.nbytes == item.nbytes, f"message {number} has {handle.nbytes} bytes, not {item.nbytes}")
            found = handle.payload if place is None else place[: item.nbytes]
            assert found is not None
            same(found, item, f"message {number}")
            if place is None:
                net.ends[1].release(handle)
        net.wait(*sent)


def every_pair(end: Transport, world: int, tags: int, nbytes: int) -> tuple[list[Handle], Callable[[], None]]:
    """Start one end's messages to all others and theirs to it. Returns a check of the received data."""
    others = [other for other in range(world) if other != end.rank]
    came: dict[tuple[int, int], np.ndarray[Any, Any]] = {}
    handles = []
    for other in others:
        for tag in range(tags):
            came[other, tag] = np.zeros(nbytes, np.uint8)
            handles.append(end.recv(other, tag, came[other, tag]))
            handles.append(end.send(other, tag, numbers(nbytes, end.rank * 100 + other * 10 + tag)))

    def check() -> None:
        for (other, tag), found in came.items():
            what = f"the data from rank {other} to rank {end.rank} under tag {tag}"
            same(found, numbers(nbytes, other * 100 + end.rank * 10 + tag), what)

    return handles, check


@_MESSAGES.law(between(4))
def many_exchanges_are_in_flight_between_all_pairs(case: Case) -> None:
    """Every process exchanges with every other concurrently."""
    with case.open() as net:
        begun = [every_pair(end, case.processes, 8, 70_001) for end in net.ends]
        net.wait(*(handle for handles, _ in begun for handle in handles))
        for _, check in begun:
            check()


@_MESSAGES.law(between(3))
def ends_move_in_threads_of_their_own(case: Case) -> None:
    """Each end waits only for its own operations, as processes do, and no end polls for another."""

    def run(end: Transport) -> None:
        handles, check = every_pair(end, case.processes, 3, 70_001)
        alone = Ends([end])
        alone.wait(*handles)
        alone.until(lambda: end.idle, lambda: f"rank {end.rank} still has data to write")
        check()

    with case.open() as net:
        together(net.ends, run)


@_MESSAGES.law(between(2))
def any_number_of_messages_may_wait(case: Case) -> None:
    """Many messages in both directions at once, half of them before their receives."""
    keys = range(1500)
    with case.open() as net:
        into = np.zeros((2, len(keys), 4), np.uint8)
        data = numbers(2 * len(keys) * 4).reshape(into.shape)
        handles = []
        for turn in (0, 1):
            for key in keys:
                if key % 2 == turn:
                    handles += [net.ends[rank].recv(1 - rank, key, into[rank, key]) for rank in (0, 1)]
            if turn == 0:
                handles += [net.ends[rank].send(1 - rank, key, data[rank, key]) for key in keys for rank in (0, 1)]
                net.turn(2)
        net.wait(*handles)
        same(into.ravel(), data[::-1].ravel(), "what came")


@_MESSAGES.law(between(2))
def both_send_large_messages_before_either_receives(case: Case) -> None:
    """There is no deadlock although neither end receives first."""
    with case.open() as net:
        big = numbers(20_000_000)
        sent = [net.ends[rank].send(1 - rank, 0, big) for rank in (0, 1)]
        net.turn()
        into = [np.zeros(big.nbytes, np.uint8) for _ in range(2)]
        received = [net.ends[rank].recv(1 - rank, 0, into[rank]) for rank in (0, 1)]
        net.wait(*sent, *received)
        for rank in (0, 1):
            same(into[rank], big, f"the data received by rank {rank}")


@_MESSAGES.law(between(2))
def a_message_that_does_not_fit_is_an_error_and_harms_no_other(case: Case) -> None:
    """The receive's handle fails with UsageError, which names both sizes and the sender."""
    with case.open() as net:
        net.ends[0].send(1, 0, numbers(90_000))
        net.ends[0].send(1, 1, numbers(10))
        bad, good = net.ends[1].recv(0, 0, np.zeros(80_000, np.uint8)), net.ends[1].recv(0, 1, np.zeros(10, np.uint8))
        net.wait(good)
        told = str(raised(lambda: net.wait(bad), UsageError))
        for part in ("90000", "80000", "rank 0"):
            require(part in told, f"the error lacks {part!r}: {told}")


@_MESSAGES.law(between(2))
def unknown_peers_are_refused(case: Case) -> None:
    """With UsageError: waiting for an unknown process or for itself would never end."""
    with case.open() as net:
        end, memory = net.ends[0], np.zeros(1, np.uint8)
        for peer in (0, 2, -1):
            raised(lambda peer=peer: end.send(peer, 0, memory), UsageError)  # type: ignore[misc]
            raised(lambda peer=peer: end.recv(peer, 0, memory), UsageError)  # type: ignore[misc]


@_MESSAGES.law(between(2))
def traffic_counts_every_byte_of_a_message(case: Case) -> None:
    """On both ends and only for this peer, with small headers. ``moved_bytes`` is the sum of all."""
    with case.open() as net:
        net.wait(net.ends[1].recv(0, 0, np.zeros(100_000, np.uint8)), net.ends[0].send(1, 0, numbers(100_000)))
        for end in net.ends:
            counted, moved = sum(sum(each.values()) for each in end.traffic()), end.moved_bytes
            require(moved == counted, f"moved_bytes reports {moved}, but traffic totals {counted}")
        (sent, _), (_, received) = net.ends[0].traffic(), net.ends[1].traffic()
        require(
            [*sent] == [1] and [*received] == [0],
            f"it counts for the peers {[*sent]} and {[*received]}, not for each other",
        )
        require(sent[1] == received[0], f"{sent[1]} bytes were sent, but {received[0]} received")
        require(100_000 <= sent[1] < 100_200, f"{sent[1]} bytes are counted for a message of 100000")


@_MESSAGES.law(between(2))
def freed_memory_is_not_confused_with_new_memory(case: Case) -> None:
    """Allocated memory stays valid for the transport's lifetime, so an address cannot mean other data."""
    with case.open() as net:
        for seed in range(5):
            net.ends[0].allocate(1 << 21)
            plain = numbers(1 << 21, seed)
            into = np.zeros(plain.nbytes, np.uint8)
            net.wait(net.ends[1].recv(0, 0, into), net.ends[0].send(1, 0, plain))
            same(into, plain, "what was received")


@_MESSAGES.law(each(0, 4, 132, 80_000, 1_200_004), lambda case: case.subject.adds_messages)
def received_data_is_added(case: Case) -> None:
    """To the array's content, whether the message or the receive comes first."""
    (nbytes,) = case.sizes
    with case.open() as net:
        held, come = case.draw().standard_normal((2, nbytes // 4), np.float32)
        for late in (False, True):
            into, end = held.copy(), net.ends[1]
            assert isinstance(end, Adds)
            received = None if late else end.add(0, 3, into)
            sent = net.ends[0].send(1, 3, come.view(np.uint8))
            net.turn(2)
            net.wait(sent, received or end.add(0, 3, into))
            same(into, held + come, "the sum")


_WAITING = 40
_SIZES = 60_000, 100_000
assert _SIZES[0] < INLINE_BYTES < _SIZES[1]


def waiting(subject: Subject, seed: int, count: int) -> Iterator[Case]:  # noqa: ARG001
    """Messages of both kinds: sent at once, and waiting for their receives.

    A library gets the latter only once their receives are posted; waiting inside it is not visible here.
    """
    for size in _SIZES if subject.ahead_bytes == 0 else _SIZES[:1]:
        yield Case(subject, sizes=(size,), seed=seed)


@_MESSAGES.law(waiting, lambda case: case.subject.ahead_bytes < inf)
def an_urgent_message_overtakes_waiting_messages(case: Case) -> None:
    """All except those that may be sent ahead; the others keep their order."""
    (nbytes,) = case.sizes
    urgent, ahead = _WAITING, case.subject.ahead_bytes
    with case.open() as net:
        received = [net.ends[1].recv(0, tag, np.zeros(nbytes, np.uint8)) for tag in range(_WAITING + 1)]
        net.turn(2)  # the sender knows the posted receives
        data = [numbers(nbytes, tag) for tag in range(_WAITING + 1)]
        for tag in range(_WAITING):
            net.ends[0].send(1, tag, data[tag], 5.0)
        net.ends[0].send(1, urgent, data[urgent], 2.0)
        net.wait(*received)
        order = [handle.tag for handle in net.told if handle in received]
    before = order.index(urgent)
    most = 0 if ahead == 0 else int(ahead // nbytes) + 2
    require(before <= most, f"{before} messages arrived before the urgent one, at most {most} may")
    order.remove(urgent)
    require(order == sorted(order), f"messages with one priority arrived in the order {order}")


@_MESSAGES.law(each(3, _SIZES[1]))
def unreceived_messages_hold_up_nothing(case: Case) -> None:
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
            same(into, data[tag], f"the data received with priority {priorities[tag]}")
        net.wait(*sent)
        net.wait(*[net.ends[1].recv(0, 100 + tag, np.zeros(1_000_000, np.uint8)) for tag in range(3)], *first)


@_MESSAGES.law(between(2))
def one_tag_keeps_its_order_among_urgent_messages(case: Case) -> None:
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


@_MESSAGES.law(between(2))
def waiting_messages_are_still_sent_at_the_end(case: Case) -> None:
    """Many non-urgent messages arrive from a rank that ends once it is idle."""
    nbytes = _SIZES[0]
    with case.open() as net:
        data = [numbers(nbytes, tag) for tag in range(_WAITING)]
        into = [np.zeros(nbytes, np.uint8) for _ in data]
        received = [net.ends[1].recv(0, tag, place) for tag, place in enumerate(into)]
        for tag, item in enumerate(data):
            net.ends[0].send(1, tag, item, 3.0)
        sender = net.ends[0]
        net.until(lambda: sender.idle, lambda: "the sender still has data to write")
        net.close(0)
        net.wait(*received)
        for tag, (found, item) in enumerate(zip(into, data, strict=True)):
            same(found, item, f"the data received under tag {tag}")


LAWS: Laws[Subject, Case] = Laws(_MESSAGES, transport_ends.LAWS)

_AHEAD_BYTES = 1 << 20


def check_transport(
    transport: str | Network,
    *,
    ahead_bytes: float = _AHEAD_BYTES,
    adds: Iterable[str] = ("float32",),
    seed: int = 0,
    examples: int = 30,
) -> tuple[str, ...]:
    """Check a transport, or the registered one of a text such as ``"tcp(rate=1Gbit)"``, against all laws that apply.

    A transport whose ends cannot be in one process, as under mpirun, is given as a function from the number of
    processes to a context manager with the ends. ``ahead_bytes`` limits the bytes that may precede a more urgent
    message submitted later; inf for transports that ignore priorities (``priority=False``). ``adds`` are the element
    types that its own allreduce must support. Returns the names of the laws. Raises BrokenLaw, an AssertionError with
    the law, the transport and the failing example. ``examples`` are drawn for a law, from ``seed``.
    """
    if not isinstance(transport, str):
        shown, network = getattr(transport, "__name__", str(transport)), transport
    else:
        shown, network = transport, network_of(transport)
        if not registry.get("transports", read_part(transport).name).capabilities.get("priority", True):
            ahead_bytes = inf
    return LAWS.hold(Subject(network, ahead_bytes, tuple(adds)), f"transport {shown}", seed, examples)
