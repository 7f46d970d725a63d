"""Judges why the iterations of a run take as long as they do. Pure: spans in, causes out.

An allreduce makes all ranks wait alike, so a slow rank is not found by waits but by its own time before the exchange.
A worker's own time is its iteration without waits. In each iteration the worker that waits least came last, and what it
still waits is communication that no rank hides: the exposed communication. Everything that other workers wait longer is
waiting for ranks.

* **A rank** is at fault for what its own time exceeds the median worker's, in the median iteration: by its loading, or
  by its other stages. Ranks that are late in turn, each in other iterations, are ``jitter``.
* **Exposed communication** has reasons, each with the part that it could explain at most: a link or a port slower than
  the others, servers that all workers share, codecs, the fixed cost of many small buckets, a schedule that leaves the
  backward pass without communication. Time that none of them explains is the network's.

A cause counts if it takes ``LEAST`` of an iteration.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np

from syncline.costs.cluster import Floats
from syncline.plans.plan import ranks_text

from ..report import units
from ..report.explanation import Cause
from .activity import (
    AGREEING,
    STAGES,
    Activity,
    ExchangeSpan,
    Interval,
    Side,
    Stage,
    common,
    together,
    total,
    union,
)

LEAST = 0.1
"""The share of an iteration from which a cause counts."""

SLOWER = 1 / 3
"""The rate of a slow link, at most, relative to the others."""

_FEW_BYTES = 4 << 20
"""The size of buckets whose fixed cost no longer counts."""

_MEMORY_RATE = 5e9
"""Bytes a second of an exchange over shared memory, whose messages are not recorded: a core's copies and additions."""

_TINY_BYTES, _LARGE_BYTES = 1024, 1 << 16
"""Messages up to the first size take the time of no bytes; those from the second size on show the rate of bytes."""

_SMALL_BYTES = 1 << 20
_MANY = 4
"""Buckets are many and small with more than this number of them and fewer bytes in the mean."""


def judge(activity: Activity) -> list[Cause]:
    """The causes, the main one first."""
    found = [*_ranks(activity), *_loading(activity), *_communication(activity)]
    least_s = LEAST * activity.step_s
    return sorted((cause for cause in found if cause.seconds >= least_s), key=lambda cause: -cause.seconds)


def exposed(activity: Activity) -> float:
    """The seconds of an iteration in which communication keeps even the last worker waiting."""
    return float(np.median(activity.stages["wait"].min(axis=0)))


_TAKEN = 0.25
"""The number of cores from which others' use of full cores is named."""


def busy_cores(activity: Activity) -> Iterator[str]:
    """A sentence for cores that were full. It is no cause: what more cores would bring is unknown."""
    for one in activity.cores:
        cores = f"the {one.number} core{'s' * (one.number > 1)}{f' of {one.host}' * bool(one.host)}"
        if not one.full:
            continue
        if one.others >= _TAKEN:
            yield (
                f"Processes outside the run, or started by its ranks, took {one.others:.1f} of {cores}, and hardly"
                " any was idle: wait, or run elsewhere; syncline doctor names them."
            )
        elif one.processes > one.number:
            yield f"{one.processes} processes of the run share {cores}: start fewer of them, or add cores."
        else:
            yield (
                f"The run itself kept {cores} busy: its threads are more than the cores, so exchanges and passes slow"
                " each other; try fewer threads (OMP_NUM_THREADS), fewer ranks, or more cores."
            )


# Ranks


def _beyond(times_s: Floats) -> Floats:
    """For each worker, how much its time exceeds the median worker's, in the median iteration."""
    beyond: Floats = np.median(times_s - median_worker(times_s), axis=1)
    return beyond


