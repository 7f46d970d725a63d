"""A framework's steps as they are measured: a class each, in a module that is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, Protocol

from syncline.errors import UsageError
from syncline.strategy.grammar import nearest

FRAMEWORKS: Final = {
    "numpy": ("numpy",),
    "jax": ("jax", "optax"),
    "tensorflow": ("tensorflow", "keras"),
    "torch": ("torch",),
}
"""Those that are measured, and the packages that each needs; ``_NAME`` has the class."""


class Loop(Protocol):
    """Plain SGD on so many tensors of one size in float32, whose gradients are there, on one thread."""

    def bare(self) -> None:
        """One step of the framework alone, until the new weights are there."""
        ...

    def step(self) -> None:
        """One step of a model that Syncline exchanges the gradients of; all ranks call it."""
        ...

    def first(self) -> float:
        """An element of the weights that ``step`` has updated, which were 1 at first."""
        ...


def loop_of(framework: str) -> Callable[[int, int], Loop]:
    """What makes a loop of so many tensors of so many elements each, within a run; imports the framework."""
    made: Any = importlib.import_module(f"{__package__}._{framework}").Steps
    return made  # type: ignore[no-any-return]


def check_framework(name: str) -> None:
    """Raise UsageError for one that is not known, or not installed."""
    if name not in FRAMEWORKS:
        hint = nearest(name, FRAMEWORKS) or "; there are " + ", ".join(FRAMEWORKS)
        raise UsageError(f"unknown framework {name!r}{hint}")
    if missing := [package for package in FRAMEWORKS[name] if find_spec(package) is None]:
        raise UsageError(
            f"{name} cannot be measured: {', '.join(missing)} is not installed; name others by --frameworks"
        )


def installed() -> list[str]:
    """Those that can be measured here."""
    return [name for name, packages in FRAMEWORKS.items() if all(map(find_spec, packages))]


LEARNING_RATE: Final = 2.0**-20
"""Of all loops; gradients are 1, so that the sums are exact for a long time."""
