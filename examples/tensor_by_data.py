"""Data parallelism with tensor parallelism: each layer is split into two halves, and each half is on two workers.

    syncline run -n 4 examples/tensor_by_data.py
    syncline run -n 4 --strategy "ps(servers=2, on=workers)" examples/tensor_by_data.py
    torchrun --nproc-per-node 4 examples/tensor_by_data.py

Each worker is in two groups. In its tensor-parallel group are the two halves of a model, whose partial results are
summed during forward and backward. In its data-parallel group are the two workers with the same half and different
samples, which average their gradients. At the end the script compares the weights with those of one process that has
whole layers and all samples.

A block has two layers. The first is split by outputs and the second by inputs, so each pass through a block needs only
one allreduce (Shoeybi et al., "Megatron-LM", 2019).
"""

from typing import Any

import torch

import syncline

HALVES, REPLICAS = 2, 2
WIDTH, HIDDEN = 8, 32
STEPS, BATCH = 20, 32


class Copied(torch.autograd.Function):
    """Passes the input to all halves unchanged; backward sums the gradients of the halves (Megatron-LM's ``f``)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return syncline.allreduce(gradient.clone(), "sum", group=ctx.group), None


class Added(torch.autograd.Function):
    """Sums the outputs of all halves; backward passes the gradient to each half unchanged (Megatron-LM's ``g``)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:  # noqa: ARG004
        return syncline.allreduce(x.clone(), "sum", group=group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return gradient, None


class HalfBlock(torch.nn.Module):
    """One half of a block, or the whole block if ``whole`` is None."""

    def __init__(self, whole: "HalfBlock | None" = None, half: int = 0, group: Any = None) -> None:
        super().__init__()
        self.group = group
        hidden = HIDDEN if whole is None else HIDDEN // HALVES
        self.into = torch.nn.Linear(WIDTH, hidden, dtype=torch.float64)
        self.out = torch.nn.Linear(hidden, WIDTH, bias=False, dtype=torch.float64)
        if whole is not None:
            with torch.no_grad():
                for name, tensor in self.named_parameters():
                    tensor.copy_(part(name, whole.get_parameter(name), half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return x + self.out(torch.tanh(self.into(x)))
        return x + Added.apply(self.out(torch.tanh(self.into(Copied.apply(x, self.group)))), self.group)


def part(name: str, tensor: torch.Tensor, half: int) -> torch.Tensor:
    """A half's part of a block's parameter, split by outputs or by inputs."""
    return tensor.chunk(HALVES, dim=1 if name == "out.weight" else 0)[half]


def blocks() -> list[HalfBlock]:
    """Whole blocks, with the same initial weights on all ranks."""
    torch.manual_seed(0)
    return [HalfBlock(), HalfBlock()]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, share: slice) -> None:
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        (model(x[share]) - x[share].roll(1, dims=1)).square().mean().backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)
    syncline.init()
    replica, half = divmod(syncline.rank(), HALVES)
    # Creating a group is collective: all workers create all groups in the same order, and each uses its own.
    of_model = [syncline.new_group([HALVES * row + column for column in range(HALVES)]) for row in range(REPLICAS)]
    of_data = [syncline.new_group([HALVES * row + column for row in range(REPLICAS)]) for column in range(HALVES)]

    model = torch.nn.Sequential(*(HalfBlock(whole, half, of_model[replica]) for whole in blocks()))
    model, optimizer = syncline.prepare(model, sgd(model), group=of_data[half])
    train(model, optimizer, slice(replica, None, REPLICAS))

    alone = torch.nn.Sequential(*blocks())
    train(alone, sgd(alone), slice(None))
    differences = [
        float((tensor - part(name.partition(".")[2], alone.get_parameter(name), half)).detach().abs().max())
        for name, tensor in model.named_parameters()
    ]
    largest = max(map(float, syncline.gather(str(max(differences)).encode())))
    if syncline.rank() == 0:
        print(f"{syncline.stats(group=of_data[half]).strategy}: {HALVES} halves x {REPLICAS} replicas")
        print(f"largest difference from one process: {largest:.1e}")


if __name__ == "__main__":
    main()
