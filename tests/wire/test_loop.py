"""Links end in order: nothing that a peer had sent before it went is lost."""

from __future__ import annotations

import socket

from syncline.wire.link import Frame, Link, header
from syncline.wire.loop import Loop

BODY = bytes(range(256)) * 700  # more than one reading takes


class Owner:
    """The end of a link in a loop: bodies into fresh memory."""

    def __init__(self, sock: socket.socket) -> None:
        self.bodies: list[bytes] = []
        self.lost: list[int] = []
        self._body = memoryview(b"")
        self.link = Link(sock, 1, self._sink, self._arrival)
        self.loop = Loop([self.link], self.lost.append)

    def _sink(self, link: Link, frame: Frame) -> memoryview:  # noqa: ARG002
        self._body = memoryview(bytearray(frame.size))
        return self._body

    def _arrival(self, link: Link, frame: Frame) -> None:  # noqa: ARG002
        self.bodies.append(bytes(self._body))


def test_what_a_peer_sent_before_it_went_arrives_although_one_still_writes() -> None:
    """Between processes of one host; TCP may drop what is still under way when somebody writes to a closed socket."""
    mine, theirs = socket.socketpair()
    owner = Owner(mine)
    for sock in (mine, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    peer = Link(theirs, 0, lambda *_: None, lambda *_: None)
    peer.push(1, 0, body=memoryview(BODY))
    while not peer.flush():
        owner.loop.turn(0.0)
    peer.close()
    owner.link.push(1, 0, body=memoryview(b"an answer"))
    owner.loop.write_soon(owner.link)
    owner.loop.write()
    owner.loop.close()
    assert owner.bodies == [BODY]
    assert owner.lost == [1]


def test_a_peer_that_takes_nothing_and_sends_without_end_is_let_go() -> None:
    mine, theirs = socket.socketpair()
    owner = Owner(mine)

    def send_again(_link: Link, _frame: Frame) -> None:
        owner.bodies.append(b"")
        assert len(owner.bodies) < 1000, "without end"
        theirs.sendall(header(1, 0, 0, 0))

    owner.link._arrival = send_again
    theirs.shutdown(socket.SHUT_RD)
    theirs.sendall(header(1, 0, 0, 0))
    owner.link.push(1, 0, body=memoryview(b"an answer"))
    owner.loop.write_soon(owner.link)
    owner.loop.write()
    assert owner.lost == [1]
    owner.loop.close()
    theirs.close()
