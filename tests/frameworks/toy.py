"""What the tests of the PyTorch adapter share: a small model and data, and one body run alone or on a group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from host_copier import HostCopier
from syncline.frameworks.torch import Options, prepare
from syncline.frameworks.torch.passes import TrainedReplica
from syncline.frameworks.torch.prepare import shadow_until_all_joined
from syncline.frameworks.torch.served import Client
from syncline.session.session import Session

STAGED = " staged"
"""After a strategy: the model lives on a device, for which the CPU stands in, and is copied to and fro."""
REPLICAS = ["direct", "ps(servers=2, update=worker)", "ring schedule=wait_free" + STAGED]
SERVED = ["ps(servers=2, on=workers)", "ps(servers=2) schedule=wait_free", "ps(servers=1)" + STAGED]
STRATEGIES = REPLICAS + SERVED
"""Each way in which an adapter can work, once; ``test_matrix`` combines more of them with rules and codecs.

Where two values take turns beside them, replicas, servers and staged models get both.
"""

Make = Callable[[int], tuple[torch.nn.Module, torch.optim.Optimizer]]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02, amsgrad=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


@dataclass
class Here:
    """What a body gets: the model on one worker, or alone (``replica`` is None)."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rank: int = 0
    world: int = 1
    session: Session | None = None
    replica: TrainedReplica | None = None
    client: Client | None = None

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.replica is None else self.replica.no_sync()

    def share(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part of a batch."""
        return x[len(x) * self.rank // self.world : len(x) * (self.rank + 1) // self.world]


def fill(model: torch.nn.Module, seed: int = 3) -> torch.nn.Module:
    """Fixed values, not from torch's own generator, which the ranks of a test share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 4)
    return model


def mlp(seed: int = 3) -> torch.nn.Module:
    """4 inputs, 3 outputs, float64."""
    return fill(
        torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double(),
        seed,
    )


def sgd(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(index: int = 0) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
    model = mlp()
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def making(optimizer: str) -> Make:
    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        model = mlp()
        return model, OPTIMIZERS[optimizer](model.parameters())

    return make


def batch(step: int, size: int = 12, width: int = 4) -> torch.Tensor:
    return torch.randn(size, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over samples."""
    return (output.square().sum(1) + output[:, 0]).mean()


def train(here: Here, steps: range) -> None:
    """Plain training, on this rank's share of every batch."""
    for step in steps:
        here.optimizer.zero_grad()
        loss_of(here.model(here.share(batch(step)))).backward()
        here.optimizer.step()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float = 1e-9) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).double().norm() <= tolerance * tensor.double().norm(), name


def same_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Two optimizers' state_dicts agree: groups exactly, tensors within 1e-9."""
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            other = found["state"][index][key]
            assert type(other) is type(value)
            if isinstance(value, torch.Tensor):
                assert other.shape == value.shape
                assert other.dtype == value.dtype
                assert (other - value).norm() <= 1e-9 * value.norm()
            else:
                assert other == value


def alone(make: Make, body: Callable[[Here], Any]) -> Any:
    """The body on one worker without Syncline."""
    return body(Here(*make(0)))


def on_group(
    group: Any,
    strategy: str,
    workers: int,
    make: Make,
    body: Callable[[Here], Any],
    nodes: tuple[int, ...] = (),
    **options: Any,
) -> Any:
    """The body on every worker of a group, which are on the hosts ``nodes``; results in rank order.

    Ranks count by their batches unless ``options`` say otherwise: most laws are about the union of batches.
    """
    options.setdefault("weight", "batch")
    staged = strategy.endswith(STAGED)

    def run(session: Session) -> Any:
        copier = HostCopier() if staged and session.is_worker else None
        made = prepare(session, *make(session.index), Options(**options), copier=copier)
        if made is None:
            return None
        here = Here(made.model, made.optimizer, session.rank, session.world_size, session, made.replica, made.client)
        try:
            return body(here)
        finally:
            made.replica.detach()

    return group(strategy.removesuffix(STAGED), workers, run, nodes)[:workers]


def same_as_alone(
    group: Any, strategy: str, workers: int, make: Make, body: Callable[[Here], dict[str, torch.Tensor]], **options: Any
) -> None:
    """Every worker ends with what one worker gets from the union of the batches."""
    wanted = alone(make, body)
    for found in on_group(group, strategy, workers, make, body, **options):
        close(found, wanted)


def uneven_epochs_as_alone(group: Any, strategy: str, counts: list[int], check: Callable[[Here], object]) -> None:
    """Two epochs in which ranks have as many batches as ``counts`` says are one worker's, of those that are there.

    ``check`` looks at every rank at the end.
    """

    def part(step: int, rank: int) -> torch.Tensor:
        return batch(100 * step + rank, 4)

    def body(here: Here) -> dict[str, torch.Tensor]:
        assert here.replica is not None
        for epoch in (0, 100):
            for step in range(epoch, epoch + counts[here.rank]):
                here.optimizer.zero_grad()
                loss_of(here.model(part(step, here.rank))).backward()
                here.optimizer.step()
            shadow_until_all_joined(here.replica, here.client)
        check(here)
        return weights(here.model)

    def union(here: Here) -> dict[str, torch.Tensor]:
        for epoch in (0, 100):
            for step in range(epoch, epoch + max(counts)):
                here.optimizer.zero_grad()
                parts = [part(step, rank) for rank, count in enumerate(counts) if step - epoch < count]
                loss_of(here.model(torch.cat(parts))).backward()
                here.optimizer.step()
        return weights(here.model)

    wanted = alone(sgd, union)
    for found in on_group(group, strategy, len(counts), sgd, body):
        close(found, wanted)
