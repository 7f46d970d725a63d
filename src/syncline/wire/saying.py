"""What the processes of a run say of its end: every sentence once, not once per rank.

A user's mistake is found by every rank at once, and every rank hears of it from the others. Ranks of one local launcher
share a list of what has been said, in memory that they inherit; elsewhere each process knows what it has said itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "SYNCLINE_SAID"
"""Where a rank finds the descriptor of the list."""

_NAME = "syncline-said"
_DIGEST_BYTES = 16
_MOST = 1024
_WHO = re.compile(r"rank \d+ \([^)]*\)")

_own: set[bytes] = set()


def in_bytes(text: str) -> bytes:
    """Text as it is printed and told: what has no bytes, such as half of a name of a file, is spelled out."""
    return text.encode(errors="backslashreplace")


def say(text: str) -> None:
    """Print whole lines in one piece: ranks print at once."""
    with contextlib.suppress(OSError):
        os.write(2, in_bytes(text))


def new_list() -> int:
    """A descriptor of an empty list, for processes to inherit."""
    return os.memfd_create(_NAME, os.MFD_CLOEXEC)


def first_time(sentence: str) -> bool:
    """Whether nobody is known to have said so, whichever rank it was about; from now on somebody has."""
    digest = hashlib.sha256(in_bytes(_WHO.sub("rank", sentence))).digest()[:_DIGEST_BYTES]
    if digest in _own:
        return False
    _own.add(digest)
    with _shared() as fd:
        if fd is None:
            return True
        said = os.pread(fd, _MOST * _DIGEST_BYTES, 0)
        if digest in (said[start : start + _DIGEST_BYTES] for start in range(0, len(said), _DIGEST_BYTES)):
            return False
        if len(said) < _MOST * _DIGEST_BYTES:
            os.pwrite(fd, digest, len(said))
    return True


@contextlib.contextmanager
def _shared() -> Iterator[int | None]:
    """The list, locked; None where there is none: another file may have come to stand in its place."""
    fd = os.environ.get(VARIABLE, "")
    try:
        there = fd.isdigit() and _NAME in Path(f"/proc/self/fd/{fd}").readlink().name
    except OSError:
        there = False
    if not there:
        yield None
        return
    fcntl.lockf(int(fd), fcntl.LOCK_EX)
    try:
        yield int(fd)
    finally:
        fcntl.lockf(int(fd), fcntl.LOCK_UN)
