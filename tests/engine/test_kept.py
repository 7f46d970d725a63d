"""What is kept for calls of one kind, over real shared memory."""

from __future__ import annotations

import contextlib
import time

import numpy as np
from mapped import machine, plan_of

from syncline.engine.engine import Engine
from syncline.engine.order import Order, Sign
from syncline.errors import ClosedError, SynclineError
from syncline.kernels.board import SIGN_WORDS
from syncline.plans.messages import compile_program

LIMIT_S = 30.0


def test_while_a_run_is_under_way_no_other_is_begun() -> None:
    plan, arrays = plan_of("direct", 2), [np.ones(3), np.ones(3)]
    programs = [compile_program(plan, rank) for rank in range(2)]
    sign = Sign((0,) * SIGN_WORDS, lambda *_: SynclineError("another call"))
    with machine(2) as ends, contextlib.ExitStack() as stack:
        one, two = (Engine(end) for end in ends)
        for engine in (one, two):
            stack.callback(engine.close)
            stack.callback(engine.fail, ClosedError("the test is over"))
        kept = work = None
        deadline = time.monotonic() + LIMIT_S
        while work is None and time.monotonic() < deadline:  # they have to know each other, and nobody to drive
            kept = kept or one.keep(programs[0], arrays[0].dtype, arrays[0].size)
            work = kept and kept.begin(arrays[0].ctypes.data, 0, "first", sign, arrays[0])
        assert kept is not None
        assert work is not None
        assert not work.done
        assert kept.begin(arrays[0].ctypes.data, 1, "second", sign, arrays[0]) is None
        assert not kept.run(arrays[0].ctypes.data, 1, "second", sign, LIMIT_S)
        two.run(Order(programs[1], arrays[1], 0, "first", sign=sign), LIMIT_S)
        one.wait(work, timeout=LIMIT_S)
        assert all((array == 2).all() for array in arrays)
