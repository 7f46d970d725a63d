"""What ranks of JAX do, by name, in processes of ``array_ranks``."""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from array_bodies import Place, batch, joined, said, train_all

import syncline
import syncline.errors
import syncline.jax
from syncline.frameworks._flat import FlatModel
from syncline.frameworks.jax import trees

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(optax.exponential_decay(0.1, 2, 0.7)),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "adamw": lambda: optax.adamw(0.02, weight_decay=0.1),
}


def model(seed: int = 0, dtype: Any = None) -> Any:
    draw = np.random.default_rng(seed)
    shapes = {"first": {"w": (5, 7), "b": (7,)}, "last": {"w": (7, 1)}, "scale": ()}
    made = {
        name: {key: draw.normal(size=shape) / 2 for key, shape in of.items()} if isinstance(of, dict) else draw.normal()
        for name, of in shapes.items()
    }
    return jax.tree.map(lambda value: jnp.asarray(value, dtype), made)


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    return ((hidden @ params["last"]["w"] * params["scale"] - y) ** 2).mean()


def step_of(optimizer: Any) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step)


train_matrix = partial(train_all, "jax")


def plain(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def alone(optimizer: str, steps: int, seed: int = 0) -> Any:
    """One worker without Syncline, on the union of the batches."""
    params, made = model(seed), OPTIMIZERS[optimizer]()
    state, step = made.init(params), step_of(made)
    for number in range(steps):
        params, state = step(params, state, *batch(number, 0, 1))
    return plain(params)


def begin(optimizer: str) -> tuple[Any, Any, Any]:
    """From parameters that are rank 0's, whatever this one's were."""
    params = syncline.jax.broadcast(model(syncline.rank()))
    made = syncline.jax.distributed(OPTIMIZERS[optimizer]())
    return params, made, made.init(params)


def advance(made: Any, params: Any, state: Any, first: int, last: int) -> tuple[Any, Any]:
    step = step_of(made)
    for number in range(first, last):
        params, state = step(params, state, *batch(number, syncline.rank(), syncline.world_size()))
    return params, state


def train(place: Place, cases: list[tuple[str, str]], steps: int) -> list[Any]:
    """What a worker has in the end under a strategy with an optimizer, and, from rank 0, one alone."""
    optimizers = {optimizer for _, optimizer in cases}
    wanted = {optimizer: alone(optimizer, steps) if place[0] == 0 else None for optimizer in optimizers}
    found = []
    for strategy, optimizer in cases:
        with joined(place, strategy):
            params, made, state = begin(optimizer)
            params, state = advance(made, params, state, 0, steps)
            found.append((plain(params), int(state.step), wanted[optimizer]))
    return found


def not_finite(place: Place, steps: int) -> Any:
    """Rank 1's gradients of the step with the number 2 are NaN."""
    with joined(place, "ring"):
        params, made, state = begin("sgd")
        step = step_of(made)
        for number in range(steps):
            x, y = batch(number, syncline.rank(), syncline.world_size())
            params, state = step(params, state, x, y * np.nan if (syncline.rank(), number) == (1, 2) else y)
        return plain(params)


def unwaited(place: Place, steps: int) -> Any:
    """Steps that are under way when the run ends, and others, whose results nobody has, when the process does."""

    def begun() -> Any:
        params, made, state = begin("adam")
        step = jax.jit(lambda params, state, x, y: step_of(made)(params, state, x + _later(x), y))
        for number in range(steps):
            params, state = step(params, state, *batch(number, syncline.rank(), syncline.world_size()))
        return params

    with joined(place, "ring"):
        params = begun()
        under_way = not all(leaf.is_ready() for leaf in jax.tree.leaves(params))
    _begin_at_exit(place)
    begun()
    return under_way, plain(params), alone("adam", steps)


def _begin_at_exit(place: Place) -> None:
    """Join a run that ends with the process, which says then how many steps were made."""
    models: list[Any] = []
    atexit.register(lambda: print("steps", *(one.steps for one in models)))
    index, processes, address = place
    syncline.init("ring", rank=index, world_size=processes, address=address)
    enter = FlatModel.__init__

    def noted(model: Any, *arguments: Any, **keywords: Any) -> None:
        models.append(model)
        enter(model, *arguments, **keywords)

    FlatModel.__init__ = noted  # type: ignore[method-assign]


def unread(place: Place, steps: Sequence[int], where: str) -> None:
    """So many steps of each rank, whose results nobody has, on the first of its devices, the last, or all of them."""
    _begin_at_exit(place)
    devices = devices_as_asked()
    mesh = jax.sharding.Mesh(np.array(devices), "all")
    places = {
        "first": devices[0],
        "last": devices[-1],
        "all": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()),
    }
    params = jax.device_put(syncline.jax.broadcast(model()), places[where])
    made = syncline.jax.distributed(optax.sgd(0.1))
    state = jax.device_put(made.init(params), places[where])
    step = jax.jit(lambda params, state, x, y: step_of(made)(params, state, x + _later(x), y))
    for number in range(steps[place[0]]):
        x, y = jax.device_put(batch(number, syncline.rank(), syncline.world_size()), places[where])
        params, state = step(params, state, x, y)


