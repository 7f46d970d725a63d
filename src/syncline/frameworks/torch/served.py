"""The optimizer of a worker whose weights live on a parameter server: ``step()`` asks for the update and waits.

During backward the gradients have been pushed bucket by bucket. ``step()`` commits them with the optimizer's group
values (learning rate and so on), the owners of each slice apply the real update, and the new weights are written
straight into the parameters, which lie in contiguous storage like the gradients.

Whatever the owners would not see is refused: gradients that were changed after they had been sent, a second exchange
before the step. Clipping is ``syncline.clip_grad_norm_``, which the owners compute.

``Owners`` is how a worker talks to them: ``RemoteOwners`` by messages to server processes, ``LocalOwners`` when the
workers themselves own the slices.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...errors import GradientError, NotBuiltError, UsageError
from ...program import Program
from ...session import WEIGHT_KEYS, Session
from ...tickets import COMMIT, NORM
from ...updates import Updates
from .records import pack, unpack
from .replica import Replica
from .serve import REPLY_BYTES, REQUEST_BYTES
from .shard import WEIGHTS, Piece, Record, Shard, in_memory_order, records_of, whole_state
from .storage import Storage

Groups = list[dict[str, Any]]


class Owners(Protocol):
    """The processes that hold and update the weights, as a worker sees them."""

    def squared_norm(self, clock: int) -> float:
        """The squared norm of all averaged gradients of step ``clock``."""
        ...

    def commit(self, clock: int, groups: Groups, scale: float) -> None:
        """Have the update of step ``clock`` applied; weights may be pulled after it."""
        ...

    def state(self) -> list[Record]:
        """The optimizer's state from all owners."""
        ...

    def load(self, records: list[Record]) -> None:
        """Replace the optimizer's state at all owners."""
        ...

    def weights(self) -> list[Record]:
        """The weights of all owners, which under a codec know more than the workers'."""
        ...

    def resume(self, step: int, weights: list[Record]) -> None:
        """Go on from that step with these weights, as far as there are any; all workers call it."""
        ...


class LocalOwners:
    """The workers own the slices: every call is collective, ``shard`` is this rank's (None when it owns nothing)."""

    def __init__(self, session: Session, shard: Shard | None) -> None:
        self._session, self._shard = session, shard

    def squared_norm(self, clock: int) -> float:
        """Summed in rank order, so that all ranks get the same bits."""
        self._session.agree(NORM, clock)
        mine = 0.0 if self._shard is None else self._shard.squared_norm()
        return sum(float(part) for part in self._session.gather(repr(mine).encode()))

    def commit(self, clock: int, groups: Groups, scale: float) -> None:
        """All ranks must bring the same values; owners then update their slices."""
        self._session.agree(COMMIT, zlib.crc32(json.dumps([clock, groups, scale], sort_keys=True).encode()))
        if self._shard is not None:
            self._shard.apply(groups, scale)

    def state(self) -> list[Record]:
        """Collective."""
        return self._gathered([] if self._shard is None else self._shard.state())

    def load(self, records: list[Record]) -> None:
        """Collective in effect: every owner keeps what it owns."""
        if self._shard is not None:
            self._shard.load(records)

    def weights(self) -> list[Record]:
        """Collective."""
        return self._gathered([] if self._shard is None else self._shard.weights())

    def resume(self, step: int, weights: list[Record]) -> None:  # noqa: ARG002 - the workers know the step themselves
        """Every owner keeps what it owns."""
        if self._shard is not None:
            self._shard.load_weights(weights)

    def _gathered(self, records: list[Record]) -> list[Record]:
        return [record for part in self._session.gather(pack(records)) for record in unpack(part)]


