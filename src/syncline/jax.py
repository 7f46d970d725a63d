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
from typing import Any, Literal

from .frameworks import jax as adapter
from .frameworks.jax import Kept, SynclineState
from .process import process
from .session.groups import WorkerGroup

__all__ = [
    "Kept",
    "SynclineState",
    "average",
    "broadcast",
    "consolidate",
    "distributed",
    "keep",
    "load_state_dict",
    "state_dict",
]

Weight = Literal[1, "batch"]


def average(*, weight: Weight = 1, group: WorkerGroup | None = None) -> Any:
    """A transformation for ``optax.chain`` that replaces gradients by their mean over all workers.

    Its ``init`` is collective, outside ``jit``, with rank 0's parameters (``broadcast``); a server serves there until
    the workers have left. Raises UsageError under strategies that exchange weights (use ``distributed``).
    ``weight="batch"`` counts a worker by its part of a global batch, if ``keep`` has the values.
    """
    return adapter.transformation(process.within(group), None, process.leave, weight)


def distributed(optimizer: Any, *, weight: Weight = 1, group: WorkerGroup | None = None) -> Any:
    """An optax optimizer under any strategy of the run; if gradients are exchanged, it acts like ``average``.

    Owners that hold the weights run the optimizer, which must be element-wise, and keep its state. ``update`` needs the
    parameters. ``weight`` is as in ``average``.
    """
    return adapter.transformation(process.within(group), optimizer, process.leave, weight)


def broadcast(tree: Any, root: int = 0, *, group: WorkerGroup | None = None) -> Any:
    """A tree of arrays and numbers with the values of ``root``. Collective among workers; servers keep their own."""
    return adapter.broadcast(process.within(group), tree, root)


def keep(values: Any) -> Kept:
    """Keep what a training step returns, for ``syncline.elastic`` and ``syncline repeat``.

        kept = syncline.jax.keep((params, state))    # any tree with the optimizer's state of init(params)

        def training():
            while sampler.epoch < 10:
                for batch in sampler:
                    kept.update(step(*kept.values, images[batch], labels[batch]))
                    sampler.commit()

    ``update`` waits for the step, so that ``commit`` counts none that fails. After a loss, and in a worker that joins,
    ``values`` are those of a worker that is left.
    """
    return Kept(process.session, values)


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
