"""Whether TensorFlow and Keras are there, new enough, and work together; imported before anything of theirs."""

from __future__ import annotations

import importlib
import re
from typing import Any

from ...errors import UsageError

_OLDEST = {"tensorflow": (2, 16), "keras": (3, 0)}


def check_packages() -> None:
    """Raise UsageError, with what to install or to set, where one is missing, too old, or set to something else."""
    for name, oldest in _OLDEST.items():
        wanted = ".".join(map(str, oldest))
        remedy = f"pip install 'syncline[tensorflow]', which brings {name} {wanted} or newer"
        try:
            module: Any = importlib.import_module(name)
            found = str(module.__version__)
        except ImportError as error:
            raise UsageError(
                f"syncline.tensorflow needs {name}, which cannot be imported ({error}): {remedy}"
            ) from error
        if tuple(map(int, re.findall(r"\d+", found)[: len(oldest)])) < oldest:
            raise UsageError(f"syncline.tensorflow needs {name} {wanted} or newer, and {found} is installed: {remedy}")
    backend = module.backend.backend()
    if backend != "tensorflow":
        raise UsageError(
            f"syncline.tensorflow needs Keras to compute by TensorFlow, and here it does by {backend}: set"
            " KERAS_BACKEND=tensorflow before anything imports keras"
        )


check_packages()
