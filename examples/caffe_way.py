"""Two ways of data parallelism in Caffe, on its small CIFAR-10 network, with layers written by hand in NumPy.

    syncline run -n 4 examples/caffe_way.py                              # decentralised: an allreduce among workers
    syncline run -n 4 --servers 1 examples/caffe_way.py --way ps         # one more process is the server

Zhu, Liu and Fang ("Caffe on Sunway TaihuLight", 2020) built both. With a parameter server (algorithm 1), a layer's
gradient goes to the server as soon as backward has computed it, and the new weights come back. In the decentralised
version (algorithm 2), all gradients are in one block, which is averaged after backward; then each rank updates its own
weights. Both compute W <- W - lr * (mean of dW over all workers), which is also the update of one worker with the whole
batch.

The network is Caffe's ``cifar10_quick``. The images are random, in CIFAR-10's shape. Layers keep their inputs for the
backward pass, which reports the gradient of the bias and then that of the weight.
"""

import argparse
import hashlib
from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

import syncline

WAYS = {"ps": "ps(servers=1) schedule=wait_free", "ring": "ring schedule=fifo"}
Array = np.ndarray
Told = Callable[[str, Array], None]


class Convolution:
    """A 5 x 5 convolution with padding 2, as a matrix product with the patches of all images, one per row (im2col)."""

    def __init__(self, name: str, weights: dict[str, Array]) -> None:
        self.name, self.weights = name, weights

    def forward(self, x: Array) -> Array:
        self.shape = x.shape
        padded = np.pad(x, ((0, 0), (0, 0), (2, 2), (2, 2)))
        patches = sliding_window_view(padded, (5, 5), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)  # n, y, x, c, 5, 5
        self.rows = patches.reshape(-1, x.shape[1] * 25)
        kernel = self.weights[f"{self.name}.weight"]
        out = self.rows @ kernel.reshape(len(kernel), -1).T + self.weights[f"{self.name}.bias"]
        return out.reshape(len(x), *x.shape[2:], -1).transpose(0, 3, 1, 2)

    def backward(self, back: Array, told: Told) -> Array:
        kernel = self.weights[f"{self.name}.weight"]
        rows = back.transpose(0, 2, 3, 1).reshape(-1, len(kernel))
        told(f"{self.name}.bias", rows.sum(0))
        told(f"{self.name}.weight", (rows.T @ self.rows).reshape(kernel.shape))
        count, channels, height, width = self.shape
        patches = (rows @ kernel.reshape(len(kernel), -1)).reshape(count, height, width, channels, 5, 5)
        padded = np.zeros((count, channels, height + 4, width + 4))
        for y in range(5):  # col2im
            for x in range(5):
                padded[:, :, y : y + height, x : x + width] += patches[..., y, x].transpose(0, 3, 1, 2)
        return padded[:, :, 2:-2, 2:-2]


