"""A worker whose weights live on a parameter server: a step asks for the update and waits.

During backward the gradients have been pushed bucket by bucket. A step commits them with the optimizer's group
values (learning rate and so on), the owners of each slice apply the real update, and the new weights are written
straight into the parameters, which lie in contiguous storage like the gradients. The user's side of it, the optimizer
object, is in ``optimizer``.

Weights that the script has changed since the last step (a state that was loaded, weights that were clipped) are given
to the owners with the step: rank 0's, and all ranks have to have changed the same. What the owners would not see
otherwise is refused: gradients that were changed after they had been sent, a second exchange before the step. Clipping
of gradients is ``syncline.clip_grad_norm_``, which the owners compute.

``Owners`` is how a worker talks to them: ``RemoteOwners`` by messages to server processes, ``LocalOwners`` when the
workers themselves own the slices.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ...compression.updates import Updates
from ...errors import GradientError, UsageError
from ...plans.messages import Program
from ...session.communicator import WEIGHT_KEYS
from ...session.session import Session
from ...session.tickets import COMMIT, NORM
from .intact import Contents
from .messages import read_message, receive_body, send_body
from .records import pack, unpack
from .replica import Replica
from .serve import REPLY_BYTES, REQUEST_BYTES
from .shard import WEIGHTS, Piece, Record, Shard, in_memory_order, whole_state
from .storage import Storage

Groups = list[dict[str, Any]]
NOTHING: Mapping[str, type] = {}


class Owners(Protocol):
    """The processes that hold and update the weights, as a worker sees them."""

    count: int
    """How many they are."""
    answers_one: bool
    """Whether one worker alone may ask for the state; otherwise all have to."""

    def squared_norm(self, clock: int) -> float:
        """The squared norm of all averaged gradients of step ``clock``."""
        ...

    def commit(self, clock: int, groups: Groups, scale: float, changed: int = 0) -> None:
        """Have the update of step ``clock`` applied; weights may be pulled after it.

        ``changed`` tells the changes of weights before it from others; it has to be the same on all workers.
        """
        ...

    def state(self) -> list[Record]:
        """The optimizer's state from all owners."""
        ...

    def kept(self) -> list[Record] | None:
        """The state of what this process owns itself, None when that is nothing; asks nobody."""
        ...

    def load(self, records: list[Record]) -> None:
        """Replace the optimizer's state at all owners."""
        ...

    def weights(self) -> list[Record]:
        """The weights of all owners, which under a codec know more than the workers'."""
        ...

    def replace(self, weights: list[Record]) -> None:
        """Take over these weights, whole tensors, before the next ``commit``; all workers call it."""
        ...

    def resume(self, step: int, weights: list[Record]) -> None:
        """Go on from that step with these weights, as far as there are any; all workers call it."""
        ...


class LocalOwners:
    """The workers own the slices: every call is collective, ``shard`` is this rank's (None when it owns nothing)."""

    answers_one = False

    def __init__(self, session: Session, shard: Shard | None) -> None:
        self._session, self._shard = session, shard
        roles = session.strategy.roles
        assert roles is not None
        self.count = roles.owners

    def squared_norm(self, clock: int) -> float:
        """Summed in rank order, so that all ranks get the same bits."""
        self._session.agree(NORM, clock)
        mine = 0.0 if self._shard is None else self._shard.squared_norm()
        return sum(float(part) for part in self._session.gather(repr(mine).encode()))

    def commit(self, clock: int, groups: Groups, scale: float, changed: int = 0) -> None:
        """All ranks must bring the same values; owners then update their slices."""
        self._session.agree(COMMIT, zlib.crc32(json.dumps([clock, groups, scale, changed], sort_keys=True).encode()))
        if self._shard is not None:
            self._shard.apply(groups, scale)

    def state(self) -> list[Record]:
        """Collective."""
        return self._gathered([] if self._shard is None else self._shard.state())

    def kept(self) -> list[Record] | None:
        """This rank's shard's."""
        return None if self._shard is None else self._shard.state()

    def load(self, records: list[Record]) -> None:
        """Collective in effect: every owner keeps what it owns."""
        if self._shard is not None:
            self._shard.load(records)

    def weights(self) -> list[Record]:
        """Collective."""
        return self._gathered([] if self._shard is None else self._shard.weights())

    def replace(self, weights: list[Record]) -> None:
        """Every owner keeps what it owns."""
        if self._shard is not None:
            self._shard.load_weights(weights)

    def resume(self, step: int, weights: list[Record]) -> None:  # noqa: ARG002 - the workers know the step themselves
        """Every owner keeps what it owns."""
        if self._shard is not None:
            self._shard.load_weights(weights)

    def _gathered(self, records: list[Record]) -> list[Record]:
        parts = self._session.gather(pack(records))
        return [record for rank, part in enumerate(parts) for record in unpack(part, self._session.name(rank), rank)]


