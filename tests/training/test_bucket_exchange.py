"""Before a bucket goes: all workers that make the step update alike, and the bucket is weighed by this one's share."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from syncline.engine.order import Work
from syncline.errors import MismatchError
from syncline.kernels import cpu
from syncline.session.tickets import JOINED, STEP, Meeting, Ticket, step_argument, ticket_table
from syncline.strategy.strategy import Strategy
from syncline.training.exchange import REPLACES, BucketExchange, storages_of
from syncline.training.memory import Blocks, Staging

KEY, RULE_AT = 3, 32


class Rank:
    """One of two workers whose optimizer is said to be a ``rule``; its session has a name for each, and no engine."""

    def __init__(self, rule: str | None) -> None:
        self.strategy, self.choice, self.rank = Strategy.parse("ring schedule=fixed"), None, 0
        self.layers, self.buckets, self.renewed = (), (), None
        self.rule, self.arrays = rule, ()
        said = None if rule is None else lambda: str(self.rule)
        me: Any = self
        self.exchange = BucketExchange(me, KEY, me, cast("list[Blocks]", [self]), cast("Staging", None), rule=said)

    def computes_on_device(self, *_: object) -> bool:
        return False

    def compression(self, *_: object) -> None:
        """There is no codec."""

    def name(self, rank: int) -> str:
        return f"rank {rank}"

    def titled(self, text: str) -> str:
        return text

    def goes(self, other: Ticket, weight: float = 1.0) -> list[float]:
        """What a bucket of ones is when it goes, where the other worker has shown this."""
        mine = Ticket(STEP, 1, step_argument(KEY, 4), weight, self.exchange.flags)
        table = ticket_table(2, 0, mine) | ticket_table(2, 1, other)
        work = Work("tickets")
        work.done = True
        array = np.ones(3)
        meeting = Meeting(work, table, mine, lambda _, __: MismatchError("kinds"))
        self.exchange._check_and_weigh(partial(cpu.weigh, array), meeting)
        return array.tolist()


def step(flags: int, weight: float = 1.0, kind: int = STEP) -> Ticket:
    return Ticket(kind, 1, step_argument(KEY, 4), weight, flags)


def test_a_bucket_goes_as_it_is_where_all_count_alike() -> None:
    rank = Rank("sgd(lr=0.1)")
    assert rank.goes(step(rank.exchange.flags)) == [1.0] * 3
    assert rank.goes(step(rank.exchange.flags, 3.0)) == [0.5] * 3
    assert rank.goes(step(rank.exchange.flags), 0.0) == [0.0] * 3


def test_who_updates_by_another_rule_is_named_before_anything_goes() -> None:
    rank = Rank("sgd(lr=0.1)")
    before = rank.exchange.flags
    rank.rule = "sgd(lr=0.2)"
    text = r"rank 1 has other optimizer values in step 4 than rank 0, which has sgd\(lr=0.2\)"
    for _ in range(2):
        with pytest.raises(MismatchError, match=text):
            rank.goes(step(before))


def test_what_else_a_ticket_says_is_no_rule() -> None:
    """Of another layout, or how many steps one has made that has no batches left."""
    rank = Rank("sgd(lr=0.1)")
    assert rank.goes(step(rank.exchange.flags | REPLACES)) == [1.0] * 3
    assert rank.goes(step(1000 << RULE_AT, 0.0, JOINED), 2.0) == [2.0] * 3
    unruled = Rank(None)
    assert unruled.exchange.flags >> RULE_AT == 0
    assert unruled.goes(step(5 << RULE_AT)) == [1.0] * 3


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("ring schedule=fixed", 1),
        ("ring schedule=delayed", 2),
        ("ring schedule=fixed sync=local(steps=2)", 1),
        ("ring schedule=fixed sync=post_local(after=2, steps=2)", 2),
    ],
)
def test_gradients_and_weights_have_memory_of_their_own_and_so_have_two_steps_under_way(text: str, count: int) -> None:
    assert storages_of(Strategy.parse(text)) == count
