"""Runs a whole group inside this process, one thread per rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from syncline.errors import PeerError
from syncline.launch.connecting import in_process
from syncline.session.session import Session

LIMIT_S = 120.0
"""Kernels may have to be compiled within it."""

END_S = 10.0
"""How long ranks that have not ended by then have to end when they learn that it is over."""


def run_group(strategy: str, workers: int, body: Callable[[Session], Any], nodes: tuple[int, ...] = ()) -> list[Any]:
    """``run_sessions`` on a group over ``inproc``; ``nodes`` are the workers' hosts, as they are told."""
    return run_sessions(in_process(strategy, workers, nodes=nodes), body)


def run_sessions(sessions: Sequence[Session], body: Callable[[Session], Any]) -> list[Any]:
    """Run ``body`` on every process of a group, each a thread; results by process index.

    The first exception of any of them is raised here. All sessions have been shut down by then, unless a body waits for
    something of its own: when ``LIMIT_S`` is over TimeoutError names all ranks that have not ended, and those of them
    that do not end either when their sessions fail.
    """
    results: list[Any] = [None] * len(sessions)
    errors: dict[int, BaseException] = {}

    def run(session: Session) -> None:
        try:
            results[session.index] = body(session)
        except BaseException as error:
            errors[session.index] = error
            for other in sessions:
                other.fail(error if isinstance(error, Exception) else RuntimeError(str(error)))
        finally:
            session.shutdown()

    threads = [threading.Thread(target=run, args=(session,), daemon=True) for session in sessions]
    for thread in threads:
        thread.start()
    if hung := still_there(threads, sessions, LIMIT_S):
        late = TimeoutError(f"not done within {LIMIT_S:.0f} s: {hung}")
        for session in sessions:
            session.fail(late)
        if left := still_there(threads, sessions, END_S):
            late = TimeoutError(f"{late}; and still there: {left}")
        raise late from (first_culprit(errors) if errors else None)
    if errors:
        raise first_culprit(errors)
    return results


def still_there(threads: Sequence[threading.Thread], sessions: Sequence[Session], limit_s: float) -> str:
    """Wait for all threads; the ranks of those that have not ended in time, and what they are in."""
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    pairs = zip(threads, sessions, strict=True)
    return ", ".join(f"{one.name(one.index)} in {one.engine.doing}" for thread, one in pairs if thread.is_alive())


def first_culprit(errors: dict[int, BaseException]) -> BaseException:
    """The first error that does not blame a process which itself failed: what the watcher finds between processes."""
    for error in errors.values():
        if not (isinstance(error, PeerError) and error.rank in errors):
            return error
    return next(iter(errors.values()))
