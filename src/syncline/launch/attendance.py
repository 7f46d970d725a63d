"""Who is in the middle of a run, as the local launcher sees it: a byte per rank in memory that both of them have.

A process that ends with status 0 says that it was done. One that calls ``os._exit(0)`` in the middle of a run, or is
ended so by a library, says the same, and when it was the last one nobody else can tell. So a rank notes that it has
joined, and that it has left; who ends with status 0 in between has failed. A script that never joins is judged by its
status alone.
"""

from __future__ import annotations

import contextlib
import os

from ..wire.saying import inherited

VARIABLE = "SYNCLINE_ATTENDANCE"
"""What a rank finds in its environment: a descriptor and the place of its byte."""

_NAME = "syncline-attendance"
_AWAY, _PRESENT = b"\0", b"\1"


class Attendance:
    """The launcher's side, for so many ranks; ``fd`` is to be inherited by them."""

    def __init__(self, processes: int) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, processes)

    def environ(self, rank: int) -> dict[str, str]:
        """What that rank needs in its environment."""
        return {VARIABLE: f"{self.fd}:{rank}"}

    def present(self, rank: int) -> bool:
        """Whether that rank has joined and not left."""
        return os.pread(self.fd, 1, rank) == _PRESENT

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self.fd)


def join() -> None:
    """This process has joined a run; says nothing where no launcher of this machine listens."""
    _note(_PRESENT)


def leave() -> None:
    """This process has ended its part."""
    _note(_AWAY)


def _note(state: bytes) -> None:
    number, _, place = os.environ.get(VARIABLE, "").partition(":")
    fd = inherited(_NAME, number)
    if fd is not None and place.isdecimal():
        with contextlib.suppress(OSError):
            os.pwrite(fd, state, int(place))
