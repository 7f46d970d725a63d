"""Room for the connections of a group: two to every other process, and what a start needs beside them, strangers too.

Owns the limit of open descriptors. Systems begin with 1024 for the sake of select(2), and let processes ask for more.
"""

from __future__ import annotations

import resource

from ..errors import UsageError
from ..wire.doors import CALLERS
from ..wire.meeting_server import MORE

_EACH = 2
"""Connections to every other process: control, and data."""
_MEETING = 3
"""Of each in rank 0 while the group forms: the meeting, and handshakes under way."""
_BESIDE = 256
"""What the script, its framework and the start itself may have open."""


def _with_crowds(world: int) -> int:
    """As many as there can be: all that strangers may hold at rank 0's two pairs of doors, and in its meeting."""
    doors, meeting = CALLERS + 2 * world, MORE + 2 * world
    return _EACH * world + 2 * doors + meeting + _BESIDE


def make_room(world: int) -> None:
    """Raise this process's limit to what a group of ``world`` needs; UsageError where the system does not allow it.

    It is raised further, as far as the system allows, so that a crowd of strangers leaves room for the group.
    """
    needed, most = (_EACH + _MEETING) * world + _BESIDE, _with_crowds(world)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{world} processes need {needed} descriptors in each of them, the system allows {hard}: raise the limit"
            " (ulimit -Hn, LimitNOFILE= of systemd, nofile in limits.conf) where the processes are started"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
