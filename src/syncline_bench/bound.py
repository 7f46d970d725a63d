"""The lower bound of a replayed iteration's time, which assumes that communication is hidden perfectly.

Owns the formula behind ``bound_s`` and ``of_bound`` of ``compare``:

    bound = max(compute, 2(N-1)/N bytes / link)    bytes: all gradients, uncompressed
    link  = max(measured goodput, rate * 1448/1514)
    compute = copy + forward + backward            plus loading; if prefetched, the larger of the two

A full Ethernet frame of 1514 bytes carries 1448 bytes of TCP payload (with timestamps); rate limits count whole frames.
In an allreduce each rank sends and receives at least 2(N-1)/N of the bytes. Servers on hosts of their own and
compression can need less; ``of_bound`` is then above 1. If neither a lab nor the strategy limits the link (shared
memory, loopback), the bound is compute alone.
"""

from __future__ import annotations

from dataclasses import replace

from .report.rows import Row
from .workloads import AT_ONCE, EVEN, Pipeline, Speed, Trace

PAYLOAD_SHARE = 1448 / 1514


def link_bytes_per_s(goodput_bytes_per_s: float | None, lab_rate: float | None, own_rate: float | None) -> float | None:
    """The speed of a rank's link in bytes/s; None if nothing limits it. The rates are in bits/s.

    ``lab_rate`` is the rate of a lab's links, ``own_rate`` the strategy's own limit (``tcp(rate=)``). The lower counts.
    """
    limits = []
    if lab_rate is not None:
        limits.append(max(goodput_bytes_per_s or 0.0, _payload(lab_rate)))
    if own_rate is not None:
        limits.append(_payload(own_rate))
    return min(limits, default=None)


def bound_s(trace: Trace, workers: int, link: float | None, pipeline: Pipeline = AT_ONCE, speed: Speed = EVEN) -> float:
    """The least time of an iteration in seconds, on a worker that is not slowed down; ``link`` in bytes/s."""
    wire_s = 0.0 if link is None else 2 * (workers - 1) / workers * trace.nbytes / link
    return max(pipeline.least_s(speed.least_s(trace.total_s)), wire_s)


def bounded(
    row: Row, trace: Trace | None, link: float | None, pipeline: Pipeline = AT_ONCE, speed: Speed = EVEN
) -> Row:
    """The row with its bound and bound / iteration time. Unchanged if the workload is not a replay."""
    if trace is None:
        return row
    bound = bound_s(trace, row.workers, link, pipeline, speed)
    return replace(row, bound_s=bound, of_bound=bound / row.iteration_s if row.iteration_s else None)


def _payload(rate: float) -> float:
    return rate / 8 * PAYLOAD_SHARE
