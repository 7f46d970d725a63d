"""Models as a prediction sees them: layers with their times, how batches come and how fast workers are.

Owns the way from a workload to one. Knows no cluster and no strategy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from syncline.costs.worker import Batches, Stretch
from syncline.errors import UsageError
from syncline.nouns import Layer
from syncline.workloads import EVEN, Speed, Trace, Workload

_AT_ONCE = Batches()


@dataclass(frozen=True)
class Model:
    """What a worker computes in an iteration, and on how many samples: parts of layers in forward order."""

    name: str
    parts: tuple[Stretch, ...]
    layers: tuple[Layer, ...]
    batch: int
    batches: Batches = _AT_ONCE
    speed: Speed = EVEN

    @property
    def forward_s(self) -> float:
        """Seconds of the forward pass."""
        return sum(part.forward_s for part in self.parts)

    @property
    def backward_s(self) -> float:
        """Seconds of the backward pass."""
        return sum(part.backward_s for part in self.parts)

    @property
    def computing_s(self) -> float:
        """Seconds of both passes."""
        return self.forward_s + self.backward_s

    @property
    def alike(self) -> bool:
        """Whether all workers take the same time."""
        return self.speed.slow_rank is None and not self.speed.jitter

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(layer.spec.nbytes for layer in self.layers)


def model_of(workload: Workload) -> Model:
    """The model of a workload whose layers have times; raises UsageError, with the remedy, for one that computes."""
    if workload.trace is None:
        raise UsageError(
            f"the workload {workload.name} computes, and how long its layers take on a worker is not known: record a"
            " trace of it with `syncline record -o FILE.csv SCRIPT` and predict trace:FILE.csv"
        )
    pipeline = workload.pipeline
    batches = Batches(pipeline.loading, pipeline.h2d or 0.0, pipeline.prefetch)
    return traced(workload.name, workload.trace, workload.batch, batches, workload.speed)


def traced(name: str, trace: Trace, batch: int, batches: Batches = _AT_ONCE, speed: Speed = EVEN) -> Model:
    """The model of a trace."""
    parts: list[Stretch] = []
    layers: list[Layer] = []
    stretch = speed.least_s(trace.total_s) / trace.total_s if trace.total_s > 0 else 1.0
    for one in trace.layers:
        tensors = tuple(range(len(layers), len(layers) + len(one.tensors)))
        parts.append(Stretch(one.forward_s * stretch, one.backward_s * stretch, tensors))
        for number, spec in enumerate(one.tensors):
            # Schedules read times by tensor: the layer's are those of the first of its tensors that is ready.
            last = number == len(one.tensors) - 1
            named = replace(spec, name=f"{one.name}.{spec.name}")
            layers.append(Layer(named, parts[-1].forward_s * (number == 0), parts[-1].backward_s * last))
    return Model(name, tuple(parts), tuple(layers), batch, batches, speed)
