"""``multiworker``: TensorFlow's MultiWorkerMirroredStrategy, Keras' own way over several processes.

As in its tutorial, ``TF_CONFIG`` names all workers, variables are created in the strategy's scope, and TensorFlow's own
ring over gRPC sums gradients inside the step. Keras also averages a step's results over the workers, along a first
dimension that its numbers do not have (3.15 fails there), so this file adds one. Waits and bytes are not counted.

The library needs the addresses of all workers at its start: each rank sends rank 0 one line over TCP, and rank 0
answers with the list. Syncline's own start does not use this.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from syncline.errors import GroupError
from syncline.launch.environment import Environment
from syncline.registry import register

from ..sides import NoCounts, Placed

_TIMEOUT_S = 120.0
_RETRY_S = 0.05


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

    def shutdown(self) -> None:
        """No worker leaves before all are done; the server ends with its process."""
        self.barrier()


def all_addresses(environment: Environment, port: int, timeout_s: float) -> list[str]:
    """An address with a free port for each process, in rank order. All ranks call this; rank 0 listens at ``port``.

    Raises GroupError if not all ranks have called within ``timeout_s``.
    """
    due = time.monotonic() + timeout_s
    try:
        if environment.rank == 0:
            return _gathered(environment.address, port, environment.world, due)
        with _called(environment.address, port, due) as line, line.makefile("rw", encoding="utf-8") as file:
            file.write(json.dumps([environment.rank, _free(line.getsockname()[0])]) + "\n")
            file.flush()
            found: list[str] = json.loads(file.readline())
            return found
    except (OSError, ValueError) as error:
        raise GroupError(
            f"rank {environment.rank} of {environment.world} has not met the others at {environment.address}:{port}"
            f" within {timeout_s:.0f} s: {error}"
        ) from error


def _gathered(address: str, port: int, world: int, due: float) -> list[str]:
    """Rank 0's side: collect the address of every rank and send all of them to every rank."""
    found, files = {0: _free(address)}, []
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server((address, port)))
        while len(found) < world:
            door.settimeout(max(0.1, due - time.monotonic()))
            line = stack.enter_context(door.accept()[0])
            line.settimeout(max(0.1, due - time.monotonic()))
            file = stack.enter_context(line.makefile("rw", encoding="utf-8"))
            rank, said = json.loads(file.readline())
            found[int(rank)] = str(said)
            files.append(file)
        every = [found[rank] for rank in range(world)]
        for file in files:
            file.write(json.dumps(every) + "\n")
            file.flush()
    return every


def _called(address: str, port: int, due: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection((address, port), max(0.1, due - time.monotonic()))
        except OSError:
            if time.monotonic() > due:
                raise
            time.sleep(_RETRY_S)


def _free(host: str) -> str:
    """The host with a port that is free now. Another process may still take it before the caller does."""
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"
