"""Threads of a framework's own that call Python again and again.

A thread that Python has not made is given a state of the interpreter when it comes, and loses it when its call ends,
with all that is its own: making these takes longer than most calls. CPython counts how often a thread has come
(``PyGILState_Ensure``), so one time more lets it keep its state; the interpreter lock it gives back as before.
"""

from __future__ import annotations

import ctypes
import threading

_kept = threading.local()


def keep_state() -> None:
    """Let the thread that calls keep its state of the interpreter, some kilobytes, as long as the process lasts."""
    if not hasattr(_kept, "state"):
        _kept.state = ctypes.pythonapi.PyGILState_Ensure()
