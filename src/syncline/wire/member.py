"""Who is in a run: one process as it describes itself, and the whole group. Values, no I/O.

What comes from another process is checked field by field, since its text may say anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import RollCallError


@dataclass(frozen=True)
class Member:
    """One process of the group, as it describes itself in the roll call.

    ``index`` counts workers first, then servers; ``world`` is the number of processes it believes in. ``machine`` is
    equal for processes that can reach each other's memory, ``pid_space`` for those that see each other's pids.
    ``terms`` is what all must agree on (version, strategy). ``cores`` is how many the process may use.
    """

    index: int
    world: int
    host: str
    machine: str
    pid: int
    pid_space: str
    address: str
    port: int
    unix: str
    terms: dict[str, str]
    cores: int = 1

    @property
    def where(self) -> str:
        """Host and process, for messages."""
        return f"{self.host}, pid {self.pid}"

    def to_text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True)
class Roll:
    """The group as one process sees it after the roll call."""

    index: int
    members: tuple[Member, ...]
    run: str
    secret: bytes

    @property
    def hosts(self) -> int:
        """On how many hosts the processes are: those of one can share memory."""
        return len({member.machine for member in self.members})

    @property
    def near(self) -> frozenset[int]:
        """The other processes of this process's host."""
        here = self.members[self.index].machine
        return frozenset(peer.index for peer in self.members if peer.machine == here and peer.index != self.index)

    @property
    def nodes(self) -> tuple[int, ...]:
        """The host number of every process, in order of appearance."""
        order: dict[str, int] = {}
        return tuple(order.setdefault(member.machine, len(order)) for member in self.members)

    def name(self, index: int) -> str:
        """How messages call a process."""
        return f"rank {index} ({self.members[index].where})"


_KINDS: Mapping[str, type] = {"int": int, "str": str, "dict[str, str]": dict}


def read_member(text: str | bytes) -> Member:
    """The process that a text describes; raises RollCallError when it describes none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return check_member(found)


def check_member(found: Any) -> Member:
    """The process that decoded JSON describes; raises RollCallError when it describes none."""
    names = {field.name: _KINDS[str(field.type)] for field in fields(Member)}
    right = isinstance(found, dict) and found.keys() == names.keys()
    if not right or any(type(found[name]) is not kind for name, kind in names.items()):
        raise _unknown()
    terms: dict[Any, Any] = found["terms"]
    numbers = (found["index"], found["world"], found["pid"], found["port"], found["cores"])
    if not all(0 <= number < 1 << 32 for number in numbers) or found["port"] >= 1 << 16:
        raise _unknown()
    if not all(isinstance(value, str) for value in terms.values()):
        raise _unknown()
    # Other processes' messages show these: nothing in them moves a terminal's cursor, or begins a line.
    shown = {name: printable(found[name]).replace("\n", "\N{REPLACEMENT CHARACTER}") for name in ("host", "address")}
    return Member(**found | shown)


def printable(text: str) -> str:
    """Text of another process without what a terminal would act on."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def _unknown() -> RollCallError:
    return RollCallError("its record is not one of this version: does it run another version of Syncline?")
