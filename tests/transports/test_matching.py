"""Messages and receives meet first to first per sender and tag, whichever side comes first."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from syncline.transports._operations import Matcher

steps = st.lists(st.tuples(st.sampled_from(["post", "arrive"]), st.integers(0, 2), st.integers(0, 2)), max_size=60)


@given(steps)
def test_the_nth_receive_of_a_key_gets_its_nth_message(run: list[tuple[str, int, int]]) -> None:
    matcher: Matcher[int, int] = Matcher()
    posted: dict[tuple[int, int], int] = defaultdict(int)
    arrived: dict[tuple[int, int], int] = defaultdict(int)
    for what, src, tag in run:
        key = src, tag
        if what == "post":
            expected = posted[key] if arrived[key] > posted[key] else None
            assert matcher.post(src, tag, posted[key]) == expected
            posted[key] += 1
        else:
            expected = arrived[key] if posted[key] > arrived[key] else None
            assert matcher.arrive(src, tag, arrived[key]) == expected
            arrived[key] += 1
    for src in range(3):
        for tag in range(3):
            for number in range(arrived[src, tag], posted[src, tag]):
                assert matcher.take(src, tag) == number
            assert matcher.take(src, tag) is None


def test_a_receive_is_taken_out_once() -> None:
    matcher: Matcher[str, str] = Matcher()
    assert matcher.take(0, 1) is None
    assert matcher.post(0, 1, "first") is None
    assert matcher.post(0, 1, "second") is None
    assert matcher.take(0, 1) == "first"
    assert matcher.arrive(0, 1, "message") == "second"
    assert matcher.take(0, 1) is None


def test_forgetting_a_sender_keeps_its_messages_and_others_receives() -> None:
    matcher: Matcher[str, str] = Matcher()
    matcher.post(0, 1, "waits for 0")
    matcher.post(1, 1, "waits for 1")
    matcher.arrive(0, 2, "came before")
    matcher.forget(0)
    assert matcher.take(0, 1) is None
    assert matcher.take(1, 1) == "waits for 1"
    assert matcher.post(0, 2, "asks later") == "came before"
