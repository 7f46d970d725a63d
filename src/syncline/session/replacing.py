"""A layout takes the place of another between two steps, on workers and servers together.

    1. workers show tickets: all have come for it; rank 0 tells everyone the layout (``decide_layout``)
    2. all processes meet: behind this nobody begins anything in the old layout
    3. servers, which had posted the pushes of a next step, get one that is none, in the old layout; nobody looks at it
    4. every process cuts its memory anew, in which tensors stay where they are
    5. servers that hold weights get those that the workers have: each knew its own slices only
    6. owners give each other what they hold, since elements have other owners then, and the ranks of a host, where
       these compress for it, what they have kept back

Costs a push and a broadcast where there are servers, and each owner's memory once to every other owner: for a few times
in a run.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from ..collectives import Collective
from ..compression.compression import Compression
from ..compression.saved import Saved, as_bytes, from_bytes
from ..engine.order import CodedOrder, Order, Work
from ..errors import ProtocolError, SynclineError, UsageError
from ..nouns import Bucket, Layer, numpy_dtype
from ..plans.messages import Program
from ..schedules import Cost
from .communicator import Array
from .layout import Lay, Layout, Passed, decide_layout
from .session import Session
from .tickets import BUCKET_KEYS, CALLS, LAYOUT

LABEL = CALLS[LAYOUT]

Choose = Callable[[bool, Lay], Layout]
"""Makes one of the layouts that it is offered, given whether a worker objects to crossing iterations."""


def agree_on_layout(
    session: Session,
    layers: Sequence[Layer],
    first_key: int,
    cost: Cost | None = None,
    chosen: Layout | None = None,
    *,
    choose: Choose | None = None,
    objects: bool = False,
    passed: Passed,
    before: Layout,
    fits: Callable[[Sequence[Bucket]], None],
) -> Layout:
    """The workers' part up to the point where everyone knows the layout; arguments as for ``decide_layout``.

    ``choose`` is told, too, whether any worker ``objects`` to schedules that cross iterations.
    """
    text = "" if chosen is None else json.dumps(chosen.plain(), sort_keys=True)
    tickets = session.agree(LAYOUT, zlib.crc32(f"{first_key} {text}".encode()), flags=int(objects))
    some = any(ticket.flags for ticket in tickets)
    by = None if choose is None else partial(choose, some)
    layout = decide_layout(session, layers, cost, chosen=chosen, choose=by, passed=passed, before=before, fits=fits)
    session.everyone.meet(LABEL)
    return layout


def push_nothing(
    session: Session,
    program: Callable[[int], Program | Collective],
    buckets: Sequence[Bucket],
    compression: Compression | None,
    first_key: int,
) -> None:
    """A worker's part in what servers had posted in the old layout: zeros, which they forget."""
    if not session.group.servers:
        return
    zeros = [np.zeros(bucket.elements, numpy_dtype(bucket.dtype)) for bucket in buckets]
    empty = None if compression is None else compression.fresh(buckets, zeros)
    works: list[Work] = []
    for number, array in enumerate(zeros):
        key, label = first_key + number, f"{LABEL}, bucket {number}"
        if empty is None:
            order: Order | CodedOrder = Order(program(array.nbytes), array, key, label)
        else:
            order = session.coded_order(empty, number, key, label)
        works.append(session.engine.start(order))
    session.engine.wait(*works)


class Recompressing:
    """What a codec remembers on its way from buckets to others; made before anything travels in the old ones."""

    def __init__(self, session: Session, compression: Compression | None) -> None:
        self._session, self._compression = session, compression
        self._kept: Saved | None = None
        self._kept_for_host: Saved | None = None
        if compression is not None and compression.owners_keep:
            self._kept = compression.kept_by_owner()
        if compression is not None and compression.ranks_keep:
            self._kept_for_host = compression.kept_for_host()

    def on(self, buckets: Sequence[Bucket], arrays: Sequence[Array], passed: Passed) -> Compression | None:
        """The codec of the new buckets; all owners call it together."""
        if self._compression is None:
            return None
        made, owners = self._compression.on(buckets, arrays, passed.steps), self._compression.participant.owners
        if self._kept_for_host is not None:
            self._share(made.participant.hosts[made.participant.encoder], self._kept_for_host, made.take_over_for_host)
        if self._kept is not None and made.participant.owner >= 0:
            self._share(owners, self._kept, made.take_over)
        return made

    def _share(self, ranks: Sequence[int], kept: Saved, take_over: Callable[[Saved], None]) -> None:
        """Give others what this process has kept back, and take up what each of them has."""
        for rank, data in zip(ranks, self._session.everyone.share(ranks, as_bytes(kept), LABEL), strict=True):
            with from_peer(self._session, rank, LABEL):
                take_over(from_bytes(data))


def copy_weights(session: Session, arrays: Sequence[Array]) -> None:
    """Let servers have the weights of rank 0, by bucket; all processes call it."""
    for number, array in enumerate(arrays if session.group.servers else ()):
        session.engine.wait(session.everyone.broadcast(array, BUCKET_KEYS, f"{LABEL}, weights of bucket {number}"))


def gather_saved(session: Session, saved: Saved) -> list[Saved]:
    """What the codec, or the mode, of every worker has to keep in a checkpoint, in rank order; all call it."""
    found = []
    for rank, data in enumerate(session.gather(as_bytes(saved))):
        with from_peer(session, rank, "gathering a checkpoint"):
            found.append(from_bytes(data))
    return found


@contextmanager
def from_peer(session: Session, rank: int, label: str) -> Iterator[None]:
    """Inside, what worker ``rank`` has kept back is read: raises ProtocolError, which names it, for what is no such."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"{label}: what {session.name(rank)} has kept back makes no sense ({error}); do all processes run the same"
            " version on sound machines?",
            rank=session.member.number(rank),
        ) from error


@contextmanager
def reading_state() -> Iterator[None]:
    """Inside, a state that the script has loaded is read: raises UsageError for one that is none, or damaged."""
    try:
        yield
    except SynclineError:
        raise
    except (
        AttributeError, IndexError, KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UsageError(
            f"this is no whole state of a run that this version of Syncline saved ({error!r}): load another one, or"
            " begin anew"
        ) from error
