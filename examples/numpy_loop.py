"""Training without a framework: a network of two layers in NumPy, with gradients written by hand.

syncline run -n 2 examples/numpy_loop.py
syncline run -n 2 examples/numpy_loop.py "ring codec=topk(ratio=0.1)"
syncline run -n 2 --servers 1 examples/numpy_loop.py "ps(servers=1)"
"""

import sys

import numpy as np

import syncline


class Momentum:
    """Updates flat pieces of the weights, every element by itself; ``state`` has the velocity."""

    def __init__(self, lr: float, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: dict[str, np.ndarray]) -> None:
        velocity = state.setdefault("velocity", np.zeros_like(weights))
        velocity *= self.momentum
        velocity += gradient
        weights -= self.lr * velocity


def gradients(weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
    hidden = np.tanh(x @ weights["first"])
    error = hidden @ weights["second"] - y
    back = error @ weights["second"].T * (1 - hidden**2)
    return {"first": x.T @ back / len(x), "second": hidden.T @ error / len(x)}, float((error**2).mean())


syncline.init(sys.argv[1] if len(sys.argv) > 1 else None)
draw = np.random.default_rng(syncline.rank())  # each rank draws its own data; all ranks get rank 0's weights
weights = {"first": draw.normal(size=(8, 32)) / 3, "second": draw.normal(size=(32, 1)) / 6}
weights, optimizer = syncline.prepare(weights, Momentum(lr=0.02))
for _ in range(300):
    x = draw.normal(size=(64, 8))
    found, loss = gradients(weights, x, np.sin(x.sum(1, keepdims=True)))
    optimizer.step(found)
if syncline.rank() == 0:
    print(f"{syncline.stats().chosen}: loss {loss:.4f}")
