"""States of runs as files: dictionaries and lists of arrays and plain values, as NumPy's archives without pickle.

The tree is JSON, in which ``{"array": n}`` stands for the n-th array; keys of dictionaries are texts.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...compression.saved import from_bytes as archived
from ...errors import UsageError

_TREE, _ARRAY, _KEYS = "tree", "array", "keys"


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """An archive; raises UsageError for what is neither array nor plain value."""
    arrays: list[Any] = []
    tree = json.dumps(_taken(state, arrays))
    file = io.BytesIO()
    found: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
    np.savez(file, allow_pickle=False, **found, **{_TREE: np.array(tree)})
    return file.getvalue()


def from_bytes(data: bytes, name: object) -> dict[str, Any]:
    """The other way round, from the file ``name``; raises UsageError for what is no such archive."""
    try:
        arrays = archived(data)
        found = _given(json.loads(str(arrays[_TREE])), arrays)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"{name} is no whole checkpoint that syncline.tensorflow.Checkpoint wrote ({error}): give another one, or"
            " remove it to begin anew"
        ) from error
    return dict(found)


def _taken(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, Mapping):
        return {_KEYS: {key: _taken(one, arrays) for key, one in value.items()}}
    if isinstance(value, list | tuple):
        return [_taken(one, arrays) for one in value]
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"a state with {type(value).__name__} cannot be written: it has arrays, numbers and words")


def _given(value: Any, file: Any) -> Any:
    if isinstance(value, list):
        return [_given(one, file) for one in value]
    if isinstance(value, dict):
        if _ARRAY in value:
            return file[str(value[_ARRAY])]
        return {key: _given(one, file) for key, one in value[_KEYS].items()}
    return value
