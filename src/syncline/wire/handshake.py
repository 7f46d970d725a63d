"""Mutual authentication of the two ends of a connection. Pure functions over messages of fixed size, no I/O.

    dialler  -> listener   hello      magic, run, from, to, purpose, nonce             (72 bytes)
    listener -> dialler    answer     nonce, HMAC(secret, "listener", hello, nonce)    (56 bytes)
    dialler  -> listener   proof      HMAC(secret, "dialler", hello, nonce)            (32 bytes)
    (over TLS, if the run asks for it: its handshake)
    listener -> dialler    welcome    one byte

Each end proves that it knows the secret, for this run, these two ranks and this purpose, and whether TLS follows. Both
nonces enter both proofs, so a recorded exchange proves nothing later. Each message has a fixed size, so no end relies
on a length that a stranger has sent. HMAC is SHA-256 (RFC 2104).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import struct
from dataclasses import dataclass

from ..errors import HandshakeError, SecretError

MAGIC = b"SYNCLIN1"
NONCE_BYTES = 24
MAC_BYTES = 32
RUN_BYTES = 16
WELCOME = b"\x06"

_HELLO = struct.Struct(f"<8s{RUN_BYTES}sII16s{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
ANSWER_BYTES = NONCE_BYTES + MAC_BYTES


@dataclass(frozen=True)
class Hello:
    """A dialler's first message. ``raw`` are its bytes, which both proofs cover."""

    run: bytes
    source: int
    target: int
    purpose: str
    raw: bytes


def run_id(text: str) -> bytes:
    """The 16 bytes that represent a run's name in messages."""
    return hashlib.sha256(os.fsencode(text)).digest()[:RUN_BYTES]


def hello(run: bytes, source: int, target: int, purpose: str) -> Hello:
    """The first message of process ``source`` to process ``target``."""
    name = purpose.encode()
    raw = _HELLO.pack(MAGIC, run, source, target, name, secrets.token_bytes(NONCE_BYTES))
    return Hello(run, source, target, purpose, raw)


def read_hello(raw: bytes) -> Hello:
    """Parse a first message. Raises HandshakeError for other bytes."""
    if len(raw) != HELLO_BYTES:
        raise HandshakeError(f"its first message has {len(raw)} bytes instead of {HELLO_BYTES}")
    magic, run, source, target, purpose, _ = _HELLO.unpack(raw)
    if magic != MAGIC:
        raise HandshakeError("it does not speak this protocol")
    try:
        return Hello(run, source, target, purpose.rstrip(b"\0").decode("ascii"), raw)
    except UnicodeDecodeError:
        raise HandshakeError("it does not speak this protocol") from None


def answer(secret: bytes, said: Hello, tls: bool = False) -> bytes:
    """The listener's nonce and proof."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + _mac(secret, b"listener", said, nonce, tls)


def check_answer(secret: bytes, said: Hello, reply: bytes, tls: bool = False) -> bytes:
    """Check the listener's answer and return the dialler's proof. Raises SecretError, or HandshakeError for TLS."""
    nonce, proof = reply[:NONCE_BYTES], reply[NONCE_BYTES:]
    _check(secret, b"listener", said, nonce, tls, proof)
    return _mac(secret, b"dialler", said, nonce, tls)


def check_proof(secret: bytes, said: Hello, reply: bytes, proof: bytes, tls: bool = False) -> None:
    """Check the dialler's proof. Raises SecretError, or HandshakeError for TLS."""
    _check(secret, b"dialler", said, reply[:NONCE_BYTES], tls, proof)


def _check(secret: bytes, side: bytes, said: Hello, nonce: bytes, tls: bool, proof: bytes) -> None:
    if hmac.compare_digest(proof, _mac(secret, side, said, nonce, tls)):
        return
    if hmac.compare_digest(proof, _mac(secret, side, said, nonce, not tls)):
        its, own = ("without TLS", "with TLS") if tls else ("with TLS", "without TLS")
        raise HandshakeError(f"it runs {its}, but this process {own}: give all the same --tls, SYNCLINE_TLS or tls=")
    raise SecretError("it does not know this run's secret")


def _mac(secret: bytes, side: bytes, said: Hello, nonce: bytes, tls: bool) -> bytes:
    return hmac.new(secret, side + (b" tls" if tls else b"") + said.raw + nonce, hashlib.sha256).digest()
