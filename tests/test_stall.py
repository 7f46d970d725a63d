"""When it is certain that nothing moves, and who is to blame: on a clock that the tests turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from syncline.stall import LOOKS, SEARCHES, Stall
from syncline.wire.culprit import Answer, Culprit, Found

LIMIT_S = 80.0
LOOK_S = LIMIT_S / LOOKS
GUILTY = Found(Culprit(1, "has not come to bucket 0"), {1: Answer({})})
OTHER = Found(Culprit(2, "has not come to bucket 0"), {2: Answer({})})


@dataclass
class Clock:
    """One stall from time 0, and what its searches find, the last of them again and again."""

    finds: list[Found] = field(default_factory=lambda: [GUILTY])
    now: float = 0.0
    searches: int = 0

    def __post_init__(self) -> None:
        self.stall = Stall(LIMIT_S, LOOK_S, self.now)

    def search(self) -> Found:
        self.searches += 1
        return self.finds.pop(0) if len(self.finds) > 1 else self.finds[0]

    def look(self, lasted_s: float) -> Found | None:
        self.now += lasted_s
        return self.stall.look(self.now, self.search)

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
    assert LIMIT_S <= clock.now < LIMIT_S + 1


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
