"""Backends of other devices beside this one, as for ``init_process_group("cpu:syncline,cuda:nccl")``.

Torch gives a group that is written in Python all devices, and makes none of the other backends that were asked for. So
the first tensor on another device makes that device's backend, in a group of torch's own beside this one, and calls
with such tensors are passed on. Where none was asked for they are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import Backend, ProcessGroup

if TYPE_CHECKING:
    from .group import SynclineGroup


def of(group: SynclineGroup, tensors: Sequence[Any]) -> Any:
    """The group that tensors on another device belong to; None for those that this one moves itself."""
    first = tensors[0] if tensors else None
    if not isinstance(first, torch.Tensor) or first.device.type == "cpu":
        return None
    return of_device(group, first.device)


def of_device(group: SynclineGroup, device: torch.device) -> Any:
    """The same for a device."""
    if device.type == "cpu":
        return None
    found = group.beside.get(device.type)
    if found is None:
        found = group.beside[device.type] = _make(group, device.type, _asked_for(group, device.type))
    return found


def devices(group: SynclineGroup) -> list[torch.device]:
    """Those whose tensors the group takes, the CPU first."""
    return [torch.device("cpu"), *(torch.device(kind) for kind in _asked(group) if kind != "cpu")]


def _asked(group: SynclineGroup) -> dict[str, str]:
    """The backends that the group was to have for devices, but for its own."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    return {kind: name for kind, _, name in pairs if name != group.name()}


def _asked_for(group: SynclineGroup, device: str) -> str:
    name = _asked(group).get(device, "")
    if not name:
        better = "cuda:nccl" if device == "cuda" else f"{device}:BACKEND"
        raise NotImplementedError(
            f"the backend syncline moves tensors on the CPU, this one is on {device}: use"
            f' init_process_group("cpu:syncline,{better}"), or move the tensor with .cpu()'
        )
    return name


def _make(group: SynclineGroup, device: str, name: str) -> Any:
    """A group of torch's own with one backend; all ranks make it at their first call for that device."""
    store, rank, size = PrefixStore(f"beside/{device}/", group.store), group.rank(), group.size()
    timeout = group.timeout
    inner = ProcessGroup(store, rank, size)
    kind = Backend.backend_type_map[name]
    backend: Any
    if name == Backend.GLOO:
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    elif name == Backend.NCCL:
        if not dist.is_nccl_available():
            raise NotImplementedError("this build of PyTorch has no NCCL: install one with CUDA, or use cuda:gloo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        options.global_ranks_in_group = list(dist.get_process_group_ranks(group))
        options.group_name = group.group_name
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
    elif (plugin := Backend._plugins.get(name.upper())) is not None and not plugin.extended_api:
        backend = plugin.creator_fn(store, rank, size, timeout)
    else:
        raise NotImplementedError(f"the backend {name} cannot be made beside syncline: use gloo or nccl for {device}")
    if isinstance(backend, ProcessGroup):
        return backend
    inner._set_default_backend(kind)
    inner._register_backend(torch.device(device), kind, backend)
    return inner
