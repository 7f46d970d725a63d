"""Messages of a process group that are not what they should be, and ranks that leave instead of sending one."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pytest
import torch
from process_groups import of

from syncline.errors import PeerError, ProtocolError
from syncline.session.session import Session


def header(tag: int, nbytes: int, number: int) -> bytes:
    return struct.pack("<qqQ", tag, nbytes, number)


@pytest.mark.parametrize(
    ("message", "what"),
    [
        (b"short", "5 bytes in place of a header of 24"),
        (header(0, 8, 1) + b"x", "1 bytes with the header of a message of 8"),
        (header(0, 8, 1) + b"xxxxxxxxx", "9 bytes with the header of a message of 8"),
        (header(0, 80_000, 1) + b"x", "1 bytes with the header of a message of 80000"),
        (header(0, -8, 1), "0 bytes with the header of a message of -8"),
        (header(0, 80_000, 1 << 62), f"message {1 << 62} where 1 is the next"),
    ],
)
def test_what_no_rank_sends_is_an_error_that_names_who_has_sent_it(group: Any, message: bytes, what: str) -> None:
    def body(session: Session) -> None:
        mine = of(session)
        if mine.rank() == 1:
            session.engine.wait(session.engine.send(0, session.topic(0), message, "send"))
        else:
            mine.recv([torch.zeros(8 if b"x" in message else 80_000, dtype=torch.uint8)], 1).wait()

    with pytest.raises(ProtocolError, match=f"receive from rank 1: rank 1.* sends {what}; .* version"):
        group("direct", 2, body)


def test_what_follows_a_header_is_as_much_as_that_says(group: Any) -> None:
    def body(session: Session) -> None:
        mine = of(session)
        if mine.rank() == 1:
            engine = session.engine
            engine.send(0, session.topic(0), header(0, 80_000, 1), "send")
            engine.wait(engine.send(0, session.topic((1 << 49) + 1), b"x", "send"))
        else:
            mine.recv([torch.zeros(80_000, dtype=torch.uint8)], 1).wait()

    with pytest.raises(ProtocolError, match=r"rank 1.* sends 1 bytes of a message of 80000"):
        group("direct", 2, body)


@pytest.mark.parametrize(("first", "who"), [("before", "rank 1"), ("after", "(any rank|rank 1)"), ("any", "any rank")])
def test_a_rank_that_has_left_is_named_behind_a_receive_from_any(group: Any, first: str, who: str) -> None:
    """Whether it leaves before or after somebody waits for it alone, when it may be the last of all; or all leave."""
    asked = threading.Event()

    def body(session: Session) -> None:
        mine = of(session)
        if mine.rank() == 1:
            asked.wait(60)
            return
        if mine.rank() == 2:
            return
        works = [mine.recv_anysource([torch.zeros(2)])]
        if first == "before":
            works.append(mine.recv([torch.zeros(2)], 1, 7))
            session.engine.wait(session.engine.then("what is asked for before this", []))  # nobody has left till then
        asked.set()
        if first == "after":
            works.append(mine.recv([torch.zeros(2)], 1, 7))
        works[-1].wait()

    with pytest.raises(PeerError, match=rf"receive from {who}: rank [12] .*(gone|left|ended)"):
        group("direct", 3, body)
