"""A communication hook for DistributedDataParallel that compresses its buckets with a codec.

DDP still creates, orders and overlaps its buckets. The hook reduces a compressed bucket with the same reducers as
``syncline.prepare``, over the collectives of a process group: Gloo's, NCCL's or Syncline's. They run in separate groups
with the same ranks and backend, in threads that each handle every k-th bucket in order (``carrier``), so no call of the
script or of DDP interleaves with them.

On the CPU codecs work in DDP's own memory, without copying gradients. If owners add payloads, the owners divide the
sums and gradients are encoded undivided; otherwise a bucket is divided by the number of ranks first. A residual then
belongs to a rank's gradient, not to its share of the mean, and is scaled when the number of ranks changes.

DDP rebuilds its buckets after the first step, in the order in which gradients arrived. The first step is therefore sent
uncompressed, also in a resumed run.
"""

# No postponed annotations, because DDP reads those of a hook.
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ..codecs import Codec, Stochastic, codec_of
from ..compression.compression import Compression
from ..compression.reducers import Participant
from ..compression.reducers.ways import way_of
from ..compression.saved import Array, Saved, as_bytes, from_bytes
from ..errors import PeerError, SynclineError, UsageError
from ..frameworks.torch import storage
from ..nouns import Bucket, Layer, Slice, Spec, numpy_dtype
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO, NONE
from ..wire.scratch import Scratch
from .carrier import Carrier, Lanes, drive
from .works import Promise


class CompressedBucket:
    """Bucket ``index`` with the parameters ``numbers``, and the codec's state for it.

    It is compressed in DDP's own memory if that is on the CPU.
    """

    def __init__(
        self,
        codec: Codec,
        index: int,
        numbers: tuple[int, ...],
        parameters: Sequence[torch.Tensor],
        buffer: torch.Tensor,
        lanes: Lanes,
    ) -> None:
        self.index, self.numbers = index, numbers
        self._rank, self._world = lanes.rank, lanes.world
        kind = storage.dtype_name(buffer.dtype)
        layers = [
            Layer(Spec(f"parameter {number}", tuple(parameter.shape), kind))
            for number, parameter in zip(numbers, parameters, strict=True)
        ]
        codecs = [codec_of(codec, Spec(layer.spec.name, layer.spec.shape, "float32")) for layer in layers]
        self._means = all(way_of(one.codec).again and not one.warmup for one in codecs)
        bucket = Bucket(tuple(Slice(place, 0, one.numel()) for place, one in enumerate(parameters)), kind)
        me = Participant(self._rank, self._world, tuple(range(self._world)), Scratch(), means=self._means)
        self._address, self._array = buffer.data_ptr(), _memory_of(buffer)
        name = f"rank {self._rank}"
        self.compression = Compression(codec, layers, [bucket], [self._array], me, served=False, name=name)

    def load(self, saved: Sequence[Mapping[str, Array]]) -> None:
        """Restore the states that the ranks saved. The number of ranks may have changed."""
        more = self._world / len(saved) if self._means else 1.0
        self.compression.load([{key: _worth(key, array, more) for key, array in one.items()} for one in saved])

    def reduce(self, buffer: torch.Tensor, carrier: Carrier) -> None:
        """Replace a bucket by the mean over the ranks."""
        if buffer.device.type == "cpu" and buffer.data_ptr() != self._address:
            self._address, self._array = buffer.data_ptr(), _memory_of(buffer)
            self.compression = self.compression.beside([self._array])
        here = storage.as_torch(self._array, buffer.dtype)
        if buffer.device.type != "cpu":
            here.copy_(buffer.detach())
        if not self._means:
            here.div_(self._world)
        drive(self.compression.pieces(0), carrier)
        self.compression.finish(0)
        if buffer.device.type != "cpu":
            with torch.no_grad():
                buffer.copy_(here)

    def named(self, error: Exception) -> Exception:
        """The error with the rank and the bucket prepended. Errors of Syncline keep their type."""
        text = f"rank {self._rank}: bucket {self.index} of DistributedDataParallel: {error}"
        if isinstance(error, PeerError):
            named: Exception = type(error)(text, rank=error.rank, host=error.host)
        else:
            named = type(error)(text) if isinstance(error, SynclineError) else SynclineError(text)
        named.__cause__ = error
        return named


