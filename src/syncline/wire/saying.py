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
import time
from collections.abc import Iterator

from .inherited import inherited

VARIABLE = "SYNCLINE_SAID"
"""Where a rank finds the descriptor of the list."""

_NAME = "syncline-said"
_DIGEST_BYTES = 16
_MOST = 1024
_LOCK_S = 1.0
_AGAIN_S = 0.01
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
    """The list, locked; None where there is none, or where it stays locked: who holds it may have been stopped."""
    fd = inherited(_NAME, os.environ.get(VARIABLE, ""))
    if fd is None or not _lock(fd):
        yield None
        return
    try:
        yield fd
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def _lock(fd: int) -> bool:
    """Lock the list within the limit; False when others hold it for longer."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_AGAIN_S)
