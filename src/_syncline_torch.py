"""The entry point by which ``import torch`` knows the backend ``syncline`` of torch.distributed.

Torch calls ``register`` in every process of the environment that imports it, and fails where this fails. So it stands
beside the package, where it can be loaded though the package cannot, and warns instead.
"""

from __future__ import annotations

import sys
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec

_told: set[str] = set()


def register() -> None:
    """Make ``torch.distributed.init_process_group("syncline")`` known, or warn why it is not; never raises."""
    try:
        _find()
        from syncline.torch_backend import register as register_backend

        register_backend()
    except Exception as error:
        _tell(f"{type(error).__name__}: {error}")


def _find() -> None:
    """Raise where something else has the package's name: a script called syncline.py must not be run by an import."""
    found = find_spec("syncline")
    if found is None:
        raise ModuleNotFoundError("there is no package syncline any more")
    if PathFinder.find_spec("syncline.torch_backend", found.submodule_search_locations or []) is None:
        raise ModuleNotFoundError(f"{found.origin or 'a folder called syncline'} has no torch_backend")


def _tell(reason: str) -> None:
    """Warn once of each reason; where warnings are errors, write it instead."""
    if reason in _told:
        return
    _told.add(reason)
    text = (
        f"the backend syncline of torch.distributed is not there: {reason}. Install syncline again, or uninstall it;"
        " TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from looking for it"
    )
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except Exception:
        print(text, file=sys.stderr)
