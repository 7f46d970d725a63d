"""``multiworker``: TensorFlow's MultiWorkerMirroredStrategy, Keras' own way over several processes.

As in its tutorial, ``TF_CONFIG`` names all workers, variables are created in the strategy's scope, and TensorFlow's own
ring over gRPC sums gradients inside the step. Keras also averages a step's results over the workers, along a first
dimension that its numbers do not have (3.15 fails there), so this file adds one. Waits and bytes are not counted.

The library needs the addresses of all workers at its start: the ranks tell each other over a session of Syncline, which
has ended when the library starts.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import AbstractContextManager
from typing import Any

from syncline.launch.address import listen_address
from syncline.launch.connecting import connect_session
from syncline.launch.environment import Environment
from syncline.launch.rendezvous import Rendezvous
from syncline.registry import register
from syncline.strategy.strategy import Strategy

from ..sides import NoCounts, Placed

_TIMEOUT_S = 120.0


@register("peers", "multiworker", trains=True, framework="tensorflow")
class MultiWorker:
    """TensorFlow's MultiWorkerMirroredStrategy, over a ring on gRPC."""

    def join(self) -> Member:
        """Become one of the strategy's workers. Raises GroupError if the others cannot be reached."""
        return Member()


class Member(Placed):
    """One worker of the strategy, behind the calls that the training loop makes."""

    def __init__(self) -> None:
        import tensorflow as tf

        super().__init__()
        workers = all_addresses(self.environment, _TIMEOUT_S)
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

    def shutdown(self) -> None:
        """No worker leaves before all are done; the server ends with its process."""
        self.barrier()


def all_addresses(environment: Environment, timeout_s: float) -> list[str]:
    """An address with a free port for each process, in rank order. All ranks call this.

    Raises GroupError if not all ranks have called within ``timeout_s``.
    """
    point = Rendezvous(environment)
    try:
        run = f"{environment.run_id}/multiworker"
        session = connect_session(Strategy.parse("direct transport=tcp"), point, run, timeout=timeout_s)
        try:
            return [said.decode() for said in session.gather(_free(listen_address(environment, None)).encode())]
        finally:
            session.shutdown()
    finally:
        point.close()


def _free(host: str) -> str:
    """The host with a port that is free now. Another process may still take it before the caller does."""
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"