class RemoteOwners:
    """Server processes own the slices."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._servers = range(session.group.workers, session.group.processes)

    def squared_norm(self, clock: int) -> float:
        """Summed in server order."""
        return sum(float(reply["squared"]) for reply in self._ask({"kind": "norm", "clock": clock}))

    def commit(self, clock: int, groups: Groups, scale: float) -> None:
        """Every server answers once it has applied the update."""
        self._ask({"kind": "commit", "clock": clock, "values": {"groups": groups, "scale": scale}})

    def state(self) -> list[Record]:
        """Any worker may ask, alone."""
        return self._fetch("state")

    def load(self, records: list[Record]) -> None:
        """Any worker may load, alone; the last one counts."""
        self._put({"kind": "load"}, records)

    def weights(self) -> list[Record]:
        """Any worker may ask, alone."""
        return self._fetch("weights")

    def resume(self, step: int, weights: list[Record]) -> None:
        """Rank 0 tells the servers, and nobody goes on before they know."""
        if self._session.rank == 0:
            self._put({"kind": "resume", "step": step}, weights)
        self._session.barrier()

    def _fetch(self, kind: str) -> list[Record]:
        found: list[Record] = []
        for server, reply in zip(self._servers, self._ask({"kind": kind}), strict=True):
            body = self._session.recv(server, f"the owner's {kind}", int(reply["size"]))
            self._session.engine.wait(body)
            found += unpack(body.result)
        return found

    def _put(self, request: Mapping[str, Any], records: list[Record]) -> None:
        body, label = pack(records), f"the body of a {request['kind']}"
        for server in self._servers:
            self._send(server, {**request, "size": len(body)})
            self._session.engine.wait(self._session.send(server, body, label))
        for server in self._servers:
            self._session.engine.wait(self._session.recv(server, f"the answer to a {request['kind']}", REPLY_BYTES))

    def _ask(self, request: Mapping[str, Any]) -> list[dict[str, Any]]:
        label = f"the answer to a {request['kind']}"
        replies = [self._session.recv(server, label, REPLY_BYTES) for server in self._servers]
        for server in self._servers:
            self._send(server, request)
        self._session.engine.wait(*replies)
        return [json.loads(reply.result) for reply in replies]

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
    ) -> None:
        self.session, self.replica, self.owners = session, replica, owners
        self.parameters = [parameter for _, parameter in replica.named]
        self.scale = 1.0
        self.commits = 0  # the clock of this session's protocol; a resumed run begins at 0 again
        self._weights, self._pull, self._updates = weights, pull, updates
        self._staging = replica.staging
        self._versions: dict[str, int] = {}
        self._weight_versions = [parameter._version for parameter in self.parameters]
        replica.on_second_backward = self._refuse_second_backward
        replica.on_exchanged = self._remember

    def clip(self, max_norm: float) -> float:
        """Have the next update's gradients clipped to a norm of ``max_norm``; their norm."""
        self._check_pushed()
        norm: float = self.scale * self.owners.squared_norm(self.commits + 1) ** 0.5
        self.scale *= min(1.0, max_norm / (norm + 1e-6))
        return norm

    def step(self, groups: Groups) -> None:
        """Commit the pushed gradients and wait for the new weights."""
        self._check_pushed()
        self._check_weights()
        engine, first = self.session.engine, WEIGHT_KEYS + self.replica.first_key
        scale, self.scale = self.scale, 1.0
        self.commits += 1
        self.owners.commit(self.commits, groups, scale)
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
        self.replica.exchanged = False

    @property
    def keeps(self) -> bool:
        """True when the owners' weights may say more than the workers', which a checkpoint then needs."""
        return self._updates is not None and self._updates.keeps

    def owners_weights(self) -> dict[str, torch.Tensor]:
        """The weights as the owners have them, by name; all workers call it."""
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
            piece = Piece(index, 0, parameter.numel())
            records.append(Record(piece, WEIGHTS, in_memory_order(found, parameter)))
        self.owners.resume(step, records)

    def _remember(self) -> None:
        self._versions = {dtype: flat._version for dtype, flat in self.replica.storage.resident.items()}

    def _check_pushed(self) -> None:
        """The owners must have seen what the worker sees."""
        if not self.replica.exchanged:
            raise GradientError("step() before backward(): the parameter server has no gradients of this step")
        for index, (name, parameter) in enumerate(self.replica.named):
            view = self.replica.storage.views[index]
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                raise self._changed(repr(name))
        for dtype, flat in self.replica.storage.resident.items():
            if flat._version != self._versions[dtype]:
                raise self._changed(dtype)

    def _check_weights(self) -> None:
        """The owners must have the weights that the worker has; pulls are no changes, they write past autograd."""
        for (name, parameter), version in zip(self.replica.named, self._weight_versions, strict=True):
            if parameter._version != version:
                raise self.replica.fault(
                    f"the weights {name!r} were changed on this worker after syncline.prepare(); the parameter server"
                    " holds them and does not see that: load a state_dict before prepare(), or use ps(update=worker)"
                )

    def _changed(self, what: str) -> GradientError:
        error = GradientError(
            f"{self.session.name(self.session.index)}: the gradients ({what}) were changed between backward() and"
            " step(), after the parameter server had received them. Clip with syncline.clip_grad_norm_(); for"
            " GradScaler and other changes use ps(update=worker) or an allreduce such as ring"
        )
        self.session.fail(error)
        return error

    def _refuse_second_backward(self) -> None:
        raise self.replica.fault(
            "a second backward() before step(): the parameter server has the first one's gradients already; wrap all"
            " but the last in `with syncline.no_sync():`"
        )


