"""Syncline under JAX: optax transformations that average gradients between processes inside ``jit``.

    import syncline
    import syncline.jax

    syncline.init()
    params = syncline.jax.broadcast(params)
    optimizer = syncline.jax.distributed(optax.adam(1e-3))
    state = optimizer.init(params)                  # outside of jit: all ranks meet
    updates, state = optimizer.update(gradients, state, params)

Or ``optax.chain(syncline.jax.average(), optax.adam(1e-3))`` under strategies that exchange gradients. ``import
syncline`` does not import this module, because it imports JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .frameworks import jax as adapter
from .frameworks.jax import SynclineState
from .process import process
from .session.groups import WorkerGroup

__all__ = ["SynclineState", "average", "broadcast", "consolidate", "distributed", "load_state_dict", "state_dict"]


def average(*, group: WorkerGroup | None = None) -> Any:
    """A transformation for ``optax.chain`` that replaces gradients by their mean over all workers.

    Its ``init`` is collective, outside ``jit``, with rank 0's parameters (``broadcast``); a server serves there until
    the workers have left. Raises UsageError under strategies that exchange weights (use ``distributed``).
    """
    return adapter.transformation(process.within(group), None, process.leave)


def distributed(optimizer: Any, *, group: WorkerGroup | None = None) -> Any:
    """An optax optimizer under any strategy of the run; if gradients are exchanged, it acts like ``average``.

    Owners that hold the weights run the optimizer, which must be element-wise, and keep its state. ``update`` needs the
    parameters.
    """
    return adapter.transformation(process.within(group), optimizer, process.leave)


def broadcast(tree: Any, root: int = 0, *, group: WorkerGroup | None = None) -> Any:
    """A tree of arrays and numbers with the values of rank ``root``. Collective among workers; servers keep their
    own.
    """
    return adapter.broadcast(process.within(group), tree, root)


def consolidate(params: Any, state: Any) -> Any:
    """The newest parameters of all workers. Collective, between two steps, as ``syncline.consolidate``.

    If replicas differ during training (``asp``, ``ssp``, ``local``, ``easgd``, ...), call it before an evaluation.
    """
    return adapter.run_of(state).consolidate(params)


def state_dict(params: Any, state: Any) -> dict[str, Any]:
    """Everything that a resumed run needs, as NumPy arrays and plain values. Collective; all workers get it.

    This includes the parameters, the optimizer's state, also on owners, and the codecs' residuals.
    """
    return adapter.run_of(state).state_dict(params, state)


def load_state_dict(saved: Mapping[str, Any], params: Any, state: Any) -> tuple[Any, Any]:
    """Restored parameters and state, for the same or another number of workers. Collective, with the same arguments.

    ``params`` and ``state``, of ``init(params)``, give the shapes and devices. Refuses the state of a strategy with
    different mathematics.
    """
    return adapter.run_of(state).load_state_dict(saved, params, state)
