"""PyTorch: the workload's own model, optimizer and learning-rate schedule, as in a user's loop."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from syncline.registry import register
from syncline.strategy.strategy import Strategy

from ..batches import Batch
from ..messages import Job
from ..sides import Side
from ..workloads import Part, Workload
from . import KEEPS_FREED_MEMORY

if TYPE_CHECKING:
    from torch import Tensor, nn


@register("frameworks", "torch", needs=("torch",), install="syncline[torch]", environ=KEEPS_FREED_MEMORY)
class TorchTraining:
    """A module under autograd: forward, ``loss.backward()``, ``optimizer.step()`` and ``zero_grad()``."""

    fused = False

    def __init__(self, workload: Workload, job: Job, process: int) -> None:
        self._workload, self._job, self._process = workload, job, process
        self.model: Any = self._build()
        self._bare: nn.Module = self.model
        self._optimizer: Any = workload.optimizer(self._bare)
        self._spare: nn.Module | None = None
        self._scheduler: Any = None
        self._scheduled = 0

    @staticmethod
    def loaded() -> str:
        """Limits each process to one thread, so that rows differ only in their number of processes."""
        import torch

        torch.set_num_threads(1)
        return str(torch.__version__)

    @staticmethod
    def lacks(workload: Workload) -> str:  # noqa: ARG004
        """Nothing: every workload has a model for PyTorch."""
        return ""

    @staticmethod
    def check(strategy: Strategy) -> None:
        """The adapter accepts every strategy."""

    def prepare(self, side: Side, weight: Any) -> None:
        """Replicas start equal. Random numbers during training (dropout) differ, as in one large batch."""
        import torch

        self.model, self._optimizer = side.prepare(self._bare, self._optimizer, weight=weight)
        torch.manual_seed(self._job.seed * 65_537 + side.rank())
        self._scheduler = self._workload.schedule(self._optimizer, self._job.iterations)
        self.model.train()

    def taken(self, part: Part) -> tuple[Any, Any]:
        """Tensors in the memory of the arrays, in the model's layout."""
        import torch

        inputs, labels = map(torch.from_numpy, part)
        return self._workload.computing.laid_out(inputs), labels

    def moved(self, batch: Batch) -> Batch:
        move = self._workload.computing.moved
        return batch._replace(inputs=move(batch.inputs), target=move(batch.target))

    def now(self) -> float:
        return self._workload.computing.now()

    def forward(self, batch: Batch) -> None:
        self._loss = self._workload.loss(self.model(batch.inputs), batch.target)

    def backward(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]

    def update(self, position: int) -> float:
        """The schedule advances to the run's position, which other workers may have advanced by several steps."""
        self._optimizer.step()
        while self._scheduler is not None and self._scheduled < position:
            self._scheduler.step()
            self._scheduled += 1
        self._optimizer.zero_grad()
        return float(self._loss.detach())

    def pause(self) -> None:
        self.model.eval()

    def resume(self) -> None:
        self.model.train()

    def consolidate(self, side: Side) -> None:
        side.consolidate()

    def copied(self) -> Mapping[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._bare.state_dict().items()}

    def evaluate(self, weights: Mapping[str, Any] | None = None) -> tuple[float, float]:
        """Weights from ``copied`` are loaded into a second model."""
        model = self._bare
        if weights is not None:
            model = self._spare = self._spare or self._build()
            model.load_state_dict(weights)
        found = self._workload.evaluate(model)
        assert found is not None
        return found

    def digest(self) -> str:
        """The digest of the model without a wrapper of the side."""
        return digest(self._bare)

    def _build(self) -> nn.Module:
        made = self._workload.model(self._job.seed, self._process)
        return self._workload.computing.placed(made, self._process)


def digest(model: nn.Module) -> str:
    """The SHA-256 of all parameters and buffers, names, types and bytes, in the order of their names."""
    import torch

    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
