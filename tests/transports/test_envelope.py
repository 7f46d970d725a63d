"""Urgency over a message library that knows none: what waits, what goes next, and that nothing waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.transports import Bytes, Handle
from syncline.transports._envelope import Body, Enveloped
from syncline.transports._frames import AHEAD_BYTES, Outbox

LARGE = AHEAD_BYTES // 4


class Wire:
    """What two ends of a library have given it: frames that arrive in order, and bodies that wait for both ends."""

    def __init__(self) -> None:
        self.frames: dict[int, deque[Callable[[], None]]] = {0: deque(), 1: deque()}  # by who receives
        self.pushed: dict[tuple[int, int], tuple[Bytes, Callable[[], None]]] = {}  # (receiver, slot)
        self.pulled: dict[tuple[int, int], tuple[Bytes, Callable[[], None]]] = {}

    def bodies(self) -> list[tuple[int, int]]:
        """Those that both ends have given to the library, as they were pushed."""
        return [key for key in self.pushed if key in self.pulled]

    def move(self, key: tuple[int, int]) -> None:
        """Let a body arrive."""
        (data, sent), (into, received) = self.pushed.pop(key), self.pulled.pop(key)
        into[...] = data
        sent()
        received()


class Library(Enveloped):
    """One of two ends of a wire; what has been given to it moves when the test says so."""

    name = "library"
    answers = False
    asks = False

    def __init__(self, rank: int, wire: Wire, asks: bool) -> None:
        super().__init__(rank, 2)
        self.wire = wire
        self.asks = asks  # type: ignore[misc]

    def _put(self, peer: int, frame: Bytes, done: Callable[[], None]) -> None:
        def arrive() -> None:
            buffer = ends_of[self.wire][peer].scratch.take(frame.nbytes)
            buffer[: frame.nbytes] = frame
            done()
            ends_of[self.wire][peer]._came(self.rank, buffer, frame.nbytes)

        self.wire.frames[peer].append(arrive)

    def _push(self, peer: int, body: Body) -> None:
        self.wire.pushed[peer, body.slot] = body.data, body.done

    def _pull(self, peer: int, body: Body) -> None:  # noqa: ARG002
        self.wire.pulled[self.rank, body.slot] = body.data, body.done

    def _collect(self, call: Any, handle: Handle) -> None:
        raise NotImplementedError

    def _move(self, timeout: float) -> None:
        pass

    def _leave(self) -> None:
        pass


ends_of: dict[Wire, list[Library]] = {}


def library(asks: bool) -> tuple[Wire, list[Library]]:
    wire = Wire()
    ends_of[wire] = [Library(rank, wire, asks) for rank in range(2)]
    return wire, ends_of[wire]


def settle(wire: Wire) -> None:
    """Let all frames arrive."""
    while any(wire.frames.values()):
        for frames in wire.frames.values():
            while frames:
                frames.popleft()()


@pytest.mark.parametrize("asks", [False, True])
def test_an_urgent_body_goes_before_those_that_the_library_has_not_been_given(asks: bool) -> None:
    wire, (sender, receiver) = library(asks)
    received = [receiver.recv(0, tag, np.zeros(LARGE, np.uint8)) for tag in range(12)]
    for tag in range(11):
        sender.send(1, tag, np.full(LARGE, tag, np.uint8), 5.0)
    settle(wire)
    given_before = len(wire.bodies())
    assert given_before == AHEAD_BYTES // LARGE
    sender.send(1, 11, np.full(LARGE, 11, np.uint8), 1.0)
    order: list[int] = []
    for _ in range(12):
        settle(wire)
        wire.move(wire.bodies()[0])
        order += [handle.tag for handle in receiver.poll(0.0)]
    assert order == [*range(given_before), 11, *range(given_before, 11)]
    assert all(handle.done for handle in received)
    assert sender.idle


@pytest.mark.parametrize("asks", [False, True])
def test_where_priorities_are_equal_the_library_is_given_all_at_once(asks: bool) -> None:
    wire, (sender, receiver) = library(asks)
    for tag in range(12):
        receiver.recv(0, tag, np.zeros(LARGE, np.uint8))
        sender.send(1, tag, np.full(LARGE, tag, np.uint8))
    settle(wire)
    assert wire.bodies() == [(1, slot) for slot in range(1, 13)]


PRIORITIES = st.sampled_from([0.0, 0.0, 1.0, 5.0, -2.0])
MESSAGES = st.lists(st.tuples(PRIORITIES, st.sampled_from([10, LARGE])), min_size=1, max_size=12)


@given(MESSAGES, MESSAGES, st.booleans(), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_every_message_whose_receive_is_posted_arrives(
    there: Sequence[tuple[float, int]], back: Sequence[tuple[float, int]], asks: bool, seed: int
) -> None:
    """Receives are posted in any order, some of them never: what waits for those holds up no other."""
    draw = np.random.default_rng(seed)
    wire, ends = library(asks)
    wanted: list[tuple[Handle, Bytes, int]] = []
    calls: list[Callable[[], Any]] = []
    for src, messages in enumerate((there, back)):
        for tag, (priority, nbytes) in enumerate(messages):
            data = np.full(nbytes, tag, np.uint8)
            calls.append(
                lambda src=src, tag=tag, data=data, priority=priority: ends[src].send(1 - src, tag, data, priority)
            )

            def receive(src: int = src, tag: int = tag, nbytes: int = nbytes) -> None:
                into = np.zeros(nbytes, np.uint8)
                wanted.append((ends[1 - src].recv(src, tag, into), into, tag))

            if draw.integers(4):
                calls.append(receive)
    for index in draw.permutation(len(calls)):
        calls[index]()
        if draw.integers(2):
            settle(wire)
    while any(wire.frames.values()) or wire.bodies():
        settle(wire)
        there_are = wire.bodies()
        if there_are:
            wire.move(there_are[int(draw.integers(len(there_are)))])
    assert all(handle.done and (into == tag).all() for handle, into, tag in wanted)


def test_what_waits_is_given_when_a_rank_ends_and_forgotten_when_its_peer_does() -> None:
    given_to: list[str] = []
    box = Outbox([1, 2])
    box.ranked = True
    for peer in (1, 2):
        for name, priority in (("late", 3.0), ("later", 3.0), ("urgent", 1.0)):
            box.put(
                peer, priority, AHEAD_BYTES, lambda _, peer=peer, name=name: given_to.append(f"{name} {peer}"), print
            )
    assert given_to == ["late 1", "late 2"]
    box.forget(1)
    box.empty(2)
    assert given_to == ["late 1", "late 2", "urgent 2", "later 2"]
    assert not box.holds(1)
    assert not box.holds(2)
