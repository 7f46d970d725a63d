"""Numbers of groups, from which their keys and tags follow: how those that make a group agree on one.

Each process counts the communicators that it is in. A new number is larger than all that the ranks of the group have
used, so that groups which share a process have different ones, and others may have the same. Either all ranks make a
group together, and find out who makes another one, or its own ranks do without the others. Threads of a process make
groups one after the other.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence

from ..errors import PeerTimeout, UsageError
from .grouped import AnyMember
from .tickets import COMMUNICATORS, SPLIT, Ticket, making, numbers_of

_FOUNDING = struct.Struct("<IIQ")
"""The least new number here, and one that may be used again with the calls made in its group, or nothing."""

_FOUNDING_MESSAGES = 7 << 61
"""Tags of messages by which some processes make a group; no others have all of the highest three bits."""


class Numbers:
    """What the workers with the process numbers ``ranks`` agree on their groups' numbers by.

    ``agree`` has all of them meet for one call, ``late`` is the error for processes that have not come in time.
    """

    def __init__(
        self,
        member: AnyMember,
        ranks: Sequence[int],
        agree: Callable[[int, int, float | None, int], tuple[Ticket, ...]],
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
            with member.process.splitting:
                return self._agree_on(chosen, timeout)
        except BaseException as error:
            member.process.interrupted(error)
            raise

    def _agree_on(self, chosen: tuple[int, ...], timeout: float | None) -> int:
        member = self._member
        processes = self._processes(chosen)
        free = member.process.given_back.get(processes, [])
        asked = making(chosen, member.process.communicators, free[-1][0] if free else 0)
        tickets = self._agree(SPLIT, zlib.crc32(str(chosen).encode()), timeout, asked)
        numbers = [numbers_of(tickets[rank]) for rank in chosen]
        number, again = max(new for new, _ in numbers), {old for _, old in numbers}
        if len(again) == 1 and 0 not in again:
            return free.pop()[0] if member.process.index in processes else again.pop()
        _check(number)
        if member.process.index in processes:
            member.process.communicators = number + 1
        return number

    def agree_within(self, chosen: tuple[int, ...], name: str, timeout: float | None = None) -> int:
        """The number of a group that these ranks make without the others.

        All of them call it with the same ranks and ``name``, and overlapping groups in one order. PeerTimeout names
        those that have not come within ``timeout`` seconds. A number is used again that all of them have given back
        behind as many calls: then what each has told the others of it has come, and nothing of it is left.
        """
        member, label = self._member, f"making the group {name}"
        free = member.process.given_back.get(self._processes(chosen), [])
        mine = _FOUNDING.pack(member.process.communicators, *(free[-1] if free else (0, 0)))
        peers = [self._ranks[rank] for rank in chosen if self._ranks[rank] != member.index]
        tag = _FOUNDING_MESSAGES | zlib.crc32(f"{name} {chosen}".encode())
        with member.process.splitting:
            number = member.process.communicators
            if peers:
                engine = member.engine
                sent = [engine.send(peer, tag, mine, label) for peer in peers]
                heard = {peer: engine.recv(peer, tag, _FOUNDING.size, label) for peer in peers}
                try:
                    engine.wait(*sent, *heard.values(), timeout=timeout)
                except PeerTimeout:
                    if timeout is None or engine.error is not None:
                        raise
                    raise self._late(label, [peer for peer, work in heard.items() if not work.done], timeout) from None
                told = [_FOUNDING.unpack(work.result) for work in heard.values()]
                number = max(number, *(new for new, *_ in told))
                alike = {tuple(old) for _, *old in told} == {free[-1] if free else (0, 0)}
            else:
                alike = True
            if free and alike:
                return free.pop()[0]
            _check(number)
            member.process.communicators = number + 1
        return number

    def give_back(self, ranks: Iterable[int], number: int, calls: int = 0) -> None:
        """Nothing is under way here any more in the group of these ranks of that number, and nothing will be.

        ``calls`` is how many were made in it, where its ranks have not met since.
        """
        self._member.process.given_back.setdefault(self._processes(ranks), []).append((number, calls))

    def _processes(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Their numbers in the run."""
        return tuple(self._member.number(self._ranks[rank]) for rank in ranks)


def _check(number: int) -> None:
    if number >= COMMUNICATORS:
        raise UsageError(
            f"a process can be in up to {COMMUNICATORS} communicators in a run, and numbers of destroyed groups are"
            " used again by groups of the same ranks only: make groups once and keep them, or begin a new run"
        )
