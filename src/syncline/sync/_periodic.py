"""Shared parts of the modes whose workers train locally and synchronize after a number of updates.

``Period`` defines the period and ``Mean`` the averaging. ``agree_in_blocks`` walks through a model's weights in blocks,
so that an update of several operations reads memory once.
"""

from __future__ import annotations

from typing import ClassVar

from ..errors import UsageError
from . import Agrees, Elements

BLOCK_ELEMENTS = 1 << 16
"""The block size of an update on the CPU: a few such operands fit a core's second-level cache."""


class Period:
    """No gradients are exchanged; weights are exchanged after the last of every ``steps`` updates."""

    steps: int
    merges: ClassVar[bool] = True

    def due(self, step: int) -> bool:  # noqa: ARG002
        return False

    def averages(self, step: int) -> bool:
        return step % self.steps == self.steps - 1

    def may_proceed(self, clock: int, slowest: int) -> bool:
        """Workers do not wait within a period. The next period starts when all have finished this one."""
        return clock // self.steps <= slowest // self.steps


class Mean:
    """All workers take over the mean of their weights."""

    remembers: ClassVar[bool] = False

    def pull(self, workers: int) -> float:  # noqa: ARG002
        return 1.0

    def agree(self, agreed: Elements, mean: Elements, memory: Elements | None) -> None:  # noqa: ARG002
        agreed += mean


def check_steps(mode: str, steps: int) -> None:
    """Raise UsageError unless ``steps`` is at least 1."""
    if steps < 1:
        raise UsageError(
            f"steps={steps} of {mode}: workers exchange weights after 1 step or more, such as {mode}(steps=16)"
        )


def agree_in_blocks(
    mode: Agrees, agreed: Elements, mean: Elements, memory: Elements | None, block: int = BLOCK_ELEMENTS
) -> None:
    """Call ``mode.agree`` on flat arrays, ``block`` elements at a time."""
    for start in range(0, len(agreed), block):
        part = slice(start, start + block)
        mode.agree(agreed[part], mean[part], None if memory is None else memory[part])
