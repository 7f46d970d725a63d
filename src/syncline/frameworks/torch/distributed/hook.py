"""A communication hook for DistributedDataParallel: its buckets compressed by a codec, over the group that it has.

DDP goes on to make buckets, to order them and to hide them behind backward; what a codec makes of a bucket is reduced
by the same reducers as under ``syncline.prepare``, whose messages and sums the collectives of a process group carry:
Gloo's, NCCL's or Syncline's. They travel in groups of their own with the same ranks and backend, from threads, each of
which has every so many buckets in their order (``lanes``); so nothing that the script or DDP calls meanwhile comes
between them.

On the CPU codecs work in DDP's own memory: no gradient is copied. Where owners add payloads, these divide the sums,
each its share, and gradients are encoded as they are; else a bucket is divided by the number of ranks before.

DDP puts its buckets together anew after the first step, by the order in which gradients came. That step is therefore
sent as it is, also in a run that is resumed.
"""

# No postponed annotations: DDP reads those of a hook.
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ....codecs import Stochastic, codec_of
from ....compression.saved import Saved, as_bytes, from_bytes
from ....errors import SynclineError, UsageError
from ....nouns import Spec
from ....strategy.strategy import Strategy
from ....strategy.words import AUTO, NONE
from .carrier import Carrier
from .compressed import CompressedBucket
from .lanes import Lanes
from .works import Promise


class HookState:
    """What ``comm_hook`` has to know: the codec, the group, and what the codec keeps back of which parameter.

    ``codec`` is a strategy's, as in ``codec=int8`` or ``codec=topk(ratio=0.01)``; the group is DDP's.
    """

    def __init__(self, strategy: str, process_group: Any = None) -> None:
        self.strategy = Strategy.parse(strategy)
        if self.strategy != replace(Strategy.parse(""), codec=self.strategy.codec):
            raise UsageError(f"{strategy!r}: a hook has a codec only, since DDP's group carries it: give codec=...")
        if self.strategy.codec in (NONE, AUTO):
            raise UsageError(f"{strategy!r}: choose a codec, such as codec=int8 or codec=powersgd(rank=2)")
        self._codec = self.strategy.codec_object()
        self._asked = process_group
        self._lanes: Lanes | None = None
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._buckets: dict[int, CompressedBucket] = {}
        self._loaded: list[Saved] = []
        self._steps = 0
        self._failed: Exception | None = None

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to reduce a bucket; the future has the mean of all ranks' gradients."""
        group = dist.group.WORLD if self._asked is None else self._asked
        world = dist.get_world_size(group)
        parameters = bucket.parameters()
        for parameter in parameters:
            if id(parameter) not in self._numbers:
                self._numbers[id(parameter)] = len(self._numbers)
                self._kept.append(parameter)  # or another one might come to have its address
        buffer, step = bucket.buffer(), self._steps
        self._steps += bucket.is_last()
        if step == 0 or world == 1:
            buffer.div_(world)
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return work.get_future().then(lambda found: found.value()[0])  # type: ignore[no-any-return]
        if self._lanes is None:
            self._lanes = Lanes(group)
        known = self._known(self._lanes, bucket.index(), parameters, buffer, step)
        promise = Promise()
        self._lanes.add(bucket.index(), partial(self._reduce, known, buffer, promise))
        return promise.future

    def _known(
        self, lanes: Lanes, index: int, parameters: Sequence[torch.Tensor], buffer: torch.Tensor, step: int
    ) -> CompressedBucket:
        """Bucket ``index``, made when it comes for the first time."""
        numbers = tuple(self._numbers[id(parameter)] for parameter in parameters)
        if (known := self._buckets.get(index)) is None:
            known = self._buckets[index] = CompressedBucket(self._codec, index, numbers, parameters, buffer, lanes)
            if self._loaded:
                known.load(self._loaded)
            else:
                known.compression.resume_at(step)
        elif known.numbers != numbers:
            raise UsageError(
                "DistributedDataParallel has put its buckets together anew after the second step, and what the"
                " codec has kept back is of the others: make a new hook state, or use syncline.prepare()"
            )
        return known

    def _reduce(
        self,
        bucket: CompressedBucket,
        buffer: torch.Tensor,
        promise: Promise,
        carrier: Carrier,
    ) -> None:
        """Reduce a bucket, in its lane; what goes wrong goes to the future, and to those of all later buckets."""
        try:
            if self._failed is not None:
                raise SynclineError(f"nothing is sent after an error: {self._failed}")
            bucket.reduce(buffer, carrier)
        except Exception as error:
            self._failed = self._failed or error
            promise.set_exception(bucket.named(error))
        else:
            promise.set_result(buffer)

    # Checkpoints.

    @property
    def keeps(self) -> bool:
        """Whether a resumed run would go on otherwise if it knew nothing of the steps before."""
        one = codec_of(self._codec, Spec("a weight", (1 << 10, 1 << 10), "float32"))
        return one.feedback or (isinstance(one.codec, Stochastic) and one.codec.stochastic)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know; all ranks call it, between two steps, and get what all have."""
        mine: Saved = {"clock": np.array([self._steps], np.int64)}
        for bucket in self._buckets.values():
            mine |= bucket.compression.saved()
        group = dist.group.WORLD if self._asked is None else self._asked
        gathered = (self._lanes or Carrier(group)).gather(as_bytes(mine))
        everyone = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in gathered]
        return {"strategy": str(self.strategy), "ranks": everyone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave, before the first step; refuses another codec's."""
        if (strategy := state.get("strategy")) != str(self.strategy):
            raise UsageError(f"this state is of a hook with {strategy}, this one has {self.strategy}")
        if self._steps:
            raise UsageError("load the state of a hook before the first step")
        try:
            self._loaded = [from_bytes(data.numpy().tobytes()) for data in state["ranks"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is no whole state of a hook: {error!r}") from error


def hook_state(strategy: str, process_group: Any = None) -> HookState:
    """The state of ``comm_hook``: a codec, and the group that DDP has where that is not the default one."""
    return HookState(strategy, process_group)


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``ddp.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)``."""
    return state.start(bucket)
