"""Messages between workers and owners besides gradients and weights: small JSON objects, and bodies of any size.

Received objects are checked field by field. For an object that no process of this version sends, the error names the
sender and the operation. A body travels in pieces; its memory is allocated as they arrive, whatever size was announced.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import ProtocolError
from ..session.session import Session

BODY_PIECE_BYTES = 64 * 1024 * 1024
"""The largest piece of a body."""

_MOST_BODY_BYTES = 1 << 56

REQUESTS, ANSWERS, TURNS = range(3)
"""Topics. They differ because a process that is both worker and owner sends all of them to the same peer. Owners tell
each other of ``turns``."""


def read_message(session: Session, source: int, label: str, data: bytes, fields: Mapping[str, type]) -> dict[str, Any]:
    """Parse the JSON object that process ``source`` has sent and check its ``fields``; raises ProtocolError."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise nonsense(session, source, label, f"no JSON ({error})") from error
    if not isinstance(message, dict):
        raise nonsense(session, source, label, f"a {type(message).__name__} in place of an object")
    check_fields(session, source, label, message, fields)
    return message


def check_fields(
    session: Session, source: int, label: str, message: Mapping[str, Any], fields: Mapping[str, type]
) -> None:
    """Raise ProtocolError unless an object has these fields with these types; an int must not be negative."""
    for name, kind in fields.items():
        value = message.get(name)
        kinds: Any = (int, float) if kind is float else kind
        negative = kind is int and isinstance(value, int) and value < 0
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool) or negative:
            raise nonsense(session, source, label, f"{name} is {value!r:.100}")


def nonsense(session: Session, source: int, label: str, why: str) -> ProtocolError:
    """The error for a message that no process of this version sends."""
    return ProtocolError(
        f"{label} from {session.name(source)} makes no sense: {why}; do all processes run the same version on sound"
        " machines?",
        rank=session.member.number(source),
        host="" if session.roll is None else session.roll.members[source].host,
    )


def send_body(session: Session, dst: int, body: bytes, label: str, topic: int = REQUESTS) -> None:
    """Start sending a body whose size the receiver knows."""
    for at in range(0, len(body), BODY_PIECE_BYTES):
        session.send(dst, body[at : at + BODY_PIECE_BYTES], label, topic)


def receive_body(session: Session, src: int, size: int, label: str, topic: int = REQUESTS) -> bytes:
    """Wait for a body of ``size`` bytes, allocating memory piece by piece."""
    if size > _MOST_BODY_BYTES:
        raise nonsense(session, src, label, f"it has {size} bytes")
    pieces = []
    for at in range(0, size, BODY_PIECE_BYTES):
        wanted = min(BODY_PIECE_BYTES, size - at)
        piece = session.recv(src, label, wanted, topic=topic)
        session.engine.wait(piece)
        if len(piece.result) != wanted:
            raise nonsense(session, src, label, f"a piece of {len(piece.result)} bytes in place of {wanted}")
        pieces.append(piece.result)
    return b"".join(pieces)
