"""Reports of ranks: to their launcher, who is present and who failed first; to the user, each sentence once.

Every rank finds a user's mistake at once, and hears of it from the others. Ranks of one local launcher share memory,
which they inherit as a descriptor. It has

* the first culprit: the order in which processes end does not tell it, since the failing rank may end last;
* the sentences printed so far;
* a byte per rank that is set between ``join`` and ``leave``. A process that calls ``os._exit(0)`` in the middle of a
  run ends with status 0, and this byte alone shows the failure. A script that never joins is judged by its status.
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

FAILED = "failed: "
"""How the reason begins of a process that ends with an error of its own; the error follows."""

VARIABLE = "SYNCLINE_REPORTS"
"""What a rank finds in its environment: the descriptor of the memory, and its number."""

_NAME = "syncline-reports"
_CULPRIT = struct.Struct("<?xHI")  # whether there is one, how long the reason is, which rank
_REASON_BYTES = 1000
_SAID_AT = _CULPRIT.size + _REASON_BYTES
_DIGEST_BYTES = 16
_MOST = 1024
_PRESENT_AT = _SAID_AT + _MOST * _DIGEST_BYTES
_AWAY, _PRESENT = b"\0", b"\1"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_AFTER_S = 2
"""By how much those that end because of another one are later: torchrun itself notes the time of a death that left no
word, when it looks again."""
_LOCK_S = 1.0
_AGAIN_S = 0.01
_WHO = re.compile(r"rank \d+ \([^)]*\)")

_own: set[bytes] = set()


class Reports:
    """The launcher's side, for so many ranks; ``fd`` is to be inherited by them."""

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _PRESENT_AT + ranks)

    def environ(self, rank: int) -> dict[str, str]:
        """The variables for that rank's environment."""
        return {VARIABLE: f"{self.fd}:{rank}"}

    def present(self, rank: int) -> bool:
        """Whether that rank has joined a run and not left it."""
        return os.pread(self.fd, 1, _PRESENT_AT + rank) == _PRESENT

    def culprit(self) -> tuple[int, str] | None:
        """Who has failed first and why, as the ranks have noted it; None where they have not."""
        noted = os.pread(self.fd, _SAID_AT, 0)
        known, size, rank = _CULPRIT.unpack_from(noted)
        return (rank, noted[_CULPRIT.size : _CULPRIT.size + size].decode(errors="replace")) if known else None

    def close(self) -> None:
        """Let go of the memory."""
        os.close(self.fd)


def in_bytes(text: str) -> bytes:
    """Text as it is printed and told: what has no bytes, such as half of a name of a file, is spelled out."""
    return text.encode(errors="backslashreplace")


def say(text: str) -> None:
    """Print whole lines in one piece: ranks print at once."""
    with contextlib.suppress(OSError):
        os.write(2, in_bytes(text))


def join() -> None:
    """This process has joined a run; says nothing where no launcher of this machine listens."""
    _note(_PRESENT)


def leave() -> None:
    """This process has ended its part."""
    _note(_AWAY)


def _note(state: bytes) -> None:
    found = _inherited()
    if found is not None:
        with contextlib.suppress(OSError):
            os.pwrite(found[0], state, _PRESENT_AT + found[1])


def blame(rank: int, name: str, reason: str, *, own: bool) -> None:
    """Note for the launcher that a process failed first, and why; ``own`` if it is this one. The first note stays."""
    text = in_bytes(reason)[:_REASON_BYTES]
    with _locked() as fd:
        if fd is not None and not _CULPRIT.unpack(os.pread(fd, _CULPRIT.size, 0))[0]:
            os.pwrite(fd, _CULPRIT.pack(True, len(text), rank) + text, 0)
    with contextlib.suppress(OSError):
        _tell_torchrun(f"{name} {reason}", own)


def _tell_torchrun(text: str, own: bool) -> None:
    """Leave the error where torchrun reads it, unless the script has (torch's ``@record``).

    torchrun calls the earliest error of all ranks the root cause, in whole seconds.
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
    with _locked() as fd:
        if fd is not None:
            os.pwrite(fd, bytes(_SAID_AT), 0)


def first_time(sentence: str) -> bool:
    """Whether nobody is known to have said so, whichever rank it was about; from now on somebody has."""
    digest = hashlib.sha256(in_bytes(_WHO.sub("rank", sentence))).digest()[:_DIGEST_BYTES]
    if digest in _own:
        return False
    _own.add(digest)
    with _locked() as fd:
        said = b"" if fd is None else os.pread(fd, _MOST * _DIGEST_BYTES, _SAID_AT)
        for at in range(0, len(said), _DIGEST_BYTES):
            one = said[at : at + _DIGEST_BYTES]
            if one == digest:
                return False
            if fd is not None and not any(one):
                os.pwrite(fd, digest, _SAID_AT + at)
                break
    return True


def _inherited() -> tuple[int, int] | None:
    """The descriptor of the launcher's memory and this rank's number; None if there is none, or another file."""
    number, _, rank = os.environ.get(VARIABLE, "").partition(":")
    if not (number.isdecimal() and rank.isdecimal()):
        return None
    try:
        found = str(Path(f"/proc/self/fd/{int(number)}").readlink())
        return (int(number), int(rank)) if found == f"/memfd:{_NAME} (deleted)" else None
    except (OSError, ValueError):  # more digits than a number may have
        return None


@contextlib.contextmanager
def _locked() -> Iterator[int | None]:
    """The memory, locked; None where there is none, or where it stays locked: who holds it may have been stopped."""
    found = _inherited()
    if found is None or not _lock(found[0]):
        yield None
        return
    try:
        yield found[0]
    finally:
        fcntl.lockf(found[0], fcntl.LOCK_UN)


def _lock(fd: int) -> bool:
    """Lock it within the limit; False when others hold it for longer."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_AGAIN_S)
