"""Means of gradients for scripts that have an optimizer of their own, or that look at gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from ...session.session import Session
from ._matching import Unused
from ._prepared import Prepared
from ._prepared import average as enter


class Means:
    """What ``syncline.tensorflow.average`` gives: called with gradients, it has their means over all workers."""

    def __init__(self, made: Prepared) -> None:
        self._made = made

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """The means, in the order of ``variables``, which are those of the model in its own order if not given.

        All workers call it as often, inside of ``tf.function`` or not.
        """
        made = self._made
        of = made.variables if variables is None else list(variables)
        if made.run is None:
            means = made.matching.matched(list(gradients), of)
        else:
            means = made.run.exchange(made.run.matched(list(gradients), of))
        return [means[made.matching.number(one)] for one in of]

    def tape(self, persistent: bool = False, watch_accessed_variables: bool = True) -> MeanTape:
        """A ``tf.GradientTape`` whose ``gradient(loss, variables)`` gives the means."""
        return MeanTape(self, persistent, watch_accessed_variables)


class MeanTape(tf.GradientTape):  # type: ignore[misc]
    """Records as TensorFlow's does."""

    def __init__(self, means: Means, persistent: bool, watch_accessed_variables: bool) -> None:
        super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        self._means = means

    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """As TensorFlow's; ``sources`` are the variables of the model, all of them."""
        nest = tf.nest
        found = super().gradient(target, sources, *arguments, **options)
        flat = [found] if not isinstance(sources, list | tuple | dict) else nest.flatten(found)
        means = self._means(flat, nest.flatten(sources))
        return nest.pack_sequence_as(sources, means)


def average(session: Session, model: Any, unused: Unused, leave: Callable[[], NoReturn]) -> Means:
    """All processes call it at the same place; ``leave`` ends a server that has served."""
    made = enter(session, model, unused)
    return leave() if made is None else Means(made)
