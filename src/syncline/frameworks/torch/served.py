"""A model whose weights others hold: what pushes and pulls need of PyTorch, and what they forbid.

``training.owners`` has the step. Here the new weights are written straight into the parameters, which lie in contiguous
storage like the gradients, and what the owners would not see is found. The user's side of it, the optimizer object, is
in ``optimizer``.

Weights that the script has changed since the last step (a state that was loaded, weights that were clipped) are given
to the owners with the step: rank 0's, and all ranks have to have changed the same. Refused are gradients that were
changed after they had been sent, and a second exchange before the step. Clipping of gradients is
``syncline.clip_grad_norm_``, which the owners compute.

Weights may come back layer by layer while the next iteration runs (``Pulling``). The owners are told the values of the
optimizer's groups at the first gradient of a step. From then on each bucket goes its way by itself: it is pushed when
its gradients are there, updated, and pulled at once, those that the next forward pass needs first before the others. So
weights come while backward still reads the old ones, and before the script calls the optimizer. They are pulled into
memory of their own and copied into the parameters when somebody looks at these after ``optimizer.step()``, as a rule
their layer in the next forward pass (``overlap``, ``deferred``). Memory: a copy of the weights. What the owners could
not take into account any more is refused by ``optimizer.step()``: another learning rate than at the first gradient,
weights that were changed since then, clipping by the norm of all gradients.
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
from .overlap import Crossing, Owed, watch_zero_grad
from .own_values import OwnValues, group_values
from .passes import TrainedReplica
from .replica import Replica
from .shard import as_elements, in_memory_order, whole_state
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
        self._begun: Groups = ()  # the values that owners were told at the first gradient of the step
        self._looked = False  # what the gradients hold is remembered, as somebody may change it
        self._scaler_looks = False  # a GradScaler has them, between ``share_overflow`` and ``step``
        self._unscaled = False  # the next update divides by a GradScaler's scale
        self._remember_weights()
        self._left = False  # what the last exchange has left in the gradients may still be there
        self._left_versions: dict[int, int] = {}  # of the gradients that it may be in, when that was known last
        self._meeting: Meeting | None = None  # of the last exchange
        self._counted: float | None = None  # this rank's share in the gradients that others are being added to
        replica.listeners.forward = self._count_left_again
        replica.listeners.backward = self._check_left
        replica.listeners.second_backward = self._refuse_second_backward
        replica.listeners.exchanged = self._remember
        replica.listeners.loaded = self._note_loaded
        replica.exchange.on_replacing, owned.taken = self._prepare_to_lay_out, self._taken

    crossing: Pulling | None = None
    """Where steps end in the next iteration."""

    def begin(self, groups: Groups) -> None:
        """The first gradient of a step has come: tell the owners the values that it is to be made with."""
        self._pulled.remember_mirror()  # all that was pulled is in the parameters
        self._tell_changed()
        self.owned.begin(groups)
        self._begun = groups
        self._remember_weights()

    def settle(self, what: str) -> None:
        """Wait for what is under way, since somebody wants to know, by ``what``, what owners have.

        Raises GradientError where these are ahead of the script.
        """
        if self.crossing is None:
            return
        self.crossing.flush()
        if self.replica.exchanged:
            raise self.replica.fault(
                f"{what} between backward() and step(): under schedule={self.crossing.name} the owners of the weights"
                " have made the update of this step already; do it after step(), or use schedule=fixed"
            )
        self._pulled.remember_mirror()  # all that was pulled is in the parameters

    def clip(self, max_norm: float, scale: float = 1.0) -> float:
        """Have the next update's gradients clipped to a norm of ``max_norm``, once divided by ``scale``; their norm."""
        if self.crossing is not None:
            raise self.replica.fault(
                "clip_grad_norm_() has to know all gradients before any weight is updated, and under"
                f" schedule={self.crossing.name} owners of the weights update each bucket when it comes: use"
                " schedule=fixed, or ps(update=worker)"
            )
        mode = self.replica.session.strategy.sync_mode()
        if backup_of(mode):
            raise self.replica.fault(
                "clip_grad_norm_() has to know the gradients that are averaged, and with backup workers these are"
                " whoever's come first: use sync=bsp without backup="
            )
        self._check_pushed()
        if scale != 1.0:
            self.unscale(scale)
        return self.owned.clip(max_norm)

    def share_overflow(self) -> None:
        """A GradScaler is about to look whether this worker's gradients overflow: it shall see those of all workers.

        It looks in a way that counts as one change to each gradient, which leaves all numbers as they are.
        """
        if not self.replica.exchanged:
            return  # which ``step`` says
        if self.crossing is not None:
            raise self.replica.fault(
                "GradScaler has to know all gradients before any weight is updated, and under"
                f" schedule={self.crossing.name} owners of the weights update each bucket when it comes: use"
                " schedule=fixed, or ps(update=worker)"
            )
        self._check_pushed()
        if self.owned.together and self.owned.overflown():  # else a push is skipped by itself
            view = next(view for view in self.replica.storage.views if view.numel())
            view.view(-1)[:1].fill_(math.inf)
            self._pushed.remember()
        self._versions = [view._version for view in self.replica.storage.views]
        self._scaler_looks = True

    def unscale(self, scale: float) -> None:
        """Have the next update's gradients divided by ``scale``, unless ``clip`` has already."""
        if not self._unscaled:
            self.owned.scale *= 1.0 / scale
            self._unscaled = True

    def step(self, groups: Groups, *, skip: bool = False) -> None:
        """Have the pushed gradients applied and wait for the new weights, which come while pushes are under way.

        With ``skip`` the gradients are dropped, on all workers.
        """
        self._check_pushed()
        self._scaler_looks = self._unscaled = False
        if self.crossing is not None:
            self._check_same(self.crossing.name, groups)
            self.crossing.take_step()
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
        """Take part, without batches, in what other workers do, who show tickets of ``kind``; ``teller`` is of them.

        Whether the step is over.
        """
        self._left = False  # those that add to what was left see that this rank's does not count any more
        over = self.owned.shadow(kind, teller)
        if over:
            self._learn_own()
        return over

    def _learn_own(self, skipped: bool = False) -> None:
        """Have the values of groups that the optimizer has changed itself, which owners of the weights know.

        In a step that was skipped owners have not taken what the script has changed, which counts in the next one.
        """
        if self._own is not None:
            # All workers may have to ask together.
            found = self.owned.owners.ask("advanced") if self._own.advance else []
            if not skipped:
                self._own.take(found)

    def _taken(self) -> None:
        """The weights of all buckets have come."""
        if self.crossing is not None:
            for number in range(len(self._weights.arrays)):
                self._weights.bring_up(number)
        self._remember_weights()

    def consolidate(self, call: str = "consolidate()") -> None:
        """Have the owners' newest weights, as all workers then do; those that have not left call it between steps."""
        self.settle("syncline.consolidate()")
        if self.owned.together:
            return
        self._check_between("syncline.consolidate()")
        self._tell_changed()
        self.owned.consolidate(call)

    def join(self) -> None:
        """Take part in what others do between their steps, until no worker has batches any more."""
        self.owned.met = ""
        while self.owned.met != JOIN:
            self.consolidate(JOIN)

    def _check_between(self, what: str) -> None:
        if self.replica.exchanged:
            raise self.replica.fault(
                f"{what} between backward() and step(): the owners of the weights have gradients of this step; do it"
                " between two steps"
            )

    def _check_same(self, schedule: str, groups: Groups) -> None:
        """Raise GradientError where the update that owners have made is not the one that the script asks for."""
        for number, (told, now) in enumerate(zip(self._begun, groups, strict=True)):
            for key in sorted({*told, *now}):
                if told.get(key) != now.get(key):
                    raise self.replica.fault(
                        f"{key!r} of the optimizer's group {number} was {told.get(key)} at the first gradient of this"
                        f" step and is {now.get(key)} at step(): under schedule={schedule} owners of the weights update"
                        " each bucket when it comes; change values between step() and the next backward(), or use"
                        " schedule=fixed"
                    )
        if changed := self._changed_weights():
            raise self.replica.fault(
                f"the weights {self.replica.named[changed[0]][0]!r} were changed between the first gradient of this"
                f" step and step(): under schedule={schedule} owners of the weights have updated those from before;"
                " change weights between step() and the next backward(), or use schedule=fixed"
            )

    @property
    def keeps(self) -> bool:
        """True when the owners' weights may say more than the workers', which a checkpoint then needs."""
        return self.owned.keeps

    def owners_weights(self) -> dict[str, torch.Tensor]:
        """The weights as the owners have them, by name; all workers call it."""
        self.settle("syncline.state_dict()")
        self._tell_changed()
        if not self.owned.together and self.replica.exchange.compression is None:
            self.consolidate("state_dict()")  # what the workers have then says all
            return {name: parameter.detach().cpu().clone() for name, parameter in self.replica.named}
        whole = whole_state(self.owned.weights(), self.parameters)
        return {
            name: whole[parameter][WEIGHTS].cpu() if parameter in whole else parameter.detach()  # without elements
            for name, parameter in self.replica.named
        }

    def resume(self, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Have the owners go on from that step with their own weights, where there are any; all workers call it.

        Raises UsageError for those of another model.
        """
        self.settle("syncline.load_state_dict()")
        if self.owned.together or not weights:
            self._tell_changed()  # weights that were loaded now; what the owners know beside them comes after
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
        """Other buckets are about to take the place of these: the servers shall know what was changed before."""
        if self.replica.exchanged:
            raise self.replica.fault(
                "load_state_dict() between backward() and step(): the parameter server has gradients of this step; load"
                " it between two steps"
            )
        self._tell_changed()
        return self._lay_out

    def _lay_out(self) -> None:
        self.owned.lay_out()
        if self._own is not None:
            self._own.forget()

    def _remember(self, meeting: Meeting | None) -> None:
        self._versions = [view._version for view in self.replica.storage.views]
        self._looked, self._meeting = self.crossing is None, meeting
        counted, self._counted = self._counted, None
        if counted is not None and counted != self._share(meeting):
            raise self._not_zeroed(0, "this rank's batches do not count as much as they did in that step")
        if self.crossing is not None:
            return  # who looks waits first
        if self._changes_gradients(meeting):
            self.replica.session.engine.wait(*self.owned.pushes)
        self._pushed.remember()

    def remember_gradients(self) -> None:
        """Somebody may look at the gradients of this step from now on, all of which have been pushed."""
        self._looked = True
        self._pushed.remember()

    def _changes_gradients(self, meeting: Meeting | None) -> bool:
        """Whether the exchange itself writes to what the script sees of its gradients."""
        if self._staging.device is not None:  # what is pushed are copies
            return False
        if not self.owned.together and self.replica.exchange.compression is None:  # what is pushed is only read
            return False
        session = self.replica.session
        if not session.group.servers:
            return True  # the parts that this worker owns
        return self._share(meeting) != 1.0

    def _leave(self) -> None:
        """A step has ended, and its gradients may stay in their places."""
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
        """Let gradients that were not zeroed be part of the next ones, as torch adds them up.

        What is left of a step is this worker's share, and it is divided by the number of workers once more. Where
        workers own the weights, owners have the sums of their parts, and others must not count them again.
        """
        replica = self.replica
        if not self._left:
            return
        left, views = self._left_over(), replica.storage.views
        if self.crossing is None and replica.exchange.compression is None:
            self._left = False
            if self.owned.together:  # else each adds up its own
                self._count_again(left)
        self._left_versions = {index: views[index]._version for index in left}

    def _count_again(self, left: Sequence[int]) -> None:
        replica = self.replica
        if not left:
            return
        self._counted = self._share(self._meeting)
        factor = replica.session.world_size / self._counted
        if self._staging.device is not None or replica.session.group.servers:
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
        """How much this rank's gradients count in an exchange, on the average 1."""
        if meeting is None:
            return 1.0
        self.replica.session.engine.wait(*([] if meeting.work is None else [meeting.work]))
        return meeting.share()

    def _check_left(self, first: int | None) -> None:
        """Raise GradientError where gradients are added to what nobody has made ready for that.

        ``first`` is the one whose gradient has come already, if any has: it was zeroed before where it was written to
        more than this once since it held what was left.
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
                plain = self.crossing is None and self.replica.exchange.compression is None
                why = "no forward pass of the model came before" if plain else "owners do not have it as it is here"
                raise self._not_zeroed(left[0], why)

    def _not_zeroed(self, index: int, why: str) -> GradientError:
        return self.replica.fault(
            f"the gradient of {self.replica.named[index][0]!r} was not zeroed after the last step, so that the next one"
            f" would be added to it, and {why}: call zero_grad() after each step, accumulate within a step by"
            " `with syncline.no_sync():`, or use ps(update=worker)"
        )

    def _check_pushed(self) -> None:
        """The owners must have seen what the worker sees."""
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
        """Give the owners the weights that the script has changed since the last step.

        Pulls are no changes, they write past autograd.
        """
        found = self._changed_weights()
        if not found:
            return
        whole = self._loaded and len(found) == len(self.parameters)
        if self.keeps and self.owned.together and not whole and self.owned.steps:
            raise self.replica.fault(
                f"the weights {self.replica.named[found[0]][0]!r} were changed on this worker since the last step. With"
                " the codec their owners know more of them than the workers, which would be lost: load a state_dict"
                " into the whole model, or use codec=none or ps(update=worker)"
            )
        self._bring_home(found)
        self._remember_weights()
        records = [_whole(index, self._weights.flat_of(index)) for index in found]
        self.owned.change(records, zlib.crc32(self._pulled.digest(found)) or 1)

    def _changed_weights(self) -> list[int]:
        """Numbers of parameters."""
        if self._weights.moved:
            raise self.replica.fault(
                "the weights have been moved to other memory (model.share_memory()?), which is not the one that the"
                " parameter server writes: call it before syncline.prepare()"
            )
        found = set(self._pulled.changed())
        with torch._C.DisableTorchFunctionSubclass():
            found |= {i for i, p in enumerate(self.parameters) if p._version != self._weight_versions[i]}
            away = {i for i, p in enumerate(self.parameters) if p.data_ptr() != self._weights.places[i]}
        if away:
            self.replica.guard.check_forms()
        return sorted(found | away)

    def _bring_home(self, changed: Sequence[int]) -> None:
        """Let these parameters lie in the contiguous storage again, and the transport's memory have their values."""
        with torch.no_grad():
            for index in changed:
                parameter, view = self.parameters[index], self._weights.views[index]
                if parameter.data_ptr() != self._weights.places[index]:
                    view.data.copy_(parameter)
                    parameter.data = view
                self._weights.bring_down(index)

    def _changed(self, name: str) -> GradientError:
        self.replica.guard.check_forms()  # what has changed them with the model says more
        session = self.replica.session
        error = GradientError(
            f"{session.name(session.index)}: the gradient of {name!r} was changed between backward() and"
            " step(), after the parameter server had received it. Clip with syncline.clip_grad_norm_(), which takes"
            " scaler= in place of a GradScaler's unscale_(); for other changes use ps(update=worker) or an allreduce"
            " such as ring"
        )
        session.fail(error)
        return error

    def _refuse_second_backward(self) -> None:
        raise self.replica.fault(
            "a second backward() before step(): the parameter server has the first one's gradients already; wrap all"
            " but the last in `with syncline.no_sync():`, or set model.require_backward_grad_sync = False for them"
        )


def _whole(index: int, values: torch.Tensor) -> Record:
    """A record of a tensor's weights, given in memory order."""
    return Record(Slice(index, 0, values.numel()), WEIGHTS, as_elements(values))


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
