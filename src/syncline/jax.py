"""Syncline under JAX: gradients that are averaged between processes inside of ``jit``, by transformations of optax.

    import syncline
    import syncline.jax

    syncline.init()
    params = syncline.jax.broadcast(params)
    optimizer = syncline.jax.distributed(optax.adam(1e-3))
    state = optimizer.init(params)                  # outside of jit: all ranks meet
    updates, state = optimizer.update(gradients, state, params)

Or ``optax.chain(syncline.jax.average(), optax.adam(1e-3))``, where gradients are what is exchanged. Not loaded with the
package, since it loads JAX.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from .frameworks import jax as adapter
from .frameworks.jax import SynclineState
from .process import process
from .session.groups import WorkerGroup

__all__ = ["SynclineState", "average", "broadcast", "consolidate", "distributed", "load_state_dict", "state_dict"]


def average(*, group: WorkerGroup | None = None) -> Any:
    """A transformation that makes of gradients their mean over all workers, for the next one in ``optax.chain``.

    Its ``init`` is called by all, outside of ``jit``, with parameters that are rank 0's (``broadcast``); a server
    serves there until the workers have left. Raises UsageError where weights are what is exchanged (``distributed``).
    """
    return adapter.transformation(process.within(group), None, _leave)


def distributed(optimizer: Any, *, group: WorkerGroup | None = None) -> Any:
    """An optimizer of optax under the strategy of the run, whatever is exchanged; else as ``average``.

    Where owners hold the weights they run the optimizer, which has to treat every element by itself, and their state is
    not in this one's; ``update`` needs the parameters.
    """
    return adapter.transformation(process.within(group), optimizer, _leave)


def broadcast(tree: Any, root: int = 0, *, group: WorkerGroup | None = None) -> Any:
    """A tree of arrays and numbers with the values of rank ``root``; all workers call it, servers keep their own."""
    return adapter.broadcast(process.within(group), tree, root)


def consolidate(params: Any, state: Any) -> Any:
    """The newest parameters of all workers, who all call it between two steps, as ``syncline.consolidate`` says.

    Where replicas differ on the way (``asp``, ``ssp``, ``local``, ``easgd``, ...) say it before an evaluation.
    """
    return adapter.run_of(state).consolidate(params)


def state_dict(params: Any, state: Any) -> dict[str, Any]:
    """All that a resumed run needs, as arrays of NumPy and plain values; all workers call it, and have it.

    The parameters, the optimizer's state, the owners' where they have it, and what codecs keep back.
    """
    return adapter.run_of(state).state_dict(params, state)


def load_state_dict(saved: Mapping[str, Any], params: Any, state: Any) -> tuple[Any, Any]:
    """Parameters and state to go on from, with as many workers, or more, or fewer; all call it with the same.

    ``params`` and ``state``, of ``init(params)``, say of which shapes they are, and where. Refuses a state of another
    strategy, whose mathematics would differ.
    """
    return adapter.run_of(state).load_state_dict(saved, params, state)


def _leave() -> NoReturn:
    process.end(fetch=True)
    sys.exit(0)