class RemoteOwners:
    """Server processes own the slices."""

    answers_one = True

    def __init__(self, session: Session) -> None:
        self._session = session
        self.count = session.group.servers
        self._servers = range(session.group.workers, session.group.processes)

    def squared_norm(self, clock: int) -> float:
        """Summed in server order."""
        return sum(float(reply["squared"]) for reply in self._ask({"kind": "norm", "clock": clock}, {"squared": float}))

    def commit(self, clock: int, groups: Groups, scale: float, changed: int = 0) -> None:
        """Every server answers once it has applied the update."""
        values = {"groups": groups, "scale": scale, "changed weights": changed}
        self._ask({"kind": "push", "clock": clock, "values": values})

    def state(self) -> list[Record]:
        """Any worker may ask, alone."""
        return self._fetch("state")

    def kept(self) -> None:
        """Nothing."""
        return

    def load(self, records: list[Record]) -> None:
        """Any worker may load, alone; the last one counts."""
        self._put({"kind": "load"}, records)

    def weights(self) -> list[Record]:
        """Any worker may ask, alone."""
        return self._fetch("weights")

    def replace(self, weights: list[Record]) -> None:
        """Rank 0 tells the servers; nothing is applied before it has, and the others have, committed."""
        if self._session.rank == 0:
            self._put({"kind": "replace"}, weights)

    def resume(self, step: int, weights: list[Record]) -> None:
        """Rank 0 tells the servers, and nobody goes on before they know."""
        if self._session.rank == 0:
            self._put({"kind": "resume", "step": step}, weights)
        self._session.barrier()

    def _fetch(self, kind: str) -> list[Record]:
        found: list[Record] = []
        for server, reply in zip(self._servers, self._ask({"kind": kind}, {"size": int}), strict=True):
            body = receive_body(self._session, server, reply["size"], f"the owner's {kind}")
            found += unpack(body, self._session.name(server), server)
        return found

    def _put(self, request: Mapping[str, Any], records: list[Record]) -> None:
        body, label = pack(records), f"the body of a {request['kind']}"
        for server in self._servers:
            self._send(server, {**request, "size": len(body)})
            send_body(self._session, server, body, label)
        for server in self._servers:
            self._session.engine.wait(self._session.recv(server, f"the answer to a {request['kind']}", REPLY_BYTES))

    def _ask(self, request: Mapping[str, Any], fields: Mapping[str, type] = NOTHING) -> list[dict[str, Any]]:
        """Ask all servers; their answers, which have these fields."""
        label = f"the answer to a {request['kind']}"
        replies = [self._session.recv(server, label, REPLY_BYTES) for server in self._servers]
        for server in self._servers:
            self._send(server, request)
        self._session.engine.wait(*replies)
        return [
            read_message(self._session, server, label, reply.result, fields)
            for server, reply in zip(self._servers, replies, strict=True)
        ]

    def _send(self, server: int, request: Mapping[str, Any]) -> None:
        data = json.dumps(request).encode()
        if len(data) > REQUEST_BYTES:
            raise UsageError(
                f"the values of the optimizer's parameter groups take {len(data)} bytes, a parameter server takes up to"
                f" {REQUEST_BYTES}: use fewer groups, ps(update=worker) or an allreduce"
            )
        self._session.send(server, data, f"a {request['kind']}")


