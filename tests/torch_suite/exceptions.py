"""PyTorch's tests that pass with the backend gloo and not with syncline, each with the reason."""

from __future__ import annotations

_KEPT = "torch keeps dist.monitored_barrier() to the backend gloo; dist.barrier(timeout=...) names all late ranks"
_BARRIER = (
    "it looks for Gloo's words (timed out, closed, timeout); ours are 'not reached within ... s by', and the ranks"
)

EXCEPTIONS: dict[str, str] = {
    "test_barrier_timeout_full_group": _BARRIER,
    "test_barrier_timeout_group": _BARRIER,
    "test_get_backend": "it expects the name gloo, for which syncline stands in here",
    "test_monitored_barrier_failure_order": _KEPT,
    "test_monitored_barrier_gloo": _KEPT,
    "test_monitored_barrier_gloo_rank_0_timeout": "it calls the group's own monitored_barrier(), expects a RuntimeError"
    " with Gloo's words, and goes on; ours raises PeerTimeout, which names all late ranks, and ends the run on all",
    "test_monitored_barrier_gloo_subgroup": _KEPT,
    "test_monitored_barrier_wait_all_ranks": _KEPT,
    "test_sparse_all_reduce_sum": "sparse tensors are refused by name",
}
