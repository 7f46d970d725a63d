"""Defines ``Workload``: a model, its data and its solver, and the division of the data among ranks.

Synchronous data-parallel SGD on N workers computes what one worker computes on the union of their batches only if that
union is the same. Every rank therefore draws the same permutation from (seed, epoch), cuts it into the same global
batches, and takes its own contiguous part of each. The adapter of a framework averages unequal parts; this module knows
no strategies or transports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from syncline.errors import UsageError
from syncline.nouns import Layer, Spec

from ._blueprint import Blueprint
from ._computing import PLAIN, Computing
from ._feed import AT_ONCE, Pipeline
from ._speed import EVEN, Speed
from ._trace import Trace

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

Part = tuple[NDArray[Any], NDArray[np.int64]]
"""Inputs of a model and their labels: one for each sample, or a sequence of them."""

EVALUATION_BATCH = 500
"""Samples per forward pass of an evaluation; it only limits memory."""


class Samples(Protocol):
    """A set of labelled samples in memory."""

    def __len__(self) -> int:
        """The number of samples."""
        ...

    def take(self, index: NDArray[np.int64]) -> Part:
        """The samples with these numbers and their labels, as copies."""
        ...


@dataclass(frozen=True)
class Images:
    """Labelled images in memory in their stored type; samples are converted when taken.

    ``pixels`` is (n, channels, height, width) of any real type, ``labels`` (n,) int64. A sample is ``(pixels - mean) *
    scale`` in float32. ``repeats`` > 1 repeats the set that many times.
    """

    pixels: NDArray[Any]
    labels: NDArray[np.int64]
    mean: NDArray[np.float32]
    scale: float = 1.0
    repeats: int = 1

    def __len__(self) -> int:
        return len(self.labels) * self.repeats

    def take(self, index: NDArray[np.int64]) -> Part:
        """Images (len(index), channels, height, width) float32 and labels int64, as copies."""
        index = index % len(self.labels)
        pixels = self.pixels[index].astype(np.float32)
        pixels -= self.mean
        if self.scale != 1.0:
            pixels *= np.float32(self.scale)
        return pixels, self.labels[index]


@dataclass(frozen=True)
class Epoch:
    """The training set in the order of one epoch, cut into ``steps`` global batches, each with ``world`` parts."""

    samples: Samples
    order: NDArray[np.int64]
    batch: int
    world: int
    steps: int

    def part(self, step: int, rank: int) -> Part:
        """A worker's part of a global batch."""
        whole = self.order[step * self.batch : (step + 1) * self.batch]
        return self.samples.take(whole[len(whole) * rank // self.world : len(whole) * (rank + 1) // self.world])

    def share(self, step: int, rank: int) -> float:
        """The part's size relative to an even share: its weight in the mean over workers."""
        whole = len(self.order[step * self.batch : (step + 1) * self.batch])
        return (whole * (rank + 1) // self.world - whole * rank // self.world) * self.world / whole


@dataclass(frozen=True)
class Workload:
    """A model, its data and its solver.

    ``batch`` is the default number of samples per step: of all workers together with ``global_batch``, so that the
    result does not depend on their number, else of each worker. ``epochs`` is a sensible length of training. ``build``,
    ``loss``, ``optimizer`` and ``schedule`` are for PyTorch. ``build`` creates the model from torch's random state;
    callers use ``model(seed)``. ``schedule(optimizer, steps)`` returns a learning-rate scheduler for one step per
    optimizer step, or None. ``blueprint`` is the same network and solver for any framework, None if there is only
    PyTorch's. ``trace`` has the times of a replayed model, None for a real one. ``weight`` weighs ranks, as in
    ``syncline.prepare``: losses here are means over batches, whose sizes may differ by one sample. ``pipeline``,
    ``computing`` and ``speed`` are the arguments in parentheses.
    """

    name: str
    batch: int
    global_batch: bool
    epochs: int
    train: Samples
    test: Samples | None
    build: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    schedule: Callable[[Optimizer, int], LRScheduler | None]
    trace: Trace | None = None
    weight: Literal["batch"] = "batch"
    pipeline: Pipeline = AT_ONCE
    computing: Computing = PLAIN
    speed: Speed = EVEN
    blueprint: Blueprint | None = None

    @property
    def copied(self) -> bool:
        """Whether batches are copied to a device, really or simulated."""
        return self.computing.device != "cpu" or bool(self.pipeline.h2d)

    def model(self, seed: int, rank: int = 0) -> nn.Module:
        """The model on the CPU, the same for the same seed. The caller's random state is preserved.

        A replayed model takes the times of worker ``rank``.
        """
        import torch

        with torch.device("cpu"), torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            model = self.build()
        if self.trace is not None:
            from .models.replayed import Replayed

            assert isinstance(model, Replayed)
            model.stretch(self.speed.stretch(rank, self.trace.total_s))
        return model

    def total_batch(self, world: int, batch: int | None = None) -> int:
        """The samples per step of all ``world`` workers together. ``batch`` replaces the default and means the same.

        Raises UsageError for a batch that differs from the trace's.
        """
        timed = None if self.trace is None else self.trace.batch
        if timed is not None and batch not in (None, timed):
            raise UsageError(f"the times of {self.name} are for {timed} samples per worker: leave --batch out")
        chosen = self.batch if batch is None else batch
        return chosen if self.global_batch else chosen * world

    def steps_per_epoch(self, batch: int, world: int) -> int:
        """The number of steps of an epoch. ``batch`` is the global batch, of all ``world`` workers together."""
        _check_division(batch, world)
        full, rest = divmod(len(self.train), batch)
        return full + (rest >= world)

    def epoch(self, world: int, batch: int, seed: int, epoch: int) -> Epoch:
        """One pass over the training set, with the parts of all workers.

        ``batch`` is the global batch; its parts differ by at most one sample. An incomplete last batch is kept if it
        has a sample for every rank, else dropped.
        """
        if seed < 0 or epoch < 0:
            raise UsageError(f"seed and epoch cannot be negative, got {seed} and {epoch}")
        order = np.random.default_rng((seed, epoch)).permutation(len(self.train))
        return Epoch(self.train, order, batch, world, self.steps_per_epoch(batch, world))

    def tests(self) -> Iterator[Part]:
        """The test set in pieces of ``EVALUATION_BATCH``."""
        assert self.test is not None
        for start in range(0, len(self.test), EVALUATION_BATCH):
            yield self.test.take(np.arange(start, min(start + EVALUATION_BATCH, len(self.test))))

    def evaluate(self, model: nn.Module) -> tuple[float, float] | None:
        """The accuracy (0 to 1) and mean loss on the test set, None if there is none.

        The model runs on its current device in evaluation mode and is returned to its previous modes.
        """
        if self.test is None:
            return None
        import torch

        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        count, correct, loss = 0, 0, 0.0
        try:
            with torch.no_grad():
                for part in self.tests():
                    inputs, labels = (torch.from_numpy(array).to(device) for array in part)
                    output = model(inputs)
                    count += labels.numel()
                    correct += int((output.argmax(1) == labels).sum())
                    loss += float(self.loss(output, labels)) * labels.numel()
        finally:
            for module, training in modes:
                module.training = training
        return correct / count, loss / count


def entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean cross entropy of scores over dimension 1, averaged over all labels."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(output, target)


def layers(model: nn.Module) -> tuple[Layer, ...]:
    """The trainable tensors of a model in registration order, which is the forward order of all models here."""
    found = ((name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad)
    return tuple(Layer(Spec(name, tuple(t.shape), str(t.dtype).removeprefix("torch."))) for name, t in found)


def _check_division(batch: int, world: int) -> None:
    if world < 1:
        raise UsageError(f"there must be at least one worker, got {world}")
    if batch < world:
        raise UsageError(
            f"a global batch of {batch} has no sample for each of {world} workers: use a batch of {world} or more"
        )
