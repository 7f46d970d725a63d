"""A training script for launchers: every rank prints "running" and trains until told otherwise.

Arguments: how rank 1 ends (none, raise, kill, stop), and the liveness limit in seconds. Only ranks that are ended from
outside train by PyTorch, whose import takes more than all else here. With ``backend`` in place of an end they wait in a
group of torch.distributed until they are ended.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import time
from collections.abc import Callable

import numpy as np

import syncline

HOLD_S = 60.0


def main(how: str, liveness: float) -> None:
    if how == "backend":
        wait_in_a_group()
    syncline.init(liveness=liveness)
    train = by_torch() if how == "none" else by_numpy()
    for step in range(1_000_000):
        if step == 2:
            if how == "none":  # taking an interpreter apart takes a second
                fork()
            os.write(1, f"running as {os.getpid()}\n".encode())  # in one piece: ranks print at once
            if syncline.rank() == 1 and how == "raise":
                raise ValueError("the data of this rank are spoilt")
            if syncline.rank() == 1 and how != "none":
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        train()


def wait_in_a_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("syncline")
    os.write(1, f"running as {os.getpid()}\n".encode())
    time.sleep(HOLD_S)


def by_torch() -> Callable[[], None]:
    """A step of a model of PyTorch."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()

    return step


class Descent:
    """Plain descent, of weights that are arrays."""

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: dict[str, np.ndarray]) -> None:  # noqa: ARG002
        weights -= 0.01 * gradient


def by_numpy() -> Callable[[], None]:
    """A step of a model in NumPy."""
    names = [f"layer {number}" for number in range(4)]
    _, optimizer = syncline.prepare({name: np.ones((100, 100)) for name in names}, Descent())
    return lambda: optimizer.step({name: np.ones((100, 100)) for name in names})


def fork() -> None:
    """A child that ends through the interpreter's whole end, which finds the parent's objects."""
    child = os.fork()
    if child == 0:
        atexit.unregister(gc.freeze)  # which children/sitecustomize.py spares all others
        gc.unfreeze()
        sys.exit(3)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 3:
        raise RuntimeError("a forked child did not end by itself")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
