"""What ranks train for ``benchmarks/same``: small models that have in them what has gone wrong, and digests of the end.

Owns models, data and loops, for every framework; knows only Syncline's public calls, since it runs on commits whose
insides differ. Everything is drawn from seeds and computed by one thread, so a training that depends on no race gives
the same bits in every run. ``FRAMEWORKS`` has, for each framework, its scenarios and the function that trains one.

A training of PyTorch has convolution, batch statistics, tied weights, odd sizes, a scalar and a frozen parameter, two
groups of parameters and a schedule of the learning rate. Ranks begin with different weights, and end with a few calls
of collectives on arrays of odd sizes.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

import syncline

Digests = dict[str, str]


@dataclass
class Place:
    """Where a training takes place: one of a rank's sessions (``part``), and what the one before has left.

    ``made`` is memory that all ranks share: how many steps each worker has made, where ``step_uneven`` counts them.
    """

    strategy: str
    rank: int
    processes: int
    address: str
    turns: bool
    made: mmap.mmap
    part: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    digests: Digests = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        """Keep a digest of weights, of what an optimizer keeps, or of results."""
        self.digests[f"{name} {self.part}" if self.part else name] = digest(value)

    def step(self, act: Callable[[], None]) -> None:
        """Make a step: with ``turns`` one worker after the other, so that updates come in one order in every run."""
        if not self.turns:
            return act()
        for turn in range(syncline.world_size()):
            if turn == syncline.rank():
                act()
            syncline.barrier()
        return None

    def step_uneven(self, act: Callable[[], None], last: bool) -> None:
        """The same without barriers, to which workers without batches do not come; ``last`` says that this has none."""
        rank, mine = syncline.rank(), self.made[syncline.rank()]
        while self.turns and any(self.made[other] < mine + (other < rank) for other in range(syncline.world_size())):
            time.sleep(1e-3)
        act()
        self.made[rank] = 255 if last else mine + 1


def digest(value: Any) -> str:
    """Sixteen digits that say whether two values have the same names, types, shapes and bits."""
    found = hashlib.sha256()
    for name, leaf in sorted(_leaves("", value)):
        found.update(f"{name} {leaf if isinstance(leaf, str) else (leaf.dtype, leaf.shape)}\n".encode())
        if not isinstance(leaf, str):
            found.update(np.ascontiguousarray(leaf).tobytes())
    return found.hexdigest()[:16]


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(f"{name}/{key}", value[key])
    elif isinstance(value, list | tuple):
        for number, one in enumerate(value):
            yield from _leaves(f"{name}/{number:06}", one)
    elif hasattr(value, "__array__"):
        yield name, np.asarray(value.detach() if hasattr(value, "detach") else value)
    else:
        yield name, repr(value)


@contextlib.contextmanager
def joined(place: Place) -> Iterator[None]:
    """A session; a server serves in it until the workers have left."""
    syncline.init(place.strategy, rank=place.rank, world_size=place.processes, address=place.address, timeout=60)
    with contextlib.suppress(SystemExit):
        yield
    syncline.shutdown()


def collectives(place: Place) -> None:
    """The calls beside training, of sizes that do not divide by the number of workers."""
    rank, found = syncline.rank(), []
    for size, kind in ((1, np.float32), (1023, np.float64), (70_001, np.float32), (5, np.int64)):
        draw = np.random.default_rng(size + rank)
        array = (draw.normal(size=size) * 100).astype(kind)
        found += [syncline.allreduce(array.copy(), op="sum"), syncline.broadcast(array.copy(), root=1)]
    found.append(syncline.gather(bytes([rank]) * (rank + 1)))
    place.note("collectives", found)


# PyTorch.


def _network(double: bool) -> Any:
    """A network whose head is in float64 where ``double`` says so: buckets of two element types."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kind = torch.float64 if double else torch.float32
            self.first = nn.Conv2d(1, 3, 3)
            self.norm = nn.BatchNorm2d(3)
            self.wide = nn.Linear(48, 67, dtype=kind)
            self.tied = nn.Linear(67, 67, dtype=kind)
            self.frozen = nn.Linear(67, 67, dtype=kind).requires_grad_(False)
            self.again = nn.Linear(67, 67, dtype=kind)
            self.again.weight = self.tied.weight
            self.last = nn.Linear(67, 5, bias=False, dtype=kind)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.sometimes = nn.Linear(67, 67, dtype=kind)

        def forward(self, x: Any, more: bool = True) -> Any:
            x = torch.tanh(self.norm(self.first(x)) * self.scale).flatten(1).to(self.wide.weight.dtype)
            x = torch.tanh(self.tied(torch.tanh(self.wide(x))))
            x = self.again(self.frozen(x) + x)
            return self.last(x + torch.tanh(self.sometimes(x)) if more else x)

    return Network()


