"""Prints an exception that ends the script once among all ranks (``wire.reports``), and reports it to other ranks."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import sys
import traceback
import types
from collections.abc import Callable
from typing import NoReturn

from ..errors import PeerError, SynclineError
from ..wire.reports import FAILED, FAILED_STATUS, end_without_memory, first_time, say
from .session import Session


def watch_exceptions(current: Callable[[], Session | None]) -> None:
    """Print exceptions that end the script from now on, and let the ``current`` session fail with them."""
    previous = sys.excepthook

    def on_exception(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        session = current()
        try:
            _print(session, kind, error, trace, previous)
        finally:
            if session is not None and not session.forked:
                try:
                    session.fail(error if isinstance(error, Exception) else RuntimeError(kind.__name__))
                except MemoryError:
                    end_without_memory()

    sys.excepthook = on_exception


def end_failed(error: Exception) -> NoReturn:
    """End the process with a failure at the interpreter's exit, where an exception would not change the status."""
    say(f"syncline: ended: {error}\n")
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed, or a pipe without a reader
            stream.flush()
    os._exit(FAILED_STATUS)


def end_quickly() -> None:
    """After a failure, skip the garbage collection at the interpreter's exit, because other ranks wait for the exit.

    With TensorFlow it takes a second of a core, and most of a minute if all ranks of a busy machine end at once.
    Buffers of files are written, as the collection would have done.
    """
    for one in gc.get_objects():
        if type(one) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with contextlib.suppress(OSError, ValueError):
                one.flush()
    gc.freeze()


def _print(
    session: Session | None,
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
    previous: Callable[..., object],
) -> None:
    """Print an exception, unless another process has printed it. ``previous`` is the former hook."""
    fault = None if session is None or session.alone or not session.process.usable else session.engine.error
    if isinstance(fault, SynclineError) and not isinstance(error, SynclineError) and str(fault) in str(error):
        # A framework has wrapped the engine's fault in an error of its own.
        if isinstance(fault, PeerError):
            error = fault
        elif first_time(f"{type(fault).__name__}: {fault}"):
            say(f"syncline: {type(fault).__name__}: {fault}\n")
    if isinstance(error, PeerError):
        # Another process failed. Its own message says why; the stacks of all ranks would hide it.
        say(f"syncline: ended: {_shortened(error)}\n")
    elif (
        isinstance(error, SynclineError)
        and error is not _passed_on
        and not first_time(f"traceback of {kind.__name__}: {error}")
    ):
        me = f"process {os.getpid()}" if session is None else session.name(session.index)
        say(f"syncline: ended: {me}: the same {kind.__name__}, see above\n")
    elif session is None or session.forked:
        _pass_on(previous, kind, error, trace)
    elif isinstance(error, KeyboardInterrupt):
        say(f"syncline: {session.name(session.index)}: interrupted\n")
    elif previous is sys.__excepthook__:
        first_time(f"{kind.__name__}: {error}")  # other ranks need not repeat the last line of this traceback
        say("".join(traceback.format_exception(kind, error, trace)))
    else:
        _pass_on(previous, kind, error, trace)


_passed_on: BaseException | None = None


def _pass_on(
    previous: Callable[..., object], kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Call the hook that was there before.

    It may be a second hook of Syncline: a process can have a session and a torch.distributed backend. The second hook
    must not mistake the error for an error that another process has printed.
    """
    global _passed_on
    _passed_on = error
    try:
        previous(kind, error, trace)
    finally:
        _passed_on = None


def _shortened(error: PeerError) -> str:
    """The error of another process, without a text that a process of the run has printed already."""
    text = str(error)
    before, failed, said = text.partition(f" {FAILED}")
    if not failed or first_time(said):
        return text
    return f"{before} {FAILED}{said.partition(':')[0]}, see above"
