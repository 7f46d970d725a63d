"""What modes share whose workers train by themselves and come together after so many updates.

``Period`` says when, ``Mean`` what becomes of their weights; ``agree_in_blocks`` walks through a model's weights so
that an update of several operations reads memory once.
"""

from __future__ import annotations

from typing import ClassVar

from ..errors import UsageError
from . import Agrees, Elements

BLOCK_ELEMENTS = 1 << 16
"""Of an update on the CPU: a few such operands fit a core's second-level cache."""


class Period:
    """No gradient is exchanged; weights are after the last of every ``steps`` updates."""

    steps: int
    merges: ClassVar[bool] = True

    def due(self, step: int) -> bool:  # noqa: ARG002
        """Never."""
        return False

    def averages(self, step: int) -> bool:
        """After the last step of every period."""
        return step % self.steps == self.steps - 1

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Within a period as it likes; into the next one when all have finished it."""
        return clock // self.steps <= slowest // self.steps


class Mean:
    """All workers take over the mean of their weights."""

    remembers: ClassVar[bool] = False

    def pull(self, workers: int) -> float:  # noqa: ARG002
        """All of it."""
        return 1.0

    def agree(self, agreed: Elements, mean: Elements, memory: Elements | None) -> None:  # noqa: ARG002
        """The mean of the weights."""
        agreed += mean


def check_steps(mode: str, steps: int) -> None:
    """Raise UsageError unless a period has a step."""
    if steps < 1:
        raise UsageError(f"steps={steps} of {mode}: workers exchange weights after 1 step or more, as {mode}(steps=16)")


def agree_in_blocks(
    mode: Agrees, agreed: Elements, mean: Elements, memory: Elements | None, block: int = BLOCK_ELEMENTS
) -> None:
    """``mode.agree`` on all elements of flat arrays, ``block`` of them at a time."""
    for start in range(0, len(agreed), block):
        part = slice(start, start + block)
        mode.agree(agreed[part], mean[part], None if memory is None else memory[part])
