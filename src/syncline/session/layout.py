"""The layout of a model: its layers, and the buckets that hold slices of their tensors.

Rank 0's schedule makes the buckets, and rank 0 sends them to all processes, including servers. A schedule may depend on
a clock, the order of a set, or times measured by each rank, and ranks with different buckets would add unrelated
elements. The buckets are checked before they are sent.

A layout may replace another between two steps: when layers have been timed, or for a checkpoint. The memory stays in
place, because a script may hold references to it, so new buckets must follow the existing order of tensors. If the
schedule is chosen by measuring, the layout names it and the reason.

    1. workers exchange tickets; rank 0 sends the layout to all processes (``decide_layout``)
    2. all processes meet; from then on no process starts an exchange in the old layout
    3. servers, which have posted receives for the next step's pushes, get empty pushes in the old layout and ignore
       them
    4. every process divides its memory anew; tensors stay in place
    5. servers that hold weights get all weights from the workers, since each server had only its own slices
    6. owners exchange their state, since elements change owners; ranks that compress for their host exchange their
       residuals

This costs a push and a broadcast if there are servers, and each owner's state is sent once to every other owner.
"""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np

from ..collectives import Collective
from ..compression.compression import Compression, join_cuts
from ..compression.saved import Saved, as_bytes, from_bytes
from ..costs.plans import LinearCost
from ..engine.order import CodedOrder, Order, Work
from ..errors import ProtocolError, StrategyError, SynclineError, UsageError
from ..nouns import Bucket, Layer, Slice, Spec, numpy_dtype
from ..plans.messages import Program
from ..schedules import Cost
from ..strategy.grammar import read_part
from ..strategy.strategy import Strategy
from ..strategy.words import AUTO, NONE, write
from .communicator import Array, Heard
from .session import MODEL_KEYS, Session
from .tickets import BUCKET_KEYS, CALLS, LAYOUT

log = logging.getLogger("syncline")

BUCKETS = MODEL_KEYS // 4
"""A model has fewer buckets. Each has keys for two phases of two steps, all of which may be in flight."""


@dataclass(frozen=True)
class Layout:
    """The layers of a model in forward order, and the buckets in the order of exchange, with their priorities.

    If the schedule was chosen by measuring, ``schedule`` is its text, ``reason`` explains the choice, and ``cost``
    models the measured exchanges. A ``trial`` is followed by another layout.
    """

    layers: tuple[Layer, ...]
    buckets: tuple[Bucket, ...]
    priorities: tuple[float, ...]
    schedule: str = ""
    reason: str = ""
    cost: LinearCost | None = None
    trial: bool = False

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the buckets in messages and timelines."""
        return tuple(f"bucket {number} ({one.describe(self.layers)})" for number, one in enumerate(self.buckets))

    def travels_like(self, other: Layout) -> bool:
        """Whether the other layout has the same buckets and priorities; measured times may differ."""
        return (self.buckets, self.priorities) == (other.buckets, other.priorities)

    def plain(self) -> dict[str, Any]:
        """The layout as plain values for JSON, without the tensors' names and shapes. ``read_layout`` reads them."""
        rows = [[bucket.dtype, [list(map(int, _range(part))) for part in bucket.slices]] for bucket in self.buckets]
        times_s = [[layer.forward_s, layer.backward_s] for layer in self.layers]
        found: dict[str, Any] = {"buckets": rows, "priorities": list(self.priorities), "times_s": times_s}
        if self.schedule:
            cost = self.cost and [self.cost.base_s, self.cost.per_byte_s]
            found["chosen"] = {"schedule": self.schedule, "reason": self.reason, "cost": cost, "trial": self.trial}
        return found

    def strategy_in(self, strategy: Strategy) -> Strategy:
        """The strategy with the schedule of these buckets. Raises UsageError if the two are incompatible."""
        return replace(strategy, schedule=read_part(self.schedule)) if self.schedule else strategy


class Passed(NamedTuple):
    """Counts that servers do not have: the exchanges of the present layout, and the codec's steps.

    ``anew``: all processes start anew even if the buckets stay, because the next step does not follow the last one.
    """

    exchanges: int = 0
    steps: int = 0
    anew: bool = False


@dataclass(frozen=True)
class Placed:
    """The place of a tensor: element type, and the range of elements in that type's block of memory."""

    dtype: str
    start: int
    stop: int


