"""A group as the scope of what an engine is given: its peers, keys, labels and figures are its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from two_engines import LIMIT_S, engines, ring

from syncline.compression.reducers import Reducer, Round
from syncline.engine.engine import Engine
from syncline.engine.order import CodedOrder, Order, When, Work
from syncline.engine.scope import BLOCK_BITS, SCOPES, Scope
from syncline.errors import UsageError

LAST = 1 << 63
"""The tag of a single message."""


def within(made: list[Engine], number: int, ranks: tuple[int, ...] = (1, 0)) -> list[Engine]:
    """The engines of a scope, in its order."""
    return [made[rank].within(Scope(ranks, index, number)) for index, rank in enumerate(ranks)]


def test_messages_of_scopes_and_of_the_run_with_one_tag_do_not_meet() -> None:
    with engines() as made:
        pairs = [made, *(within(made, number) for number in (1, 2, SCOPES - 1))]
        works = [pair[1].recv(0, LAST, 8, "a message") for pair in pairs]
        for number, pair in reversed(list(enumerate(pairs))):
            pair[0].send(1, LAST, bytes([number]), "a message")
        for number, (pair, work) in enumerate(zip(pairs, works, strict=True)):
            pair[1].wait(work, timeout=LIMIT_S)
            assert work.result == bytes([number])
        assert [work.label for work in works[:2]] == ["a message", "group of ranks 1, 0: a message"]


def test_orders_of_one_key_run_at_once_and_are_counted_for_the_scope_alone() -> None:
    with engines() as made:
        one, other = within(made, 1), within(made, 2)
        arrays = {(pair, rank): np.full(4, 10.0 * pair + rank) for pair in (0, 1) for rank in (0, 1)}

        def start(pair: int, rank: int) -> Work:
            order = Order(ring(rank), arrays[pair, rank], 7, "sum")
            return (one, other)[pair][rank].start(order, When(announce=True))

        works = [start(0, 0), start(1, 0), start(1, 1), start(0, 1)]
        for rank, work in zip((0, 0, 1, 1), works, strict=True):
            one[rank].wait(work, timeout=LIMIT_S)
        assert all((arrays[pair, rank] == 20 * pair + 1).all() for pair, rank in arrays)
        assert one[0].traffic() == other[0].traffic() == ({0: 32}, {0: 32})
        assert works[0].label == "group of ranks 1, 0: sum"


def test_time_in_a_scope_counts_for_the_run_and_not_the_other_way_round() -> None:
    with engines() as made, ThreadPoolExecutor() as pool:
        here = within(made, 1)
        list(pool.map(lambda rank: here[rank].run(Order(ring(rank), np.ones(4), 0, "sum")), (0, 1)))
        counted = here[0].blocked_s
        assert 0 < counted <= made[1].blocked_s
        list(pool.map(lambda rank: made[rank].run(Order(ring(rank), np.ones(4), 0, "sum")), (0, 1)))
        assert here[0].blocked_s == counted
        before = made[1].blocked_s
        with here[0].uncounted():
            made[0].send(1, LAST, b"", "late")
            here[0].wait(made[1].recv(0, LAST, 0, "late"), timeout=LIMIT_S)
        assert (here[0].blocked_s, made[1].blocked_s) == (counted, before)


def test_who_is_expected_in_a_scope_is_awaited_in_the_run_by_its_number_there() -> None:
    with engines() as made:
        here = within(made, 1)
        made[1].expect(lambda: {1: "an update"})
        here[0].expect(lambda: {1: "a push"})
        assert made[1].waits() == {0: "a push", 1: "an update"}
        assert here[0].awaited == {0, 1}
        here[0].expect(dict)
        assert (made[1].awaited, here[0].awaited) == ({1}, {0})


def test_a_reducer_in_a_scope_waits_for_its_device() -> None:
    device = Mock()

    def reducer() -> Reducer:
        yield Round([], [], after=device)

    order = CodedOrder(lambda: [reducer], lambda _: Mock(), 0, "bucket 0")
    (started,) = Scope((3, 5), 0, 1).coded_order(order).pieces()
    asked = next(started())
    assert isinstance(asked, Round)
    assert asked.after is device


def test_a_key_beyond_the_block_is_refused() -> None:
    with engines() as made:
        engine = within(made, 1)[0]
        with pytest.raises(UsageError, match=rf"group of ranks 1, 0: key {1 << BLOCK_BITS} is out of range"):
            engine.start(Order(ring(0), np.ones(4), 1 << BLOCK_BITS, "sum"))


def test_ranks_of_a_scope_meet_before_they_exchange() -> None:
    with engines() as made:
        assert not within(made, 1)[0].shows(ring(0), np.ones(4))
