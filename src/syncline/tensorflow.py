"""Syncline under TensorFlow: Keras 3 models, in ``fit`` and in custom loops, averaged inside ``tf.function``.

    import syncline
    import syncline.tensorflow

    syncline.init()
    model.compile(optimizer, loss)
    syncline.tensorflow.prepare(model)
    model.fit(x[syncline.rank() :: syncline.world_size()], ...)

Or ``average = syncline.tensorflow.average(model)``, which averages gradients for any optimizer. ``import syncline``
does not import this module, because it imports TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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
    weight: Literal[1, "batch"] = 1,
    broadcast_buffers: bool = True,
    group: WorkerGroup | None = None,
) -> Any:
    """Make a Keras model, a ``tf.Module`` or a list of variables part of the run, with a Keras optimizer.

    Without an optimizer, the optimizer of ``compile()`` is used and only the model is returned; else both, the same
    objects. All ranks start from rank 0's values, and ``fit``, ``apply`` and ``apply_gradients`` exchange from then on.
    ``unused`` controls variables without a gradient: ``"error"`` names them, ``"zeros"`` counts their gradients as
    zero. ``weight="batch"`` counts a worker by its part of a global batch. Variables that steps change themselves, such
    as moving means, get rank 0's values after every step, or stay local with ``broadcast_buffers=False``. On a server
    this call does not return: it serves until the workers have left, and exits with status 0.
    """
    here = process.within(group)
    here.check_fit()
    if adapter.prepare(here, model, optimizer, unused, buffers=broadcast_buffers, weight=weight) is None:
        process.leave()
    return model if optimizer is None else (model, optimizer)


def average(model: Any, *, unused: Unused = "error", group: WorkerGroup | None = None) -> Means:
    """A function that replaces a model's gradients by their means over all workers, for an optimizer of the script.

        average = syncline.tensorflow.average(model)   # all ranks meet, and have rank 0's values
        with average.tape() as tape:                   # or tf.GradientTape, and average(gradients)
            loss = ...
        gradients = tape.gradient(loss, model.trainable_variables)

    Raises UsageError under strategies that exchange weights (use ``prepare``). On a server it does not return.
    """
    here = process.within(group)
    here.check_fit()
    return adapter.average(here, model, unused, process.leave)


def broadcast(variables: Any, root: int = 0, *, group: WorkerGroup | None = None) -> None:
    """Set the variables of a model, an optimizer or a list to the values of ``root``. Collective among workers."""
    adapter.broadcast(process.within(group), variables, root)


def state_dict(model: Any) -> dict[str, Any]:
    """Everything that a resumed run needs, as NumPy arrays and plain values. Collective; all workers get it.

    This includes the model's weights, a Keras optimizer's state, here or on owners, and the codecs' residuals.
    """
    return adapter.prepared(model).state_dict()


def load_state_dict(model: Any, saved: Mapping[str, Any]) -> None:
    """Restore that state, with the same or another number of workers. Collective, with the same arguments.

    Refuses the state of a strategy with different mathematics.
    """
    adapter.prepared(model).load_state_dict(saved)