def _optimizer(model: Any, name: str) -> Any:
    import torch

    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]
    if name == "momentum":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name](groups, lr=0.01)


def _loss(model: Any, number: int, samples: int = 4, more: bool = True) -> Any:
    """Of a batch of this rank's."""
    import torch

    draw = torch.Generator().manual_seed(100 * number + syncline.rank())
    x, y = torch.randn(samples, 1, 6, 6, generator=draw), torch.randint(0, 5, (samples,), generator=draw)
    return torch.nn.functional.cross_entropy(model(x, more), y)


@dataclass(frozen=True)
class Torch:
    """A training loop of PyTorch's, by what is particular to it."""

    optimizer: str = "momentum"
    steps: int = 6
    double: bool = False
    accumulate: int = 1
    clip: float | None = None
    uneven: bool = False
    again_after: int | None = None  # the step before which other parameters are frozen, and the model prepared anew
    options: Mapping[str, Any] = field(default_factory=dict)
    samples: bool = False  # ranks have batches of different sizes
    skips: bool = False  # a layer has no gradient in every other step
    parts: int = 1  # sessions, each of which goes on from the state of the one before

    def __call__(self, place: Place) -> None:
        import torch

        torch.manual_seed(syncline.rank())
        model = _network(self.double)
        optimizer = _optimizer(model, self.optimizer)
        # Where updates are by themselves, nobody's buffers are copied.
        options = {**self.options, **({"broadcast_buffers": False} if place.turns else {})}
        syncline.prepare(model, optimizer, **options)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        if place.kept:
            model.load_state_dict(place.kept["model"])
            optimizer.load_state_dict(place.kept["optimizer"])
            syncline.load_state_dict(place.kept["syncline"])
            schedule.load_state_dict(place.kept["schedule"])
        losses: list[float] = []
        with syncline.join() if self.uneven else contextlib.nullcontext():
            steps = self.steps + (syncline.rank() if self.uneven else 0)
            for number in range(steps):
                if number == self.again_after:
                    model.frozen.requires_grad_(True)
                    model.first.requires_grad_(False)
                    syncline.prepare(model, optimizer, **options)
                step = partial(place.step_uneven, last=number + 1 == steps) if self.uneven else place.step
                step(lambda number=number: losses.append(self._step(model, optimizer, number)))
                schedule.step()
        place.note("losses", losses)
        place.note("weights", model.state_dict())
        syncline.consolidate()
        place.note("brought together", model.state_dict())
        state = copy.deepcopy(optimizer.state_dict())
        place.note("optimizer", state)
        if place.part + 1 < self.parts:
            place.kept = {"model": copy.deepcopy(model.state_dict()), "optimizer": state}
            place.kept |= {"syncline": copy.deepcopy(syncline.state_dict()), "schedule": schedule.state_dict()}
        else:
            syncline.barrier()
            collectives(place)

    def _step(self, model: Any, optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        samples, more = 3 + syncline.rank() * self.samples, not (self.skips and number % 2)
        with syncline.no_sync() if self.accumulate > 1 else contextlib.nullcontext():
            for micro in range(1, self.accumulate):
                (_loss(model, 50 * micro + number) / self.accumulate).backward()
        loss = _loss(model, number, samples, more) / self.accumulate
        loss.backward()
        if self.clip is not None:
            syncline.clip_grad_norm_(model, self.clip)
        optimizer.step()
        return float(loss.detach())


@dataclass(frozen=True)
class Groups:
    """Two models, each of a group of workers; groups overlap, so one worker trains both.

    Each group makes calls of collectives besides, and all workers meet in the end.
    """

    members: tuple[tuple[int, ...], ...] = ((0, 2), (1, 2))
    steps: int = 4
    parts: int = 1

    def __call__(self, place: Place) -> None:
        import torch

        made, losses, told = [], [], []
        for number, ranks in enumerate(self.members):
            group = syncline.new_group(ranks)
            torch.manual_seed(10 * number + syncline.rank())
            if group.rank >= 0:
                model = torch.nn.Sequential(torch.nn.Linear(7, 67), torch.nn.Tanh(), torch.nn.Linear(67, 5))
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                syncline.prepare(model, optimizer, group=group)
                made.append((model, optimizer, group))

        def act(number: int) -> None:
            for model, optimizer, _ in made:
                draw = torch.Generator().manual_seed(100 * number + syncline.rank())
                optimizer.zero_grad()
                loss = model(torch.randn(4, 7, generator=draw)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))

        for number in range(self.steps):
            place.step(lambda number=number: act(number))
            told += [syncline.allreduce(np.array(losses[-1:]), group=group) for *_, group in made]
        place.note("told", told)
        place.note("losses", losses)
        place.note("weights", [model.state_dict() for model, *_ in made])
        syncline.consolidate()
        place.note("brought together", [model.state_dict() for model, *_ in made])
        syncline.barrier()


