"""Whether anything moves, and what others are told of it, without threads, peers or waiting."""

from __future__ import annotations

import pytest

from syncline.engine.watchdog import Watchdog
from syncline.errors import PeerTimeout
from syncline.wire.culprit import ANEW, Culprit, Found, Waits

LIMIT_S = 8.0


class Here:
    """One process that waits for rank 1: its clock, its bytes, and who is found to be to blame."""

    def __init__(self, culprit: Culprit | None = None) -> None:
        self.now_s, self.moved_bytes = 0.0, 0
        self.searches: list[Waits] = []
        self._culprit = culprit
        self.watchdog = Watchdog(LIMIT_S, lambda: {1: "sum"}, self._search, self, lambda: self.now_s)

    def _search(self, waits: Waits) -> Found:
        self.searches.append(waits)
        return Found(self._culprit, {})

    def look(self, needed: bool = True) -> None:
        """A look that lasts as long as it may."""
        self.now_s += (self.watchdog.stall or self.watchdog).patience_s
        self.watchdog.found_nothing(needed)

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
            here.watchdog.moved()
        elif how == "nobody needs it":
            here.look(needed=False)
        else:
            here.watchdog.stall = None
    assert here.searches == []


def test_a_longer_limit_holds_from_the_next_stall_on() -> None:
    here = Here(Culprit(2, "has not come"))
    here.watchdog.allow(LIMIT_S / 2)
    assert here.watchdog.limit_s == LIMIT_S
    here.look()
    here.watchdog.allow(10 * LIMIT_S)
    here.watchdog.moved()
    while here.now_s < 9 * LIMIT_S:
        here.look()
    assert here.searches == []


def test_bytes_that_move_are_seen_once() -> None:
    here = Here()
    assert not here.watchdog.bytes_moved()
    here.moved_bytes = 5
    assert [here.watchdog.bytes_moved(), here.watchdog.bytes_moved()] == [True, False]


def test_who_asks_is_answered_at_once_and_looked_for_again() -> None:
    here = Here()
    assert here.watchdog.looks >= here.watchdog.owed
    here.watchdog.moved()
    before = here.watchdog.answer(looking=True)
    assert (before.waits, before.moves, before.looks) == ({1: "sum"}, 1, 0)
    for _ in range(ANEW):
        assert here.watchdog.looks < here.watchdog.owed
        here.look()
    assert here.watchdog.looks >= here.watchdog.owed
    assert here.watchdog.answer(looking=True).still(before)
    here.watchdog.moved()
    assert not here.watchdog.answer(looking=True).still(before)


def test_who_has_nothing_to_look_for_says_so() -> None:
    here = Here()
    here.look(needed=False)
    assert here.watchdog.answer(looking=False).looks == -1
