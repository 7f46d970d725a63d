"""Who sleeps in compiled code is rung, by peers and by its own process, and looks at what else there is."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from mapped import anyone, machine, placed, plan_of, run_of, turn

from syncline.engine import exchange as exchange_module
from syncline.engine.exchange import Exchange
from syncline.kernels import board
from syncline.transports.shm import Shm

LIMIT_S = 30.0


def test_who_was_rung_looks_at_what_was_handed_over_before_it_sleeps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer and the own process ring the same bell, which says no more than that it was rung."""
    monkeypatch.setattr(exchange_module, "PATIENCE_MS", int(LIMIT_S * 1000))
    plan, handed = plan_of("ring", 3), list[bool]()
    with machine(3) as ends:
        exchanges = [Exchange(end, handed_over=lambda: bool(handed)) for end in ends]
        arrays = [placed(end, np.ones(6), True) for end in ends]
        runs = [[run_of(plan, rank, array, key) for rank, array in enumerate(arrays)] for key in range(2)]
        for exchange, run in zip(exchanges, runs[0], strict=True):
            exchange.start(run)
        turn(exchanges, runs[0], anyone())  # they know each other's memory from here on
        exchanges[0].start(runs[1][0])
        thread = threading.Thread(target=exchanges[0].progress, args=(LIMIT_S,), daemon=True)
        thread.start()
        deadline = time.monotonic() + LIMIT_S
        while ends[0].board[0] != board.ASLEEP and time.monotonic() < deadline:
            pass
        handed.append(True)  # at the moment in which the peer rings
        exchanges[2].start(runs[1][2])
        exchanges[2].progress(0.0)  # goes on when rank 1 comes, and so does rank 0 then
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()
        exchanges[1].start(runs[1][1])
        turn(exchanges, runs[1], anyone())


def test_threads_that_sleep_while_they_wait_are_always_rung() -> None:
    """Each rank in a thread of its own, in which it sleeps for as long as it likes."""
    plan, count, world = plan_of("direct", 3), 300, 3
    faults: list[BaseException] = []
    with machine(world) as ends:

        def work(end: Shm) -> None:
            exchange = Exchange(end)
            try:
                for key in range(count):
                    run = run_of(plan, end.rank, np.full(key % 7 + 1, end.rank + 1.0), key % 5)
                    exchange.start(run)
                    while not run.done:
                        exchange.progress(4 * LIMIT_S)
                    assert (run.array == 6).all()
            except BaseException as error:
                faults.append(error)
            finish.wait(LIMIT_S)

        finish = threading.Barrier(world)
        threads = [threading.Thread(target=work, args=(end,), daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
    assert faults == []