def median_worker(times_s: Floats) -> Floats:
    """The time of the median worker in each iteration; of two in the middle the lower, which a slow one is not."""
    middle: Floats = np.sort(times_s, axis=0)[(len(times_s) - 1) // 2]
    return middle


_DOING: Mapping[Stage, str] = {
    "forward": "its forward pass",
    "backward": "its backward pass",
    "optimizer": "its optimizer's step",
    "script": "its script outside the passes",
    "update": "updates of the weights that it owns",
}

_ALWAYS = 0.75
"""The share of iterations from which a rank counts as always the last."""


def _ranks(activity: Activity) -> Iterator[Cause]:
    """Ranks that the others wait for, each with its stage, and jitter."""
    own_s, least_s = activity.own_s, LEAST * activity.step_s
    beyond_s = _beyond(own_s)
    of_stage: dict[Stage, Floats] = {stage: _beyond(activity.stages[stage]) for stage in STAGES}
    for place, side in enumerate(activity.workers):
        left_s = float(beyond_s[place])
        if left_s < least_s:
            continue
        others = ranks_text([other.number for other in activity.workers if other is not side])
        wait = f"{others} {'wait' if len(activity.workers) > 2 else 'waits'} for it"
        loading_s = min(left_s, float(of_stage["loading"][place]))
        if loading_s >= least_s:
            left_s -= loading_s
            yield Cause(
                "late_loader", loading_s, rank=side.number,
                said=f"{side.name} begins its forward pass late; {wait}",
                remedy=f"load the batches of rank {side.number} ahead, in other processes, or give it less data",
            )  # fmt: skip
        stage = max(_DOING, key=lambda one: of_stage[one][place])
        usual_s = float(np.median(median_worker(activity.stages[stage])))
        times = f", {1 + float(of_stage[stage][place]) / usual_s:.1f} times the median" if usual_s > 0 else ""
        yield Cause(
            "slow_rank", left_s, rank=side.number,
            said=f"{side.name} is slow in {_DOING[stage]}{times}; {wait}",
            remedy=f"look at the host of rank {side.number}: other processes, clock speed, its share of the work",
        )  # fmt: skip
    late_s = float(np.median(own_s.max(axis=0) - median_worker(own_s))) - max(0.0, float(beyond_s.max()))
    often = Counter(own_s.argmax(axis=0).tolist()).most_common(1)[0][1]
    if often < _ALWAYS * own_s.shape[1]:
        yield Cause(
            "jitter", late_s,
            said="each iteration waits for another rank, which is late by chance",
            remedy="look for other processes on the hosts; sync=ssp(staleness=3) waits less often, but trains"
            " with older weights",
        )  # fmt: skip


def _loading(activity: Activity) -> Iterator[Cause]:
    """The time before the forward pass that all ranks need."""
    seconds = float(np.median(activity.stages["loading"].min(axis=0)))
    yield Cause(
        "slow_loading", seconds,
        said="all ranks spend it before their forward passes, without a span: loading a batch, or other code there",
        remedy="load batches ahead, in other processes (DataLoader(num_workers=..., prefetch_factor=...))",
    )  # fmt: skip


# Communication


def _communication(activity: Activity) -> Iterator[Cause]:
    """The reasons of the exposed communication. They overlap, and each explains at most all of it.

    A fault comes before the schedule, which could hide it.
    """
    exposed_s = exposed(activity)
    if exposed_s < LEAST * activity.step_s:
        return
    faults = [_slow_link(activity, exposed_s), _shared_server(activity, exposed_s), _codec(activity, exposed_s)]
    named_s = max(cause.seconds for cause in faults if cause is not None)
    found = [*faults, _fixed_cost(activity, exposed_s), _no_overlap(activity, exposed_s - named_s)]
    known = [cause for cause in found if cause is not None]
    yield from known
    left_s = exposed_s - max(cause.seconds for cause in known)
    yield Cause(
        "network", left_s,
        said="the exchange takes longer than the computation beside it",
        remedy="send fewer bytes, with a codec or fewer exchanges, or use a faster network",
    )  # fmt: skip


def _slow_link(activity: Activity, exposed_s: float) -> Cause | None:
    """A link, or all links of one process, that is slower than the others. Links inside hosts are compared with each
    other, and so are links between hosts."""
    best: Cause | None = None
    for inside in (False, True):
        rates = {
            ends: link.bytes_per_s
            for ends, link in activity.links.items()
            if _is_inside(activity, ends) is inside and link.nbytes >= 0.1 * _most_bytes(activity)
        }
        if len(rates) < 2:
            continue
        ordered = sorted(rates.values())
        slow = [ends for ends, rate in rates.items() if rate <= SLOWER * _others(ordered, rate)]
        port = _common_process(slow)
        if not slow or len(slow) == len(rates) or (len(slow) > 1 and port is None):
            continue
        usual = median(rate for ends, rate in rates.items() if ends not in slow)
        worst = min(slow, key=lambda ends: rates[ends])
        busy_s = activity.per_step(total(common(activity.links[worst].busy, _waits(activity, worst[1]))))
        seconds = min(exposed_s, busy_s * (1 - rates[worst] / usual))
        if best is None or seconds > best.seconds:
            best = _slow(activity, seconds, slow, worst, port, rates[worst], usual)
    return best


def _slow(
    activity: Activity,
    seconds: float,
    slow: Sequence[tuple[int, int]],
    worst: tuple[int, int],
    port: int | None,
    rate: float,
    usual: float,
) -> Cause:
    speeds = f"{units.link_rate(8 * rate)}, the others {units.link_rate(8 * usual)}"
    if len(slow) == 1:
        src, dst = (_called(activity, one) for one in worst)
        return Cause(
            "slow_link", seconds, link=worst,
            said=f"the link from {src} to {dst} carries {speeds}",
            remedy=f"look at the cables, the ports and other traffic between {src} and {dst}; syncline doctor"
            " measures pairs of hosts",
        )  # fmt: skip
    assert port is not None
    return Cause(
        "slow_link", seconds, rank=port, link=worst,
        said=f"the links of {_called(activity, port)} carry {speeds}",
        remedy=f"look at the port and the host of {_called(activity, port)}; syncline doctor measures pairs of hosts",
    )  # fmt: skip


def _others(ordered: Sequence[float], rate: float) -> float:
    """The median rate of the links that are faster than this one by half, or this rate if there is none."""
    faster = [one for one in ordered if one > 1.5 * rate]
    return median(faster) if faster else rate


def _most_bytes(activity: Activity) -> int:
    return max((link.nbytes for link in activity.links.values()), default=0)


def _is_inside(activity: Activity, ends: tuple[int, int]) -> bool:
    hosts = [activity.hosts.get(one, "") for one in ends]
    return hosts[0] == hosts[1]


def _common_process(links: Sequence[tuple[int, int]]) -> int | None:
    """The process that all links begin or end at, if there is exactly one."""
    shared = set(links[0]).intersection(*map(set, links[1:])) if links else set()
    return shared.pop() if len(shared) == 1 else None


def _waits(activity: Activity, process: int) -> list[Interval]:
    """The times in which a worker's training thread waits; for a server, in which any worker's does."""
    sides = [side for side in activity.workers if side.number == process] or activity.workers
    return union(
        (stretch.begin_s, stretch.end_s) for side in sides for stretch in side.thread if stretch.stage == "wait"
    )


def _called(activity: Activity, process: int) -> str:
    return next((side.name.partition(" (")[0] for side in activity.sides if side.number == process), f"rank {process}")


def _owners(activity: Activity) -> list[Side]:
    """The processes that own weights or sum for others: servers, or workers that update weights."""
    return [*activity.servers] or [side for side in activity.workers if side.owns]


def _shared_server(activity: Activity, exposed_s: float) -> Cause | None:
    """Fewer servers than workers, whose links or processors are busy while workers wait for them."""
    owners = _owners(activity)
    if not owners or len(owners) >= len(activity.workers):
        return None
    waits = _waits(activity, -1)
    busiest, busy_s = owners[0], 0.0
    for side in owners:
        busy = [(begin, end) for begin, end in side.serving]
        busy += [part for ends, link in activity.links.items() if side.number in ends for part in link.busy]
        found_s = total(common(union(busy), waits))
        if found_s > busy_s:
            busiest, busy_s = side, found_s
    share = min(1.0, activity.per_step(busy_s) / exposed_s)
    one = "one server" if len(owners) == 1 else f"{len(owners)} servers"
    return Cause(
        "shared_server", exposed_s * share * (1 - len(owners) / len(activity.workers)), rank=busiest.number,
        said=f"{len(activity.workers)} workers share {one}, and wait while {busiest.name} receives, updates and sends",
        remedy=f"use more servers, ps(servers={len(activity.workers)}), or on=workers, or an allreduce such as ring",
    )  # fmt: skip


def _codec(activity: Activity, exposed_s: float) -> Cause:
    """Encoding and decoding while workers wait."""
    seconds = max(
        activity.per_step(total(common(list(side.coding), _waits(activity, side.number)))) for side in activity.workers
    )
    return Cause(
        "codec", min(exposed_s, seconds),
        said="workers wait while gradients are encoded and decoded",
        remedy="use a cheaper codec, or none: `syncline bench codecs` shows the link speed below which each pays",
    )  # fmt: skip


_BUCKET = re.compile(r"bucket (\d+)\b")


def bucket_of(exchange: ExchangeSpan) -> int | None:
    """The number of the bucket that an exchange carries."""
    match = _BUCKET.match(exchange.label)
    return int(match.group(1)) if match and exchange.nbytes else None


def buckets_of(activity: Activity) -> list[list[ExchangeSpan]]:
    """The exchanges of buckets that belong together, one of each worker."""
    return [row for row in together(activity) if bucket_of(row[0]) is not None]


def _exchanged(activity: Activity) -> list[ExchangeSpan]:
    """The first worker's exchanges of buckets."""
    return [one for one in activity.workers[0].exchanges if bucket_of(one) is not None]


def _fixed_cost(activity: Activity, exposed_s: float) -> Cause | None:
    """The fixed cost of exchanges: of those that larger buckets would spare, or of one in each iteration."""
    own = _exchanged(activity)
    if not own:
        return None
    count, nbytes = len(own) / activity.steps.shape[1], sum(one.nbytes for one in own) / activity.steps.shape[1]
    fixed_s = exposed_s * _part_of(activity)
    if count < _MANY or nbytes / count > _SMALL_BYTES:
        short = ", and the computation is short" if exposed_s > activity.step_s / 2 else ""
        return Cause(
            "fixed_cost", min(fixed_s, max(0.0, exposed_s - _bytes_s(activity, nbytes))),
            said=f"the exchange hardly depends on its bytes: it is mostly latency{short}",
            remedy="compute more between exchanges: larger batches; no_sync and sync=local(steps=8) do it, too, but"
            " change the training, because workers exchange less often: results differ, and under local the replicas"
            " differ until consolidate()",
        )  # fmt: skip
    return Cause(
        "small_buckets", fixed_s * max(0.0, 1 - max(1.0, nbytes / _FEW_BYTES) / count),
        said=f"{count:.0f} exchanges an iteration carry {units.size(nbytes / count)} each, mostly at a fixed cost",
        remedy="use larger buckets: schedule=fixed(bucket=25MiB), or schedule=merged, which measures the best size",
    )  # fmt: skip


def _bytes_s(activity: Activity, nbytes: float) -> float:
    """The seconds of an iteration that its bytes need, at the busiest receiver, at the rate of large messages beyond
    their latency; over shared memory, at the memory's. 0 if the recording does not tell rate and latency apart."""
    if not activity.links:
        return nbytes / _MEMORY_RATE
    lasted = [(one.nbytes, one.end_s - one.ready_s) for link in activity.links.values() for one in link.messages]
    latency_s = min((seconds for size, seconds in lasted if size <= _TINY_BYTES), default=math.inf)
    paces = [max(0.0, seconds - latency_s) / size for size, seconds in lasted if size >= _LARGE_BYTES]
    if not paces or math.isinf(latency_s):
        return 0.0
    received = Counter[int]()
    for (_, dst), link in activity.links.items():
        received[dst] += link.nbytes
    return activity.per_step(max(received.values()) * median(paces))


def _part_of(activity: Activity) -> float:
    return fixed_part(activity, buckets_of(activity) or [[one] for one in _exchanged(activity)])


def fixed_part(activity: Activity, rows: Sequence[Sequence[ExchangeSpan]]) -> float:
    """The part of the time of exchanges that does not depend on their bytes, between 0 and 1.

    Either small exchanges take about as long as large ones, or an exchange takes about as long as the agreement on a
    step, which carries some bytes, times the messages that it has more.
    """
    if not rows:
        return 0.0
    lasted = [(row[0].nbytes, _lasted(row)) for row in rows]
    mean = sum(nbytes for nbytes, _ in lasted) / len(lasted)
    small = [seconds for nbytes, seconds in lasted if nbytes <= mean / 4]
    large = [seconds for nbytes, seconds in lasted if nbytes >= mean]
    known = [min(1.0, median(small) / median(large))] if len(small) > 2 and large and median(large) > 0 else [0.0]
    agreed = [_lasted(row) for row in together(activity) if row[0].label.startswith(AGREEING)]
    active_s = total(union((max(one.begin_s for one in row), row[0].end_s) for row in rows)) / len(rows)
    if agreed and active_s > 0:
        counted = Counter[bool]()
        agreements = {row[0].key for row in together(activity) if row[0].label.startswith(AGREEING)}
        for link in activity.links.values():
            counted.update(message.key in agreements for message in link.messages)
        more = counted[False] / len(rows) / (counted[True] / len(agreed)) if counted[True] else 1.0
        known.append(min(1.0, median(agreed) * max(1.0, more) / active_s))
    return max(known)


def _lasted(row: Sequence[ExchangeSpan]) -> float:
    """The seconds of an exchange since its last worker began, until the first one ended."""
    return max(0.0, min(one.end_s for one in row) - max(one.begin_s for one in row))


def _no_overlap(activity: Activity, exposed_s: float) -> Cause | None:
    """Bytes that are exchanged after backward passes, although a part of them was ready long before."""
    side = activity.workers[0]
    passes = union((one.begin_s, one.end_s) for one in side.thread if one.stage == "backward")
    own = _exchanged(activity)
    nbytes, late = sum(one.nbytes for one in own), sum(one.nbytes for one in own if _is_late(one.submit_s, passes))
    if not passes or not nbytes or late < 0.75 * nbytes:
        return None
    backward_s = float(np.median(activity.stages["backward"]))
    return Cause(
        "no_overlap", min(exposed_s * (1 - _part_of(activity)), backward_s) * late / nbytes,
        said="gradients are exchanged after the backward pass, not during it",
        remedy="use smaller buckets, which start during the backward pass: schedule=wait_free, or fixed(bucket=4MiB)",
    )  # fmt: skip


_LATE = 0.2
"""The last part of a backward pass: what is submitted then has nothing left to overlap with."""


def _is_late(submit_s: float, passes: Sequence[Interval]) -> bool:
    """Whether an exchange was submitted in the last part of the backward pass before it, or after that."""
    before = [one for one in passes if one[0] <= submit_s]
    return bool(before) and submit_s >= before[-1][1] - _LATE * (before[-1][1] - before[-1][0])
