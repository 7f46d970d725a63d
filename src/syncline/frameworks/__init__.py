"""Adapters: each connects the models, gradients and optimizers of one framework with a session.

An adapter is a file or folder with the name of the package whose objects it prepares. It is imported when
``syncline.prepare`` first receives such an object, so a run of one framework loads no other. Start reading at
``Adapt``, then in the folder of your framework. Files with a leading underscore are shared: ``_flat`` has the steps
of all frameworks whose gradients arrive as host arrays. Only ``api``, ``checkpoint``, ``process``, ``torch_backend``
and the modules of public names (``optim``, ``jax``, ``tensorflow``) import from this package.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import UsageError
from ..session.session import Session
from ._memory import is_memory


class Handed(NamedTuple):
    """The result of ``syncline.prepare``, and the prepared object that later calls need, if there is one."""

    result: Any
    prepared: Any = None


Adapt = Callable[[Session, Any, Any, Mapping[str, Any]], Handed | None]
"""Makes a model and its optimizer part of the run, with the options of ``syncline.prepare``.

It returns None on a server at its end, and raises UsageError, with a remedy, for a model that it does not support. Each
module in this folder has one, named ``adapt``.
"""


def adapter_of(model: object) -> Adapt:
    """The ``adapt`` for a model: by the package of its class or of a base class, or of the values in its collections.

    A dictionary of values of unknown packages belongs to NumPy if some of them export memory.
    """
    values = _values(model)
    packages = {kind.__module__.partition(".")[0] for value in values for kind in type(value).__mro__}
    known = sorted(found.name for found in pkgutil.iter_modules(__path__) if not found.name.startswith("_"))
    if isinstance(model, Mapping) and packages.isdisjoint(known) and any(map(is_memory, values)):
        packages.add("numpy")
    for name in known:
        if name in packages:
            adapt: Adapt = importlib.import_module(f"{__name__}.{name}").adapt
            return adapt
    if "keras" in packages:
        raise UsageError(
            f"the model is {type(model).__name__} of Keras, whose backend Syncline does not support: set"
            " KERAS_BACKEND=tensorflow, or torch, before anything imports keras"
        )
    raise UsageError(
        f"the model is {type(model).__name__}, which belongs to no framework that Syncline supports"
        f" ({', '.join(known)}): give a torch.nn.Module, a model of Keras, or a dictionary of arrays"
    )


def _values(model: object) -> list[object]:
    if isinstance(model, Mapping):
        return [leaf for one in model.values() for leaf in _values(one)]
    return list(model) if isinstance(model, list | tuple) and model else [model]