def place_tensors(elements: Sequence[int], buckets: Sequence[Bucket]) -> tuple[Placed, ...]:
    """Places of tensors with these numbers of elements, contiguous and in the order of the buckets."""
    placed: dict[int, Placed] = {}
    ends: dict[str, int] = {}
    for bucket in buckets:
        for part in bucket.slices:
            if part.tensor not in placed:
                start = ends.get(bucket.dtype, 0)
                ends[bucket.dtype] = stop = start + elements[part.tensor]
                placed[part.tensor] = Placed(bucket.dtype, start, stop)
    return tuple(placed[index] for index in range(len(elements)))


def place_bucket(bucket: Bucket, tensors: Sequence[Placed]) -> int:
    """The position of a bucket in its block. Raises UsageError unless its slices are contiguous there."""
    places = [tensors[part.tensor].start + part.start for part in bucket.slices]
    at = first = places[0] if places else 0
    for part, found in zip(bucket.slices, places, strict=True):
        if found != at:
            raise UsageError("this schedule's buckets cannot be laid out contiguously")
        at += part.elements
    return first


Lay = Callable[[Strategy], Layout]
"""Makes the buckets of a strategy's schedule. Raises UsageError for impossible buckets."""


def decide_layout(
    session: Session,
    layers: Sequence[Layer],
    cost: Cost | None = None,
    *,
    chosen: Layout | None = None,
    choose: Callable[[Lay], Layout] | None = None,
    passed: Passed = Passed(),  # noqa: B008 - a frozen value
    before: Layout | None = None,
    fits: Callable[[Sequence[Bucket]], None] = lambda _: None,
) -> Layout:
    """The layout that rank 0's schedule makes of ``layers``, or rank 0's ``chosen``. All processes call it.

    ``choose`` selects a schedule if the strategy leaves it open. It, ``cost``, the layers' times and ``chosen`` are
    used on rank 0 only; ``passed`` is for servers. Raises UsageError on all processes for a schedule that fails, or
    does not put every element into one bucket of its type, or if ``fits`` raises UsageError for the buckets. With a
    layout ``before`` this is a warning, and that layout stays.
    """
    told = {}
    if session.index == 0:
        told = _decide(session, partial(_lay_out, layers, cost, fits), chosen, choose)
        if before is not None and "fault" in told:
            log.warning("%s: %s; buckets stay as they were", session.name(0), told["fault"])
            told = replace(before, layers=tuple(layers)).plain()
        told["passed"] = passed
    return _said(session, layers, session.everyone.tell(json.dumps(told).encode(), LABEL))[0]


def hear_layout(session: Session, layers: Sequence[Layer], heard: Heard) -> tuple[Layout, Passed]:
    """On a server: the layout that the workers have decided, and the counts."""
    return _said(session, layers, session.everyone.hear(heard))


LABEL = "telling the buckets"


