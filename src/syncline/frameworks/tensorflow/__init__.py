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
from ._prepared import prepare

__all__ = ["adapt", "prepare"]

_OPTIONS = {"weight": 1, "ignore": (), "broadcast_buffers": True}
"""Those of ``syncline.prepare`` that say nothing."""


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Rank 0's values, and the optimizer in whose ``apply`` workers exchange; without one, that of ``compile()``."""
    others = sorted(name for name, default in _OPTIONS.items() if options[name] != default)
    if others:
        raise UsageError(f"{others[0]}= is for models of PyTorch")
    used = prepare(session, model, optimizer, options["unused"])
    if used is None:
        return None
    return Handed(model if optimizer is None else (model, optimizer))
