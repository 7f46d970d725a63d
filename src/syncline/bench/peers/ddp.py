"""``ddp``: PyTorch's DistributedDataParallel over Gloo, as its documentation says to run it on CPUs.

Gradients are views of the buckets (``gradient_as_bucket_view``), which saves a copy; one thread per process, as for all
others (``bench.train``); Gloo is bound to the interface on which the processes meet, since it would otherwise look the
host name up (``GLOO_SOCKET_IFNAME``, which a lab sets). DistributedDataParallel waits where it likes and counts
nothing: its iterations are measured, its blocked time and bytes are not.

Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...errors import UsageError
from ...launch.environment import Environment, recognise
from ...nouns import Size
from ...registry import register
from ..sides import NoCounts
from ..store import open_store

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_TIMEOUT_S = 120.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
_BUCKET = Size(25 << 20)


@register("peers", "ddp", trains=True)
@dataclass(frozen=True)
class DDP:
    """PyTorch's DistributedDataParallel over Gloo; a communication hook sends gradients with 16 bits."""

    bucket: Size = _BUCKET
    hook: Literal["none", "fp16", "bf16"] = "none"

    def __post_init__(self) -> None:
        if self.bucket < 1:
            raise UsageError(f"bucket of ddp must be 1 byte or more, got {self.bucket}: its own default is 25MiB")

    def join(self) -> Member:
        """Become a member of the run's Gloo group; raises GroupError when the others cannot be reached."""
        return Member(self, recognise())


class Member:
    """One process of a DistributedDataParallel run, behind the calls that the training loop makes."""

    def __init__(self, peer: DDP, environment: Environment) -> None:
        import torch.distributed as dist

        self._peer, self._dist = peer, dist
        if environment.address.startswith("127."):
            os.environ.setdefault(_INTERFACE, "lo")
        prefix = dist.PrefixStore("ddp", open_store(environment, _TIMEOUT_S))  # type: ignore[no-untyped-call,attr-defined,unused-ignore]
        dist.init_process_group("gloo", store=prefix, rank=environment.rank, world_size=environment.world)

    def rank(self) -> int:
        """This worker's rank."""
        return int(self._dist.get_rank())

    def world_size(self) -> int:
        """The number of workers."""
        return int(self._dist.get_world_size())

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[DistributedDataParallel, Any]:  # noqa: ARG002
        """The model wrapped; the optimizer holds its parameters already. Ranks weigh alike here, whatever is asked."""
        from torch.nn.parallel import DistributedDataParallel

        # torch counts megabytes of 1024 * 1024 bytes.
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=self._peer.bucket / (1 << 20),
            gradient_as_bucket_view=True,
        )
        hook = _hook(self._peer.hook)
        if hook is not None:
            wrapped.register_comm_hook(None, hook)
        return wrapped, optimizer

    def stats(self) -> NoCounts:
        """Nothing: DistributedDataParallel does not count."""
        return NoCounts(f"ddp over gloo on {os.environ.get(_INTERFACE, 'the default interface')}", blocked_s=None)

    def barrier(self) -> None:
        """Wait for all workers."""
        self._dist.barrier()

    def consolidate(self) -> None:
        """Nothing: replicas never differ."""

    def shutdown(self) -> None:
        """Leave the group."""
        self._dist.destroy_process_group()


def _hook(name: str) -> Any:
    """torch's hook of that name, None for ``none``."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooks: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_hook,
        # Under its own name this hook is refused unless torch was built with NCCL, whatever the backend is. Gloo adds
        # bfloat16 as well.
        "bf16": lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
    }
    return hooks.get(name)
