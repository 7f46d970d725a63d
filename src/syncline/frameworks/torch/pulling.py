"""Weights that others hold, and that come back layer by layer while the next iteration runs.

The owners are told the values of the optimizer's groups at the first gradient of a step. From then on each bucket goes
its way by itself: it is pushed when its gradients are there, updated, and pulled at once, those that the next forward
pass needs first before the others. So weights come while backward still reads the old ones, and before the script
calls the optimizer. They are pulled into memory of their own and copied into the parameters when somebody looks at
these after ``optimizer.step()``, as a rule their layer in the next forward pass (``overlap``, ``deferred``). Memory: a
copy of the weights.

What the owners could not take into account any more is refused by ``optimizer.step()`` (``served``): another learning
rate than at the first gradient, weights that were changed since then, clipping by the norm of all gradients.
"""

from __future__ import annotations

import logging

import torch

from ...engine.step import Apply
from .optimizer import watch_zero_grad
from .overlap import Crossing, Owed
from .own_values import group_values
from .passes import TrainedReplica
from .replica import Replica
from .served import Client
from .storage import Storage

log = logging.getLogger("syncline")


class Pulling(Crossing):
    """One model's steps, whose ``weights`` are what owners have sent; ``client`` tells the owners of them."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, client: Client, weights: Storage) -> None:
        super().__init__(replica, optimizer, type(optimizer), later=False, local=False)
        self._client, self._weights = client, weights
        for storage in replica.storages:
            storage.count_users()  # the client has become one

    def take_step(self) -> None:
        """The script has called the optimizer: from now on weights are the new ones, whenever they come."""
        with self._deferral.lock:
            replica, machine = self._replica, self._replica.trained.machine
            number, everything = machine.begun - 1, range(len(self._parameters))
            actions = machine.stepped()
            if not actions:  # nobody has looked
                storage, buckets = replica.storage_of(number), replica.exchange.layout.buckets
                self._owed[number] = Owed(storage, self._written, buckets, [], set(everything))
                self._deferral.defer(everything)
            self._do(actions)
            if self._keeps():
                self.settle()

    def flush(self) -> None:
        """Wait for all that is under way. Who does it before the optimizer's step may look at gradients from now on."""
        with self._deferral.lock:
            looks = self._deferral.any and self._replica.trained.machine.unstepped
            super().flush()
            if looks:
                self._client.remember_gradients()

    def apply(self, action: Apply) -> None:
        """The weights of these buckets have come."""
        owed = self._owed.get(action.step)
        tensors = [] if owed is None else owed.complete(action.buckets)
        if owed is not None:
            self._check_unwritten(owed.written, tensors)
        for number in action.buckets:
            self._weights.bring_up(number)
        self._deferral.release(tensors)
        if owed is not None and owed.over:
            del self._owed[action.step]

    def detach(self) -> None:
        """Parameters are what they seem to be."""
        if self._replica.trained.machine.unstepped and self._replica.session.engine.error is None:
            log.warning(
                "%s: the run ends between backward() and step(): the owners of the weights have made the update of this"
                " step, and the model has not got it",
                self._replica.session.name(self._replica.session.index),
            )
        super().detach()
        vars(self.model).pop("zero_grad", None)


def pull_by_layer(replica: TrainedReplica, optimizer: torch.optim.Optimizer, client: Client, weights: Storage) -> None:
    """Let the steps of a model end in the next iteration, each layer waiting for its own weights."""
    crossing = Pulling(replica, optimizer, client, weights)
    replica.crossing = client.crossing = crossing
    client.owned.by_layer = True
    replica.listeners.begin = lambda: client.begin(group_values(optimizer.param_groups))
    watch_zero_grad(crossing)
