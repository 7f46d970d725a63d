"""What servers and workers tell each other: checked when it comes, and bodies of any size in pieces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.errors import ProtocolError
from syncline.serving import messages
from syncline.serving.messages import BODY_PIECE_BYTES, read_message, receive_body, send_body
from syncline.transports._operations import UNCLAIMED_BYTES


def session(pieces: list[bytes] | None = None) -> Any:
    """Two ends in one: what is sent is received, in order."""
    queue = [] if pieces is None else pieces
    roll = SimpleNamespace(members=[SimpleNamespace(host="here"), SimpleNamespace(host="there")])
    return SimpleNamespace(
        name=lambda index: f"rank {index} (there, pid 7)",
        roll=roll,
        send=lambda _dst, data, _label, _topic: queue.append(data),
        recv=lambda _src, _label, nbytes, topic: SimpleNamespace(result=queue.pop(0), nbytes=nbytes, topic=topic),
        engine=SimpleNamespace(wait=lambda _: None),
        member=SimpleNamespace(number=lambda rank: rank),
        queue=queue,
    )


@given(st.binary(max_size=40), st.integers(1, 12))
@settings(deadline=None)
def test_a_body_travels_in_pieces(body: bytes, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "BODY_PIECE_BYTES", piece)
        ends = session()
        send_body(ends, 1, body, "the owner's state")
        assert all(1 <= len(part) <= piece for part in ends.queue)
        assert receive_body(ends, 1, len(body), "the owner's state") == body


def test_a_piece_may_come_before_it_is_asked_for() -> None:
    assert 2 * BODY_PIECE_BYTES < UNCLAIMED_BYTES


def test_a_size_alone_takes_no_memory() -> None:
    """The first piece is waited for before the next one's memory is taken."""
    with pytest.raises(ProtocolError, match=r"the owner's state from rank 1 \(there, .* a piece of 3 bytes"):
        receive_body(session([b"abc"]), 1, 1 << 50, "the owner's state")
    with pytest.raises(ProtocolError, match="it has") as fault:
        receive_body(session(), 1, 1 << 60, "the owner's state")
    assert (fault.value.rank, fault.value.host) == (1, "there")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"{}", b'{"size": -1}', b'{"size": "1"}', b'{"size": true}',
     b'{"size": 1.5}', b'{"size": null}', b'{"size": ' + b"9" * 5000 + b"}"],
    ids=lambda data: repr(data[:12]),
)  # fmt: skip
def test_nonsense_names_its_sender_and_the_operation(data: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"an answer from rank 1 \(there, pid 7\) makes no sense") as fault:
        read_message(session(), 1, "an answer", data, {"size": int})
    assert fault.value.rank == 1
