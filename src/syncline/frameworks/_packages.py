"""Whether the packages that an adapter needs are there, and new enough."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping

from ..errors import UsageError


def check_packages(framework: str, oldest: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UsageError, with what to install, where a package that ``framework`` needs is missing or too old."""
    for name, version in oldest.items():
        wanted, needs = ".".join(map(str, version)), f"syncline.{framework} needs {name}"
        remedy = f"pip install 'syncline[{framework}]', which brings {name} {wanted} or newer"
        try:
            found = str(importlib.import_module(name).__version__)
        except ImportError as error:
            raise UsageError(f"{needs}, which cannot be imported ({error}): {remedy}") from error
        if tuple(map(int, re.findall(r"\d+", found)[: len(version)])) < version:
            raise UsageError(f"{needs} {wanted} or newer, and {found} is installed: {remedy}")
