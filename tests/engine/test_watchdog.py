"""Whether anything moves and which peer is to blame, on a clock that the tests turn."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from syncline.engine.watchdog import LOOKS, SEARCHES, Stall, Watchdog
from syncline.errors import PeerTimeout
from syncline.wire.culprit import ANEW, Answer, Culprit, Found, Waits

LIMIT_S = 8.0


class Here:
    """One process that waits for rank 1: its clock, its bytes, and who is found to be to blame."""

    def __init__(self, culprit: Culprit | None = None) -> None:
        self.now_s, self.moved_bytes = 0.0, 0
        self.searches: list[Waits] = []
        self._culprit = culprit
        self.watchdog = Watchdog(
            LIMIT_S, lambda: {1: "sum"}, self._search, lambda: self.moved_bytes, lambda: self.now_s
        )

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
    assert here.watchdog.looks >= here.watchdog.awaited_looks
    here.watchdog.moved()
    before = here.watchdog.answer(looking=True)
    assert (before.waits, before.moves, before.looks) == ({1: "sum"}, 1, 0)
    for _ in range(ANEW):
        assert here.watchdog.looks < here.watchdog.awaited_looks
        here.look()
    assert here.watchdog.looks >= here.watchdog.awaited_looks
    assert here.watchdog.answer(looking=True).still(before)
    here.watchdog.moved()
    assert not here.watchdog.answer(looking=True).still(before)


def test_who_has_nothing_to_look_for_says_so() -> None:
    here = Here()
    here.look(needed=False)
    assert here.watchdog.answer(looking=False).looks == -1


STALL_LIMIT_S = 80.0
ROUGH_S = 0.7
GUILTY = Found(Culprit(1, "has not come to bucket 0"), {1: Answer({})})
OTHER = Found(Culprit(2, "has not come to bucket 0"), {2: Answer({})})


@dataclass
class Clock:
    """One stall from time 0, and what its searches find, the last of them again and again."""

    finds: list[Found] = field(default_factory=lambda: [GUILTY])
    now: float = 0.0
    searches: int = 0
    limit_s: float = STALL_LIMIT_S
    search_s: float = 0.0

    def __post_init__(self) -> None:
        self.stall = Stall(self.limit_s, self.limit_s / LOOKS, lambda: self.now)

    def search(self) -> Found:
        self.searches += 1
        self.now += self.search_s
        return self.finds.pop(0) if len(self.finds) > 1 else self.finds[0]

    def look(self, lasted_s: float) -> Found | None:
        self.now += lasted_s
        return self.stall.look(self.search)

    def on_time(self) -> Found | None:
        return self.look(self.stall.patience_s)

    def until_certain(self) -> Found:
        while True:
            found = self.on_time()
            if found is not None:
                return found


def test_it_is_searched_once_the_limit_is_over_and_a_second_time() -> None:
    clock = Clock()
    for _ in range(LOOKS - 1):
        assert clock.on_time() is None
    assert clock.searches == 0
    assert clock.until_certain() is GUILTY
    assert clock.searches == 2
    assert STALL_LIMIT_S <= clock.now < STALL_LIMIT_S + 1


def test_the_time_in_which_this_process_did_not_look_does_not_count() -> None:
    """A machine that was asleep for a day: those that wait for each other have not had a moment to go on."""
    clock = Clock()
    for _ in range(LOOKS // 2 - 1):
        assert clock.look(86_400.0) is None
    assert clock.searches == 0


def test_somebody_that_was_busy_at_the_first_look_is_not_blamed() -> None:
    clock = Clock([OTHER, GUILTY])
    assert clock.until_certain() is GUILTY
    assert clock.searches == 3


def test_where_others_move_on_for_ever_the_last_search_counts() -> None:
    moving = [Found(GUILTY.culprit, {1: Answer({}, moves)}) for moves in range(2 * SEARCHES)]
    clock = Clock(moving.copy())
    assert clock.until_certain() is moving[SEARCHES - 1]


def busy(moves: int, looks: int = 5) -> Found:
    """A search that ends at rank 2, asked by way of rank 1."""
    return Found(OTHER.culprit, {1: Answer({2: "bucket 0"}, moves, looks), 2: Answer({})})


def test_one_that_does_not_look_for_messages_is_named_instead_of_whom_it_seems_to_wait_for() -> None:
    clock = Clock([busy(3)])
    found = clock.until_certain().culprit
    assert found is not None
    assert found.rank == 1
    waited = clock.now - STALL_LIMIT_S
    assert found.why.startswith(f"has not looked for messages for {waited:.1f} s: a call")
    assert clock.searches == SEARCHES


@pytest.mark.parametrize("last", [busy(4), busy(3, 6), busy(3, -1), OTHER], ids=["moved", "looked", "rests", "gone"])
def test_one_that_has_looked_in_between_is_not_said_to_be_busy(last: Found) -> None:
    clock = Clock([busy(3), busy(3), last, *(busy(moves) for moves in range(5, 5 + SEARCHES))])
    assert clock.until_certain().culprit == OTHER.culprit


@pytest.mark.parametrize("limit_s", [0.2, 2.0, 30.0, 1800.0])
def test_all_searches_together_take_no_more_than_twice_the_limit_again(limit_s: float) -> None:
    clock = Clock([busy(3)], limit_s=limit_s)
    clock.until_certain()
    assert limit_s <= clock.now <= limit_s + min(2 * limit_s, 13.0)


def test_a_search_that_takes_long_is_no_look() -> None:
    clock = Clock([GUILTY, OTHER, GUILTY], search_s=5.0)
    while clock.searches < 2:
        clock.on_time()
    assert clock.look(0.0) is None
    assert clock.searches == 2


def test_looks_that_add_up_to_the_limit_but_for_rounding_are_enough() -> None:
    clock = Clock(limit_s=ROUGH_S, now=ROUGH_S)
    for _ in range(LOOKS):
        clock.on_time()
    assert clock.searches == 1


def test_how_long_it_has_lasted_counts_the_time_in_which_it_was_not_looked() -> None:
    clock = Clock()
    clock.look(86_400.0)
    assert clock.stall.lasted_s == 86_400.0
