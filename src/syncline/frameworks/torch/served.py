"""A model whose weights others own, with PyTorch's side of pushes and pulls: ``Client``, and ``Pulling`` by layer.

``training.owners`` runs the step. This module writes the new weights directly into the parameters, which lie in
contiguous storage like the gradients, and detects changes that the owners would not see. ``optimizer`` has the user's
side, the optimizer object.

Weights that the script has changed since the last step (a loaded state, clipped weights) are sent to the owners with
the step. Rank 0's are used, and all ranks must have made the same change. Gradients that were changed after they were
sent are refused, and so is a second exchange before the step. With ``syncline.clip_grad_norm_`` owners clip.

Weights may come back layer by layer during the next iteration (``Pulling``). At the first gradient of a step the owners
receive the values of the optimizer's groups. From then on each bucket proceeds by itself: it is pushed when its
gradients are complete, updated, and pulled at once. Buckets that the next forward pass needs first have the highest
priority. New weights thus arrive while backward still reads the old ones, and before the script calls the optimizer.
They are pulled into separate memory and copied into the parameters at the first read after ``optimizer.step()``,
usually by their layer in the next forward pass (``deferred``, ``first_use``). Memory: a copy of the weights.
``optimizer.step()`` refuses changes that come too late for the owners: another learning rate than at the first
gradient, weights that were changed since then, and clipping by the norm of all gradients.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence

import torch

from ...engine.step import Apply
from ...errors import GradientError, UsageError
from ...nouns import Slice
from ...serving.protocol import JOIN
from ...serving.records import Record
from ...serving.shard import WEIGHTS, Groups
from ...session.tickets import Meeting
from ...sync import backup_of
from ...training.owners import OwnedModel
from .deferred import DeferredUpdates, PendingUpdate, watch_zero_grad
from .own_values import OwnValues, group_values
from .partial_optimizer import as_elements, in_memory_order, whole_state
from .passes import TrainedReplica
from .replica import Replica
from .storage import Contents, Storage

log = logging.getLogger("syncline")


class Client:
    """A worker's model: ``replica`` has its gradients, and ``owned`` pulls its weights into ``weights``."""

    def __init__(
        self,
        replica: TrainedReplica,
        weights: Storage,
        owned: OwnedModel,
        *,
        keeps_state: bool = True,
        own: OwnValues | None = None,
    ) -> None:
        self.replica, self.owned = replica, owned
        self._own = own
        self.keeps_state = keeps_state  # whether the optimizer has any
        self.parameters = [parameter for _, parameter in replica.named]
        self._weights = weights
        self._staging = replica.exchange.staging
        self._versions: list[int] = []
        self._pushed, self._pulled = Contents(replica.storage), Contents(weights)
        self._weight_versions: list[int] = []
        self._loaded = False
        self._begun: Groups = ()  # the group values that were sent at the first gradient of the step
        self._looked = False  # the gradients are recorded, because the script may change them
        self._scaler_looks = False  # a GradScaler checks them, between ``share_overflow`` and ``step``
        self._unscaled = False  # the next update divides by a GradScaler's scale
        self._remember_weights()
        self._left = False  # the gradients of the last exchange may still be in their places
        self._left_versions: dict[int, int] = {}  # the versions of these gradients when last checked
        self._meeting: Meeting | None = None  # the meeting of the last exchange
        self._counted: float | None = None  # this rank's share in left gradients that count in the next step
        replica.listeners.forward = self._count_left_again
        replica.listeners.backward = self._check_left
        replica.listeners.second_backward = self._refuse_second_backward
        replica.listeners.exchanged = self._remember
        replica.listeners.loaded = self._note_loaded
        replica.exchange.on_replacing, owned.taken = self._prepare_to_lay_out, self._taken

    deferred: Pulling | None = None
    """The pulls by layer, if steps end in the next iteration."""

    def begin(self, groups: Groups) -> None:
        """Send the group values of this step to the owners: its first gradient is complete."""
        self._pulled.remember_mirror()  # every pull has been copied into the parameters
        self._tell_changed()
        self.owned.begin(groups)
        self._begun = groups
        self._remember_weights()

    def settle(self, what: str) -> None:
        """Wait for everything in flight before the call ``what``, which reads the owners' state.

        Raises GradientError if the owners are ahead of the script.
        """
        if self.deferred is None:
            return
        self.deferred.flush()
        if self.replica.exchanged:
            raise self.replica.fault(
                f"{what} between backward() and step(): under schedule={self.deferred.name} the owners of the weights"
                " have made the update of this step already; call it after step(), or use schedule=fixed"
            )
        self._pulled.remember_mirror()  # every pull has been copied into the parameters

    def clip(self, max_norm: float, scale: float = 1.0) -> float:
        """Let the owners clip the next update's gradients to a norm of ``max_norm``, after division by ``scale``.
        Returns the norm."""
        self._check_together("clip_grad_norm_()")
        mode = self.replica.session.strategy.sync_mode()
        if backup_of(mode):
            raise self.replica.fault(
                "clip_grad_norm_() needs the gradients that are averaged, but with backup workers these are the first"
                " to arrive, which no worker knows in advance: use sync=bsp without backup="
            )
        self._check_pushed()
        if scale != 1.0:
            self.unscale(scale)
        return self.owned.clip(max_norm)

    def share_overflow(self) -> None:
        """Make an overflow on any worker visible to this worker's GradScaler, which is about to check its gradients.

        The scaler's check increments each gradient's version by one and keeps all values.
        """
        if not self.replica.exchanged:
            return  # ``step`` will report it
        self._check_together("GradScaler")
        self._check_pushed()
        if self.owned.together and self.owned.overflown():  # otherwise only this worker's push is skipped
            view = next(view for view in self.replica.storage.views if view.numel())
            view.view(-1)[:1].fill_(math.inf)
            self._pushed.remember()
        self._versions = [view._version for view in self.replica.storage.views]
        self._scaler_looks = True

    def _check_together(self, what: str) -> None:
        """Raise GradientError if owners update bucket by bucket, but ``what`` needs all gradients."""
        if self.deferred is not None:
            raise self.replica.fault(
                f"{what} needs all gradients before any weight is updated, but under schedule={self.deferred.name}"
                " owners of the weights update each bucket when it arrives: use schedule=fixed, or ps(update=worker)"
            )

    def unscale(self, scale: float) -> None:
        """Divide the next update's gradients by ``scale``, unless ``clip`` has done it already."""
        if not self._unscaled:
            self.owned.scale *= 1.0 / scale
            self._unscaled = True

    def step(self, groups: Groups, *, skip: bool = False) -> None:
        """Let the owners apply the pushed gradients, and wait for the new weights. Pulls start before pushes end.

        With ``skip`` all workers drop the gradients.
        """
        self._check_pushed()
        self._scaler_looks = self._unscaled = False
        if self.deferred is not None:
            self._check_same(self.deferred.name, groups)
            self.deferred.take_step()
            self._leave()
            self.replica.exchanged = False
            return
        self._tell_changed()
        told = groups if self._own is None else self._own.to_send(groups)
        self.owned.step(told, skip=skip)
        self._learn_own(skip)
        self.replica.exchanged = False
        if self.replica.exchange.replaces:
            self.replica.replace_layout()
        self._leave()

    def shadow(self, kind: int, teller: int) -> bool:
        """Take part, without batches, in a call of the other workers, whose tickets are of ``kind``; ``teller`` is one
        of them.

        Returns whether the step is over.
        """
        self._left = False  # a shadow has no gradients; the others' shares show that it no longer counts
        over = self.owned.shadow(kind, teller)
        if over:
            self._learn_own()
        return over

    def _learn_own(self, skipped: bool = False) -> None:
        """Fetch the values that the optimizer has changed itself, which the owners know.

        In a skipped step the owners have not taken the script's changes; these count in the next step.
        """
        if self._own is not None:
            # ``ask`` may be a collective call, so every worker makes it in every step that advances values.
            found = self.owned.owners.ask("advanced") if any(self._own.own) else []
            if not skipped:
                self._own.take(found)

    def _taken(self) -> None:
        """Copy the weights from a mirror if there is one: all buckets have arrived."""
        if self.deferred is not None:
            for number in range(len(self._weights.arrays)):
                self._weights.bring_up(number)
        self._remember_weights()

    def consolidate(self, call: str = "consolidate()") -> None:
        """Give all workers the owners' newest weights; the workers that still have batches call it between steps."""
        self.settle("syncline.consolidate()")
        if self.owned.together:
            return
        self._check_between("syncline.consolidate()")
        self._tell_changed()
        self.owned.consolidate(call)

    def join(self) -> None:
        """Take part in the others' calls between steps until no worker has batches any more."""
        self.owned.met = ""
        while self.owned.met != JOIN:
            self.consolidate(JOIN)

    def _check_between(self, what: str) -> None:
        if self.replica.exchanged:
            raise self.replica.fault(
                f"{what} between backward() and step(): the owners of the weights have gradients of this step; call it"
                " between two steps"
            )

    def _check_same(self, schedule: str, groups: Groups) -> None:
        """Raise GradientError if the update that the owners have made differs from the one that the script asks for."""
        for number, (told, now) in enumerate(zip(self._begun, groups, strict=True)):
            for key in sorted({*told, *now}):
                if told.get(key) != now.get(key):
                    raise self.replica.fault(
                        f"{key!r} of the optimizer's group {number} was {told.get(key)} at the first gradient of this"
                        f" step and is {now.get(key)} at step(): under schedule={schedule} owners of the weights update"
                        " each bucket when it arrives; change values between step() and the next backward(), or use"
                        " schedule=fixed"
                    )
        if changed := self._changed_weights():
            raise self.replica.fault(
                f"the weights {self.replica.named[changed[0]][0]!r} were changed between the first gradient of this"
                f" step and step(): under schedule={schedule} owners of the weights have updated the earlier values;"
                " change weights between step() and the next backward(), or use schedule=fixed"
            )

    def owners_weights(self) -> dict[str, torch.Tensor]:
        """The owners' weights, by name; all workers must call it."""
        self.settle("syncline.state_dict()")
        self._tell_changed()
        if not self.owned.together and self.replica.exchange.compression is None:
            self.consolidate("state_dict()")  # all workers then have the owners' weights
            return {name: parameter.detach().cpu().clone() for name, parameter in self.replica.named}
        whole = whole_state(self.owned.weights(), self.parameters)
        return {
            name: whole[parameter][WEIGHTS].cpu() if parameter in whole else parameter.detach()  # without elements
            for name, parameter in self.replica.named
        }

    def resume(self, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Let the owners continue from that step, with their own weights if the state has any; all workers call it.

        Raises UsageError for weights of another model.
        """
        self.settle("syncline.load_state_dict()")
        if self.owned.together or not weights:
            self._tell_changed()  # the loaded weights first; the owners' own weights follow below
        records = []
        for index, (name, parameter) in enumerate(self.replica.named if weights else ()):
            found = weights.get(name)
            if found is None or found.shape != parameter.shape or found.dtype != parameter.dtype:
                raise UsageError(f"the owners' weights in this state do not have {name!r} as this model has it")
            records.append(_whole(index, in_memory_order(found, parameter)))
        if not self.owned.together:
            self._check_between("syncline.load_state_dict()")
        self.owned.resume(step, records)

    def _prepare_to_lay_out(self) -> Callable[[], None]:
        """Send changed weights to the owners before other buckets replace these. Returns the function to call
        afterwards."""
        self._check_between("load_state_dict()")
        self._tell_changed()
        return self._lay_out

    def _lay_out(self) -> None:
        self.owned.lay_out()
        if self._own is not None:
            self._own.forget()

    def _remember(self, meeting: Meeting | None) -> None:
        self._versions = [view._version for view in self.replica.storage.views]
        self._looked, self._meeting = self.deferred is None, meeting
        counted, self._counted = self._counted, None
        if counted is not None and counted != self._share(meeting):
            raise self._not_zeroed(0, "this rank's batches do not count as much as they did in that step")
        if self.deferred is not None:
            return  # a read waits for the exchange first
        if self._changes_gradients(meeting):
            self.replica.session.engine.wait(*self.owned.pushes)
        self._pushed.remember()

    def remember_gradients(self) -> None:
        """Record the gradients of this step, which have all been pushed: from now on the script may change them."""
        self._looked = True
        self._pushed.remember()

    def _changes_gradients(self, meeting: Meeting | None) -> bool:
        """Whether the exchange itself writes to the gradients that the script sees."""
        if self._staging.device is not None and not self.replica.exchange.coded_on_device:
            return False  # the exchange uses copies on the host
        if not self.owned.together and self.replica.exchange.compression is None:  # a plain push only reads
            return False
        session = self.replica.session
        roles = session.strategy.roles
        if not session.group.servers or (roles is not None and roles.local):
            return True  # sums are written to the parts that this worker owns, or pushes for its host
        return self._share(meeting) != 1.0

    def _leave(self) -> None:
        """Note that a step has ended and that its gradients may still be in their places."""
        self._left = True
        self._left_versions = {index: view._version for index, view in enumerate(self.replica.storage.views)}

    def _left_over(self) -> list[int]:
        """The gradients that the script has not zeroed since the last step."""
        storage = self.replica.storage
        with torch._C.DisableTorchFunctionSubclass():
            return [
                index
                for index, (_, parameter) in enumerate(self.replica.named)
                if parameter.grad is not None
                and parameter.grad.data_ptr() == storage.places[index]
                and bool(parameter.grad.any())
            ]

    def _count_left_again(self) -> None:
        """Let gradients that were not zeroed count in the next step, because PyTorch adds to them.

        The left gradients are this worker's share and will be divided by the number of workers once more. If workers
        own the weights, an owner's gradients hold the sums of its parts, which other workers must not count again.
        """
        replica = self.replica
        if not self._left:
            return
        left, views = self._left_over(), replica.storage.views
        if self.deferred is None and replica.exchange.compression is None:
            self._left = False
            if self.owned.together:  # else each adds up its own
                self._count_again(left)
        self._left_versions = {index: views[index]._version for index in left}

    def _count_again(self, left: Sequence[int]) -> None:
        replica = self.replica
        if not left:
            return
        roles, servers = replica.session.strategy.roles, replica.session.group.servers
        if self._staging.device is None and servers and roles is not None and roles.local:
            raise self._not_zeroed(left[0], "the push has added gradients of other workers of this host to it")
        self._counted = self._share(self._meeting)
        factor = replica.session.world_size / self._counted
        if self._staging.device is not None or servers:
            for index in left:
                replica.storage.views[index].mul_(factor)
            return
        shard = self.owned.owners.shard
        mine = [] if shard is None else [held.gradient for held in shard.holdings]
        kept = [gradient * gradient.dtype.type(factor) for gradient in mine]
        for index in left:
            replica.storage.views[index].zero_()
        for gradient, values in zip(mine, kept, strict=True):
            gradient[...] = values

    def _share(self, meeting: Meeting | None) -> float:
        """This rank's weight in an exchange; the mean over the ranks is 1."""
        if meeting is None:
            return 1.0
        self.replica.session.engine.wait(*([] if meeting.work is None else [meeting.work]))
        return meeting.share()

    def _check_left(self, first: int | None) -> None:
        """Raise GradientError if backward adds to gradients that were left from the last step and not prepared for it.

        ``first`` is the parameter whose gradient is already complete, if there is one. It was zeroed before if it has
        been written more than once since the end of the step.
        """
        if self._counted is None and not self._left:
            return
        left = self._left_over()
        if first in left:
            before = self._left_versions.get(first)
            if before is None or self.replica.storage.views[first]._version - before > 1:
                left.remove(first)
        if not left:
            self._counted = None  # zeroed between the forward pass and this one
        if self._left and (self.owned.together or self.replica.exchange.compression is not None):
            self._left = False
            if left:
                plain = self.deferred is None and self.replica.exchange.compression is None
                why = "no forward pass of the model came before" if plain else "owners have other values of it"
                raise self._not_zeroed(left[0], why)

    def _not_zeroed(self, index: int, why: str) -> GradientError:
        return self.replica.fault(
            f"the gradient of {self.replica.named[index][0]!r} was not zeroed after the last step, so the next one"
            f" would be added to it, and {why}: call zero_grad() after each step, accumulate within a step by"
            " `with syncline.no_sync():`, or use ps(update=worker)"
        )

    def _check_pushed(self) -> None:
        """Raise GradientError unless the owners have received the gradients that the script sees."""
        if not self.replica.exchanged:
            raise GradientError("step() before backward(): the parameter server has no gradients of this step")
        storage = self.replica.storage
        with torch._C.DisableTorchFunctionSubclass():
            for index, (name, parameter) in enumerate(self.replica.named):
                if parameter.grad is None or parameter.grad.data_ptr() != storage.places[index]:
                    raise self._changed(name)
                if storage.views[index]._version - self._versions[index] not in (0, int(self._scaler_looks)):
                    raise self._changed(name)
        for index in self._pushed.changed() if self._looked else ():
            raise self._changed(self.replica.named[index][0])

    def _remember_weights(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._weight_versions = [parameter._version for parameter in self.parameters]
        self._pulled.remember()
        self._loaded = False

    def _note_loaded(self) -> None:
        self._loaded = True

    def _tell_changed(self) -> None:
        """Send the weights that the script has changed since the last step to the owners.

        Pulls write without autograd and are no changes.
        """
        found = self._changed_weights()
        if not found:
            return
        whole = self._loaded and len(found) == len(self.parameters)
        if self.owned.keeps and self.owned.together and not whole and self.owned.steps:
            raise self.replica.fault(
                f"the weights {self.replica.named[found[0]][0]!r} were changed on this worker since the last step. With"
                " a codec the owners' weights are more precise than the workers', and this precision would be lost:"
                " load a state_dict into the whole model, or use codec=none or ps(update=worker)"
            )
        self._bring_home(found)
        self._remember_weights()
        records = [_whole(index, self._weights.flat_of(index)) for index in found]
        self.owned.change(records, zlib.crc32(self._pulled.digest(found)) or 1)

    def _changed_weights(self) -> list[int]:
        """The numbers of the parameters that were changed."""
        if self._weights.moved:
            raise self.replica.fault(
                "the weights were moved to other memory (model.share_memory()?), to which pulls from the parameter"
                " server do not write: call that before syncline.prepare()"
            )
        found = set(self._pulled.changed())
        with torch._C.DisableTorchFunctionSubclass():
            found |= {i for i, p in enumerate(self.parameters) if p._version != self._weight_versions[i]}
            away = {i for i, p in enumerate(self.parameters) if p.data_ptr() != self._weights.places[i]}
        if away:
            self.replica.guard.check_forms()
        return sorted(found | away)

    def _bring_home(self, changed: Sequence[int]) -> None:
        """Move these parameters back to the contiguous storage, and copy their values to the transport's memory."""
        with torch.no_grad():
            for index in changed:
                parameter, view = self.parameters[index], self._weights.views[index]
                if parameter.data_ptr() != self._weights.places[index]:
                    view.data.copy_(parameter)
                    parameter.data = view
                self._weights.bring_down(index)

    def _changed(self, name: str) -> GradientError:
        self.replica.guard.check_forms()  # a change of the model's form gives a better error
        return self.replica.fault(
            f"the gradient of {name!r} was changed between backward() and step(), after the parameter server had"
            " received it. Clip with syncline.clip_grad_norm_(), which takes scaler= in place of a GradScaler's"
            " unscale_(); for other changes use ps(update=worker) or an allreduce such as ring"
        )

    def _refuse_second_backward(self) -> None:
        raise self.replica.fault(
            "a second backward() before step(): the parameter server has the first one's gradients already; wrap all"
            " but the last in `with syncline.no_sync():`, or set model.require_backward_grad_sync = False for them"
        )


def _whole(index: int, values: torch.Tensor) -> Record:
    """A record of a tensor's weights, given in memory order."""
    return Record(Slice(index, 0, values.numel()), WEIGHTS, as_elements(values))


class Pulling(DeferredUpdates):
    """The steps of a model under pulls by layer. ``weights`` receives the pulls, ``client`` talks to the owners."""

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer, client: Client, weights: Storage) -> None:
        super().__init__(replica, optimizer, type(optimizer), later=False, local=False)
        self._client, self._weights = client, weights
        for storage in replica.storages:
            storage.count_users()  # the client has become a user of the memory

    def take_step(self) -> None:
        """Handle the script's call of the optimizer: from now on reads give the new weights, and may wait for them."""
        with self._deferral.lock:
            replica, machine = self._replica, self._replica.trained.machine
            number, everything = machine.begun - 1, range(len(self._parameters))
            actions = machine.stepped()
            if not actions:  # the script has read nothing
                storage, buckets = replica.storage_of(number), replica.exchange.layout.buckets
                self._pending[number] = PendingUpdate(storage, self._written, buckets, [], set(everything))
                self._deferral.defer(everything)
            self._do(actions)
            if self._keeps():
                self.settle()

    def flush(self) -> None:
        """Wait for everything in flight. A caller before the optimizer's step may read gradients from now on."""
        with self._deferral.lock:
            looks = self._deferral.any and self._replica.trained.machine.unstepped
            super().flush()
            if looks:
                self._client.remember_gradients()

    def apply(self, action: Apply) -> None:
        """Copy the arrived weights of these buckets into the parameters."""
        pending = self._pending.get(action.step)
        tensors = [] if pending is None else pending.complete(action.buckets)
        if pending is not None:
            self._check_unwritten(pending.written, tensors)
        for number in action.buckets:
            self._weights.bring_up(number)
        self._deferral.release(tensors)
        if pending is not None and pending.over:
            del self._pending[action.step]

    def detach(self) -> None:
        """End the deferral of all parameters, without waiting for exchanges in flight."""
        if self._replica.trained.machine.unstepped and self._replica.session.engine.error is None:
            log.warning(
                "%s: the run ends between backward() and step(): the owners of the weights have made the update of this"
                " step, and the model has not received it",
                self._replica.session.name(self._replica.session.index),
            )
        super().detach()
        vars(self.model).pop("zero_grad", None)


def pull_by_layer(replica: TrainedReplica, optimizer: torch.optim.Optimizer, client: Client, weights: Storage) -> None:
    """Pull each layer's weights during the next iteration, so that the model's steps end there."""
    deferred = Pulling(replica, optimizer, client, weights)
    replica.deferred = client.deferred = deferred
    client.owned.by_layer = True
    replica.listeners.begin = lambda: client.begin(group_values(optimizer.param_groups))
    watch_zero_grad(deferred)