def _said(session: Session, layers: Sequence[Layer], data: bytes) -> tuple[Layout, Passed]:
    """Rank 0's layout and counts, from received bytes."""
    fault = ""
    try:
        told = json.loads(data)
        fault = str(told.get("fault", ""))
        if not fault:
            layout = read_layout(layers, told)
            layout.strategy_in(session.strategy)
            return layout, _passed(*told["passed"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, StrategyError) as error:
        raise ProtocolError(
            f"{LABEL}: what {session.name(0)} tells makes no sense ({error}); do all processes run the same version on"
            " sound machines?",
            rank=session.member.number(0),
        ) from error
    raise UsageError(fault)


def _passed(exchanges: Any, steps: Any, anew: Any) -> Passed:
    return Passed(_count(exchanges), _count(steps), bool(anew))


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def read_layout(layers: Sequence[Layer], told: Mapping[str, Any]) -> Layout:
    """The layout, with its measured times, from the result of ``plain``.

    Raises UsageError for a layout of other layers; ValueError, TypeError, KeyError or OverflowError for invalid values.
    """
    buckets = tuple(
        Bucket(tuple(Slice(*map(_count, part)) for part in slices), str(dtype)) for dtype, slices in told["buckets"]
    )
    check_buckets(layers, buckets)
    timed = [
        replace(layer, forward_s=_finite(forward_s), backward_s=_finite(backward_s))
        for layer, (forward_s, backward_s) in zip(layers, told["times_s"], strict=True)
    ]
    priorities = tuple(map(_finite, told["priorities"]))
    if len(priorities) != len(buckets):
        raise ValueError(f"{len(priorities)} priorities of {len(buckets)} buckets")
    if (by := told.get("chosen")) is None:
        return Layout(tuple(timed), buckets, priorities)
    cost = None if by["cost"] is None else LinearCost(*map(_finite, by["cost"]))
    trial = bool(by.get("trial", False))  # missing in states of earlier versions
    return Layout(tuple(timed), buckets, priorities, str(by["schedule"]), str(by["reason"]), cost, trial)


def _finite(value: Any) -> float:
    if not math.isfinite(found := float(value)):
        raise ValueError(f"{found} is no number")
    return found


def _lay_out(
    layers: Sequence[Layer], cost: Cost | None, fits: Callable[[Sequence[Bucket]], None], by: Strategy
) -> Layout:
    schedule = by.schedule_object()
    buckets = tuple(schedule.buckets(layers, cost))
    check_buckets(layers, buckets)
    if by.codec != NONE:
        buckets = tuple(join_cuts(by.codec_object(), layers, buckets))
    fits(buckets)
    return Layout(tuple(layers), buckets, tuple(float(schedule.priority(bucket)) for bucket in buckets))


def _decide(
    session: Session, lay: Lay, chosen: Layout | None, choose: Callable[[Lay], Layout] | None
) -> dict[str, Any]:
    """Rank 0's message. It reports every fault of a schedule, because the other processes wait for it."""
    at = session.strategy.schedule.name

    def tried(by: Strategy) -> Layout:
        nonlocal at
        at = f"auto, at {write('schedules', by.schedule)}"
        return lay(by)

    try:
        if choose is not None:
            at = AUTO.name
            chosen = choose(tried)
        elif chosen is None:
            chosen = lay(session.strategy)
        json.dumps(found := chosen.plain(), allow_nan=False)
        return found
    except Exception as error:
        said = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
        return {"fault": f"schedule={at}: {said}"}


def _range(part: Slice) -> tuple[int, int, int]:
    return part.tensor, part.start, part.stop


def check_buckets(layers: Sequence[Layer], buckets: Sequence[Bucket]) -> None:
    """Raise UsageError unless each element is in exactly one bucket of its type, and there are not too many buckets."""
    if len(buckets) >= BUCKETS:
        raise UsageError(
            f"this model has {len(buckets)} buckets, but at most {BUCKETS - 1} are possible: use schedule=fixed, or"
            " larger slices"
        )
    slices: list[list[Slice]] = [[] for _ in layers]
    for number, bucket in enumerate(buckets):
        if not bucket.slices:
            raise UsageError(f"bucket {number} is empty")
        for part in bucket.slices:
            if not 0 <= part.tensor < len(layers):
                raise UsageError(
                    f"bucket {number} has a slice of tensor {part.tensor}, but there are {len(layers)} tensors"
                )
            spec = layers[part.tensor].spec
            if bucket.dtype != spec.dtype:
                raise UsageError(
                    f"bucket {number} has type {bucket.dtype}, but {spec.name!r} in it has type {spec.dtype}"
                )
            slices[part.tensor].append(part)
    for layer, found in zip(layers, slices, strict=True):
        _check_tensor(layer.spec, found)
    placed = place_tensors([layer.spec.elements for layer in layers], buckets)
    for bucket in buckets:
        place_bucket(bucket, placed)


def _check_tensor(spec: Spec, slices: Sequence[Slice]) -> None:
    if not slices:
        raise UsageError(f"{spec.name!r} is in no bucket")
    at = 0
    for part in sorted(slices, key=_range):
        if not 0 <= part.start <= part.stop <= spec.elements:
            raise UsageError(
                f"{spec.name!r} has {spec.elements} elements, but a slice goes from {part.start} to {part.stop}"
            )
        if part.start < at:
            raise UsageError(f"elements {part.start} to {min(at, part.stop)} of {spec.name!r} are in two slices")
        if part.start > at:
            raise UsageError(f"elements {at} to {part.start} of {spec.name!r} are missing")
        at = part.stop
    if at < spec.elements:
        raise UsageError(f"elements {at} to {spec.elements} of {spec.name!r} are missing")


REPLACING = CALLS[LAYOUT]

Choose = Callable[[bool, Lay], Layout]
"""Selects a layout, given whether a worker objects to overlap with the next iteration."""


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
    """The workers' part until all processes know the layout. Arguments as for ``decide_layout``.

    ``choose`` also gets whether any worker ``objects`` to schedules that overlap with the next iteration.
    """
    text = "" if chosen is None else json.dumps(chosen.plain(), sort_keys=True)
    tickets = session.agree(LAYOUT, zlib.crc32(f"{first_key} {text}".encode()), flags=int(objects))
    some = any(ticket.flags for ticket in tickets)
    by = None if choose is None else partial(choose, some)
    layout = decide_layout(session, layers, cost, chosen=chosen, choose=by, passed=passed, before=before, fits=fits)
    session.everyone.meet(REPLACING)
    return layout


def push_nothing(
    session: Session,
    program: Callable[[int], Program | Collective],
    buckets: Sequence[Bucket],
    compression: Compression | None,
    first_key: int,
) -> None:
    """A worker's part in the pushes that servers have posted in the old layout: zeros, which servers ignore."""
    if not session.group.servers:
        return
    zeros = [np.zeros(bucket.elements, numpy_dtype(bucket.dtype)) for bucket in buckets]
    empty = None if compression is None else compression.fresh(buckets, zeros)
    works: list[Work] = []
    for number, array in enumerate(zeros):
        key, label = first_key + number, f"{REPLACING}, bucket {number}"
        if empty is None:
            order: Order | CodedOrder = Order(program(array.nbytes), array, key, label)
        else:
            order = session.coded_order(empty, number, key, label)
        works.append(session.engine.start(order))
    session.engine.wait(*works)


class Recompressing:
    """Carries a codec's state from old buckets to new ones. Create it before the last exchange in the old ones."""

    def __init__(self, session: Session, compression: Compression | None) -> None:
        self._session, self._compression = session, compression
        self._kept: Saved | None = None
        self._kept_for_host: Saved | None = None
        if compression is not None and compression.owners_keep:
            self._kept = compression.kept_by_owner()
        if compression is not None and compression.ranks_keep:
            self._kept_for_host = compression.kept_for_host()

    def on(self, buckets: Sequence[Bucket], arrays: Sequence[Array], passed: Passed) -> Compression | None:
        """The compression of the new buckets. All owners call it together."""
        if self._compression is None:
            return None
        made, owners = self._compression.on(buckets, arrays, passed.steps), self._compression.participant.owners
        if self._kept_for_host is not None:
            self._share(made.participant.hosts[made.participant.encoder], self._kept_for_host, made.take_over_for_host)
        if self._kept is not None and made.participant.owner >= 0:
            self._share(owners, self._kept, made.take_over)
        return made

    def _share(self, ranks: Sequence[int], kept: Saved, take_over: Callable[[Saved], None]) -> None:
        """Send this process's state to these ranks, and take over theirs."""
        for rank, data in zip(ranks, self._session.everyone.share(ranks, as_bytes(kept), REPLACING), strict=True):
            with from_peer(self._session, rank, REPLACING):
                take_over(from_bytes(data))


def copy_weights(session: Session, arrays: Sequence[Array]) -> None:
    """Send rank 0's weights to the servers, by bucket. All processes call it."""
    for number, array in enumerate(arrays if session.group.servers else ()):
        session.engine.wait(session.everyone.broadcast(array, BUCKET_KEYS, f"{REPLACING}, weights of bucket {number}"))


def gather_saved(session: Session, saved: Saved) -> list[Saved]:
    """Every worker's state of its codec or mode for a checkpoint, in rank order. All workers call it."""
    found = []
    for rank, data in enumerate(session.gather(as_bytes(saved))):
        with from_peer(session, rank, "gathering a checkpoint"):
            found.append(from_bytes(data))
    return found


@contextmanager
def from_peer(session: Session, rank: int, label: str) -> Iterator[None]:
    """A block that reads the state of worker ``rank``. Invalid state becomes a ProtocolError that names the worker."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"{label}: the codec's state on {session.name(rank)} makes no sense ({error}); do all processes run the"
            " same"
            " version on sound machines?",
            rank=session.member.number(rank),
        ) from error


@contextmanager
def reading_state() -> Iterator[None]:
    """A block that reads a state from the script. An invalid or damaged state becomes a UsageError."""
    try:
        yield
    except SynclineError:
        raise
    except (
        AttributeError, IndexError, KeyError, OverflowError, RecursionError, RuntimeError, TypeError, ValueError,
    ) as error:  # fmt: skip
        raise UsageError(
            f"this is not a complete state of a run that this version of Syncline has saved ({error!r}): load another"
            " one, or start a new run"
        ) from error
