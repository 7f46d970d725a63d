"""What ranks of the pool do with groups of workers."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_bodies import Place, joined
from torch.distributed.device_mesh import init_device_mesh

import syncline

PAIRS = [[0, 2], [1, 3]]
BATCH, STEPS = 12, 4


class Block(torch.nn.Module):
    """A block of a small language model, as anybody would write it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size, length, width = x.shape
        split = [
            part.view(size, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.first(x)).split(width, dim=2)
        ]
        seen = torch.nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(size, length, width))
        return x + self.mlp(self.second(x))


class Language(torch.nn.Module):
    """Which letter comes next; the embedding is the last layer too."""

    def __init__(self, layers: int, width: int, letters: int = 17, length: int = 8) -> None:
        super().__init__()
        self.letters, self.places = torch.nn.Embedding(letters, width), torch.nn.Embedding(length, width)
        self.blocks = torch.nn.Sequential(*(Block(width, 2) for _ in range(layers)))
        self.head = torch.nn.Linear(width, letters, bias=False)
        self.head.weight = self.letters.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        found = self.letters(text) + self.places(torch.arange(text.shape[1]))
        logits = self.head(self.blocks(found))[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def language(number: int) -> torch.nn.Module:
    torch.manual_seed(number)
    return Language(1 + number, 16 + 8 * number).double()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int, rank: int, world: int) -> None:
    for step in range(STEPS):
        text = torch.randint(0, 17, (BATCH, 8), generator=torch.Generator().manual_seed(100 * seed + step))
        optimizer.zero_grad(set_to_none=True)
        model(text.chunk(world)[rank]).backward()
        clip = syncline.clip_grad_norm_ if syncline.is_initialized() else torch.nn.utils.clip_grad_norm_
        clip(model.parameters(), 1.0)
        optimizer.step()


def weights(model: torch.nn.Module) -> list[Any]:
    return [tensor.detach().numpy().copy() for tensor in model.parameters()]


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def learnt_alone(number: int) -> list[Any]:
    """What one process learns."""
    model = language(number)
    train(model, adam(model), number, 0, 1)
    return weights(model)


def two_models_at_once(line: Connection, place: Place, strategy: str) -> None:
    """A plain script in each of two groups: other layers, other widths, other texts."""
    with joined(place, strategy):
        groups = [syncline.new_group(ranks) for ranks in PAIRS]
        number = syncline.rank() % 2
        model = language(number)
        model, optimizer = syncline.prepare(model, adam(model), group=groups[number])
        train(model, optimizer, number, groups[number].rank, groups[number].size)
        syncline.consolidate()
        found = syncline.stats(group=groups[number])
        peers = sorted(found.bytes_sent)
        line.send([number, weights(model), peers, found.blocked_s <= syncline.stats().blocked_s])


def calls(line: Connection, place: Place, strategy: str) -> None:
    """Every public call that takes a group, in one, and on the ranks outside."""
    with joined(place, strategy):
        group = syncline.new_group([3, 1, 2], timeout=60)
        found: dict[str, Any] = {"rank": syncline.rank(group), "size": syncline.world_size(group), "is": repr(group)}
        here = float(syncline.rank())
        if group.rank >= 0:
            found["sum"] = syncline.allreduce(torch.full((2, 3), here), "sum", group=group).tolist()
            found["root"] = float(syncline.broadcast(np.full(3, here), 1, group=group)[0])
            found["gather"] = syncline.gather(b"%d" % syncline.rank(), group=group)
            found["samples"] = list(syncline.sampler(9, shuffle=False, group=group))
            syncline.barrier(60, group=group)
        else:
            for name, call in (
                ("allreduce", lambda: syncline.allreduce(torch.ones(3), group=group)),
                ("prepare", lambda: syncline.prepare(torch.nn.Linear(2, 2), group=group)),
                ("stats", lambda: syncline.stats(group=group)),
            ):
                try:
                    call()
                except syncline.errors.UsageError as error:
                    found[name] = str(error)
        for wrong in (3, "data", [0, 1]):
            try:
                syncline.barrier(group=wrong)  # type: ignore[arg-type]
            except syncline.errors.UsageError as error:
                found[repr(wrong)] = str(error)
        found["all"] = float(syncline.allreduce(np.ones(3), "sum")[0])
        group.end()
        line.send(found)
    with joined(place, strategy):
        try:
            syncline.barrier(group=group)
        except syncline.errors.UsageError as error:
            line.send(str(error))


