"""This rank's slots: where its peers find the runs that it has come to, on its board and in tables beyond it.

There is always one more: tables are added, each twice as large as the last, and said on the board (``kernels.board``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import SynclineError
from ..kernels import board
from ..transports import Words
from ..wire.scratch import address_of
from .window import Window


@dataclass(frozen=True)
class Table:
    """A table of this rank's slots.

    ``users`` has per slot how many had to look at what was there last, and None while it is in use.
    """

    address: int
    words: Words
    users: list[int | None]


class Slots:
    """The slots of one process over one window."""

    def __init__(self, window: Window) -> None:
        from ..kernels import onesided  # compiled code: loaded where it is used

        self._window = window
        address, words = int(window.members[window.rank, onesided.BOARD]), window.board[board.BOARD_HEAD // 8 :]
        self.tables = [Table(address + board.BOARD_HEAD, words, [0] * board.SLOTS)]

    def take(self, wanted: int) -> tuple[Table, int]:
        """A slot where peers look for a run of that identity, in the first table that has a free one."""
        sets, level = board.SLOTS // board.WAYS, 0
        while True:
            if level == len(self.tables):
                self._add_table()
            table, first = self.tables[level], _first_slot(wanted, sets)
            for slot in range(first, first + board.WAYS):
                user = table.users[slot]
                if user is None:
                    continue
                if user == 0 or table.words[(slot * board.SLOT_BYTES + board.SLOT_DONE_WITH) // 8] >= user:
                    table.users[slot] = None
                    return table, slot
            sets, level = 2 * sets, level + 1

    def _add_table(self) -> None:
        """Make twice as many slots as the last table has, and say on the board where."""
        further, slots = len(self.tables) - 1, 2 * len(self.tables[-1].users)
        if further == board.MORE_TABLES:
            used = sum(table.users.count(None) for table in self.tables)
            raise SynclineError(f"{used} exchanges are under way at once, more than shared memory can show")
        memory = self._window.allocate(slots * board.SLOT_BYTES)
        place = self._window.find(address_of(memory), memory.nbytes)
        assert place is not None
        self.tables.append(Table(address_of(memory), memory.view(np.int64), [0] * slots))
        self._window.board[board.TABLES // 8 + further] = place[0]


def _first_slot(wanted: int, sets: int) -> int:
    """As ``kernels.onesided.first_slot``, of which a call costs more than it does."""
    return ((wanted * board.SPREAD & 0xFFFFFFFFFFFFFFFF) >> 32 & sets - 1) * board.WAYS
