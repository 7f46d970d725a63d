"""Keras callbacks for several workers: metrics averaged over the workers, and checkpoints of the run.

A checkpoint is a NumPy archive without pickle. Its tree of dictionaries, lists and plain values is stored as JSON, in
which ``{"array": n}`` stands for the n-th array. Keys of dictionaries are texts.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ...compression.saved import from_bytes as archived
from ...errors import MismatchError, UsageError
from ...session.session import Session
from .prepared import prepared

_STATE, _EPOCHS = "state", "epochs"
_TREE, _ARRAY, _KEYS = "tree", "array", "keys"


class MeanMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Replaces the metrics that ``fit`` reports for an epoch by their mean over all workers, so that all decide alike.

    It must precede callbacks that read metrics, such as EarlyStopping and ReduceLROnPlateau.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - Keras' names
        """All workers must have the same number of epochs and the same metrics."""
        made = prepared(self.model)
        made.check_steps()
        session, names = made.session, sorted(logs or {})
        if logs is not None and not session.alone:
            self._compare(session, names)
            values = np.array([float(logs[name]) for name in names])
            session.allreduce(values)
            logs.update(zip(names, map(float, values), strict=True))

    def _compare(self, session: Session, names: Sequence[str]) -> None:
        """End all ranks with an error that names a metric that not all of them have."""
        for rank, data in enumerate(session.gather(json.dumps(names).encode())):
            if other := sorted(set(names) ^ set(json.loads(data))):
                text = (
                    f"{session.name(session.index)} and {session.name(rank)} report different metrics of an epoch, and"
                    f" only one has {other[0]!r}: compile models with the same metrics, and validate on all or none"
                )
                raise session.fail(MismatchError(text))


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Stores the state of the run in a file of rank 0 after every ``epochs`` epochs, replacing the previous state.

        checkpoint = syncline.tensorflow.Checkpoint("run.npz")
        model.fit(..., initial_epoch=checkpoint.resume(model), callbacks=[checkpoint])

    The run may resume with any number of workers. The file contains the result of ``syncline.tensorflow.state_dict``.
    """

    def __init__(self, path: str | os.PathLike[str], epochs: int = 1) -> None:
        super().__init__()
        if epochs < 1:
            raise UsageError(f"a checkpoint every {epochs} epochs: choose 1 or more")
        self._path, self._epochs = Path(path), epochs

    def resume(self, model: Any) -> int:
        """Load the file if rank 0 has it. Returns the number of finished epochs. All workers must call it."""
        made = prepared(model)
        data = self._path.read_bytes() if made.session.rank == 0 and self._path.exists() else b""
        data = made.session.gather(data)[0]
        if not data:
            return 0
        saved = _from_bytes(data, self._path)
        made.load_state_dict(saved[_STATE])
        return int(saved[_EPOCHS])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - Keras' names
        """All workers take part, because each has a part of the state."""
        if (epoch + 1) % self._epochs:
            return
        made = prepared(self.model)
        state = made.state_dict()
        if made.session.rank == 0:
            beside = self._path.with_name(f"{self._path.name}.part")
            beside.write_bytes(_to_bytes({_STATE: state, _EPOCHS: epoch + 1}))
            beside.replace(self._path)  # atomic: a run that ends during the write keeps the previous checkpoint
        made.session.barrier()


def _to_bytes(state: Mapping[str, Any]) -> bytes:
    """A state as an archive. Raises UsageError for values other than arrays and plain values."""
    arrays: list[Any] = []
    tree = json.dumps(_taken(state, arrays))
    file = io.BytesIO()
    found: dict[str, Any] = {str(number): array for number, array in enumerate(arrays)}
    np.savez(file, allow_pickle=False, **found, **{_TREE: np.array(tree)})
    return file.getvalue()


def _from_bytes(data: bytes, name: object) -> dict[str, Any]:
    """The state in the archive of file ``name``. Raises UsageError for a file that is not such an archive."""
    try:
        arrays = archived(data)
        found = _given(json.loads(str(arrays[_TREE])), arrays)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(
            f"{name} is not a complete checkpoint of syncline.tensorflow.Checkpoint ({error}): give another one, or"
            " remove"
            " it to start from the beginning"
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
    raise UsageError(f"a state with {type(value).__name__} cannot be written, only arrays, numbers and texts")


def _given(value: Any, file: Any) -> Any:
    if isinstance(value, list):
        return [_given(one, file) for one in value]
    if isinstance(value, dict):
        if _ARRAY in value:
            return file[str(value[_ARRAY])]
        return {key: _given(one, file) for key, one in value[_KEYS].items()}
    return value