def meshes(line: Connection, place: Place, backend: str) -> None:
    """A dimension of a mesh, and a process group, as groups of ours, whatever backend they have."""
    index, world, address = place
    host, _, port = address.rpartition(":")
    with joined(place, "ring"):
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
        dist.init_process_group(backend, rank=index, world_size=world)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        number = mesh.get_local_rank("stage")
        found: list[Any] = [number]
        for group in (mesh["data"], mesh["data"].get_group()):
            model = language(number)
            model, optimizer = syncline.prepare(model, adam(model), group=group)
            train(model, optimizer, number, mesh.get_local_rank("data"), 2)
            found.append(weights(model))
        found.append([syncline.rank(mesh["stage"]), syncline.world_size(mesh["stage"])])
        found.append(syncline.gather(b"%d" % index, group=mesh["stage"]))
        pair = dist.new_group([0, 3])
        for wrong in (mesh, pair if index in (1, 2) else "text"):
            try:
                syncline.barrier(group=wrong)
            except syncline.errors.UsageError as error:
                found.append(str(error))
        line.send(found)
        dist.destroy_process_group()


def killed(line: Connection, place: Place, strategy: str) -> None:
    """Rank 3 dies while its group, and another one, train."""
    with joined(place, strategy):
        groups = [syncline.new_group(ranks) for ranks in PAIRS]
        number = syncline.rank() % 2
        model = language(number)
        model, optimizer = syncline.prepare(model, adam(model), group=groups[number])
        train(model, optimizer, number, groups[number].rank, 2)
        line.send("training")
        if syncline.rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            train(model, optimizer, number, groups[number].rank, 2)


def other_ranks(line: Connection, place: Place) -> None:  # noqa: ARG001
    """Rank 2 makes other groups than all others."""
    with joined(place, "ring"):
        syncline.new_group([0, 1])
        syncline.new_group([1, 2] if syncline.rank() == 2 else [0, 2])


def slow(line: Connection, place: Place) -> None:  # noqa: ARG001
    """Rank 1 does not come to a call of its group."""
    with joined(place, "ring"):
        group = syncline.new_group([0, 1])
        if syncline.rank() == 0:
            syncline.barrier(1.0, group=group)
        time.sleep(60)
        syncline.barrier()


def uneven(line: Connection, place: Place, strategy: str) -> None:
    """One group whose ranks have different numbers of batches, each batch in two pieces; another one has none of it."""
    with joined(place, strategy):
        groups = [syncline.new_group(ranks) for ranks in PAIRS]
        number = syncline.rank() % 2
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 2).double()
        model, optimizer = syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), group=groups[number])
        rank = groups[number].rank
        with syncline.join():
            for step in range(4 - 2 * (rank if number else 0)):
                optimizer.zero_grad()
                pieces = [
                    torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + rank + part)).double()
                    for part in (0, 5)
                ]
                with syncline.no_sync():
                    model(pieces[0]).square().mean().backward()
                model(pieces[1]).square().mean().backward()
                optimizer.step()
        syncline.flush()
        line.send([number, weights(model), syncline.stats(group=groups[number]).strategy])


def crossed(line: Connection, place: Place) -> None:  # noqa: ARG001
    """Two ranks wait for each other, each in another one of two groups; a third one waits for both."""
    with joined(place, "ring", progress=1.5):
        first, second = syncline.new_group([0, 1]), syncline.new_group([0, 1, 2])
        if syncline.rank() == 0:
            syncline.barrier(group=first)
        syncline.barrier(group=second)
        if syncline.rank() == 1:
            syncline.barrier(group=first)
