"""Callbacks of Keras for several workers: metrics that are the workers' mean, and checkpoints of the run."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ...errors import MismatchError, UsageError
from ...session.session import Session
from ._files import from_bytes, to_bytes
from ._prepared import prepared

_STATE, _EPOCHS = "state", "epochs"


class MeanMetrics(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets what ``fit`` reports of an epoch be the mean over all workers, who then decide alike.

    It comes before callbacks that look at metrics, such as EarlyStopping and ReduceLROnPlateau.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - Keras' names
        """All workers end as many epochs, and have the same metrics."""
        made = prepared(self.model)
        made.check_steps()
        session, names = made.session, sorted(logs or {})
        if logs is not None and not session.alone:
            self._compare(session, names)
            values = np.array([float(logs[name]) for name in names])
            session.allreduce(values)
            logs.update(zip(names, map(float, values), strict=True))

    def _compare(self, session: Session, names: Sequence[str]) -> None:
        """All ranks end with an error that names the first metric that not all have."""
        for rank, data in enumerate(session.gather(json.dumps(names).encode())):
            if other := sorted(set(names) ^ set(json.loads(data))):
                error = MismatchError(
                    f"{session.name(session.index)} and {session.name(rank)} report other metrics of an epoch, of which"
                    f" {other[0]!r} is one's alone: compile models with the same metrics, and validate on all or none"
                )
                session.fail(error)
                raise error


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the state of the run in a file of rank 0's after every so many ``epochs``, in place of the one before.

        checkpoint = syncline.tensorflow.Checkpoint("run.npz")
        model.fit(..., initial_epoch=checkpoint.resume(model), callbacks=[checkpoint])

    It resumes under as many workers, or more, or fewer. What is in the file is ``syncline.tensorflow.state_dict``'s.
    """

    def __init__(self, path: str | os.PathLike[str], epochs: int = 1) -> None:
        super().__init__()
        if epochs < 1:
            raise UsageError(f"a checkpoint every {epochs} epochs: give 1 or more")
        self._path, self._epochs = Path(path), epochs

    def resume(self, model: Any) -> int:
        """Go on from the file, where rank 0 has one; how many epochs have been made. All workers call it."""
        made = prepared(model)
        data = self._path.read_bytes() if _is_first(made.session) and self._path.exists() else b""
        data = made.session.gather(data)[0]
        if not data:
            return 0
        saved = from_bytes(data, self._path)
        made.load_state_dict(saved[_STATE])
        return int(saved[_EPOCHS])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:  # noqa: ARG002 - Keras' names
        """All workers come here, since each has a part of the state."""
        if (epoch + 1) % self._epochs:
            return
        made = prepared(self.model)
        state = made.state_dict()
        if _is_first(made.session):
            beside = self._path.with_name(f"{self._path.name}.part")
            beside.write_bytes(to_bytes({_STATE: state, _EPOCHS: epoch + 1}))
            beside.replace(self._path)  # a run that ends while it is written has the one before
        made.session.barrier()


def _is_first(session: Session) -> bool:
    return session.rank == 0