def _memory_of(buffer: torch.Tensor) -> Any:
    """The memory of a bucket as numbers, or CPU memory of the same size."""
    there = buffer.detach() if buffer.device.type == "cpu" else torch.empty(buffer.numel(), dtype=buffer.dtype)
    return storage.as_bytes(there).numpy().view(numpy_dtype(storage.dtype_name(buffer.dtype)))


def _worth(key: str, array: Array, more: float) -> Array:
    """The factor for residuals when the number of ranks has grown ``more``-fold."""
    return array * np.float32(more) if more != 1 and key.startswith("own/") and key.endswith("/residual") else array


class HookState:
    """The state of ``comm_hook``: the codec, the group, and the codec's state per parameter.

    ``codec`` is a strategy's, as in ``codec=int8`` or ``codec=topk(ratio=0.01)``; the group is DDP's.
    """

    def __init__(self, strategy: str, process_group: Any = None) -> None:
        self.strategy = Strategy.parse(strategy)
        if self.strategy != replace(Strategy.parse(""), codec=self.strategy.codec):
            raise UsageError(f"{strategy!r}: a hook takes only a codec, because DDP's group carries it: give codec=...")
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
        """Start to reduce a bucket. The future yields the mean of all ranks' gradients."""
        group = dist.group.WORLD if self._asked is None else self._asked
        world = dist.get_world_size(group)
        parameters = bucket.parameters()
        for parameter in parameters:
            if id(parameter) not in self._numbers:
                self._numbers[id(parameter)] = len(self._numbers)
                self._kept.append(parameter)  # keeps the bucket's address from being reused
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
        """Bucket ``index``, created on first use."""
        numbers = tuple(self._numbers[id(parameter)] for parameter in parameters)
        if (known := self._buckets.get(index)) is None:
            known = self._buckets[index] = CompressedBucket(self._codec, index, numbers, parameters, buffer, lanes)
            if self._loaded:
                known.load(self._loaded)
            else:
                known.compression.resume_at(step)
        elif known.numbers != numbers:
            raise UsageError(
                "DistributedDataParallel has formed new buckets after the second step, and the codec's residuals"
                " belong to the former ones: make a new hook state, or use syncline.prepare()"
            )
        return known

    def _reduce(
        self,
        bucket: CompressedBucket,
        buffer: torch.Tensor,
        promise: Promise,
        carrier: Carrier,
    ) -> None:
        """Reduce a bucket in its lane. Errors go to its future and to the futures of all later buckets."""
        try:
            if self._failed is not None:
                raise SynclineError(f"nothing is sent after an error: {self._failed}")
            bucket.reduce(buffer, carrier)
        except Exception as error:
            self._failed = self._failed or error
            promise.set_exception(bucket.named(error))
        else:
            promise.set_result(buffer)

    # Checkpoints

    @property
    def keeps(self) -> bool:
        """Whether a resumed run needs the codec's state to go on with the same bits."""
        one = codec_of(self._codec, Spec("a weight", (1 << 10, 1 << 10), "float32"))
        return one.feedback or (isinstance(one.codec, Stochastic) and one.codec.stochastic)

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint. Collective, between two steps; every rank gets the states of all."""
        mine: Saved = {"clock": np.array([self._steps], np.int64)}
        for bucket in self._buckets.values():
            mine |= bucket.compression.saved()
        group = dist.group.WORLD if self._asked is None else self._asked
        gathered = (self._lanes or Carrier(group)).gather(as_bytes(mine))
        everyone = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in gathered]
        return {"strategy": str(self.strategy), "ranks": everyone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a ``state_dict`` before the first step. Refuses a state of another codec."""
        if (strategy := state.get("strategy")) != str(self.strategy):
            raise UsageError(f"this state belongs to a hook with {strategy}, but this hook has {self.strategy}")
        if self._steps:
            raise UsageError("load the state of a hook before the first step")
        try:
            self._loaded = [from_bytes(data.numpy().tobytes()) for data in state["ranks"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"this is not a complete state of a hook: {error!r}") from error


def hook_state(strategy: str, process_group: Any = None) -> HookState:
    """The state for ``comm_hook``: a codec, and DDP's group unless it is the default group."""
    return HookState(strategy, process_group)


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``ddp.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)``."""
    return state.start(bucket)
