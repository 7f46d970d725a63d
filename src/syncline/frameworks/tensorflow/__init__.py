"""The TensorFlow adapter: models and optimizers of Keras 3, and gradients in loops, averaged inside ``tf.function``.

``syncline.tensorflow`` has the public names; ``adapt`` is for ``syncline.prepare``. Start reading in ``prepared``,
which makes a model part of the run; ``run`` has the calls of a step. Importing this folder loads TensorFlow and Keras,
and no other framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ...session.session import Session
from .. import Handed
from .._supported import check_options, check_packages

check_packages("tensorflow", {"tensorflow": (2, 16), "keras": (3, 0)})

import keras  # noqa: E402 - only now it is known to be there

if (backend := keras.backend.backend()) != "tensorflow":
    raise UsageError(
        f"syncline.tensorflow needs Keras with the backend tensorflow, and this one has the backend {backend}: set"
        " KERAS_BACKEND=tensorflow before anything imports keras"
    )

from .callbacks import Checkpoint, MeanMetrics  # noqa: E402
from .prepared import Means, average, prepare, prepared  # noqa: E402
from .variables import broadcast  # noqa: E402

__all__ = ["Checkpoint", "MeanMetrics", "Means", "adapt", "average", "broadcast", "prepare", "prepared"]


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Copy rank 0's values to all, and let the optimizer's ``apply`` exchange first. The default is the optimizer of
    ``compile()``."""
    check_options(options, known=("unused", "weight", "broadcast_buffers"))
    unused, weight, buffers = options["unused"], options["weight"], options["broadcast_buffers"]
    if prepare(session, model, optimizer, unused, buffers=buffers, weight=weight) is None:
        return None
    return Handed(model if optimizer is None else (model, optimizer))
