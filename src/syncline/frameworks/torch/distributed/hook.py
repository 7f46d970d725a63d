"""A communication hook for DistributedDataParallel: its buckets compressed by a codec, over the group that it has.

DDP goes on to make buckets, to order them and to hide them behind backward; what a codec makes of a bucket is reduced
by the same reducers as under ``syncline.prepare``, whose messages and sums the collectives of a process group carry:
Gloo's, NCCL's or Syncline's. They travel in a group of their own with the same ranks and backend, from a thread, in the
order of the buckets; so nothing that the script or DDP calls meanwhile comes between them.

DDP puts its buckets together anew after the first step, by the order in which gradients came. That step is therefore
sent as it is, also in a run that is resumed.
"""

# No postponed annotations: DDP reads those of a hook.
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ....codecs import Stochastic, codec_of
from ....compression.compression import Compression
from ....compression.reducers import Participant, Reducer, Round
from ....compression.saved import Saved, as_bytes, from_bytes
from ....engine.reducing import OPEN
from ....errors import UsageError
from ....nouns import Bucket, Layer, Slice, Spec
from ....strategy.strategy import Strategy
from ....strategy.words import AUTO, NONE
from ....wire.scratch import Scratch
from ..storage import as_bytes as bytes_of
from ..storage import as_torch, dtype_name
from .carrier import Carrier


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
        self._carrier: Carrier | None = None
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []
        self._compressed: dict[int, tuple[tuple[int, ...], Compression, Any]] = {}
        self._loaded: list[Saved] = []
        self._steps = 0
        self._queue = _Queue()

    def start(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin to reduce a bucket; the future has the mean of all ranks' gradients."""
        group = dist.group.WORLD if self._asked is None else self._asked
        world = dist.get_world_size(group)
        parameters = bucket.parameters()
        for parameter in parameters:
            if id(parameter) not in self._numbers:
                self._numbers[id(parameter)] = len(self._numbers)
                self._kept.append(parameter)  # or another one might come to have its address
        buffer, first = bucket.buffer(), self._steps == 0
        self._steps += bucket.is_last()
        if first or world == 1:
            buffer.div_(world)
            work = dist.all_reduce(buffer, group=group, async_op=True)
            return work.get_future().then(lambda found: found.value()[0])  # type: ignore[no-any-return]
        if self._carrier is None:
            self._carrier = Carrier(group)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        compression, array = self._compression(bucket.index(), parameters, buffer)
        self._queue.add(lambda: self._reduce(compression, array, buffer, world), future)
        return future

    def _compression(self, index: int, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> Any:
        """What compresses bucket ``index``, and the memory that it works on."""
        assert self._carrier is not None
        numbers = tuple(self._numbers[id(parameter)] for parameter in parameters)
        if index in self._compressed:
            known, compression, array = self._compressed[index]
            if known != numbers:
                raise UsageError(
                    "DistributedDataParallel has put its buckets together anew after the second step, and what the"
                    " codec has kept back is of the others: make a new hook state, or use syncline.prepare()"
                )
            return compression, array
        kind = dtype_name(buffer.dtype)
        layers = [
            Layer(Spec(f"parameter {number}", tuple(parameter.shape), kind))
            for number, parameter in zip(numbers, parameters, strict=True)
        ]
        bucket = Bucket(tuple(Slice(place, 0, one.numel()) for place, one in enumerate(parameters)), kind)
        array = bytes_of(torch.empty(buffer.numel(), dtype=buffer.dtype)).numpy().view(self._numbers_type(buffer))
        me = Participant(self._carrier.rank, self._carrier.world, tuple(range(self._carrier.world)), Scratch())
        compression = Compression(
            self._codec, layers, [bucket], [array], me, served=False, name=f"rank {self._carrier.rank}"
        )
        if self._loaded:
            compression.load(self._loaded)
        else:
            compression.resume_at(self._steps)
        self._compressed[index] = numbers, compression, array
        return compression, array

    @staticmethod
    def _numbers_type(buffer: torch.Tensor) -> Any:
        from ....nouns import numpy_dtype

        return numpy_dtype(dtype_name(buffer.dtype))

    def _reduce(self, compression: Compression, array: Any, buffer: torch.Tensor, world: int) -> torch.Tensor:
        assert self._carrier is not None
        flat = as_torch(array, buffer.dtype)
        flat.copy_(buffer.detach()).div_(world)
        self._drive(compression.pieces(0))
        compression.finish(0)
        with torch.no_grad():
            buffer.copy_(flat)
        return buffer

    def _drive(self, pieces: Sequence[Callable[[], Reducer]]) -> None:
        """Let reducers compute, each while the messages of others travel, and carry what they ask for."""
        begun, under_way = 0, deque[tuple[int, Reducer, Callable[[], list[int]]]]()
        while begun < len(pieces) or under_way:
            if begun < len(pieces) and len(under_way) < OPEN:
                number, reducer, lengths = begun, pieces[begun](), None
                begun += 1
            else:
                number, reducer, finish = under_way.popleft()
                lengths = finish()
            if (waits := self._advance(number, reducer, lengths)) is not None:
                under_way.append((number, reducer, waits))

    def _advance(self, number: int, reducer: Reducer, lengths: Any) -> Callable[[], list[int]] | None:
        """Let a reducer go on until it has to wait; what waits, None at its end."""
        assert self._carrier is not None
        while True:
            try:
                asked = reducer.send(lengths)
            except StopIteration:
                return None
            if not isinstance(asked, Round):
                self._carrier.add(asked.array)
            elif asked.sends or asked.receives:
                return self._carrier.begin(asked, number)
            lengths = []

    # Checkpoints.

    @property
    def keeps(self) -> bool:
        """Whether a resumed run would go on otherwise if it knew nothing of the steps before."""
        one = codec_of(self._codec, Spec("a weight", (1 << 10, 1 << 10), "float32"))
        return one.feedback or (isinstance(one.codec, Stochastic) and one.codec.stochastic)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know; all ranks call it, between two steps, and get what all have."""
        mine: Saved = {"clock": np.array([self._steps], np.int64)}
        for _, compression, _ in self._compressed.values():
            mine |= {key: array for key, array in compression.saved().items() if key != "clock"}
        group = dist.group.WORLD if self._asked is None else self._asked
        carrier = self._carrier or Carrier(group)
        everyone = [torch.from_numpy(np.frombuffer(data, np.uint8).copy()) for data in carrier.gather(as_bytes(mine))]
        return {"strategy": str(self.strategy), "ranks": everyone}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what ``state_dict`` gave, before the first step; refuses another codec's."""
        if state["strategy"] != str(self.strategy):
            raise UsageError(f"this state is of a hook with {state['strategy']}, this one has {self.strategy}")
        if self._steps:
            raise UsageError("load the state of a hook before the first step")
        self._loaded = [from_bytes(data.numpy().tobytes()) for data in state["ranks"]]


class _Queue:
    """One bucket after the other, in a thread; what goes wrong goes to the future."""

    def __init__(self) -> None:
        self._tasks: deque[tuple[Callable[[], torch.Tensor], Any]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def add(self, task: Callable[[], torch.Tensor], future: Any) -> None:
        with self._lock:
            self._tasks.append((task, future))
            begin, self._running = not self._running, True
        if begin:
            threading.Thread(target=self._run, name="syncline-hook", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._tasks:
                    self._running = False
                    return
                task, future = self._tasks.popleft()
            try:
                found = task()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(found)


def hook_state(strategy: str, process_group: Any = None) -> HookState:
    """The state of ``comm_hook``: a codec, and the group that DDP has where that is not the default one."""
    return HookState(strategy, process_group)


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For ``ddp.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)``."""
    return state.start(bucket)
