"""What others send to be added: in the order of ranks, whoever comes first, and refused where it does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from syncline.compression.reducers import Message, Reducer, Round, Total
from syncline.engine.order import CodedOrder
from syncline.errors import ProtocolError
from syncline.session.session import Session

GIVEN = (1e8, 1.0, -1e8, 3.0)
"""What their sum is depends on the order."""


def run(session: Session, *rounds: Round) -> None:
    def reducer() -> Reducer:
        for one in rounds:
            lengths = yield one
            assert len(lengths) == len(one.receives)

    def program(_: int) -> Any:
        raise AssertionError("a plan sums")

    session.engine.wait(session.engine.start(CodedOrder(lambda: [reducer], program, 0, "a total")))


def test_arrays_are_added_in_the_order_of_ranks(group: Any) -> None:
    def body(session: Session) -> float:
        me, everyone = session.index, range(4)
        array = np.full(30_000, GIVEN[me], np.float32)
        mine = array.copy()
        total = Total(array, [rank for rank in everyone if rank < me], [rank for rank in everyone if rank > me])
        run(session, Round([Message(rank, mine.view(np.uint8)) for rank in total.peers], [], total))
        assert (array == array[0]).all()
        return float(array[0])

    wanted = np.float32(0)
    for value in GIVEN:
        wanted += np.float32(value)
    assert group("ring", 4, body) == [wanted] * 4


def test_a_total_of_one_is_what_it_was(group: Any) -> None:
    def body(session: Session) -> float:
        array = np.full(5, GIVEN[session.index], np.float32)
        run(session, Round([], [], Total(array, [], [])))
        return float(array[0])

    assert group("ring", 2, body) == list(GIVEN[:2])


def test_an_array_of_another_size_is_refused_with_the_name_of_its_rank(group: Any) -> None:
    def body(session: Session) -> None:
        if session.index == 0:
            run(session, Round([Message(1, np.zeros(8, np.uint8))], []), Round([], [Message(1, np.zeros(1, np.uint8))]))
        else:
            run(session, Round([], [], Total(np.zeros(3, np.float32), [0], [])))

    with pytest.raises(ProtocolError, match="a total: 8 bytes came from rank 0 to be added to 12; do all ranks run"):
        group("ring", 2, body)
