"""Adapters: how a framework's models, gradients and optimizers use a session. One file or folder each.

It bears the name of the package whose objects it prepares, and is imported when such an object first comes: a run of
one framework needs no other. Each has ``adapt``, as ``Adapter`` says.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ..errors import UsageError
from ..session.session import Session
from ._memory import is_memory


class Handed(NamedTuple):
    """What ``syncline.prepare`` returns, and what later calls have to know of it, where there is anything."""

    result: Any
    prepared: Any = None


class Adapter(Protocol):
    """A module of this folder."""

    @staticmethod
    def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
        """Make a model part of the run, with the ``options`` of ``syncline.prepare``; None on a server that has served.

        Raises UsageError, with the remedy, for what it does not know.
        """
        ...


def adapter_of(model: object) -> Adapter:
    """The adapter of a model's framework: of its class, or one that this derives from, or of values in collections.

    Values of no framework that is known, but with memory to show, are NumPy's affair.
    """
    values = _values(model)
    packages = {kind.__module__.partition(".")[0] for value in values for kind in type(value).__mro__}
    known = sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))
    if isinstance(model, Mapping) and packages.isdisjoint(known) and any(map(is_memory, values)):
        packages.add("numpy")
    for name in known:
        if name in packages:
            adapter: Any = importlib.import_module(f"{__name__}.{name}")
            return adapter  # type: ignore[no-any-return]
    if "keras" in packages:
        raise UsageError(
            f"the model is {type(model).__name__} of Keras, whose backend has no adapter: set KERAS_BACKEND=tensorflow,"
            " or torch, before anything imports keras"
        )
    raise UsageError(
        f"a model is {type(model).__name__}, of no framework that Syncline knows ({', '.join(known)}): give a"
        " torch.nn.Module, a model of Keras, or a dictionary of arrays"
    )


def _values(model: object) -> list[object]:
    if isinstance(model, Mapping):
        return [leaf for one in model.values() for leaf in _values(one)]
    return list(model) if isinstance(model, list | tuple) and model else [model]
