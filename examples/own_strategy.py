"""Use strategies as Python values, and write your own schedule that a strategy can name.

    syncline run -n 2 examples/own_strategy.py
    python examples/own_strategy.py

A strategy can name a part once the file that registers it has been imported. The parts of an installed package are
available everywhere, including the command line, if its pyproject.toml declares them:

    [project.entry-points."syncline.schedules"]
    even = "my_package.even"
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

import syncline
from syncline.errors import StrategyError, UsageError
from syncline.nouns import Bucket, Group, Layer, Slice
from syncline.registry import register
from syncline.schedules import Cost
from syncline.strategy.strategy import Strategy


@register("schedules", "even")
@dataclass(frozen=True)
class Even:
    """Divides the model into ``count`` buckets of nearly equal size."""

    count: int = 2
    release: ClassVar[Literal["ready", "backward_end"]] = "ready"
    phases: ClassVar[Literal["whole", "split"]] = "whole"
    apply: ClassVar[Literal["step", "layer", "next_step"]] = "step"
    in_flight: ClassVar[int] = 2
    measures: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError("even(count=...) must be at least 1")

    def buckets(self, layers: Sequence[Layer], cost: Cost | None = None) -> list[Bucket]:  # noqa: ARG002
        """Fill buckets from the last layer to the first. A bucket also ends where the element type changes."""
        share = sum(layer.spec.nbytes for layer in layers) / self.count
        made: list[Bucket] = []
        for index in reversed(range(len(layers))):
            spec = layers[index].spec
            part = Slice(index, 0, spec.elements)
            if made and made[-1].dtype == spec.dtype and made[-1].nbytes < share:
                made[-1] = Bucket((*made[-1].slices, part), spec.dtype)
            else:
                made.append(Bucket((part,), spec.dtype))
        return made

    def priority(self, bucket: Bucket) -> float:  # noqa: ARG002
        return 0.0  # all buckets have the same priority


def main() -> None:
    mine = Strategy.parse("ring schedule=even(count=3)")
    syncline.init(strategy=str(mine))
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(6)))
    model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    if syncline.rank() > 0:
        return
    print(f"trained with {syncline.stats().strategy}, {syncline.world_size()} workers")
    print(f"auto means {Strategy().resolve(Group(4), hosts=1)} on one host,")
    print(f"           {Strategy().resolve(Group(4, nodes=(0, 0, 1, 1)), hosts=2)} on two,")
    print(f"           {Strategy().resolve(Group(4), hosts=4)} on four")
    try:
        Strategy.parse("ps(servers=0)")
    except StrategyError as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    main()