# torch.distributed, whose groups Syncline is a backend of.


@dataclass(frozen=True)
class Distributed:
    """DistributedDataParallel or FSDP2 over the backend, or Syncline's hook for DDP over Gloo."""

    kind: str
    parts: int = 1

    def __call__(self, place: Place) -> None:
        import torch
        import torch.distributed as dist

        import syncline.torch_backend  # noqa: F401 - torch finds the backend by itself only where it loads what is installed

        host, _, port = place.address.rpartition(":")
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, SYNCLINE_STRATEGY=place.strategy)
        dist.init_process_group(
            "gloo" if self.kind == "hook" else "syncline", rank=place.rank, world_size=place.processes
        )
        torch.manual_seed(place.rank)
        layers = [torch.nn.Linear(7, 67), torch.nn.Tanh(), torch.nn.Linear(67, 67), torch.nn.Linear(67, 5)]
        model = self._wrapped(torch.nn.Sequential(*layers), place)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for number in range(5):
            draw = torch.Generator().manual_seed(100 * number + place.rank)
            optimizer.zero_grad()
            model(torch.randn(4, 7, generator=draw)).square().mean().backward()
            optimizer.step()
        values = model.state_dict().values()
        place.note("weights", [one.full_tensor() if hasattr(one, "full_tensor") else one for one in values])
        if self.kind != "hook":
            place.note("collectives", self._collectives(place))
        dist.barrier()
        if self.kind == "hook":
            place.kept["group"] = dist.group.WORLD  # Gloo's is left to the end of the process
        else:
            dist.destroy_process_group()

    def _wrapped(self, model: Any, place: Place) -> Any:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        if self.kind != "fsdp":
            made = DistributedDataParallel(model, bucket_cap_mb=0.01)
            if self.kind == "hook":
                made.register_comm_hook(syncline.hook_state(place.strategy), syncline.comm_hook)
            return made
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (place.processes,))
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.data, 0)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        return model

    @staticmethod
    def _collectives(place: Place) -> list[Any]:
        import torch
        import torch.distributed as dist

        draw = torch.Generator().manual_seed(place.rank)
        whole = torch.randn(place.processes * 331, generator=draw)
        part, parts = torch.empty(331), torch.empty(place.processes * 331)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_gather_into_tensor(parts, part)
        found = [part, parts, whole.clone(), whole.clone(), whole.double(), torch.empty_like(whole)]
        dist.all_reduce(found[2], op=dist.ReduceOp.MAX)
        dist.broadcast(found[3], 1)
        dist.all_reduce(found[4])
        dist.all_to_all_single(found[5], whole)
        return found


