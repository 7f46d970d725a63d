"""``ddp``: PyTorch's DistributedDataParallel over Gloo, as documented for CPUs.

It can run PyTorch's communication hooks or Syncline's, which takes a codec (``codec=int8``), and its group can be Gloo
or torch.distributed's backend ``syncline`` (``group=syncline``), over TCP at a lower ``rate`` if one is given.
PyTorch's PowerSGD sends matrices of rank 1 from the third step on, as in the first example of its documentation.

Gradients are views of the buckets (``gradient_as_bucket_view``), which saves a copy; Every process has one thread, as
under all others (``syncline_bench.train``). Gloo is bound to the interface on which the processes meet
(``GLOO_SOCKET_IFNAME``, which a lab sets), because it would otherwise look up the host name. DistributedDataParallel
does not count its waits and bytes: its iterations are measured, its blocked time and bytes are not.

Li et al., "PyTorch distributed: experiences on accelerating data parallel training", VLDB 2020.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from syncline.errors import UsageError
from syncline.launch.environment import Environment, recognise
from syncline.nouns import Rate, Size
from syncline.registry import register
from syncline.strategy.grammar import write_value
from syncline.strategy.strategy import Strategy

from ..sides import NoCounts

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_INTERFACE = "GLOO_SOCKET_IFNAME"
_BUCKET = Size(25 << 20)

_left: list[Any] = []
"""Groups over Gloo that this process has left, kept until it ends. While PyTorch frees a group it holds the interpreter
lock and waits for threads of Gloo. One of these may need the lock to free a hook's work, which would be a deadlock."""


@register("peers", "ddp", trains=True, framework="torch")
@dataclass(frozen=True)
class DDP:
    """PyTorch's DistributedDataParallel, over Gloo or Syncline's backend.

    A communication hook, PyTorch's or Syncline's with a codec, compresses gradients.
    """

    bucket: Size = _BUCKET
    hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    codec: str = "none"
    group: Literal["gloo", "syncline"] = "gloo"
    rate: Rate | None = None

    def __post_init__(self) -> None:
        if self.bucket < 1:
            raise UsageError(f"bucket of ddp must be 1 byte or more, got {self.bucket}: its own default is 25MiB")
        if "none" not in (self.hook, self.codec):
            raise UsageError(f"ddp has one hook: choose hook={self.hook}, PyTorch's, or codec={self.codec}, Syncline's")
        if self.rate is not None and self.group == "gloo":
            raise UsageError("Gloo's links have no rate: use ddp(group=syncline, rate=...), or a lab (--lab 1gbit)")
        Strategy.parse(f"codec={self.codec}")

    def join(self) -> Member:
        """Become a member of the run's group. Raises torch's exceptions if the others cannot be reached."""
        return Member(self, recognise())


class Member:
    """One process of a DistributedDataParallel run, behind the calls that the training loop makes."""

    def __init__(self, peer: DDP, environment: Environment) -> None:
        import torch.distributed as dist

        self._peer, self._dist = peer, dist
        if environment.address.startswith("127."):
            os.environ.setdefault(_INTERFACE, "lo")
        if peer.rate is not None:
            os.environ["SYNCLINE_STRATEGY"] = f"transport=tcp(rate={write_value(peer.rate, Rate)})"
        dist.init_process_group(peer.group)

    def rank(self) -> int:
        return int(self._dist.get_rank())

    def world_size(self) -> int:
        return int(self._dist.get_world_size())

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[DistributedDataParallel, Any]:  # noqa: ARG002
        """The wrapped model; the optimizer holds its parameters already. All ranks have the same weight; ``weight`` is
        ignored."""
        from torch.nn.parallel import DistributedDataParallel

        # torch counts megabytes of 1024 * 1024 bytes.
        wrapped = DistributedDataParallel(
            model,
            bucket_cap_mb=self._peer.bucket / (1 << 20),
            gradient_as_bucket_view=True,
        )
        if (found := _hook(self._peer)) is not None:
            wrapped.register_comm_hook(*found)
        return wrapped, optimizer

    def stats(self) -> NoCounts:
        where = f" on {os.environ.get(_INTERFACE, 'the default interface')}" if self._peer.group == "gloo" else ""
        if self._peer.rate is not None:
            where = f"'s tcp at {write_value(self._peer.rate, Rate)}"
        return NoCounts(f"ddp over {self._peer.group}{where}", blocked_s=None)

    def barrier(self) -> None:
        self._dist.barrier()

    def consolidate(self) -> None:
        """Nothing: replicas never differ."""

    def shutdown(self) -> None:
        """Leave the group; over Gloo, the process ends without freeing the group."""
        if self._peer.group == "gloo":
            atexit.unregister(_end)
            atexit.register(_end)
            _left.append(self._dist.group.WORLD)
        self._dist.destroy_process_group()


def _end() -> None:
    """Call the exit functions that were registered earlier, and end this process before groups are freed."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(hasattr(sys, "last_value")))  # the exception that ended the script, if any


def _hook(peer: DDP) -> tuple[Any, Any] | None:
    """The state and the function of the requested hook, if any."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if peer.codec != "none":
        from syncline.torch_backend.hook import HookState, comm_hook

        return HookState(f"codec={peer.codec}"), comm_hook
    hooks: dict[str, Any] = {
        "fp16": default_hooks.fp16_compress_hook,
        # Under its own name this hook is refused unless torch was built with NCCL, whatever the backend is. Gloo adds
        # bfloat16 as well.
        "bf16": lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket),
        "powersgd": powerSGD_hook.powerSGD_hook,
    }
    if peer.hook == "none":
        return None
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2) if peer.hook == "powersgd" else None
    return state, hooks[peer.hook]
