"""A training script for launchers: every rank prints "running" and trains until told otherwise.

Arguments: how rank 1 ends (none, raise, kill, stop), and the liveness limit in seconds.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

import torch

import syncline


def main(how: str, liveness: float) -> None:
    torch.set_num_threads(1)
    syncline.init(liveness=liveness)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(100, 100) for _ in range(4)))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for step in range(1_000_000):
        if step == 2:
            if how == "none":  # taking an interpreter apart takes a second
                fork()
            os.write(1, f"running as {os.getpid()}\n".encode())  # in one piece: ranks print at once
            if syncline.rank() == 1 and how == "raise":
                raise ValueError("the data of this rank are spoilt")
            if syncline.rank() == 1 and how != "none":
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        optimizer.zero_grad()
        model(torch.ones(4, 100)).sum().backward()
        optimizer.step()


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
