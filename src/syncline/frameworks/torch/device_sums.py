"""Adds gradients in the memory of the GPUs of one host: every rank maps the blocks of the others (CUDA IPC).

The plan is ``direct``: each rank owns a part of a bucket, adds the others' gradients to it, and reads the other parts
from their owners. The sums have the bits of the plan on the host. Ranks meet, by a message of one byte from each to
each, before they read what others have written, and before anyone may write again:

    training stream   backward ... bucket complete . backward goes on . . . . . . . . . . . . join
    stream down                 weigh         add the others' gradients to my part
    stream up                                                              copy the others' parts
    progress thread                      meet                         meet                   meet

The gradients do not pass through the host. A rank of N reads 2(N-1)/N of a bucket from the other ranks' memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from ...compression.reducers import Message, Queue, Reducer, Round
from ...compression.reducers.formats import landed
from ...errors import UsageError
from ...session.session import Session
from .storage import Storage

Mapped = Mapping[str, torch.Tensor]
"""A rank's blocks of gradients by element type, readable in this process."""


class DeviceSums:
    """The sums of a model's buckets. ``blocks[place][rank]`` are the blocks of a storage on every rank."""

    def __init__(
        self, rank: int, storages: Sequence[Storage], blocks: Sequence[Sequence[Mapped]], adding: Queue, reading: Queue
    ) -> None:
        self._rank, self._storages, self._blocks = rank, storages, blocks
        self._adding, self._reading = adding, reading

    def reducers(self, place: int, number: int) -> Callable[[], Sequence[Callable[[], Reducer]]]:
        """A call that makes the reducers of a bucket in the storage at ``place``."""
        storage, bucket = self._storages[place], self._storages[place].buckets[number]
        start = storage.starts[number]
        views = [blocks[bucket.dtype][start : start + bucket.elements] for blocks in self._blocks[place]]
        one = partial(_reduce, views, self._rank, self._adding, self._reading)
        return lambda: [one]

    def close(self) -> None:
        """Make no more reducers. The memory of others is let go of with those that were made."""
        self._blocks = ()


def map_blocks(
    session: Session,
    storages: Sequence[Storage],
    export: Callable[[torch.Tensor], object],
    attach: Callable[[object, torch.Tensor], torch.Tensor],
) -> list[list[Mapped]]:
    """The blocks of all ranks, by storage and rank. All ranks call it.

    ``export`` describes a tensor for one other process in values of JSON. ``attach`` returns the tensor that another
    process has described, which has the type and size of the given one.
    """
    me, workers = session.index, range(session.world_size)
    try:
        told = [
            [] if peer == me else [[export(block) for block in storage.resident.values()] for storage in storages]
            for peer in workers
        ]
    except Exception as error:  # of the driver
        text = f"{session.name(me)} cannot share the memory of its GPU ({_reason(error)}): {_REMEDY}"
        raise session.fail(UsageError(text)) from error
    found: list[list[Mapped]] = [[] for _ in storages]
    data = json.dumps(told).encode()
    for rank, theirs in enumerate(session.everyone.share(workers, data, "mapping the memory of GPUs")):
        for place, storage in enumerate(storages):
            if rank == me:
                found[place].append(storage.resident)
                continue
            try:
                described = json.loads(theirs)[me][place]
                own = storage.resident.items()
                blocks = {name: attach(one, block) for (name, block), one in zip(own, described, strict=True)}
            except Exception as error:  # of the driver, or of a description that is none
                raise session.fail(_explained(session, rank, error)) from error
            found[place].append(blocks)
    return found


def _explained(session: Session, rank: int, error: Exception) -> UsageError:
    mine, theirs = session.name(session.index), session.name(rank)
    return UsageError(f"{mine} cannot use the memory of {theirs}'s GPU ({_reason(error)}): {_REMEDY}")


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"


_REMEDY = "use direct, which adds in the host's memory"


def _reduce(views: Sequence[torch.Tensor], me: int, adding: Queue, reading: Queue) -> Reducer:
    """Sum one bucket, of which ``views`` are the ranks' gradients."""
    ranks, own = len(views), views[me]
    edges = [len(own) * rank // ranks for rank in range(ranks + 1)]
    parts = [slice(edges[rank], edges[rank + 1]) for rank in range(ranks)]
    before, after = ([(me + turn * k) % ranks for k in range(1, ranks)] for turn in (-1, 1))
    yield from landed(adding)
    yield _meeting(after)  # all gradients are complete
    adding.run(partial(_add, own[parts[me]], [views[rank][parts[me]] for rank in before]))
    yield from landed(adding)
    yield _meeting(after)  # all parts are sums
    reading.run(partial(_copy, [(own[parts[rank]], views[rank][parts[rank]]) for rank in after]))
    yield from landed(reading)
    yield _meeting(after)  # nobody reads here any more


def _meeting(others: Sequence[int]) -> Round:
    sent = np.zeros(1, np.uint8)
    return Round([Message(rank, sent, True) for rank in others], [Message(rank, sent.copy(), True) for rank in others])


def _add(into: torch.Tensor, others: Sequence[torch.Tensor]) -> None:
    """``into += others[0] + others[1] + ...`` from left to right."""
    for other in others:
        into.add_(other.to(into.device, non_blocking=True))


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for into, other in pairs:
        into.copy_(other, non_blocking=True)
