"""TensorFlow: models and optimizers of Keras 3, and gradients of loops, that are averaged inside of ``tf.function``.

``syncline.tensorflow`` is what scripts import; ``_run`` is what a step calls. Imported, it loads TensorFlow and Keras,
and nothing of another framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import UsageError
from ...session.session import Session
from .. import Handed
from . import _needed  # noqa: F401 - before the others, which import TensorFlow
from ._callbacks import Checkpoint, MeanMetrics
from ._means import Means, average
from ._prepared import prepare, prepared
from ._variables import broadcast

__all__ = ["Checkpoint", "MeanMetrics", "Means", "adapt", "average", "broadcast", "prepare", "prepared"]

_OPTIONS = {"weight": 1, "ignore": ()}
"""Those of ``syncline.prepare`` that say nothing."""


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Rank 0's values, and the optimizer in whose ``apply`` workers exchange; without one, that of ``compile()``."""
    others = sorted(name for name, default in _OPTIONS.items() if options[name] != default)
    if others:
        raise UsageError(f"{others[0]}= is for models of PyTorch")
    if prepare(session, model, optimizer, options["unused"], buffers=options["broadcast_buffers"]) is None:
        return None
    return Handed(model if optimizer is None else (model, optimizer))