def devices_as_asked() -> list[Any]:
    """As many as the environment says: of a rank that a server has forked too."""
    asked = re.search(r"device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    assert len(jax.devices()) == (int(asked[1]) if asked else 1)
    return jax.devices()


def forked(place: Place, steps: int) -> int:
    """The number of a child that is forked in a run and ends; 0 where none of three has within half a minute each.

    One may hang that was not ours to end: a thread of XLA's may hold a lock at the moment of the fork.
    """
    with joined(place, "ring"):
        params, made, state = begin("sgd")
        for number in range(steps):
            params, state = step_of(made)(params, state, *batch(number, syncline.rank(), syncline.world_size()))
        jax.block_until_ready(params)
        return next(filter(None, (_forked_once() for _ in range(3))), 0)


def _forked_once() -> int:
    child = os.fork()
    if not child:
        sys.exit(0)
    end = os.pidfd_open(child)
    ended, _, _ = select.select([end], [], [], 30.0)
    os.close(end)
    if not ended:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return child if ended else 0


def _later(x: Any) -> Any:
    """Zeros, after a while."""
    many = jnp.full((200, 200), x[0, 0])
    return jnp.clip(jax.lax.fori_loop(0, 50, lambda _, found: jnp.tanh(found @ many), many)[0, 0], 0.0, 0.0)


def chained(place: Place, steps: int) -> Any:
    """``average()`` before an optimizer that couples elements; all steps in one computation."""
    with joined(place, "ring"):
        params = syncline.jax.broadcast(model(syncline.rank()))
        made = optax.chain(syncline.jax.average(), optax.clip_by_global_norm(0.3), optax.adam(0.05))
        batches = [batch(number, syncline.rank(), syncline.world_size()) for number in range(steps)]
        step = step_of(made)
        (params, state), _ = jax.lax.scan(
            lambda carry, xy: (step(*carry, *xy), None), (params, made.init(params)), jax.tree.map(stacked, *batches)
        )
        mean = plain(params)
        saved = syncline.jax.state_dict(params, state)
        again = syncline.jax.load_state_dict(saved, model(5), made.init(syncline.jax.broadcast(model(7))))
        assert jax.tree.all(jax.tree.map(np.array_equal, plain((params, state[2])), plain((again[0], again[1][2]))))
    params, made = model(), optax.chain(optax.clip_by_global_norm(0.3), optax.adam(0.05))
    return mean, plain(advance_alone(made, params, steps))


def stacked(*arrays: Any) -> Any:
    return np.stack(arrays)


def advance_alone(made: Any, params: Any, steps: int) -> Any:
    state, step = made.init(params), step_of(made)
    for number in range(steps):
        params, state = step(params, state, *batch(number, 0, 1))
    return params


def refused(place: Place, cases: list[tuple[str, str]]) -> list[str]:
    """What each call says."""
    return said(place, cases, REFUSED)


def _init(optimizer: Any, params: Any = None) -> Any:
    return optimizer.init(model() if params is None else params)


def _without_params() -> None:
    made = syncline.jax.distributed(optax.sgd(0.1))
    made.update(model(), made.init(model()))


def _without_client() -> None:
    import jaxlib.xla_client

    params, made = model(), jaxlib.xla_client.make_cpu_client
    del jaxlib.xla_client.make_cpu_client
    try:
        _init(syncline.jax.distributed(optax.sgd(0.1)), params)
    finally:
        jaxlib.xla_client.make_cpu_client = made


def _stepped(optimizer: Any) -> Any:
    def step(params: Any, state: Any) -> Any:
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _donated() -> None:
    params, optimizer = model(), syncline.jax.distributed(optax.sgd(0.1))
    kept = syncline.jax.keep((params, optimizer.init(params)))
    kept.update(jax.jit(_stepped(optimizer), donate_argnums=0)(*kept.values))


def not_kept(place: Place) -> None:
    """A step counts batches, and nobody waits for it."""
    with joined(place, "ring"):
        params, optimizer = model(), syncline.jax.distributed(optax.sgd(0.1), weight="batch")
        jax.block_until_ready(jax.jit(_stepped(optimizer))(params, optimizer.init(params)))


REFUSED: dict[str, Callable[[], Any]] = {
    "donated": _donated,
    "other weight": lambda: syncline.jax.distributed(optax.sgd(0.1), weight=0.5),
    "nothing of ours": lambda: syncline.jax.keep({"w": jnp.ones(3)}),
    "average": syncline.jax.average,
    "distributed": lambda: _init(syncline.jax.distributed(optax.sgd(0.1))),
    "coupled": lambda: _init(syncline.jax.distributed(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))),
    "masked": lambda: _init(
        syncline.jax.distributed(optax.adamw(1e-3, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)))
    ),
    "integers": lambda: _init(syncline.jax.average(), {"w": jnp.ones(3, jnp.int32)}),
    "bfloat16": lambda: _init(syncline.jax.average(), {"w": jnp.ones(3, jnp.bfloat16)}),
    "gpu": lambda: _on_gpu(partial(_init, syncline.jax.average())),
    "gpu broadcast": lambda: _on_gpu(syncline.jax.broadcast),
    "none": lambda: _init(syncline.jax.average(), {}),
    "no optimizer": lambda: syncline.jax.distributed(3),
    "traced": lambda: _traced_only(),
    "another state": lambda: syncline.jax.average().update(model(), ()),
    "no client": _without_client,
    "keys": lambda: syncline.jax.broadcast(jax.random.key(0)),
}


