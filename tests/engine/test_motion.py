"""Whether anything moves, and what others are told of it, without threads, peers or waiting."""

from __future__ import annotations

import pytest

from syncline.engine.motion import Motion
from syncline.errors import PeerTimeout
from syncline.wire.culprit import ANEW, Culprit, Found, Waits

LIMIT_S = 8.0


class Here:
    """One process that waits for rank 1: its clock, its bytes, and who is found to be to blame."""

    def __init__(self, culprit: Culprit | None = None) -> None:
        self.now_s, self.moved_bytes = 0.0, 0
        self.searches: list[Waits] = []
        self._culprit = culprit
        self.motion = Motion(LIMIT_S, lambda: {1: "sum"}, self._search, self, lambda: self.now_s)

    def _search(self, waits: Waits) -> Found:
        self.searches.append(waits)
        return Found(self._culprit, {})

    def look(self, needed: bool = True) -> None:
        """A look that lasts as long as it may."""
        self.now_s += (self.motion.stall or self.motion).patience_s
        self.motion.looked_in_vain(needed)

    def look_on(self) -> None:
        """Until it is a fault."""
        for _ in range(100):
            self.look()


def test_what_stands_still_for_the_limit_is_a_fault_that_names_who_is_to_blame() -> None:
    here = Here(Culprit(2, "has not come"))
    expected = r"nothing has moved for 8\.\d s, waiting for rank 1 \(sum\); rank 2 has not come"
    with pytest.raises(PeerTimeout, match=expected) as caught:
        here.look_on()
    assert caught.value.rank == 2
    assert here.searches == [{1: "sum"}] * 2  # the second confirms the first


def test_where_nobody_is_found_the_fault_says_for_whom_it_waits() -> None:
    here = Here()
    with pytest.raises(PeerTimeout, match=r"waiting for rank 1 \(sum\)$") as caught:
        here.look_on()
    assert caught.value.rank == -1


@pytest.mark.parametrize("how", ["moves", "nobody needs it", "another thread looks"])
def test_time_is_counted_anew(how: str) -> None:
    here = Here(Culprit(2, "has not come"))
    for _ in range(10):
        for _ in range(6):
            here.look()
        if how == "moves":
            here.motion.moved()
        elif how == "nobody needs it":
            here.look(needed=False)
        else:
            here.motion.stall = None
    assert here.searches == []


def test_a_longer_limit_holds_from_the_next_stall_on() -> None:
    here = Here(Culprit(2, "has not come"))
    here.motion.allow(LIMIT_S / 2)
    assert here.motion.limit_s == LIMIT_S
    here.look()
    here.motion.allow(10 * LIMIT_S)
    here.motion.moved()
    while here.now_s < 9 * LIMIT_S:
        here.look()
    assert here.searches == []


def test_bytes_that_move_are_seen_once() -> None:
    here = Here()
    assert not here.motion.crept()
    here.moved_bytes = 5
    assert [here.motion.crept(), here.motion.crept()] == [True, False]


def test_who_asks_is_answered_at_once_and_looked_for_again() -> None:
    here = Here()
    assert here.motion.looks >= here.motion.owed
    here.motion.moved()
    before = here.motion.answer(looking=True)
    assert (before.waits, before.moves, before.looks) == ({1: "sum"}, 1, 0)
    for _ in range(ANEW):
        assert here.motion.looks < here.motion.owed
        here.look()
    assert here.motion.looks >= here.motion.owed
    assert here.motion.answer(looking=True).still(before)
    here.motion.moved()
    assert not here.motion.answer(looking=True).still(before)


def test_who_has_nothing_to_look_for_says_so() -> None:
    here = Here()
    here.look(needed=False)
    assert here.motion.answer(looking=False).looks == -1
