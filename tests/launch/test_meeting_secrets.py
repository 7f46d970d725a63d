"""What proves at the meeting that a process belongs to the start: who cannot is warned, and ends no rank."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starts import LIMIT_S, WRONG, Case, Stranger, environment, free_port

from syncline.errors import SecretError, UsageError
from syncline.launch.meeting import secret_bytes


@pytest.mark.parametrize("given", ["text", b"text"])
def test_a_secret_that_is_given_comes_before_the_environments(start: Case, given: str | bytes) -> None:
    port = free_port()
    places = [environment(rank, port=port, secret=b"variable") for rank in range(2)]
    assert start(*places, secret=given) == [b"text"] * 2
    assert start(*places) == [b"variable"] * 2


def test_without_one_rank_0_makes_a_key_and_warns(start: Case, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    with caplog.at_level(logging.WARNING, "syncline"):
        mine, theirs = start(environment(0, port=port), environment(1, port=port))
    assert "no secret is set" in caplog.text
    assert mine == theirs
    assert len(mine) == 32


@pytest.mark.parametrize("given", ["", b""])
def test_an_empty_secret_is_refused(given: str | bytes) -> None:
    with pytest.raises(UsageError, match="secret= is empty, which proves nothing: give the same random text"):
        secret_bytes(given)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"secret": "a guess"}, "rank 1 has another secret than what answers at 127.0.0.1"),
        ({"secret": None}, "rank 1 has no secret, rank 0 has one: set SYNCLINE_SECRET"),
    ],
    ids=["another", "none"],
)
def test_a_rank_that_cannot_prove_itself_is_warned_at_once(
    start: Case, other: dict[str, Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends, as the others do, when its time is over: what answers may be a stranger, and gone when rank 0 comes."""
    port = free_port()
    each = [{"secret": "text", "timeout": 0.5}, {"timeout": 1.0} | other]
    with caplog.at_level(logging.WARNING, "syncline"):
        told, own = start(environment(0, port=port), environment(1, port=port), each=each)
    assert isinstance(own, SecretError)
    assert text in str(own)
    assert caplog.text.count(f"rank 1: what answers at 127.0.0.1:{port}, where rank 0 should be, has another") == 1
    assert "rank 1 (one that claims to be it was refused at 127.0.0.1" in str(told)


@pytest.mark.parametrize("answer", WRONG, ids=["wrong", "nothing"])
@pytest.mark.parametrize("secret", ["text", None])
def test_whoever_answers_at_the_port_before_rank_0_ends_no_rank(start: Case, answer: bytes, secret: str | None) -> None:
    stranger = Stranger(answer)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(start, environment(1, port=stranger.port), secret=secret)
        stranger.answer_one()
        mine = start(environment(0, port=stranger.port), secret=secret)
        assert early.result(LIMIT_S) == mine
