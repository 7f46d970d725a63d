"""Who holds everybody up: from any process that waits, the search ends at the same one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.wire.culprit import ANSWER_BYTES, Answer, Culprit, Found, Waits, find_culprit, pack, unpack

Graph = dict[int, Waits | None]


def found(me: int, graph: Graph) -> Culprit | None:
    asked: list[int] = []

    def ask(peer: int) -> Answer | None:
        assert peer != me
        assert peer not in asked
        asked.append(peer)
        waits = graph[peer]
        return None if waits is None else Answer(waits)

    search = find_culprit(me, graph[me] or {}, ask)
    assert list(search.answers) == asked
    return search.culprit


def test_in_a_ring_it_is_found_from_far_away() -> None:
    ring: Graph = {0: {3: "bucket 3"}, 1: {0: "bucket 3"}, 2: {}, 3: {2: "bucket 3"}}
    assert [found(rank, ring) for rank in (0, 1, 3)] == [Culprit(2, "has not come to bucket 3")] * 3


def test_behind_several_servers() -> None:
    """Workers 0 and 2 wait for both servers, one of which has heard nothing yet of what the other waits for."""
    both = {3: "bucket 1", 4: "bucket 2"}
    graph: Graph = {0: both, 1: {}, 2: both, 3: {1: "bucket 1"}, 4: {1: "bucket 2"}}
    assert found(0, graph) == found(2, graph) == Culprit(1, "has not come to bucket 1")


def test_who_waits_for_one_that_waits_for_it_and_for_others() -> None:
    graph: Graph = {0: {1: "a send"}, 1: {0: "a receive", 2: "a send"}, 2: {}}
    assert found(0, graph) == Culprit(2, "has not come to a send")


def test_one_that_does_not_answer_is_named() -> None:
    graph: Graph = {0: {1: "bucket 0"}, 1: {2: "bucket 0"}, 2: None}
    assert found(0, graph) == Culprit(2, "does not say for whom it waits in bucket 0")


def test_where_all_wait_for_each_other_one_is_named() -> None:
    graph: Graph = {0: {1: "bucket 0"}, 1: {2: "bucket 1"}, 2: {0: "bucket 2"}}
    circle = "rank 2 for rank 0 (bucket 2), rank 0 for rank 1 (bucket 0), rank 1 for rank 2 (bucket 1)"
    assert found(0, graph) == Culprit(2, f"waits for others that wait for it, in bucket 1: {circle}")


def test_of_those_that_wait_for_each_other_the_search_tells_in_what() -> None:
    """Who only waits for one of them is left out; of many some are told."""
    graph: Graph = {0: {1: "a push"}, 1: {2: "step 4", 1: "itself"}, 2: {1: "barrier", 2: "itself"}}
    circle = "rank 2 for rank 1 (barrier), rank 1 for rank 2 (step 4)"
    assert found(0, graph) == Culprit(2, f"waits for others that wait for it, in step 4: {circle}")
    ring: Graph = {rank: {(rank + 1) % 20: "a send"} for rank in range(20)}
    blamed = found(0, ring)
    assert blamed is not None
    assert blamed.why.endswith("rank 6 for rank 7 (a send), and so on")


def test_who_waits_for_itself_waits_for_nobody() -> None:
    assert found(0, {0: {1: "bucket 0"}, 1: {1: "bucket 5"}}) == Culprit(1, "has not come to bucket 0")


def test_who_waits_for_nobody_blames_nobody() -> None:
    assert found(0, {0: {}}) is None


BLAMED = Culprit(2, "has not come to bucket 0")
SERVER = Answer({2: "bucket 0"}, moves=5, looks=3)
LATE = Answer({}, moves=7)
SEARCH = Found(BLAMED, {1: SERVER, 2: LATE})
NEXT = Found(BLAMED, {1: replace(SERVER, looks=5), 2: LATE})


def test_a_search_is_confirmed_by_one_after_which_all_have_looked_and_nothing_has_moved() -> None:
    assert NEXT.confirms(SEARCH)
    silent = Found(Culprit(1, "does not say for whom it waits in bucket 0"), {1: None})
    assert silent.confirms(silent)


@pytest.mark.parametrize(
    "answers",
    [
        {1: SERVER, 2: LATE},
        {1: replace(SERVER, looks=4), 2: LATE},
        {1: replace(SERVER, moves=6, looks=5), 2: LATE},
        {1: replace(SERVER, waits={2: "bucket 1"}, looks=5), 2: LATE},
        {1: replace(SERVER, looks=-1), 2: LATE},
        {1: replace(SERVER, looks=5), 2: replace(LATE, looks=1)},
        {1: replace(SERVER, looks=5), 2: replace(LATE, moves=8)},
        {1: None, 2: LATE},
        {2: LATE},
        {1: replace(SERVER, looks=5), 2: LATE, 3: LATE},
    ],
    ids=[
        "has not looked",
        "may have looked before",
        "moved",
        "waits for more",
        "rests",
        "drives",
        "came",
        "is silent",
        "left out",
        "one more",
    ],
)
def test_what_may_have_changed_between_two_searches_confirms_nothing(answers: dict[int, Answer | None]) -> None:
    assert not Found(BLAMED, answers).confirms(SEARCH)


def test_another_culprit_confirms_nothing() -> None:
    assert not replace(NEXT, culprit=Culprit(1, "has not come to bucket 0")).confirms(SEARCH)


PROCESSES = 300
waits = st.dictionaries(st.integers(0, PROCESSES - 1), st.text(max_size=60).filter(str.isprintable))
counts = st.integers(0, 2**63 - 1)


@given(waits, counts, counts | st.just(-1))
def test_an_answer_comes_as_it_was_said(said: Waits, moves: int, looks: int) -> None:
    answer = unpack(pack(Answer(said, moves, looks)), PROCESSES)
    heard = answer.waits
    assert (answer.moves, answer.looks) == (moves, looks)
    assert list(heard) == sorted(said)
    assert all(said[peer].startswith(label) for peer, label in heard.items())
    assert all(heard[peer] == label for peer, label in said.items() if len(label.encode()) <= 100)


def test_the_shortest_and_the_longest_answer_are_understood() -> None:
    assert len(pack(Answer({}))) == min(ANSWER_BYTES)
    said = pack(Answer(dict.fromkeys(range(PROCESSES), "x" * 1000)))
    assert len(said) == max(ANSWER_BYTES)
    assert len(unpack(said, PROCESSES).waits) < PROCESSES


COUNTS = pack(Answer({}))


def entry(peer: int, text: bytes, size: int | None = None) -> bytes:
    return peer.to_bytes(4, "little") + bytes([len(text) if size is None else size]) + text


@pytest.mark.parametrize(
    "said",
    [
        b"\0",
        entry(1, b""),
        entry(0, b"") * 2,
        entry(0, b"abc", 4),
        entry(0, b"x" * 101),
        b"".join(entry(peer, b"") for peer in range(257)),
    ],
    ids=["cut off", "no such rank", "twice", "a cut label", "a long label", "too many"],
)
def test_nonsense_raises(said: bytes) -> None:
    with pytest.raises(ValueError, match="an entry"):
        unpack(COUNTS + said, 1 if len(said) < 1000 else PROCESSES)


def test_counts_that_no_process_has_raise() -> None:
    with pytest.raises(ValueError, match="cut off"):
        unpack(COUNTS[:-1], PROCESSES)
    with pytest.raises(ValueError, match="looked -2 times"):
        unpack(pack(Answer({}, looks=-2)), PROCESSES)


def test_what_a_terminal_would_act_on_is_left_out() -> None:
    assert unpack(COUNTS + entry(0, b"\x1b[2Jbucket"), 1).waits == {0: "[2Jbucket"}
