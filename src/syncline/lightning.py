"""Lightning over Syncline: ``import syncline.lightning`` registers ``Trainer(strategy="syncline")``.

This is Lightning's DistributedDataParallel over the backend ``syncline``, with a codec as DDP's hook. Lightning still
starts the processes, distributes the data and saves checkpoints; only the communication differs from its ``ddp``. The
process group has the architecture and the transport, the hook has the codec, and Lightning's checkpoints contain the
codec's residuals. ``import syncline`` does not import this module, because it imports Lightning.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch.distributed as dist

from .errors import UsageError
from .strategy.strategy import Strategy
from .strategy.words import NONE
from .torch_backend import NAME, register
from .torch_backend.hook import HookState, comm_hook
from .torch_backend.sessions import chosen

__all__ = ["SynclineStrategy"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The package names of Lightning. The classes of the two packages are distinct."""
_OLDEST = (2, 4)
_SAVED = "syncline"
"""The key of the codec's residuals in a Lightning checkpoint."""


def _strategies() -> Any:
    """Lightning's module of strategies, from the package that the script has imported or else from an installed one."""
    remedy = f"pip install 'syncline[lightning]', which installs lightning {_OLDEST[0]}.{_OLDEST[1]} or newer"
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            package = import_module(name.partition(".")[0])
            module = import_module(f"{name}.strategies")
        except ModuleNotFoundError as missing:
            if missing.name is None or not f"{name}.".startswith(f"{missing.name}."):
                raise
            continue
        if tuple(int(part) for part in package.__version__.split(".")[:2]) < _OLDEST:
            raise UsageError(f"syncline.lightning does not support {package.__name__} {package.__version__}: {remedy}")
        return module
    raise UsageError(f"syncline.lightning needs Lightning: {remedy}")


_lightning: Any = _strategies()


def divided(text: str | None) -> tuple[Strategy, str | None]:
    """A strategy without its codec, for the process group, and the codec for DDP's hook, if there is one.

    The text defaults to SYNCLINE_STRATEGY. Raises UsageError for strategies that DistributedDataParallel cannot run.
    """
    whole = Strategy.parse(text if text is not None else os.environ.get("SYNCLINE_STRATEGY", ""))
    if whole.codec == NONE:
        return chosen(str(whole)), None
    group = chosen(str(replace(whole, codec=NONE)))
    codec = str(replace(Strategy.parse(""), codec=whole.codec))
    HookState(codec)  # refuses strategies that a hook cannot run
    return group, codec


class SynclineStrategy(_lightning.DDPStrategy):  # type: ignore[misc]
    """``Trainer(strategy="syncline")``, or ``Trainer(strategy=SynclineStrategy("ring codec=int8"))``.

    ``strategy`` is Syncline's and defaults to ``SYNCLINE_STRATEGY``; the other arguments are as for ``DDPStrategy``. On
    GPUs NCCL moves tensors, and the codec compresses them.
    """

    strategy_name = NAME

    def __init__(self, strategy: str | None = None, **others: Any) -> None:
        taken = sorted({"process_group_backend", "ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper"} & set(others))
        if taken:
            raise UsageError(f"SynclineStrategy sets {taken[0]} itself: leave it out, or use Lightning's DDPStrategy")
        self._group, self._codec = divided(strategy)
        self._hook: HookState | None = None
        self._kept: Mapping[str, Any] | None = None
        """The residuals from the loaded checkpoint, if there is one; empty if it has none."""
        super().__init__(**others)

    def setup_distributed(self) -> None:
        """Create the process group. An existing one must have this backend."""
        if not dist.is_initialized():
            self.set_world_ranks()
            place = self.cluster_environment
            os.environ.update(MASTER_ADDR=place.main_address, MASTER_PORT=str(place.main_port))
            dist.init_process_group(
                self._get_process_group_backend(),
                rank=place.global_rank(),
                world_size=place.world_size(),
                timeout=self._timeout,
                pg_options=str(self._group),
            )
        elif NAME not in dist.get_backend_config():
            raise UsageError(
                f"Trainer(strategy='{NAME}') finds a process group with the backend {dist.get_backend()}: make it with"
                f" init_process_group('{NAME}'), or leave it to Lightning"
            )
        super().setup_distributed()

    def _get_process_group_backend(self) -> str:
        return NAME if self.root_device.type == "cpu" else f"cpu:{NAME},cuda:nccl"

    def _register_ddp_hooks(self) -> None:
        if self._codec is not None:
            self._hook = HookState(self._codec)
            if self._kept:
                self._hook.load_state_dict(self._kept)
            elif self._kept is not None and self._hook.keeps:
                warnings.warn(
                    f"this checkpoint lacks the residuals of the codec in {self._codec!r}: they are lost, and"
                    " training does not continue bit for bit; resume from a checkpoint that this strategy saved",
                    stacklevel=2,
                )
            self.model.register_comm_hook(self._hook, comm_hook)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save on rank 0. Collective, because each rank contributes its codec's residuals."""
        if self._hook is not None:
            checkpoint[_SAVED] = self._hook.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, *path: Any, **options: Any) -> dict[str, Any]:
        """Restore Lightning's part. Residuals are restored when training begins."""
        found: dict[str, Any] = super().load_checkpoint(*path, **options)
        self._kept = found.get(_SAVED) or {}
        return found

    def teardown(self) -> None:
        """Forget the loaded checkpoint: the Trainer's next call has its own, if any."""
        self._kept = None
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register this class as ``Trainer(strategy="syncline")``."""
        register: Callable[..., Any] = strategy_registry.register
        register(NAME, cls, description="DDP over Syncline; its strategy is SYNCLINE_STRATEGY", override=True)


register()  # torch may have been imported after the package
SynclineStrategy.register_strategies(_lightning.StrategyRegistry)