# NumPy.


class _Adam:
    """Updates flat pieces of the weights, every element by itself."""

    lr = 0.01

    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:
        first = state.setdefault("first", np.zeros_like(weights))
        second = state.setdefault("second", np.zeros_like(weights))
        first += 0.1 * (gradient - first)
        second += 0.01 * (gradient * gradient - second)
        weights -= (self.lr * first / (np.sqrt(second) + 1e-8)).astype(weights.dtype)


def _descent(weights: Any, gradient: Any, state: dict[str, Any]) -> None:  # noqa: ARG001
    weights -= (0.05 * gradient).astype(weights.dtype)


_ARRAYS = {"first": ((48, 67), "f4"), "bias": ((67,), "f4"), "middle": ((67, 67), "f8"), "last": ((67, 5), "f8")}


@dataclass(frozen=True)
class Numpy:
    """Arrays of two element types, whose gradients are drawn, and pull on the weights."""

    optimizer: Any = _Adam
    steps: int = 6
    parts: int = 1

    def __call__(self, place: Place) -> None:
        draw = np.random.default_rng(syncline.rank())
        weights = {name: draw.normal(size=shape).astype(kind) for name, (shape, kind) in _ARRAYS.items()}
        weights, optimizer = syncline.prepare(weights, self.optimizer() if self.optimizer is _Adam else self.optimizer)
        if place.kept:
            optimizer.load_state_dict(place.kept["optimizer"])
        for number in range(self.steps):
            place.step(lambda number=number: self._step(weights, optimizer, number))
        place.note("weights", weights)
        syncline.consolidate()
        place.note("brought together", weights)
        if self.parts > 1:
            place.kept["optimizer"] = copy.deepcopy(optimizer.state_dict())
        if place.part + 1 == self.parts:
            collectives(place)

    @staticmethod
    def _step(weights: Any, optimizer: Any, number: int) -> None:
        draw = np.random.default_rng(100 * number + syncline.rank())
        found = {name: draw.normal(size=one.shape).astype(one.dtype) + 0.1 * one for name, one in weights.items()}
        for name in ("last", "middle"):
            optimizer.produced(name, found.pop(name))
        optimizer.step(found)


# JAX.


@dataclass(frozen=True)
class Jax:
    """A tree with a scalar, inside of ``jit``."""

    optimizer: str = "adam"
    steps: int = 5
    parts: int = 1

    def __call__(self, place: Place) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        import syncline.jax

        def loss(params: Any, x: Any, y: Any) -> Any:
            hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
            return (
                (jnp.tanh(hidden.astype("f4") @ params["middle"]) @ params["last"] * params["scale"] - y) ** 2
            ).mean()

        @jax.jit
        def step(params: Any, state: Any, x: Any, y: Any) -> Any:
            updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
            return optax.apply_updates(params, updates), state

        draw = np.random.default_rng(syncline.rank())
        shapes = {"first": {"w": (5, 67), "b": (67,)}, "middle": (67, 67), "last": (67, 1), "scale": ()}
        shape = {"is_leaf": lambda one: isinstance(one, tuple)}
        params = jax.tree.map(lambda one: jnp.asarray(draw.normal(size=one) / 8, "f4"), shapes, **shape)
        params["first"] = jax.tree.map(lambda one: one.astype("f8"), params["first"])
        made = {"adam": lambda: optax.adam(0.02), "momentum": lambda: optax.sgd(0.05, momentum=0.9)}[self.optimizer]()
        params = syncline.jax.broadcast(params)
        optimizer = syncline.jax.distributed(made)
        state = optimizer.init(params)
        if place.kept:
            params, state = syncline.jax.load_state_dict(place.kept["all"], params, state)

        def act(number: int) -> None:
            nonlocal params, state
            draw = np.random.default_rng(100 * number + syncline.rank())
            x = draw.normal(size=(4, 5))
            params, state = jax.block_until_ready(step(params, state, x, np.sin(x.sum(1, keepdims=True))))

        for number in range(self.steps):
            place.step(lambda number=number: act(number))
        place.note("weights", params)
        place.note("optimizer", jax.tree.leaves(state))
        place.note("brought together", syncline.jax.consolidate(params, state))
        if place.part + 1 < self.parts:
            place.kept["all"] = copy.deepcopy(syncline.jax.state_dict(params, state))