def _traced_only() -> None:
    made = syncline.jax.average()
    made.update(model(), jax.eval_shape(made.init, model()))


def other_parameters(place: Place) -> None:
    with joined(place, "ring"):
        syncline.jax.average().init(model(syncline.rank()))


def other_trees(place: Place) -> None:
    with joined(place, "ring"):
        syncline.jax.broadcast(model() if syncline.rank() == 0 else model() | {"scale": jnp.ones(3)})


@contextmanager
def on_gpu() -> Iterator[Any]:
    """An array that lies on a device which is not served, as far as can be seen inside."""
    seen = trees.platforms_of
    trees.platforms_of = lambda _: ["gpu"]
    try:
        yield jnp.ones(3, jnp.float32)
    finally:
        trees.platforms_of = seen


def _on_gpu(call: Callable[[Any], Any]) -> None:
    with on_gpu() as array:
        call({"w": array})


def on_one_rank(place: Place, name: str, call: str) -> None:
    """Rank 1 alone has what cannot be trained."""
    wrong = {"bfloat16": jnp.ones(3, jnp.bfloat16), "gpu": jnp.ones(3, jnp.float32), "text": "ones"}[name]
    with joined(place, "ring"):
        there = syncline.rank() == 1
        params = {"w": wrong if there else jnp.ones(3, jnp.float32)}
        with on_gpu() if there and name == "gpu" else nullcontext():
            syncline.jax.broadcast(params) if call == "broadcast" else syncline.jax.average().init(params)


def _other_optimizer(place: Place, one: Any, other: Any) -> None:
    with joined(place, "ring"):
        params = syncline.jax.broadcast(model(syncline.rank()))
        syncline.jax.distributed(other if syncline.rank() == 1 else one).init(params)


def other_rate(place: Place) -> None:
    _other_optimizer(place, optax.sgd(0.1), optax.sgd(0.2))


def other_state(place: Place) -> None:
    _other_optimizer(place, optax.sgd(0.1), optax.adam(0.1))


def other_types(place: Place) -> None:
    """One rank traces its step with gradients in bfloat16."""
    with joined(place, "ring"):
        params, made, state = begin("sgd")
        params, state = advance(made, params, state, 0, 1)
        gradients = params if syncline.rank() == 0 else jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        jax.block_until_ready(jax.jit(made.update)(gradients, state, params))


def other_shapes(place: Place) -> None:
    """One rank traces its step with a batch axis that it has forgotten to sum over."""
    with joined(place, "ring"):
        params, made, state = begin("sgd")
        params, state = advance(made, params, state, 0, 1)
        gradients = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]) if syncline.rank() == 1 else leaf, params)
        jax.block_until_ready(jax.jit(made.update)(gradients, state, params))