class Served:
    """Mixed into the class of a user's optimizer by ``take_over``; the owners' optimizer does the work."""

    _client: Client
    param_groups: Groups
    defaults: dict[str, Any]

    _step_supports_amp_scaling = True  # GradScaler then comes to step() even when it would skip it

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commit the gradients of the last backward and wait for the new weights; the closure's loss."""
        if hasattr(self, "grad_scale"):
            raise self._client.replica.fault(
                "GradScaler cannot unscale gradients that a parameter server holds: use ps(update=worker) or an"
                " allreduce such as ring, or autocast to bfloat16 without a GradScaler"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._opt_called = True  # what learning-rate schedulers look at
        self._client.step(group_values(self.param_groups))
        return loss

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers made before and after prepare find _opt_called kept

    def state_dict(self) -> dict[str, Any]:
        """As one process would give it: the owners' state put together."""
        return self._whole().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Send the state to the owners and take the group values."""
        whole = self._whole(fetch=False)
        whole.load_state_dict(dict(state))
        for mine, loaded in zip(self.param_groups, whole.param_groups, strict=True):
            mine.update({key: value for key, value in loaded.items() if key != "params"})
        self._client.owners.load(records_of(whole, self._client.parameters))

    def add_param_group(self, group: dict[str, Any]) -> None:  # noqa: ARG002
        """Refused: what is served is fixed in ``prepare``."""
        raise UsageError("add parameter groups before syncline.prepare(): the servers hold a fixed set of weights")

    def _whole(self, fetch: bool = True) -> torch.optim.Optimizer:
        """A plain optimizer of the user's class over the same parameters, with the owners' state."""
        plain = type(self).__mro__[2]
        whole: torch.optim.Optimizer = object.__new__(plain)
        vars(whole).update({key: value for key, value in vars(self).items() if key not in ("_client", "step")})
        whole.param_groups = [dict(group) for group in self.param_groups]
        whole.state = defaultdict(dict)
        if fetch:
            whole.state.update(whole_state(self._client.owners.state(), self._client.parameters))
        return whole


def take_over(optimizer: torch.optim.Optimizer, client: Client) -> None:
    """Make the user's optimizer object itself the served one: schedulers that hold it go on working."""
    vars(optimizer).pop("step", None)  # a learning-rate scheduler's wrapper around the plain step
    plain = type(optimizer)
    optimizer.state.clear()
    optimizer.__class__ = type(f"Served{plain.__name__}", (Served, plain), {})
    optimizer._client = client  # type: ignore[attr-defined]


def group_values(groups: Sequence[Mapping[str, Any]]) -> Groups:
    """The values of an optimizer's groups without their tensors, as JSON can say them."""
    return [{key: _plain(key, value) for key, value in group.items() if key != "params"} for group in groups]


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(key, item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotBuiltError(f"the optimizer's group value {key!r} is a {type(value).__name__}, which cannot be sent")
