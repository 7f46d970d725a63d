"""A whole group inside this process: sessions between threads, where nothing is proved or watched."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.engine.trace import Observer
from syncline.nouns import Group
from syncline.session.member import Member, Membership
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy, check_asked
from syncline.strategy.words import AUTO
from syncline.transports.inproc import Hub
from syncline.tuning import schedule_choice


def in_process(
    strategy: str, workers: int, observers: Sequence[Observer | None] = (), nodes: tuple[int, ...] = ()
) -> list[Session]:
    """Sessions of workers, then servers. ``observers`` are those of the first ones, ``nodes`` the workers' hosts."""
    asked = Strategy.parse(strategy)
    check_asked(asked)
    chosen = asked.resolve(Group(workers, nodes=nodes), inproc=True)
    group = Group(workers, chosen.servers, nodes)
    told = [*observers, *[None] * group.processes][: group.processes]
    hub = Hub(group.processes)
    ends = [None] if group.processes == 1 else map(hub.transport, range(group.processes))
    sessions = [
        Session(
            chosen, Membership(Member(group, index, end, observer=told[index])), left_open=asked.architecture == AUTO
        )
        for index, end in enumerate(ends)
    ]
    for session in sessions:
        session.chooses_schedule = workers > 1 and schedule_choice.is_wanted(asked, workers)
        session.ending.neighbours = [other.ending for other in sessions if other is not session]
    return sessions
