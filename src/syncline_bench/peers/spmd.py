"""``spmd``: JAX's own way over several processes: one program over arrays whose parts lie in the processes.

As in JAX's documentation of multi-process programs, ``jax.distributed.initialize`` joins the processes, whose
collectives on CPUs are Gloo's. Parameters are replicated, batches are cut along their first dimension (``shard_map``),
and gradients are averaged in the compiled step (``pmean``). Waits and bytes are not counted.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from syncline.registry import register

from ..sides import NoCounts, Placed

_TIMEOUT_S = 120
_AXIS = "workers"


@register("peers", "spmd", trains=True, framework="jax")
class Spmd:
    """JAX's sharded arrays over several processes, averaged by Gloo inside of ``jit``."""

    def join(self) -> Member:
        """Become one of the program's processes. Raises JAX's exceptions if the others cannot be reached."""
        return Member()


class Member(Placed):
    """One process of a program over several, behind the calls that the training loop makes."""

    def __init__(self) -> None:
        import jax

        super().__init__()
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"{self.environment.address}:{os.environ['MASTER_PORT']}",
            self.world_size(),
            self.rank(),
            initialization_timeout=_TIMEOUT_S,
        )
        self._mesh = jax.sharding.Mesh(np.array(jax.devices()), (_AXIS,))

    def prepare(self, model: Any, optimizer: Any, *, weight: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Parameters as replicated arrays, and an optimizer of the mean of all gradients."""
        import jax
        import optax

        def averaged(updates: Any, state: Any, params: Any = None) -> Any:
            return optimizer.update(jax.lax.pmean(updates, _AXIS), state, params)

        params = jax.tree.map(lambda leaf: self._array(np.asarray(leaf), jax.sharding.PartitionSpec()), model)
        return params, optax.GradientTransformation(jax.jit(optimizer.init), averaged)

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step over all processes, for this process's batches, which are as long as all others'."""
        import jax

        whole, part = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(_AXIS)

        def everywhere(params: Any, state: Any, *batch: Any) -> Any:
            params, state, loss = step(params, state, *batch)
            return params, state, jax.lax.pmean(loss, _AXIS)

        places = {"in_specs": (whole, whole, part, part, part), "out_specs": whole}
        # Gradients stay local to each process until they are averaged: with its check on, shard_map would sum them
        # itself.
        made = jax.jit(jax.shard_map(everywhere, mesh=self._mesh, check_vma=False, **places))

        def call(params: Any, state: Any, *batch: NDArray[Any]) -> Any:
            return made(params, state, *(self._array(array, part) for array in batch))

        return call

    def stats(self) -> NoCounts:
        return NoCounts("spmd over gloo", blocked_s=None)

    def barrier(self) -> None:
        from jax.experimental.multihost_utils import sync_global_devices

        sync_global_devices("the end of the training")

    def shutdown(self) -> None:
        import jax

        jax.distributed.shutdown()

    def _array(self, local: NDArray[Any], places: Any) -> Any:
        import jax

        return jax.make_array_from_process_local_data(jax.sharding.NamedSharding(self._mesh, places), local)