# TensorFlow.


@dataclass(frozen=True)
class Tensorflow:
    """A model of Keras with batch statistics: by ``fit``, or by a loop of one's own inside of ``tf.function``."""

    optimizer: str = "adam"
    steps: int = 5
    fit: bool = False
    parts: int = 1

    def __call__(self, place: Place) -> None:
        import keras
        import tensorflow as tf

        import syncline.tensorflow

        tf.config.threading.set_intra_op_parallelism_threads(1)
        keras.utils.set_random_seed(syncline.rank())
        layers: list[Any] = [keras.layers.Dense(67, activation="tanh"), keras.layers.Dense(1)]
        if not place.turns:
            layers.insert(1, keras.layers.BatchNormalization())
        model = keras.Sequential([keras.Input((5,)), *layers])
        made = {"adam": lambda: keras.optimizers.Adam(0.02), "momentum": lambda: keras.optimizers.SGD(0.05, 0.9)}
        optimizer = made[self.optimizer]()
        if self.fit:
            model.compile(optimizer, "mse")
            syncline.prepare(model)
        else:
            syncline.prepare(model, optimizer)
        if place.kept:
            syncline.tensorflow.load_state_dict(model, place.kept["all"])

        @tf.function
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            found = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

        def act(number: int) -> None:
            draw = np.random.default_rng(100 * number + syncline.rank())
            x = draw.normal(size=(4, 5)).astype("f4")
            y = np.sin(x.sum(1, keepdims=True))
            if self.fit:
                model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            else:
                step(tf.constant(x), tf.constant(y))

        for number in range(self.steps):
            place.step(lambda number=number: act(number))
        place.note("weights", model.get_weights())
        syncline.consolidate()
        place.note("brought together", model.get_weights())
        place.note("optimizer", [one.numpy() for one in optimizer.variables])
        if place.part + 1 < self.parts:
            place.kept["all"] = copy.deepcopy(syncline.tensorflow.state_dict(model))


FRAMEWORKS: dict[str, dict[str, Any]] = {
    "torch": {
        "plain": Torch(),
        "two types": Torch("adam", double=True),
        "accumulated": Torch(accumulate=3),
        "clipped": Torch("adamw", clip=0.3),
        "uneven": Torch(steps=3, uneven=True),
        "weighted": Torch("adam", samples=True, skips=True, options={"weight": "batch", "unused": "zeros"}),
        "prepared again": Torch("adam", again_after=3),
        "resumed": Torch("adamw", steps=3, parts=2),
        "long": Torch(steps=14),
        "in groups": Groups(),
    },
    "numpy": {"plain": Numpy(), "descent": Numpy(_descent), "resumed": Numpy(steps=3, parts=2)},
    "jax": {"plain": Jax(), "momentum": Jax("momentum"), "resumed": Jax(steps=3, parts=2)},
    "tensorflow": {
        "plain": Tensorflow(),
        "fit": Tensorflow("momentum", fit=True),
        "resumed": Tensorflow(steps=3, parts=2),
    },
    "distributed": {"ddp": Distributed("ddp"), "fsdp": Distributed("fsdp"), "hook": Distributed("hook")},
}
"""Every scenario by its framework and name; one with several ``parts`` takes as many sessions."""


def train(framework: str, scenario: str, place: Place, addresses: list[str]) -> Digests:
    """What a rank of a combination does, in all its sessions; a server has no digests."""
    training = FRAMEWORKS[framework][scenario]
    for place.part in range(training.parts):
        place.address = addresses[place.part]
        if framework == "distributed":
            training(place)
        else:
            with joined(place):
                training(place)
    return place.digests
