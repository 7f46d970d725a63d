"""Whether JAX and optax are there, and new enough; imported before anything of theirs."""

from __future__ import annotations

import importlib
import re

from ...errors import UsageError

_OLDEST = {"jax": (0, 10), "optax": (0, 2, 8)}


def check_packages() -> None:
    """Raise UsageError, with what to install, where one is missing or too old."""
    for name, oldest in _OLDEST.items():
        wanted = ".".join(map(str, oldest))
        remedy = f"pip install 'syncline[jax]', which brings {name} {wanted} or newer"
        try:
            found = str(importlib.import_module(name).__version__)
        except ImportError as error:
            raise UsageError(f"syncline.jax needs {name}, which cannot be imported ({error}): {remedy}") from error
        if tuple(map(int, re.findall(r"\d+", found)[: len(oldest)])) < oldest:
            raise UsageError(f"syncline.jax needs {name} {wanted} or newer, and {found} is installed: {remedy}")


check_packages()
