"""JAX: transformations of optax that average gradients between processes, inside of ``jit``.

``syncline.jax`` is what scripts import; ``_run`` is what a transformation does, ``_calls`` how a computation calls it.
Imported, it loads JAX and optax, and nothing of another framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import UsageError
from ...session.session import Session
from .. import Handed
from . import _needed  # noqa: F401 - before the others, which import JAX
from ._run import Run, run_of
from ._trees import broadcast
from ._weights import SynclineState

__all__ = ["Run", "SynclineState", "adapt", "broadcast", "run_of", "transformation"]

_OPTIONS = {"unused": "error", "weight": 1, "ignore": (), "broadcast_buffers": True}
"""Those of ``syncline.prepare`` that say nothing."""


def transformation(session: Session, optimizer: Any, leave: Callable[[], Any]) -> Any:
    """One of optax's, of gradients that are this worker's; ``leave`` ends a server that has served."""
    import optax

    if optimizer is not None and not (callable(getattr(optimizer, "init", None)) and hasattr(optimizer, "update")):
        raise UsageError(
            f"the optimizer is {type(optimizer).__name__}: give a transformation of optax, as optax.adam(1e-3)"
        )
    made = Run(session, optimizer)

    def init(params: Any) -> Any:
        state = made.init(params)
        return leave() if state is None else state

    return optax.GradientTransformationExtraArgs(init, made.update)


def adapt(session: Session, model: Any, optimizer: Any, options: Mapping[str, Any]) -> Handed | None:
    """Rank 0's parameters, and the optimizer around whose updates workers exchange."""
    others = sorted(name for name, value in options.items() if value != _OPTIONS[name])
    if others:
        raise UsageError(f"{others[0]}= is for models of PyTorch: parameters of JAX have no hooks, buffers or batches")
    if optimizer is None:
        raise UsageError(
            "a model of JAX needs an optimizer of optax, as optax.adam(1e-3): or call syncline.jax.average()"
        )
    if not session.is_worker:
        Run(session, optimizer).init(model)
        return None
    return Handed((broadcast(session, model, 0), transformation(session, optimizer, lambda: None)))
