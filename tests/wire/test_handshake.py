"""The mutual proof: only the two ends of one run, one pair and one purpose pass, and nothing recorded passes twice."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from syncline.errors import HandshakeError
from syncline.wire.handshake import (
    ANSWER_BYTES,
    HELLO_BYTES,
    MAC_BYTES,
    answer,
    check_answer,
    check_proof,
    hello,
    read_hello,
    run_id,
)

RUN = run_id("a run")
SECRET = b"known to all ranks of the run"

ranks = st.integers(0, 2**32 - 1)
purposes = st.text("abcdefghijklmnopqrstuvwxyz-", min_size=1, max_size=16)


@given(ranks, ranks, purposes, st.binary(min_size=1))
def test_both_ends_that_know_the_secret_accept_each_other(
    source: int, target: int, purpose: str, secret: bytes
) -> None:
    said = hello(RUN, source, target, purpose)
    heard = read_hello(said.raw)
    assert heard == said
    reply = answer(secret, heard)
    check_proof(secret, heard, reply, check_answer(secret, said, reply))


def test_every_message_has_its_one_size() -> None:
    said = hello(RUN, 1, 0, "data")
    reply = answer(SECRET, said)
    proof = check_answer(SECRET, said, reply)
    assert (len(said.raw), len(reply), len(proof)) == (HELLO_BYTES, ANSWER_BYTES, MAC_BYTES)


@given(st.binary(), st.binary())
def test_another_secret_is_refused_by_both_ends(one: bytes, other: bytes) -> None:
    # HMAC pads short keys with zero bytes: such keys are one key.
    assume(one.rstrip(b"\0") != other.rstrip(b"\0"))
    said = hello(RUN, 1, 0, "data")
    with pytest.raises(HandshakeError, match="secret"):
        check_answer(one, said, answer(other, said))
    reply = answer(one, said)
    with pytest.raises(HandshakeError, match="secret"):
        check_proof(one, said, reply, check_answer(other, said, answer(other, said)))


@pytest.mark.parametrize(
    "changed", [{"run": run_id("another run")}, {"source": 2}, {"target": 3}, {"purpose": "control"}]
)
def test_a_proof_is_bound_to_run_ranks_and_purpose(changed: dict[str, object]) -> None:
    """Whoever holds a valid proof cannot use it for another hello, not even one with the same nonce."""
    terms: dict[str, object] = {"run": RUN, "source": 1, "target": 0, "purpose": "data"}
    said, other = hello(**terms), hello(**(terms | changed))  # type: ignore[arg-type]
    nonce = len(said.raw) - 24
    other = dataclasses.replace(other, raw=other.raw[:nonce] + said.raw[nonce:])
    reply = answer(SECRET, said)
    proof = check_answer(SECRET, said, reply)
    with pytest.raises(HandshakeError):
        check_answer(SECRET, other, reply)
    with pytest.raises(HandshakeError):
        check_proof(SECRET, other, reply, proof)


def test_a_recorded_exchange_proves_nothing_again() -> None:
    said = hello(RUN, 1, 0, "data")
    reply = answer(SECRET, said)
    proof = check_answer(SECRET, said, reply)
    with pytest.raises(HandshakeError):  # to the listener, whose nonce is a new one
        check_proof(SECRET, said, answer(SECRET, said), proof)
    with pytest.raises(HandshakeError):  # to a dialler, whose nonce is a new one
        check_answer(SECRET, hello(RUN, 1, 0, "data"), reply)


def test_the_listeners_proof_reflected_is_not_the_diallers() -> None:
    said = hello(RUN, 1, 0, "data")
    reply = answer(SECRET, said)
    with pytest.raises(HandshakeError):
        check_proof(SECRET, said, reply, reply[-MAC_BYTES:])


@given(st.binary(max_size=2 * HELLO_BYTES))
@settings(max_examples=300)
def test_noise_is_refused_as_a_hello(noise: bytes) -> None:
    with pytest.raises(HandshakeError):
        read_hello(noise)


@given(st.integers(0, HELLO_BYTES - 1), st.integers(1, 255))
def test_a_damaged_hello_is_refused_or_its_proofs_are(position: int, damage: int) -> None:
    said = hello(RUN, 1, 0, "data")
    raw = bytearray(said.raw)
    raw[position] ^= damage
    try:
        heard = read_hello(bytes(raw))
    except HandshakeError:
        return
    with pytest.raises(HandshakeError):
        check_answer(SECRET, said, answer(SECRET, heard))


@given(st.binary(max_size=2 * ANSWER_BYTES), st.binary(max_size=2 * MAC_BYTES))
def test_noise_and_fragments_are_refused_as_proofs(noise: bytes, other: bytes) -> None:
    said = hello(RUN, 1, 0, "data")
    with pytest.raises(HandshakeError):
        check_answer(SECRET, said, noise)
    with pytest.raises(HandshakeError):
        check_proof(SECRET, said, answer(SECRET, said), other)


@given(st.integers(0, ANSWER_BYTES - 1))
def test_a_truncated_answer_is_refused(length: int) -> None:
    said = hello(RUN, 1, 0, "data")
    with pytest.raises(HandshakeError):
        check_answer(SECRET, said, answer(SECRET, said)[:length])
