"""Syncline under TensorFlow: models of Keras 3, in ``fit`` and in loops, averaged inside of ``tf.function``.

    import syncline
    import syncline.tensorflow

    syncline.init()
    model.compile(optimizer, loss)
    syncline.tensorflow.prepare(model)
    model.fit(x[syncline.rank() :: syncline.world_size()], ...)

Or ``average = syncline.tensorflow.average(model)``, which gives the means of gradients to whatever optimizer. Not
loaded with the package, since it loads TensorFlow.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from .frameworks import tensorflow as adapter
from .frameworks.tensorflow import Checkpoint, MeanMetrics, Means
from .process import process
from .session.groups import WorkerGroup

__all__ = [
    "Checkpoint",
    "MeanMetrics",
    "Means",
    "average",
    "broadcast",
    "load_state_dict",
    "prepare",
    "state_dict",
]

Unused = Literal["error", "zeros"]


def prepare(
    model: Any,
    optimizer: Any = None,
    *,
    unused: Unused = "error",
    broadcast_buffers: bool = True,
    group: WorkerGroup | None = None,
) -> Any:
    """Make a model of Keras, a ``tf.Module`` or a list of variables part of the run, with an optimizer of Keras.

    Without one it is that of ``compile()``, and the model alone is returned; else both, the very objects. All ranks
    start from rank 0's values, and ``fit``, ``apply`` and ``apply_gradients`` exchange from now on. ``unused`` says
    what happens to variables without a gradient: ``"error"`` names them, ``"zeros"`` counts them as zero. Variables
    that steps change by themselves, such as moving means, are rank 0's after every step, or each rank's own without
    ``broadcast_buffers``. A server does not return from here: it serves until the workers have left, and ends with
    status 0.
    """
    here = process.within(group)
    here.check_fit()
    if adapter.prepare(here, model, optimizer, unused, buffers=broadcast_buffers) is None:
        _leave()
    return model if optimizer is None else (model, optimizer)


def average(model: Any, *, unused: Unused = "error", group: WorkerGroup | None = None) -> Means:
    """What makes of a model's gradients their means over all workers, for an optimizer of the script's.

        average = syncline.tensorflow.average(model)   # all ranks meet, and have rank 0's values
        with average.tape() as tape:                   # or tf.GradientTape, and average(gradients)
            loss = ...
        gradients = tape.gradient(loss, model.trainable_variables)

    Raises UsageError where weights are what is exchanged (``prepare``). A server does not return from here.
    """
    here = process.within(group)
    here.check_fit()
    return adapter.average(here, model, unused, _leave)


def broadcast(variables: Any, root: int = 0, *, group: WorkerGroup | None = None) -> None:
    """Let the variables of a model, of an optimizer, or in a list, be those of rank ``root``; all workers call it."""
    adapter.broadcast(process.within(group), variables, root)


def state_dict(model: Any) -> dict[str, Any]:
    """All that a resumed run needs, as arrays of NumPy and plain values; all workers call it, and have it.

    The model's weights, what an optimizer of Keras keeps, here or at owners, and what codecs keep back.
    """
    return adapter.prepared(model).state_dict()


def load_state_dict(model: Any, saved: Mapping[str, Any]) -> None:
    """Go on from there, with as many workers, or more, or fewer; all call it with the same.

    Refuses a state of another strategy, whose mathematics would differ.
    """
    adapter.prepared(model).load_state_dict(saved)


def _leave() -> NoReturn:
    process.end(fetch=True)
    sys.exit(0)
