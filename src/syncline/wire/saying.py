"""What the processes of a run say of its end: every sentence once, not once per rank, and to their launcher who failed.

A user's mistake is found by every rank at once, and every rank hears of it from the others. Ranks of one local launcher
share a list of what has been said, in memory that they inherit as a descriptor, whose number the environment tells
them; elsewhere each process knows what it has said itself.
The list begins with the first culprit: in which order processes end tells nothing of that, since a rank that fails may
need longer for its end than those that hear of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
import time
from collections.abc import Iterator
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


FAILED = "failed: "
"""How the reason begins of a process that ends with an error of its own; the error follows."""

VARIABLE = "SYNCLINE_SAID"
"""Where a rank finds the descriptor of the list."""

_NAME = "syncline-said"
_CULPRIT = struct.Struct("<?xHI")  # whether there is one, how long the reason is, which rank
_REASON_BYTES = 1000
_CULPRIT_BYTES = _CULPRIT.size + _REASON_BYTES
_DIGEST_BYTES = 16
_MOST = 1024
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_AFTER_S = 2
"""By how much those that end because of another one are later: torchrun itself notes the time of a death that left no
word, when it looks again."""
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
    fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, _CULPRIT_BYTES)
    return fd


def blame(rank: int, name: str, reason: str, *, own: bool) -> None:
    """Note for the launcher that a process has failed first, and why; ``own`` where that is this process.

    Under ``syncline run`` the first note of all ranks stays.
    """
    text = in_bytes(reason)[:_REASON_BYTES]
    with _shared() as fd:
        if fd is not None and not _CULPRIT.unpack(os.pread(fd, _CULPRIT.size, 0))[0]:
            os.pwrite(fd, _CULPRIT.pack(True, len(text), rank) + text, 0)
    with contextlib.suppress(OSError):
        _tell_torchrun(f"{name} {reason}", own)


def _tell_torchrun(text: str, own: bool) -> None:
    """Leave the error where torchrun reads it, unless the script has left one itself (torch's ``@record``).

    It calls the earliest error of all ranks the root cause, in whole seconds.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    timestamp = int(time.time()) + (0 if own else _AFTER_S)
    more = {"py_callstack": in_bytes(text).decode(), "timestamp": str(timestamp)}
    with Path(path).open("x") as file:
        json.dump({"message": {"message": more["py_callstack"], "extraInfo": more}}, file)


def absolve() -> None:
    """A group begins anew: what was noted of an earlier one of the same processes is over."""
    with _shared() as fd:
        if fd is not None:
            os.pwrite(fd, bytes(_CULPRIT_BYTES), 0)


def blamed(fd: int) -> tuple[int, str] | None:
    """Who has failed first and why, as the ranks have noted it in a list; None where they have not."""
    noted = os.pread(fd, _CULPRIT_BYTES, 0)
    known, size, rank = _CULPRIT.unpack_from(noted)
    return (rank, noted[_CULPRIT.size : _CULPRIT.size + size].decode(errors="replace")) if known else None


def first_time(sentence: str) -> bool:
    """Whether nobody is known to have said so, whichever rank it was about; from now on somebody has."""
    digest = hashlib.sha256(in_bytes(_WHO.sub("rank", sentence))).digest()[:_DIGEST_BYTES]
    if digest in _own:
        return False
    _own.add(digest)
    with _shared() as fd:
        if fd is None:
            return True
        said = os.pread(fd, _MOST * _DIGEST_BYTES, _CULPRIT_BYTES)
        if digest in (said[start : start + _DIGEST_BYTES] for start in range(0, len(said), _DIGEST_BYTES)):
            return False
        if len(said) < _MOST * _DIGEST_BYTES:
            os.pwrite(fd, digest, _CULPRIT_BYTES + len(said))
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
