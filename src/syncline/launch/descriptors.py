"""Room for the connections of a group: two to every other process, and what a start needs beside them.

Owns the limit of open descriptors. Systems begin with 1024 for the sake of select(2), and let processes ask for more.
"""

from __future__ import annotations

import resource

from ..errors import UsageError

_EACH = 2
"""Connections to every other process: control, and data."""
_MEETING = 3
"""Of each in rank 0 while the group forms: the meeting, and handshakes under way."""
_BESIDE = 256
"""What the script, its framework and the start itself may have open."""


def make_room(world: int) -> None:
    """Raise this process's limit to what a group of ``world`` needs; UsageError where the system does not allow it."""
    needed = (_EACH + _MEETING) * world + _BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{world} processes need {needed} descriptors in each of them, the system allows {hard}: raise the limit"
            " (ulimit -Hn, LimitNOFILE= of systemd, nofile in limits.conf) where the processes are started"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
