"""Threads that Python has not made, and that call it twice: with what is theirs, where they keep their state."""

from __future__ import annotations

import ctypes
import threading

import pytest

from syncline.frameworks._computations import keep_state


@pytest.mark.parametrize("keeps", [True, False])
def test_what_is_a_thread_s_own_is_there_when_it_comes_again(keeps: bool) -> None:
    """It comes again at its end, as destructors of C++ do."""
    c, own, found, thread = ctypes.CDLL(None), threading.local(), list[bool](), ctypes.c_ulong()
    at_its_end = getattr(c, "__cxa_thread_atexit_impl", None)
    if at_its_end is None:
        pytest.skip("this C library calls nothing at the end of a thread")

    @ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
    def begin(_: int | None) -> None:
        if keeps:
            keep_state()
            keep_state()
        own.value = 1
        at_its_end(end, None, ctypes.cast(c.pthread_join, ctypes.c_void_p))

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def end(_: int | None) -> None:
        found.append(hasattr(own, "value"))

    assert c.pthread_create(ctypes.byref(thread), None, begin, None) == 0
    assert c.pthread_join(thread, None) == 0
    assert found == [keeps]
