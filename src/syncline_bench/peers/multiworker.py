"""``multiworker``: TensorFlow's MultiWorkerMirroredStrategy, Keras' own way over several processes.

As its tutorial has it: ``TF_CONFIG`` names all workers, variables are made in the strategy's scope, and gradients are
added up by a ring of TensorFlow's own over gRPC inside of the step. Keras averages what a step returns over the workers
too, along a first dimension that its numbers do not have (3.15 fails there): here they are given one. Waits and bytes
are not counted.
"""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager
from typing import Any

from syncline.registry import register

from ..sides import NoCounts, Placed
from ._addresses import all_addresses

_TIMEOUT_S = 120.0


@register("peers", "multiworker", trains=True, framework="tensorflow")
class MultiWorker:
    """TensorFlow's MultiWorkerMirroredStrategy, over a ring on gRPC."""

    def join(self) -> Member:
        """Become one of the strategy's workers; raises GroupError when the others cannot be reached."""
        return Member()


class Member(Placed):
    """One worker of the strategy, behind the calls that the training loop makes."""

    def __init__(self) -> None:
        import tensorflow as tf

        super().__init__()
        workers = all_addresses(self.environment, int(os.environ["MASTER_PORT"]), _TIMEOUT_S)
        task = {"type": "worker", "index": self.rank()}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        ring = tf.distribute.experimental.CommunicationImplementation.RING
        options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def scope(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._strategy.scope()
        return found

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        import tensorflow as tf

        original = model.train_step

        def train_step(data: Any) -> dict[str, Any]:
            return {name: tf.reshape(value, (1,)) for name, value in original(data).items()}

        model.train_step = train_step
        return model, optimizer

    def stats(self) -> NoCounts:
        return NoCounts("MultiWorkerMirroredStrategy, ring over gRPC", blocked_s=None)

    def barrier(self) -> None:
        """Wait for all workers, in a reduction of a number."""
        import tensorflow as tf

        with self._strategy.scope():
            self._strategy.reduce(tf.distribute.ReduceOp.SUM, self._strategy.run(lambda: tf.constant(1.0)), axis=None)

    def consolidate(self) -> None:
        """Nothing: replicas never differ."""

    def shutdown(self) -> None:
        """Nobody leaves before all are done; the server ends with its process."""
        self.barrier()
