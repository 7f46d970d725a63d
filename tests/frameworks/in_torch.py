"""The toy problem in PyTorch: on the CPU, or staged, as if that were a device."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from matrix import PART, SQUARES, TINY, Arrays, Run, rate, start

from host_copier import HostCopier
from syncline import checkpoint
from syncline.frameworks.torch import Options, Prepared, prepare
from syncline.session.session import Session

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=PART),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1, betas=(PART, SQUARES), eps=TINY),
}


class Model(torch.nn.Module):
    def __init__(self, arrays: Arrays) -> None:
        super().__init__()
        for name, array in arrays.items():
            self.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array)))

    def forward(self, pushed: Arrays, pull: float) -> torch.Tensor:
        losses = []
        for name, weights in self.named_parameters():
            told = torch.from_numpy(pushed[name]).to(weights.dtype)
            losses.append((weights * told).sum() + pull / 2 * weights.square().sum())
        return torch.stack(losses).sum()


class Trainer:
    def __init__(self, session: Session, rule: str, made: Prepared | None, model: Model, optimizer: Any) -> None:
        self.rank, self._session, self._rule, self._made = session.rank, session, rule, made
        self._model, self._optimizer = model, optimizer

    def step(self, number: int, pushed: Arrays, pull: float) -> None:
        self._optimizer.param_groups[0]["lr"] = rate(self._rule, number)
        self._optimizer.zero_grad()
        self._model(pushed, pull).backward()
        self._optimizer.step()

    def weights(self) -> Arrays:
        return {name: weights.detach().numpy().copy() for name, weights in self._model.named_parameters()}

    def consolidate(self) -> None:
        if self._made is not None:
            self._made.consolidate()

    def state(self) -> bytes:
        file = io.BytesIO()
        state = checkpoint.save(self._session, self._prepared)
        torch.save([self._model.state_dict(), self._optimizer.state_dict(), state], file)
        return file.getvalue()

    def load(self, states: Sequence[bytes]) -> None:
        """The model is rank 0's, as most scripts have it."""
        read = [torch.load(io.BytesIO(state), weights_only=True) for state in states]
        _, optimizer, state = read[self.rank if len(states) == self._session.world_size else 0]
        self._model.load_state_dict(read[0][0])
        self._optimizer.load_state_dict(optimizer)
        checkpoint.load(self._session, self._prepared, state)

    @property
    def _prepared(self) -> list[Prepared]:
        return [] if self._made is None else [self._made]

    def close(self) -> None:
        if self._made is not None:
            self._made.replica.detach()


def begin(session: Session, run: Run, staged: bool = False) -> Trainer | None:
    """From weights that are rank 0's, whatever this one's were; the first are not contiguous."""
    arrays = {name: array.astype(run.dtype) for name, array in start(session.index).items()}
    arrays["first"] = np.asfortranarray(arrays["first"])
    model = Model(arrays)
    optimizer = OPTIMIZERS[run.rule](model.parameters())
    if session.alone:
        return Trainer(session, run.rule, None, model, optimizer)
    copier = HostCopier() if staged and session.is_worker else None
    made = prepare(session, model, optimizer, Options(weight=1), copier=copier)
    return None if made is None else Trainer(session, run.rule, made, model, optimizer)
