"""Syncline under TensorFlow: models of Keras 3, in ``fit`` and in loops, averaged inside of ``tf.function``.

    import syncline
    import syncline.tensorflow

    syncline.init()
    model.compile(optimizer, loss)
    model, optimizer = syncline.tensorflow.prepare(model, optimizer)
    model.fit(x[syncline.rank() :: syncline.world_size()], ...)

Not loaded with the package, since it loads TensorFlow.
"""

from __future__ import annotations

import sys
from typing import Any, Literal, NoReturn

from .frameworks import tensorflow as adapter
from .process import process
from .session.groups import WorkerGroup

__all__ = ["prepare"]


def prepare(
    model: Any,
    optimizer: Any = None,
    *,
    unused: Literal["error", "zeros"] = "error",
    group: WorkerGroup | None = None,
) -> Any:
    """Make a model of Keras, a ``tf.Module`` or a list of variables part of the run, and the optimizer of Keras'.

    Without an optimizer it is that of ``compile()``, and the model alone is returned; else both, the very objects. All
    ranks start from rank 0's values, and ``fit``, ``apply`` and ``apply_gradients`` exchange from now on. ``unused``
    says what happens to variables without a gradient: ``"error"`` names them, ``"zeros"`` counts them as zero. A server
    does not return from here: it serves until the workers have left, and ends with status 0.
    """
    here = process.within(group)
    here.check_fit()
    if adapter.prepare(here, model, optimizer, unused) is None:
        _leave()
    return model if optimizer is None else (model, optimizer)


def _leave() -> NoReturn:
    process.end(fetch=True)
    sys.exit(0)