class Pooling:
    """3 x 3 windows with stride 2. As in Caffe, the last windows extend beyond the edge."""

    def windows(self, x: Array, beyond: float) -> Array:
        self.shape = x.shape
        padded = np.pad(x, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=beyond)
        return sliding_window_view(padded, (3, 3), axis=(2, 3))[:, :, ::2, ::2].reshape(*x.shape[:2], -1, 9)

    def spread(self, back: Array) -> Array:
        """Sum each element's values over the windows that contain it. The last dimension is the place in a window."""
        count, channels, height, width = self.shape
        parts = back.reshape(count, channels, height // 2, width // 2, 9)
        padded = np.zeros((count, channels, height + 1, width + 1))
        for place in range(9):
            y, x = divmod(place, 3)
            padded[:, :, y : y + height - 1 : 2, x : x + width - 1 : 2] += parts[..., place]
        return padded[:, :, :-1, :-1]


class MaxPooling(Pooling):
    def forward(self, x: Array) -> Array:
        windows = self.windows(x, -np.inf)
        self.largest = windows.argmax(-1)[..., None]
        return np.take_along_axis(windows, self.largest, -1).reshape(*x.shape[:2], x.shape[2] // 2, -1)

    def backward(self, back: Array, _: Told) -> Array:
        flat = back.reshape(*back.shape[:2], -1, 1)
        return self.spread(np.where(np.arange(9) == self.largest, flat, 0.0))


class AveragePooling(Pooling):
    def forward(self, x: Array) -> Array:
        inside = self.windows(np.ones((1, 1, *x.shape[2:])), 0.0).sum(-1)
        self.share = 1 / inside  # the weight of an element in the mean of its window; padding does not count
        return (self.windows(x, 0.0).sum(-1) * self.share).reshape(*x.shape[:2], x.shape[2] // 2, -1)

    def backward(self, back: Array, _: Told) -> Array:
        flat = back.reshape(*back.shape[:2], -1) * self.share
        return self.spread(np.repeat(flat[..., None], 9, -1))


class Relu:
    def forward(self, x: Array) -> Array:
        self.positive = x > 0
        return x * self.positive

    def backward(self, back: Array, _: Told) -> Array:
        return back * self.positive


class InnerProduct:
    def __init__(self, name: str, weights: dict[str, Array]) -> None:
        self.name, self.weights = name, weights

    def forward(self, x: Array) -> Array:
        self.shape, self.flat = x.shape, x.reshape(len(x), -1)
        return self.flat @ self.weights[f"{self.name}.weight"].T + self.weights[f"{self.name}.bias"]

    def backward(self, back: Array, told: Told) -> Array:
        told(f"{self.name}.bias", back.sum(0))
        told(f"{self.name}.weight", back.T @ self.flat)
        return (back @ self.weights[f"{self.name}.weight"]).reshape(self.shape)


def start() -> dict[str, Array]:
    """145,578 weights, scaled to the inputs of each layer so that a short run learns."""
    draw = np.random.default_rng(0)
    shapes = {
        "conv1": (32, 3, 5, 5),
        "conv2": (32, 32, 5, 5),
        "conv3": (64, 32, 5, 5),
        "ip1": (64, 1024),
        "ip2": (10, 64),
    }
    found = {}
    for name, shape in shapes.items():
        found[f"{name}.weight"] = draw.normal(size=shape) * np.sqrt(2 / np.prod(shape[1:]))
        found[f"{name}.bias"] = np.zeros(shape[0])
    return found


def network(weights: dict[str, Array]) -> list:
    return [
        Convolution("conv1", weights), MaxPooling(), Relu(),
        Convolution("conv2", weights), Relu(), AveragePooling(),
        Convolution("conv3", weights), Relu(), AveragePooling(),
        InnerProduct("ip1", weights), InnerProduct("ip2", weights),
    ]  # fmt: skip


def images(seed: int, count: int) -> tuple[Array, Array]:
    """Random images (count, 3, 32, 32) and labels: each of the ten classes has a coarse colour pattern, plus noise."""
    patterns = np.random.default_rng(1).normal(size=(10, 3, 4, 4)).repeat(8, 2).repeat(8, 3)
    draw = np.random.default_rng((2, seed))
    labels = draw.integers(10, size=count)
    return patterns[labels] + draw.normal(size=(count, 3, 32, 32)), labels


def softmax(scores: Array) -> Array:
    grown = np.exp(scores - scores.max(1, keepdims=True))
    return grown / grown.sum(1, keepdims=True)


def forward(layers: list, x: Array) -> Array:
    for layer in layers:
        x = layer.forward(x)
    return x


def descend(weights: Array, gradient: Array, _: dict[str, Array], *, lr: float = 0.01) -> None:
    """The update of both algorithms. ``gradient`` is the mean over all workers."""
    weights -= lr * gradient


def main() -> None:
    options = argparse.ArgumentParser(description="Caffe's cifar10_quick, data-parallel in two ways")
    options.add_argument("--way", choices=WAYS, default="ring")
    options.add_argument("--iterations", type=int, default=30)
    options.add_argument("--batch", type=int, default=40, help="images of all workers together")
    options.add_argument("--save", help="a file for the weights (.npz)")
    given = options.parse_args()

    syncline.init(WAYS[given.way])
    weights, optimizer = syncline.prepare(start(), descend)
    layers = network(weights)
    rank, workers = syncline.rank(), syncline.world_size()
    for iteration in range(given.iterations):
        x, labels = images(iteration, given.batch)
        x, labels = x[rank::workers], labels[rank::workers]
        back = (softmax(forward(layers, x)) - np.eye(10)[labels]) / len(x)
        for layer in reversed(layers):
            back = layer.backward(back, optimizer.produced)  # gradients travel while backward continues
        optimizer.step()

    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights.values())).digest()
    equal = len(set(syncline.gather(digest))) == 1
    x, labels = images(-1 % 2**32, 200)
    right = (forward(layers, x).argmax(1) == labels).mean()
    if rank == 0:
        print(f"{syncline.stats().strategy}: {right:.1%} right, replicas {'equal' if equal else 'differ'}")
        if given.save:
            np.savez(given.save, **weights)


if __name__ == "__main__":
    main()
