"""How the transport over torch.distributed ends: without a thread, whoever else is still there.

A thread that comes back from Gloo while the interpreter is taken apart ends the process with SIGABRT.
"""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from syncline.errors import PeerLost
from syncline.launch.local import launch
from syncline.transports import Handle, MemoryStore, Place, Transport

torch = pytest.importorskip("torch")

from syncline.transports.torch import Torch  # noqa: E402

LIMIT_S = 120.0


def ends(world: int) -> list[Torch]:
    store = MemoryStore()
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(Torch, [Place(rank, world, store) for rank in range(world)]))


def threads_of(end: Torch) -> list[threading.Thread]:
    found = [*end._readers.values(), *(waiter.thread for waiter in end._waiters.values())]
    return [thread for thread in found if thread.is_alive()]


def until_done(end: Transport, handle: Handle) -> None:
    while not handle.done:
        end.poll(LIMIT_S)


def test_a_rank_that_ends_first_keeps_no_thread() -> None:
    first, second = ends(2)
    first.recv(1, 0, np.zeros(1 << 20, np.uint8))
    pending = second.recv(0, 0, np.zeros(1 << 20, np.uint8))
    second.send(0, 1, np.zeros(1 << 20, np.uint8))  # announced, never asked for
    first.allreduce(0, np.zeros(8, np.float32))  # begun, never joined
    assert len(threads_of(first)) > 1
    first.close()
    assert threads_of(first) == []
    until_done(second, pending)
    assert isinstance(pending.error, PeerLost)
    second.close()
    assert threads_of(second) == []


def test_ranks_that_end_together_leave_no_thread() -> None:
    both = ends(2)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(Torch.close, both))
    assert [threads_of(end) for end in both] == [[], []]


@pytest.mark.slow
def test_a_script_without_shutdown_ends_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy, syncline\n"
        "syncline.init('native')\n"
        "for _ in range(3):\n"
        "    syncline.allreduce(numpy.ones(100_000, numpy.float32))\n"
    )
    printed: list[str] = []
    outcome = launch(
        [sys.executable, str(script)], 2, on_output=lambda _, line: printed.append(line), timeout_s=LIMIT_S
    )
    assert outcome.status == 0, printed
    assert printed == []