def dies(place: Place) -> None:
    with joined(place, "ring transport=tcp"):
        params, made, state = begin("sgd")
        params, state = advance(made, params, state, 0, 2)
        if syncline.rank() == 1:
            os._exit(3)
        jax.block_until_ready(advance(made, params, state, 2, 4))


def forgets(place: Place) -> None:
    """A step is made from a state that another step was made from, in a script that ends nothing itself."""
    index, processes, address = place
    syncline.init("ring", rank=index, world_size=processes, address=address)
    params, made, state = begin("sgd")
    advance(made, params, state, 0, 1)
    jax.block_until_ready(advance(made, params, state, 1, 2))


def sharded(place: Place, strategies: list[str], steps: int) -> list[Any]:
    """Two devices of a process share its batch; parameters are on both."""
    assert len(devices_as_asked()) == 2
    mesh = jax.make_mesh((jax.local_device_count(),), ("of",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    parted = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("of"))
    found = []
    for strategy in strategies:
        with joined(place, strategy):
            params = syncline.jax.broadcast(jax.device_put(model(syncline.rank()), everywhere))
            made = syncline.jax.distributed(OPTIMIZERS["adam"]())
            state, step = made.init(params), step_of(made)
            for number in range(steps):
                mine = jax.device_put(batch(number, syncline.rank(), syncline.world_size()), parted)
                params, state = step(params, state, *mine)
            assert all(len(leaf.devices()) == jax.local_device_count() for leaf in jax.tree.leaves(params))
            found.append(plain(params))
    return found


def large(place: Place, strategies: list[str]) -> list[int]:
    """Millions of elements on few threads: nothing waits for what cannot begin."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = []
    for strategy in strategies:
        with joined(place, strategy):
            params = {f"layer{number}": jnp.ones((1000, 300)) for number in range(4)}
            made = syncline.jax.distributed(optax.adam(0.1))
            state, step = made.init(params), jax.jit(made.update)
            for _ in range(3):
                gradients = jax.tree.map(lambda leaf: leaf * (1 + syncline.rank()), params)
                updates, state = step(gradients, state, params)
                params = optax.apply_updates(params, updates)
            params = syncline.jax.consolidate(params, state)
            found.append(float(params["layer0"].sum()))
    return found


def prepared(place: Place) -> Any:
    """By the call that all frameworks have."""
    with joined(place, "ring"):
        params, made = syncline.prepare({"layer": model(syncline.rank())}, optax.sgd(0.1))
        assert jax.tree.all(jax.tree.map(np.array_equal, plain(params), plain({"layer": model()})))
        updates, _ = made.update(jax.tree.map(lambda leaf: leaf * 0 + syncline.rank(), params), made.init(params))
        return plain(updates)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "apply_if_finite": lambda made: optax.apply_if_finite(made, 5),
    "MultiSteps": lambda made: optax.MultiSteps(made, 2).gradient_transformation(),
    "conditionally_transform": lambda made: optax.conditionally_transform(made, lambda step: step != 1),
}
"""What skips steps."""


def wrapped_around(place: Place, name: str) -> list[str]:
    """What is said of a wrapper around ``average()``, inside of jit and outside."""
    found = []
    for jit in (True, False):
        with joined(place, "ring"):
            params = syncline.jax.broadcast(model(0))
            made = WRAPPERS[name](syncline.jax.average())
            state = made.init(params)
            try:
                (jax.jit(made.update) if jit else made.update)(params, state)
            except syncline.errors.GradientError as error:
                found.append(str(error))
            else:
                found.append("")
    return found


Step = Callable[[Any, Any, Any, Any], Any]
HIDDEN: dict[str, Callable[[Step, Any, Any, Any, Any], Any]] = {
    "cond": lambda step, params, state, x, y: jax.lax.cond(
        jnp.isfinite(x).all(), lambda: step(params, state, x, y), lambda: (params, state)
    ),
    "switch": lambda step, params, state, x, y: jax.lax.switch(
        state.step % 3, [lambda: (params, state), lambda: step(params, state, x, y), lambda: (params, state)]
    ),
    "while_loop": lambda step, params, state, x, y: jax.lax.while_loop(
        lambda of: of[1].step < x.sum(), lambda of: step(*of, x, y), (params, state)
    ),
    "fori_loop": lambda step, params, state, x, y: jax.lax.fori_loop(
        0, state.step, lambda _, of: step(*of, x, y), (params, state)
    ),
    "vmap": lambda step, params, state, x, y: jax.vmap(lambda x, y: step(params, state, x, y))(x[:, None], y[:, None]),
}
"""What may leave a step out, or repeat it, on one rank alone."""


def hidden(place: Place) -> dict[str, list[str]]:
    """What is said where a step that was traced and called before, on its own, is called in one of these."""
    found: dict[str, list[str]] = {name: [] for name in HIDDEN}
    for name, jit in product(HIDDEN, (True, False)):
        with joined(place, "ring"):
            params, made, state = begin("sgd")
            step, around = step_of(made), HIDDEN[name]
            x, y = batch(0, syncline.rank(), syncline.world_size())
            params, state = jax.block_until_ready(step(params, state, x, y))
            # A rank that is refused ends what the others have under way: the steps, which the barrier keeps from it,
            # and the barrier itself on one that is late to leave it.
            with suppress(syncline.errors.PeerError):
                syncline.barrier()
            call = partial(around, step)
            try:
                jax.block_until_ready((jax.jit(call) if jit else call)(params, state, jnp.asarray(x), jnp.asarray(y)))
            except syncline.errors.SynclineError as error:
                found[name].append(str(error))
            else:
                found[name].append("")
    return found


def scanned(place: Place, strategies: list[str]) -> list[tuple[Any, Any]]:
    """Steps in a loop of known length, whose step was traced before on its own; and the same one by one."""
    found = []
    for strategy, scan in product(strategies, (True, False)):
        with joined(place, strategy):
            params, made, state = begin("momentum")
            step = step_of(made)
            drawn = [batch(number, syncline.rank(), syncline.world_size()) for number in range(5)]
            params, state = step(params, state, *drawn[0])
            if scan:
                xs, ys = (jnp.stack(some) for some in zip(*drawn[1:], strict=True))

                def body(of: Any, given: Any, step: Step = step) -> Any:
                    return step(*of, *given), None

                (params, state), _ = jax.jit(partial(jax.lax.scan, body))((params, state), (xs, ys))
            else:
                for one in drawn[1:]:
                    params, state = step(params, state, *one)
            assert int(state.step) == 5
            found.append(plain(params))
    return list(zip(found[::2], found[1::2], strict=True))


def costs(place: Place) -> tuple[int, bool]:
    """Words of ours in what is compiled beyond the calls, and whether JAX begins it by machine code."""
    with joined(place, "ring"):
        params, made, state = begin("adam")
        step = step_of(made)
        x, y = map(jnp.asarray, batch(0, syncline.rank(), syncline.world_size()))
        for _ in range(2):  # what a step returns may lie otherwise than what the script began with
            params, state = step(params, state, x, y)
        before = step._cache_size()
        jax.block_until_ready(step(params, state, x, y))
        text = step.lower(params, state, x, y).as_text()
        return text.count("syncline_exchange"), before == step._cache_size()


def wrapped_inside(place: Place, name: str) -> tuple[Any, Any]:
    """The same inside of ``distributed()``, with a batch on rank 1 of which nothing can be learnt, and one worker's."""

    def train(made: Any, rank: int, world: int) -> Any:
        params = model(0)
        state, step = made.init(params), step_of(made)
        for number in range(6):
            x, y = batch(number, rank, world)
            if number == 2 and rank == world - 1:
                x = x * (np.nan if name == "apply_if_finite" else 1.0)
            params, state = step(params, state, x, y)
        return plain(params)

    wanted = train(WRAPPERS[name](OPTIMIZERS["adam"]()), 0, 1)
    with joined(place, "ring"):
        made = syncline.jax.distributed(WRAPPERS[name](OPTIMIZERS["adam"]()))
        return train(made, syncline.rank(), syncline.world_size()), wanted


@jax.tree_util.register_pytree_with_keys_class
class Variable:
    """An array in a box, as modules of flax have it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("value"), self.value)], None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Variable:
        return cls(*children)


def boxed(place: Place, strategy: str) -> tuple[Any, Any]:
    """init() is given parameters in boxes, update() plain ones."""
    with joined(place, strategy):
        params = syncline.jax.broadcast(model(syncline.rank()))
        made = syncline.jax.distributed(optax.sgd(0.1))
        state, step = made.init(jax.tree.map(Variable, params)), step_of(made)
        for number in range(4):
            params, state = step(params, state, *batch(number, syncline.rank(), syncline.world_size()))
        found = plain(params)
    params, alone = model(0), optax.sgd(0.1)
    state, step = alone.init(params), step_of(alone)
    for number in range(4):
        params, state = step(params, state, *batch(number, 0, 1))
    return found, plain(params)
