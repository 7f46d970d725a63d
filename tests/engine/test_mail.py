"""Single messages, turned by hand: no thread, no engine."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from syncline.engine.engine import Mail
from syncline.engine.order import Work
from syncline.errors import PeerError, SynclineError
from syncline.transports.inproc import Hub, InProc


class Post:
    """The mail of one rank, and what has been done of it."""

    def __init__(self, transport: InProc, has_left: bool = False) -> None:
        self.transport = transport
        self.done: list[Work] = []
        self.mail = Mail(transport, lambda _: has_left, None, self.done.append)

    def turn(self) -> None:
        for handle in self.transport.poll(0.0):
            handle.owner(handle)


@pytest.fixture
def posts() -> list[Post]:
    hub = Hub(2)
    return [Post(hub.transport(rank)) for rank in range(2)]


def body(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


def room(nbytes: int = 8) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def nobody(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("dst", [0, 1], ids=["to itself", "to a peer"])
def test_a_message_comes_whole_or_into_its_place(posts: list[Post], dst: int, placed: bool) -> None:
    sent, received, place = Work("send"), Work("receive"), np.zeros(8, np.uint8)
    posts[dst].mail.recv(received, 0, 7, place if placed else room(), placed, nobody)
    posts[0].mail.send(sent, dst, 7, body(b"hello"))
    for post in (*posts, posts[0]):  # it learns at last that its message was taken
        post.turn()
    assert {work for post in posts for work in post.done} == {sent, received}
    assert received.result == (5 if placed else b"hello")
    assert place.tobytes() == (b"hello\0\0\0" if placed else bytes(8))


def test_it_says_for_whom_it_waits_unless_nobody_minds(posts: list[Post]) -> None:
    here = posts[0].mail
    here.recv(Work("from a peer"), 1, 7, room(), False, nobody)
    assert here.waiting_for == {1: "from a peer"}
    posts[1].mail.send(Work("send"), 0, 7, body(b"hello"))
    posts[0].turn()
    here.recv(Work("tolerant", tolerant=True), 1, 8, room(), False, nobody)
    here.recv(Work("from itself"), 0, 8, room(), False, nobody)
    assert here.waiting_for == {}


def test_a_message_to_itself_that_does_not_fit_is_a_fault(posts: list[Post]) -> None:
    posts[0].mail.send(Work("send"), 0, 7, body(b"hello"))
    with pytest.raises(SynclineError, match="receive: a message of 5 bytes does not fit a receive of 4"):
        posts[0].mail.recv(Work("receive"), 0, 7, room(4), False, nobody)


@pytest.mark.parametrize("tolerant", [False, True])
def test_who_has_left_is_a_fault_for_those_who_mind(tolerant: bool) -> None:
    hub = Hub(2)
    post, told = Post(hub.transport(0), has_left=True), list[Exception]()
    post.mail.recv(Work("receive", tolerant), 1, 7, room(), False, told.append)
    hub.kill(1)
    with contextlib.nullcontext() if tolerant else pytest.raises(PeerError, match=r"receive: .*rank 1 is gone"):
        post.turn()
    assert len(told) == tolerant
    assert not post.done
