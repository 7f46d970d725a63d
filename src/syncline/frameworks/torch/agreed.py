"""What of a model's weights workers exchange that train by themselves, and what becomes of the weights by it.

``Differences`` from the weights that all have agreed on last are averaged over all workers, and all compute the next
agreed ones from their mean, as the sync mode has it. A ``Mixture`` are the weights themselves, which a worker averages
with some others'. Both lie in the last storage of the model's buckets; what they keep beside is laid out alike. Neither
knows when anything is exchanged, nor how it travels.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from ...plans.check import check_mixing
from ...plans.messages import Program
from ...session.communicator import compiled
from ...session.session import Session
from ...sync import Agrees, Mixes, mixes_of
from ...sync._periodic import BLOCK_ELEMENTS, agree_in_blocks
from .storage import Storage, as_bytes

Tensors = dict[str, torch.Tensor]


class Mix(NamedTuple):
    """This rank's part in a plan that adds some workers' arrays, and how many it adds up."""

    program: Program
    parts: int


class Exchanged(Protocol):
    """What of a model's weights is exchanged."""

    @property
    def alike(self) -> bool:
        """Whether all workers count alike, whatever they have seen."""
        ...

    def mix(self, step: int) -> Mix | None:
        """What mixes arrays after a step; None where all are averaged by the strategy's architecture."""
        ...

    @property
    def fingerprint(self) -> int:
        """What has to be the same on all workers for an exchange to make sense."""
        ...

    def put(self, share: float) -> None:
        """Put ``share`` of it into the buckets."""
        ...

    def take(self, step: int) -> None:
        """The exchange after a step has come: give the weights what follows from it."""
        ...

    def put_own(self, share: float) -> bool:
        """Put ``share`` of what the workers' sum makes the final weights; False where no sum is needed for them."""
        ...

    def give_agreed(self) -> None:
        """Let the weights be those that all have agreed on, if there are any."""
        ...

    def take_final(self) -> None:
        """The sum has come, where one is needed: let the weights be the final ones."""
        ...

    def anew(self) -> None:
        """The script has loaded weights."""
        ...

    @property
    def all_agree(self) -> bool:
        """Whether this worker has the very weights that all have agreed on."""
        ...

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """What all workers have alike and a resumed run has to know, by parameter."""
        ...

    def load(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Take it up; all workers call it with the same."""
        ...

    def forget(self) -> None:
        """Remember nothing of the steps before."""
        ...


class Differences:
    """By how much the weights of a model differ from those that all workers have agreed on last."""

    def __init__(self, storage: Storage, parameters: Sequence[torch.Tensor], workers: int, mode: Agrees) -> None:
        self._mode, self._storage, self._parameters = mode, storage, parameters
        self._pull = mode.pull(workers)
        self._agreed = self._like_weights()
        self._memory = self._like_weights() if mode.remembers else {}
        self._views = self._views_in(self._agreed)
        self._memory_views = self._views_in(self._memory)
        self._mark: int | None = 0  # None where it has to be computed: this rank alone says what was agreed on
        self._copy_own()

    def _like_weights(self) -> Tensors:
        return {dtype: torch.zeros_like(flat) for dtype, flat in self._storage.resident.items()}

    def _views_in(self, blocks: Tensors) -> list[torch.Tensor]:
        tensors = range(len(self._parameters) if blocks else 0)
        return [self._storage.view_in(blocks, tensor) for tensor in tensors]

    def _copy_own(self) -> None:
        with torch.no_grad():
            for agreed, parameter in zip(self._views, self._parameters, strict=True):
                agreed.copy_(parameter)

    alike = False

    def mix(self, step: int) -> None:
        """All are averaged."""

    @property
    def all_agree(self) -> bool:
        """True in the beginning, and after an exchange, unless there is a centre."""
        return all(map(torch.equal, self._views, self._parameters))

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """The agreed weights, and what the mode remembers."""
        found = {"agreed": [view.cpu().clone() for view in self._views]}
        if self._memory:
            found["memory"] = [view.cpu().clone() for view in self._memory_views]
        return found

    def load(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Which the next exchange compares."""
        for mine, what in ((self._views, "agreed"), (self._memory_views, "memory")):
            for view, value in zip(mine, saved[what] if mine else (), strict=True):
                view.copy_(value)
        self._mark = None

    def anew(self) -> None:
        """What was loaded counts as agreed on: all ranks have to load the same, which the next exchange checks."""
        self._copy_own()
        self._mark = None

    def forget(self) -> None:
        """What this worker has counts as agreed on, and nothing is remembered."""
        for flat in self._memory.values():
            flat.zero_()
        self.anew()

    @property
    def fingerprint(self) -> int:
        """Of the agreed weights, where no exchange has made them."""
        if self._mark is None:
            self._mark = 0
            for flat in (*self._agreed.values(), *self._memory.values()):
                self._mark = zlib.crc32(as_bytes(flat).cpu().numpy(), self._mark)
        return self._mark

    def put(self, share: float) -> None:
        """And give up what the mode says of it."""
        self._differ()
        with torch.no_grad():
            if self._pull < 1:
                for parameter, view in zip(self._parameters, self._storage.views, strict=True):
                    parameter.sub_(view, alpha=self._pull)
            for flat in self._storage.resident.values():
                flat.mul_(share)

    def _differ(self) -> None:
        with torch.no_grad():
            for parameter, agreed, view in zip(self._parameters, self._views, self._storage.views, strict=True):
                torch.sub(parameter, agreed, out=view)

    def take(self, step: int) -> None:  # noqa: ARG002
        """Agree on what follows from the mean difference, and go on from there."""
        with torch.no_grad():
            for dtype, mean in self._storage.resident.items():
                block = BLOCK_ELEMENTS if mean.is_cpu else max(1, mean.numel())
                agree_in_blocks(self._mode, self._agreed[dtype], mean, self._memory.get(dtype), block)
        self._mark = 0
        if self._pull == 1:
            self._give(self._views)

    def give_agreed(self) -> None:
        """As they are."""
        self._give(self._views)

    def _give(self, values: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters, values, strict=True):
                parameter.copy_(value)

    def put_own(self, share: float) -> bool:
        """The difference again; a centre is what it is."""
        if self._pull < 1:
            return False
        self._differ()
        for flat in self._storage.resident.values():
            weigh(flat, share)
        return True

    def take_final(self) -> None:
        """The mean of all weights, or the centre."""
        if self._pull < 1:
            self._give(self._views)
            return
        with torch.no_grad():
            for dtype, mean in self._storage.resident.items():
                mean.add_(self._agreed[dtype])
        self._give(self._storage.views)


class Mixture:
    """A model's weights, which each worker averages with those of some others; raises PlanError for a mode's plans."""

    alike = True
    fingerprint = 0
    all_agree = False

    def __init__(self, storage: Storage, parameters: Sequence[torch.Tensor], session: Session, mode: Mixes) -> None:
        self._mode, self._session, self._storage, self._parameters = mode, session, storage, parameters
        check_mixing(mixes_of(mode, session.world_size))

    def mix(self, step: int) -> Mix:
        """As the mode has it."""
        plan = self._mode.mix(self._session.world_size, step)
        return Mix(compiled(plan, self._session.rank), len(plan.sums[self._session.rank]))

    def put(self, share: float) -> None:  # noqa: ARG002
        """All of them: what is added up is divided afterwards."""
        self._put()

    def _put(self) -> None:
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._storage.views, strict=True):
                view.copy_(parameter)

    def take(self, step: int) -> None:
        """The mean of the sum."""
        parts = self.mix(step).parts
        with torch.no_grad():
            for flat in self._storage.resident.values():
                flat.div_(parts)
        self.take_final()

    def put_own(self, share: float) -> bool:
        """A share of all workers' mean."""
        self._put()
        for flat in self._storage.resident.values():
            weigh(flat, share)
        return True

    def take_final(self) -> None:
        """What has come."""
        with torch.no_grad():
            for parameter, value in zip(self._parameters, self._storage.views, strict=True):
                parameter.copy_(value)

    def anew(self) -> None:
        """Weights are what they are."""

    def saved(self) -> dict[str, list[torch.Tensor]]:
        """Nothing that all have alike."""
        return {}

    def load(self, saved: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Nothing."""

    def forget(self) -> None:
        """There is nothing."""

    def give_agreed(self) -> None:
        """There are none."""


def weigh(flat: torch.Tensor, share: float) -> None:
    """A tensor times its worker's share; without one it is 0, whatever it was: NaN, where a worker had no samples."""
    with torch.no_grad():
        flat.mul_(share) if share > 0 else flat.zero_()
