"""The JAX adapter: transformations of optax that average gradients between processes inside ``jit``.

``syncline.jax`` has the public names and is the only module that imports this folder by name; ``adapt`` is for
``syncline.prepare``. Start reading in ``run``, which has the steps of a transformation; ``calls`` makes the calls from
compiled computations. Importing this folder loads JAX and optax, and no other framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UsageError
from ...session.session import Session
from .. import Handed
from .._supported import check_options, check_packages

check_packages("jax", {"jax": (0, 10), "optax": (0, 2, 8)})

import optax  # noqa: E402 - only now it is known to be there, and new enough

from .kept import Kept  # noqa: E402
from .run import Run, run_of  # noqa: E402
from .trees import SynclineState, broadcast  # noqa: E402

__all__ = ["Kept", "Run", "SynclineState", "adapt", "broadcast", "run_of", "transformation"]


def transformation(session: Session, optimizer: Any, leave: Callable[[], Any], weight: object = 1) -> Any:
    """A transformation of optax that exchanges this worker's gradients. ``leave`` ends a server after its work."""
    if optimizer is not None and not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__}: give a transformation of optax, such as optax.adam(1e-3)"
        )
    made = Run(session, optimizer, weight)

    def init(params: Any) -> Any:
        state = made.init(params)
        return leave() if state is None else state

    return optax.GradientTransformationExtraArgs(init, made.update)


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Return rank 0's parameters, and the optimizer wrapped in a transformation that exchanges gradients or weights."""
    check_options(options, ": parameters of JAX have no hooks, buffers or batches", known=("weight",))
    if optimizer is None:
        raise UsageError(
            "a model of JAX needs an optimizer of optax, such as optax.adam(1e-3): or call syncline.jax.average()"
        )
    if not session.is_worker:
        Run(session, optimizer).init(model)
        return None
    return Handed((broadcast(session, model, 0), transformation(session, optimizer, lambda: None, options["weight"])))
