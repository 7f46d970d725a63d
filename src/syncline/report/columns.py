"""Which columns of a table there is room for: every table loses its own by rank, and never what names a row.

Does not know what is in them, nor how wide they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """A column that can be given up."""

    @property
    def rank(self) -> int:
        """The greatest goes first when there is no room; 0 stays."""
        ...


Column = TypeVar("Column", bound=Ranked)


def fitting(columns: Sequence[Column], fit: Callable[[Sequence[Column]], bool]) -> list[Column]:
    """The columns that are left when those of the greatest rank went one by one, until the others ``fit``."""
    found = list(columns)
    while not fit(found):
        last = max(found, key=lambda column: column.rank, default=None)
        if last is None or last.rank == 0:
            break
        found.remove(last)
    return found
