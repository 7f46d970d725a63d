"""Memory that processes inherit from their launcher as a descriptor, whose number the environment tells them."""

from __future__ import annotations

from pathlib import Path


def inherited(name: str, number: str) -> int | None:
    """The descriptor of that number if it is memory of that name (memfd).

    None else: a process may have the variable but not the descriptor, and another file in its place.
    """
    if not number.isdecimal():
        return None
    try:
        found = str(Path(f"/proc/self/fd/{int(number)}").readlink())
    except (OSError, ValueError):  # more digits than a number may have
        return None
    return int(number) if found == f"/memfd:{name} (deleted)" else None
