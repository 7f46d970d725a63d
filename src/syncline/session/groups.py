"""The groups of workers that ``syncline.new_group`` returns, on members and on all other ranks.

A group is a session (``Session.within``) with a number that all workers, or its own ranks, agree on (``tickets``). This
module checks that only members use a group, and that it has not ended.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from ..engine.scope import SCOPES
from ..errors import UsageError
from ..plans.plan import ranks_text
from .session import Session


class WorkerGroup:
    """Some workers of a run, by their ``ranks`` in the run, ascending; the same value on all workers.

    Collectives and models of the group involve its members only. On other workers they raise an error that says so.
    """

    def __init__(self, world: Session, ranks: Sequence[int], number: int) -> None:
        self.ranks = tuple(ranks)
        self._world, self._number = world, number
        self._session = world.within(self.ranks, number) if world.rank in self.ranks else None
        self._ended = False

    def __repr__(self) -> str:
        return f"<group of {ranks_text(self.ranks)}>"

    @property
    def size(self) -> int:
        """The number of workers in the group."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This worker's rank within the group, from 0; -1 if it is not a member."""
        return self.ranks.index(self._world.rank) if self._session is not None else -1

    @property
    def session(self) -> Session:
        """The session of the group. Raises UsageError for a worker that is not a member, and after the group's end."""
        if self._ended:
            raise UsageError(f"{self} has ended: make another one with syncline.new_group()")
        if self._session is None:
            raise UsageError(
                f"{self._world.name(self._world.rank)} is not in the {self!r}: call this on its ranks alone, as under"
                " `if group.rank >= 0:`"
            )
        self._session.check_usable()
        return self._session

    def is_of(self, world: Session) -> bool:
        """Whether the group consists of workers of that run."""
        return self._world is world

    def end(self) -> None:
        """End the group. Its ranks wait for each other; other workers do nothing.

        A later group of the same ranks may reuse its number. Raises UsageError if models, or samplers that share a
        pool, use the group, which they do until ``syncline.shutdown()``, and while another thread is in a call of it.
        """
        if self._session is None or self._ended:
            self._ended = True
            return
        here = self.session
        if here.is_held:
            raise UsageError(f"models or samplers were made with the {self!r}: it ends with syncline.shutdown()")
        if not here.callers.close():
            raise UsageError(f"another thread of this process is in a call of the {self!r}: end it when all are over")
        try:
            here.barrier()
        except BaseException:
            here.callers.reopen()
            raise
        self._ended = True
        here.family.remove(here)
        self._world.give_back_number(self.ranks, self._number)


def new_group(world: Session, ranks: Sequence[int], timeout: float | None = None) -> WorkerGroup:
    """A group of these ranks, in any order; all workers call it with the same ones.

    MismatchError names workers that call something else, PeerTimeout those that have not come within ``timeout``
    seconds. UsageError for ranks that do not exist, and for too many groups of a process.
    """
    chosen = world.chosen(sorted(map(operator.index, ranks)))
    return _numbered(world, chosen, world.agree_on_group(chosen, timeout))


def found_group(world: Session, ranks: Sequence[int]) -> WorkerGroup:
    """A group of these ranks, including this one, which they make without the others."""
    chosen = world.chosen(sorted(map(operator.index, ranks)))
    return _numbered(world, chosen, world.agree_within(chosen, f"of {ranks_text(chosen)}"))


def _numbered(world: Session, ranks: tuple[int, ...], number: int) -> WorkerGroup:
    if number >= SCOPES:
        raise UsageError(
            f"the group of {ranks_text(ranks)} would get number {number}, but {SCOPES - 1} is the last: a new group's"
            " number is above the numbers of all groups that its ranks have been in. Make groups once and keep them,"
            " or end() groups that are no longer needed: a later group of the same ranks reuses the number"
        )
    made = WorkerGroup(world, ranks, number)
    if made.rank >= 0:
        made.session.compare_plans()
    return made
