"""The reports of ranks: to the launcher the first failure and the present ranks, to the user each sentence once.

A user's mistake is usually found by every rank, which also hears of it from the others. The ranks of one local launcher
therefore share memory, which they inherit as a descriptor. It contains

* the first culprit: the order in which processes end does not show it, since the failing rank may end last;
* digests of the sentences printed so far;
* a byte per rank that is set between ``join`` and ``leave``. A process that calls ``os._exit(0)`` in the middle of a
  run ends with status 0, and only this byte shows the failure. A script that never joins is judged by its status.
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
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import NoReturn, ParamSpec

FAILED = "failed: "
"""The start of the reason of a process that fails by itself; its error follows."""

FAILED_STATUS = 1
"""The exit status of a process that ends because of another one, or cannot handle its own fault."""

VARIABLE = "SYNCLINE_REPORTS"
"""The environment variable with the descriptor of the memory, and the rank's number."""

_NAME = "syncline-reports"
_CULPRIT = struct.Struct("<?xHI")  # whether there is one, the length of the reason, the rank
_REASON_BYTES = 1000
_SAID_AT = _CULPRIT.size + _REASON_BYTES
_DIGEST_BYTES = 16
_MOST = 1024
_PRESENT_AT = _SAID_AT + _MOST * _DIGEST_BYTES
_AWAY, _PRESENT = b"\0", b"\1"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_AFTER_S = 2
"""The time that is added to the error of a process that ends because of another one: torchrun notices a death without
an error file only at its next check.
"""
_LOCK_S = 1.0
_AGAIN_S = 0.01
_WHO = re.compile(r"rank \d+ \([^)]*\)")

_own: set[bytes] = set()

_P = ParamSpec("_P")


class Reports:
    """The launcher's side. The ranks must inherit ``fd``."""

    def __init__(self, ranks: int) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self.fd, _PRESENT_AT + ranks)

    def environ(self, rank: int) -> dict[str, str]:
        """The variables for the environment of a rank."""
        return {VARIABLE: f"{self.fd}:{rank}"}

    def present(self, rank: int) -> bool:
        """Whether a rank has joined a run and not left it."""
        return os.pread(self.fd, 1, _PRESENT_AT + rank) == _PRESENT

    def culprit(self) -> tuple[int, str] | None:
        """The rank that failed first, and the reason. None if no rank has reported a failure."""
        noted = os.pread(self.fd, _SAID_AT, 0)
        known, size, rank = _CULPRIT.unpack_from(noted)
        return (rank, noted[_CULPRIT.size : _CULPRIT.size + size].decode(errors="replace")) if known else None

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.fd)


def in_bytes(text: str) -> bytes:
    """A text as bytes. Characters that cannot be encoded, as in some file names, are escaped."""
    return text.encode(errors="backslashreplace")


def say(text: str) -> None:
    """Print whole lines by one call, because ranks print concurrently."""
    with contextlib.suppress(OSError):
        os.write(2, in_bytes(text))


_LAST_WORDS = b"syncline: this process can neither go on nor handle its failure (no memory?): ending\n"


def needed(run: Callable[_P, None]) -> Callable[_P, None]:
    """Let an exception that leaves ``run``, the function of a thread, end the process.

    Without memory even the handling of a fault can fail. The process would then neither go on nor end.
    """

    @wraps(run)
    def run_or_end(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            run(*args, **kwargs)
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc()
            end_without_memory()

    return run_or_end


def end_without_memory() -> NoReturn:
    """End the process by calls that take no memory. The end of its connections tells the others."""
    try:
        os.write(2, _LAST_WORDS)
    finally:
        os._exit(FAILED_STATUS)


def join() -> None:
    """Note for a local launcher that this process has joined a run."""
    _note(_PRESENT)


def leave() -> None:
    """Note that this process has ended its part."""
    _note(_AWAY)


def _note(state: bytes) -> None:
    found = _inherited()
    if found is not None:
        with contextlib.suppress(OSError):
            os.pwrite(found[0], state, _PRESENT_AT + found[1])


def blame(rank: int, name: str, reason: str, *, own: bool) -> None:
    """Note for the launcher which process failed first, and why; ``own`` if it is this one. The first note stays."""
    text = in_bytes(reason)[:_REASON_BYTES]
    with _locked() as fd:
        if fd is not None and not _CULPRIT.unpack(os.pread(fd, _CULPRIT.size, 0))[0]:
            os.pwrite(fd, _CULPRIT.pack(True, len(text), rank) + text, 0)
    with contextlib.suppress(OSError):
        _tell_torchrun(f"{name} {reason}", own)


def _tell_torchrun(text: str, own: bool) -> None:
    """Write torchrun's error file, unless the script has written it (torch's ``@record``).

    torchrun takes the earliest error of all ranks, in whole seconds, for the root cause.
    """
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    timestamp = int(time.time()) + (0 if own else _AFTER_S)
    more = {"py_callstack": in_bytes(text).decode(), "timestamp": str(timestamp)}
    with Path(path).open("x") as file:
        json.dump({"message": {"message": more["py_callstack"], "extraInfo": more}}, file)


def absolve() -> None:
    """Erase the failure of an earlier group of the same processes, because a new one begins."""
    with _locked() as fd:
        if fd is not None:
            os.pwrite(fd, bytes(_SAID_AT), 0)


def first_time(sentence: str) -> bool:
    """Whether no rank is known to have printed the sentence, about any rank. It counts as printed from now on."""
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
    """The descriptor of the launcher's memory and this rank's number. None without a valid descriptor."""
    number, _, rank = os.environ.get(VARIABLE, "").partition(":")
    if not (number.isdecimal() and rank.isdecimal()):
        return None
    try:
        found = str(Path(f"/proc/self/fd/{int(number)}").readlink())
        return (int(number), int(rank)) if found == f"/memfd:{_NAME} (deleted)" else None
    except (OSError, ValueError):  # ValueError: Python limits the digits of a number
        return None


@contextlib.contextmanager
def _locked() -> Iterator[int | None]:
    """The descriptor of the locked memory. None without memory, or while another process keeps it locked."""
    found = _inherited()
    if found is None or not _lock(found[0]):
        yield None
        return
    try:
        yield found[0]
    finally:
        fcntl.lockf(found[0], fcntl.LOCK_UN)


def _lock(fd: int) -> bool:
    """Lock the memory. False if another process holds the lock for longer than the limit."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        with contextlib.suppress(OSError):
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_AGAIN_S)
