"""A script in NumPy for launchers that start it again with other workers. It goes on at its newest checkpoint.

Arguments: a folder, and JSON with what happens at which step when so many workers train. ``fails`` has a pair of the
number of workers and the step before which the last worker raises, once; ``dies`` one before which it is killed, and
``holds`` pairs before which each waits to be ended. ``init`` has arguments of ``syncline.init``. Each step of rank 0 is
a line in the file ``steps``: the number of workers, and the step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import syncline

STEPS, BATCH = 8, 6
HOLD_S = 60.0


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Data, and weights."""
    draw = np.random.default_rng(1)
    return draw.normal(size=(STEPS * BATCH, 5)), draw.normal(size=STEPS * BATCH), np.zeros(5)


def gradient(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return np.asarray(2 * x.T @ (x @ weights - y) / len(x))


class Momentum:
    """Descent with a velocity."""

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: dict[str, np.ndarray]) -> None:
        velocity = state.setdefault("velocity", np.zeros_like(weights))
        velocity *= 0.9
        velocity += gradient
        weights -= 0.01 * velocity


def happen(folder: Path, plan: dict[str, Any], now: list[int]) -> None:
    """What the plan has for this number of workers and step."""
    last = syncline.rank() == syncline.world_size() - 1
    if plan.get("fails") == now and last and not (folder / "failed").exists():
        (folder / "failed").touch()
        raise ValueError("the data of this worker are spoilt")
    if plan.get("dies") == now and last:
        os.kill(os.getpid(), signal.SIGKILL)
    if now in plan.get("holds", []):
        (folder / f"holds {now}").touch()
        time.sleep(HOLD_S)


def main(folder: Path, plan: dict[str, Any]) -> None:
    syncline.init("ring", liveness=2.0, timeout=30.0, **plan.get("init", {}))
    x, y, weights = problem()
    _, optimizer = syncline.prepare({"weights": weights}, Momentum(), weight="batch")
    sampler = syncline.sampler(STEPS * BATCH, global_batch=BATCH, shuffle=False)
    store = syncline.checkpoints(folder / "checkpoints")
    if (found := store.load()) is not None:
        state: Any = found[1]
        optimizer.load_state_dict(state["optimizer"])
        sampler.load_state_dict(state["sampler"])
    while sampler.epoch < 1:
        for batch in sampler:
            now = [syncline.world_size(), sampler.step]
            happen(folder, plan, now)
            optimizer.step({"weights": gradient(x[batch], y[batch], weights)})
            sampler.commit()
            if syncline.rank() == 0:
                with (folder / "steps").open("a") as file:
                    print(*now, file=file)
            store.save(now[1] + 1, {"optimizer": optimizer.state_dict(), "sampler": sampler.state_dict()})
            store.wait()
    if syncline.rank() == 0:
        np.save(folder / "weights.npy", weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
