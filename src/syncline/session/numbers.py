"""Numbers of groups, from which their keys and tags follow: how those that make a group agree on one.

Each process counts the communicators that it is in. A new number is larger than all that the ranks of the group have
used, so that groups which share a process have different ones, and others may have the same. Either all ranks make a
group together, and find out who makes another one, or its own ranks do without the others. Threads of a process make
groups one after the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

from ..errors import PeerTimeout, UsageError
from .member import Member
from .tickets import SPLIT, Ticket, making, numbers_of

COMMUNICATORS = 1 << 10
"""As many have keys of their own."""

_FOUNDING_MESSAGES = 7 << 61
"""Tags of messages by which some processes make a group; no others have all of the highest three bits."""


class Numbers:
    """What the workers with the process numbers ``ranks`` agree on their groups' numbers by.

    ``agree`` has all of them meet for one call, ``late`` is the error for processes that have not come in time.
    """

    def __init__(
        self,
        member: Member,
        ranks: Sequence[int],
        agree: Callable[[int, int, float | None, int], list[Ticket]],
        late: Callable[[str, Sequence[int], float], PeerTimeout],
    ) -> None:
        self._member, self._ranks, self._agree, self._late = member, ranks, agree, late

    def agree_on_group(self, chosen: tuple[int, ...], timeout: float | None = None) -> int:
        """The number of a group of these ranks, which all ranks make, at the same point of their scripts.

        No rank of the group has used it, unless it was that of a group of the same ranks which all of them have given
        back (``give_back``). MismatchError names ranks that make another group, PeerTimeout those that do not come.
        """
        member = self._member
        try:
            with member.splitting:
                return self._agree_on(chosen, timeout)
        except BaseException as error:
            member.interrupted(error)
            raise

    def _agree_on(self, chosen: tuple[int, ...], timeout: float | None) -> int:
        member = self._member
        processes = tuple(self._ranks[rank] for rank in chosen)
        free = member.given_back.get(processes, [])
        asked = making(chosen, member.communicators, free[-1] if free else 0)
        tickets = self._agree(SPLIT, zlib.crc32(str(chosen).encode()), timeout, asked)
        numbers = [numbers_of(tickets[rank]) for rank in chosen]
        number, again = max(new for new, _ in numbers), {old for _, old in numbers}
        if len(again) == 1 and 0 not in again:
            return free.pop() if member.index in processes else again.pop()
        _check(number)
        if member.index in processes:
            member.communicators = number + 1
        return number

    def agree_within(self, chosen: tuple[int, ...], name: str, timeout: float | None = None) -> int:
        """The number of a group that these ranks make without the others.

        All of them call it with the same ranks and ``name``, and overlapping groups in one order. PeerTimeout names
        those that have not come within ``timeout`` seconds.
        """
        member, label = self._member, f"making the group {name}"
        peers = [self._ranks[rank] for rank in chosen if self._ranks[rank] != member.index]
        tag = _FOUNDING_MESSAGES | zlib.crc32(f"{name} {chosen}".encode())
        with member.splitting:
            number = member.communicators
            if peers:
                engine, mine = member.engine, number.to_bytes(4, "little")
                sent = [engine.send(peer, tag, mine, label) for peer in peers]
                heard = {peer: engine.recv(peer, tag, 4, label) for peer in peers}
                try:
                    engine.wait(*sent, *heard.values(), timeout=timeout)
                except PeerTimeout:
                    if timeout is None or engine.error is not None:
                        raise
                    raise self._late(label, [peer for peer, work in heard.items() if not work.done], timeout) from None
                number = max(number, *(int.from_bytes(work.result, "little") for work in heard.values()))
            _check(number)
            member.communicators = number + 1
        return number

    def give_back(self, processes: tuple[int, ...], number: int) -> None:
        """Nothing is under way any more in the group of these processes of that number, and nothing will be."""
        self._member.given_back.setdefault(processes, []).append(number)


def _check(number: int) -> None:
    if number >= COMMUNICATORS:
        raise UsageError(
            f"a process can be in up to {COMMUNICATORS} communicators in a run, and numbers of destroyed groups are"
            " not used again: make groups once and keep them, or begin a new run"
        )
