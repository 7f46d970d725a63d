"""JAX: one compiled step with the network's gradient and optax's update, as users write it.

Images are (n, height, width, channels), the order in which XLA convolves on processors. The optimizer is a chain of
optax for the blueprint's update; it takes the learning rate from its count of updates. All batches are padded to one
length with samples of weight 0, because JAX would compile the step again for every other length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from syncline.frameworks._supported import check_mode, check_schedule
from syncline.registry import register
from syncline.strategy.strategy import Strategy

from ..batches import pooled
from ..messages import Job
from ..sides import Side
from ..workloads import Workload
from ..workloads import _blueprint as plain
from . import KEEPS_FREED_MEMORY
from ._from_blueprint import FromBlueprint, InOneStep, filled, scores

if TYPE_CHECKING:
    import jax

Params = dict[str, dict[str, Any]]
Layer = Callable[[Params, Any], Any]

_ENVIRON = {
    **KEEPS_FREED_MEMORY,
    "JAX_PLATFORMS": "cpu",
    # XLA makes no threads within a computation, but keeps the threads that run several computations at once.
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@register("frameworks", "jax", needs=("jax", "optax"), install="syncline[jax]", environ=_ENVIRON)
class JaxTraining(InOneStep, FromBlueprint):
    """``jax.jit`` over value, gradient and update."""

    label_type = np.int32

    def __init__(self, workload: Workload, job: Job, process: int) -> None:  # noqa: ARG002
        assert workload.blueprint is not None
        self._workload, self._blueprint, self._job = workload, workload.blueprint, job
        self._params: Any = params_of(workload.blueprint.start(job.seed))
        self._network = network(workload.blueprint)

    @staticmethod
    def loaded() -> str:
        import jax

        return str(jax.__version__)

    @staticmethod
    def check(strategy: Strategy) -> None:
        """Refuses modes and schedules that cannot be part of a compiled computation."""
        check_schedule(strategy, "JAX")
        check_mode(strategy, [{"lr": 1.0}], "the optimizer", True)

    def prepare(self, side: Side, weight: Any) -> None:  # noqa: ARG002
        """Ranks are weighed by their shares. A peer may compile the step itself (``compiled``)."""
        import jax
        import optax

        self._longest = -(-self._job.batch // side.world_size())
        each = side.world_size() if pooled(self._job.strategy) else 1
        self._params, optimizer = side.prepare(self._params, self._solver(each), weight=1)
        self._state = optimizer.init(self._params)

        def loss_of(params: Params, images: Any, labels: Any, counts: Any) -> Any:
            said = self._network(params, images)
            losses = optax.softmax_cross_entropy_with_integer_labels(said, labels)
            return (counts * losses).sum(), (counts * losses).sum() / counts.sum()

        def step(params: Params, state: Any, images: Any, labels: Any, counts: Any) -> Any:
            gradients, loss = jax.grad(loss_of, has_aux=True)(params, images, labels, counts)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        self._step = getattr(side, "compiled", jax.jit)(step)
        self._said = jax.jit(self._network)

    def backward(self) -> None:
        """Weighs each sample, so that the mean over ranks is the mean over the whole batch."""
        images, labels, _, share = self._batch
        counts = np.full(len(labels), share / len(labels), np.float32)
        batch = (filled(array, self._longest) for array in (images, labels, counts))
        self._params, self._state, loss = self._step(self._params, self._state, *batch)
        self._loss = float(loss)

    def consolidate(self, side: Side) -> None:
        """Replace the parameters by consolidated ones."""
        import syncline

        if side is syncline:
            import syncline.jax

            self._params = syncline.jax.consolidate(self._params, self._state)

    def copied(self) -> Mapping[str, NDArray[Any]]:
        """Weights by the blueprint's names, in its layout."""
        return weights_of(self._params)

    def evaluate(self, weights: Mapping[str, Any] | None = None) -> tuple[float, float]:
        """Compiles only the network, for pieces of the test set."""
        params = params_of(self.copied() if weights is None else weights)
        parts = ((self.taken(part)[0], part[1]) for part in self._workload.tests())
        return scores([(np.asarray(self._said(params, images)), labels) for images, labels in parts])

    def _solver(self, each: int) -> Any:
        """The optimizer, which makes ``each`` updates per step of the run."""
        import jax.numpy as jnp
        import optax

        rates = np.array(self._blueprint.rates(self._job.iterations), np.float32)

        def rate(count: Any) -> Any:
            return jnp.asarray(rates)[jnp.minimum(count // each, len(rates) - 1)]

        decay, momentum = self._blueprint.weight_decay, self._blueprint.momentum
        return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, momentum=momentum))


def params_of(weights: Mapping[str, NDArray[Any]]) -> Params:
    """A tree of a blueprint's weights: kernels as (height, width, input, output), matrices as (input, output)."""
    import jax.numpy as jnp

    found: Params = {}
    for name, array in weights.items():
        layer, _, kind = name.partition(".")
        turned = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        found.setdefault(layer, {})[kind] = jnp.array(turned)
    return found


def weights_of(params: Params) -> dict[str, NDArray[Any]]:
    """A blueprint's weights from a tree."""
    found = {f"{layer}.{kind}": np.array(leaf) for layer, leaves in params.items() for kind, leaf in leaves.items()}
    return {name: array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T for name, array in found.items()}


def network(blueprint: plain.Blueprint) -> Layer:
    """The output of a blueprint's layers for images, with parameters by its names."""
    makers: dict[type, Callable[[Any, str], Layer]] = {
        plain.Convolution: lambda _, name: lambda params, x: _convolved(x, params[name]),
        plain.Dense: lambda _, name: lambda params, x: x @ params[name]["weight"] + params[name]["bias"],
        plain.Relu: lambda *_: lambda _, x: _relu(x),
        plain.MaxPooling: lambda layer, _: lambda _, x: _pooled(x, layer.side),
        plain.Flatten: lambda *_: lambda _, x: x.transpose(0, 3, 1, 2).reshape(len(x), -1),
    }
    made = [makers[type(layer)](layer, str(place)) for place, layer in enumerate(blueprint.layers)]

    def through(params: Params, x: Any) -> Any:
        for layer in made:
            x = layer(params, x)
        return x

    return through


def _convolved(x: jax.Array, of: dict[str, Any]) -> Any:
    import jax

    order = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, of["weight"], (1, 1), "SAME", dimension_numbers=order) + of["bias"]


def _relu(x: jax.Array) -> Any:
    import jax

    return jax.nn.relu(x)


def _pooled(x: jax.Array, side: int) -> Any:
    import jax
    import jax.numpy as jnp

    square = (1, side, side, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, square, square, "VALID")