class Client:
    """A worker's dealings with the owners of its weights, which come by the plan ``pull``, or as coded ``updates``."""

    def __init__(
        self,
        session: Session,
        replica: Replica,
        weights: Storage,
        owners: Owners,
        pull: Program,
        updates: Updates | None = None,
        *,
        keeps_state: bool = True,
    ) -> None:
        self.session, self.replica, self.owners = session, replica, owners
        self.keeps_state = keeps_state  # whether the optimizer has any
        self.parameters = [parameter for _, parameter in replica.named]
        self.scale = 1.0
        self._unsaid = 0  # which changed weights the owners have taken while the workers have not compared them
        self.commits = 0  # the clock of this session's protocol; a resumed run begins at 0 again
        self._weights, self._pull, self._updates = weights, pull, updates
        self._staging = replica.staging
        self._versions: list[int] = []
        self._pushed, self._pulled = Contents(replica.storage), Contents(weights)
        self._weight_versions: list[int] = []
        self._loaded = False
        self._remember_weights()
        replica.on_second_backward = self._refuse_second_backward
        replica.on_exchanged = self._remember
        replica.on_loaded = self._note_loaded

    def clip(self, max_norm: float) -> float:
        """Have the next update's gradients clipped to a norm of ``max_norm``; their norm."""
        self._check_pushed()
        norm: float = self.scale * self.owners.squared_norm(self.commits + 1) ** 0.5
        self.scale *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self, groups: Groups) -> None:
        """Commit the pushed gradients and wait for the new weights."""
        self._check_pushed()
        changed, self._unsaid = (self._unsaid + self._tell_changed()) & 0xFFFFFFFF, 0
        engine, first = self.session.engine, WEIGHT_KEYS + self.replica.first_key
        scale, self.scale = self.scale, 1.0
        self.commits += 1
        self.owners.commit(self.commits, groups, scale, changed)
        works = []
        for number, array in enumerate(self._weights.arrays):
            label = f"weights of bucket {number}"
            if self._updates is None:
                pulled = engine.exchange(self._pull, array, first + number, label)
            else:
                pulled = self.session.pull(self._updates, number, first + number, label)
            works.append(self._staging.up(self._weights.pair(number), pulled, label))
        engine.wait(*works)
        self._staging.join()
        self._remember_weights()
        self.replica.exchanged = False

    @property
    def keeps(self) -> bool:
        """True when the owners' weights may say more than the workers', which a checkpoint then needs."""
        return self._updates is not None and self._updates.keeps

    def owners_weights(self) -> dict[str, torch.Tensor]:
        """The weights as the owners have them, by name; all workers call it."""
        self._unsaid += self._tell_changed()
        self.session.barrier()
        whole = whole_state(self.owners.weights(), self.parameters)
        return {
            name: whole[parameter][WEIGHTS].cpu() if parameter in whole else parameter.detach()  # without elements
            for name, parameter in self.replica.named
        }

    def resume(self, step: int, weights: Mapping[str, torch.Tensor]) -> None:
        """Have the owners go on from that step with their own weights, where there are any; all workers call it.

        Raises UsageError for those of another model.
        """
        if self._updates is None:
            return
        records = []
        for index, (name, parameter) in enumerate(self.replica.named if weights else ()):
            found = weights.get(name)
            if found is None or found.shape != parameter.shape or found.dtype != parameter.dtype:
                raise UsageError(f"the owners' weights in this state do not have {name!r} as this model has it")
            records.append(self._whole(index, in_memory_order(found, parameter)))
        self.owners.resume(step, records)

    def _whole(self, index: int, values: torch.Tensor) -> Record:
        return Record(Piece(index, 0, values.numel()), WEIGHTS, values)

    def _remember(self) -> None:
        self._versions = [view._version for view in self.replica.storage.views]
        self._pushed.remember()

    def _check_pushed(self) -> None:
        """The owners must have seen what the worker sees."""
        if not self.replica.exchanged:
            raise GradientError("step() before backward(): the parameter server has no gradients of this step")
        storage = self.replica.storage
        for index, (name, parameter) in enumerate(self.replica.named):
            if parameter.grad is None or parameter.grad.data_ptr() != storage.places[index]:
                raise self._changed(name)
            if storage.views[index]._version != self._versions[index]:
                raise self._changed(name)
        for index in self._pushed.changed():
            raise self._changed(self.replica.named[index][0])

    def _remember_weights(self) -> None:
        self._weight_versions = [parameter._version for parameter in self.parameters]
        self._pulled.remember()
        self._loaded = False

    def _note_loaded(self) -> None:
        self._loaded = True

    def _tell_changed(self) -> int:
        """Give the owners the weights that the script has changed since the last step; a number that tells which.

        Pulls are no changes, they write past autograd.
        """
        found = self._changed_weights()
        if not found:
            return 0
        whole = self._loaded and len(found) == len(self.parameters)
        if self.keeps and not whole and self.commits:
            raise self.replica.fault(
                f"the weights {self.replica.named[found[0]][0]!r} were changed on this worker since the last step. With"
                f" codec={self.session.strategy.codec} their owners know more of them than the workers, which would be"
                " lost: load a state_dict into the whole model, or use codec=none or ps(update=worker)"
            )
        self._bring_home(found)
        self._remember_weights()
        self.owners.replace([self._whole(index, self._weights.flat_of(index)) for index in found])
        return zlib.crc32(self._pulled.digest(found)) or 1

    def _changed_weights(self) -> list[int]:
        """Numbers of parameters."""
        if self._weights.moved:
            raise self.replica.fault(
                "the weights have been moved to other memory (model.share_memory()?), which is not the one that the"
                " parameter server writes: call it before syncline.prepare()"
            )
        found = set(self._pulled.changed())
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
        error = GradientError(
            f"{self.session.name(self.session.index)}: the gradient of {name!r} was changed between backward() and"
            " step(), after the parameter server had received it. Clip with syncline.clip_grad_norm_(); for"
            " GradScaler and other changes use ps(update=worker) or an allreduce such as ring"
        )
        self.session.fail(error)
        return error

    def _refuse_second_backward(self) -> None:
        raise self.replica.fault(
            "a second backward() before step(): the parameter server has the first one's gradients already; wrap all"
            " but the last in `with syncline.no_sync():`, or set model.require_backward_grad_sync = False for them"
        )
