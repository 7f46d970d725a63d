"""The bound of a replayed iteration: what it cannot be shorter than, however well communication is hidden.

Owns the formula, for ``compare``'s ``bound_s`` and ``of_bound``:

    bound = max(compute, 2(N-1)/N bytes / link)    bytes: all gradients, uncompressed
    link  = max(measured goodput, rate * 1448/1514)
    compute = copy + forward + backward            and loading: before them, or beside them where it is prefetched

1448 of the 1514 bytes of a full Ethernet frame are payload of TCP (with timestamps); rate limits count whole frames.
2(N-1)/N is what every rank of an allreduce among workers sends and receives at least. Servers with hosts of their own
may do with less, and so may compression: ``of_bound`` above 1 says by how much. Where neither a lab nor the strategy
limits the link (shared memory, loopback) the bound is compute alone.
"""

from __future__ import annotations

from dataclasses import replace

from .report.rows import Row
from .workloads import AT_ONCE, EVEN, Pipeline, Speed, Trace

PAYLOAD_SHARE = 1448 / 1514


def link_bytes_per_s(goodput_bytes_per_s: float | None, lab_rate: float | None, own_rate: float | None) -> float | None:
    """The speed of a rank's link in bytes/s, None when nothing limits it; rates are bits/s.

    ``lab_rate`` is the link's between hosts, ``own_rate`` what a strategy keeps to (``tcp(rate=)``); the lower counts.
    """
    limits = []
    if lab_rate is not None:
        limits.append(max(goodput_bytes_per_s or 0.0, _payload(lab_rate)))
    if own_rate is not None:
        limits.append(_payload(own_rate))
    return min(limits, default=None)


def bound_s(trace: Trace, workers: int, link: float | None, pipeline: Pipeline = AT_ONCE, speed: Speed = EVEN) -> float:
    """Seconds that an iteration takes at least, on a worker that nothing slows down; ``link`` in bytes/s."""
    wire_s = 0.0 if link is None else 2 * (workers - 1) / workers * trace.nbytes / link
    return max(pipeline.least_s(speed.least_s(trace.total_s)), wire_s)


def bounded(
    row: Row, trace: Trace | None, link: float | None, pipeline: Pipeline = AT_ONCE, speed: Speed = EVEN
) -> Row:
    """The row with its bound and the share of it that was reached; as it was for a workload that is not replayed."""
    if trace is None:
        return row
    bound = bound_s(trace, row.workers, link, pipeline, speed)
    return replace(row, bound_s=bound, of_bound=bound / row.iteration_s if row.iteration_s else None)


def _payload(rate: float) -> float:
    return rate / 8 * PAYLOAD_SHARE
