"""One iteration of each form, as in training but without the computation: gradients, exchange, ``grad``.

All forms of a rank share one session, so exchanges run the same plan over the same transport, and one set of gradients.
Forms that copy have their block in the transport's memory, like Syncline's own buckets. ``contiguous`` and
``accumulated`` are models from ``syncline.prepare``, including hooks, tickets and checks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors  # as frameworks on torch call them

from syncline.engine.order import Order
from syncline.frameworks.torch import prepare
from syncline.session.session import Session

from ..collectives.kinds import Collective, collective
from ..report.bench import BARE, CONTIGUOUS

Shapes = Sequence[Sequence[int]]


class Scattered(nn.Module):
    """A network whose backward pass returns finished gradients, so that moves are measured without any computation.

    It has a parameter for each of ``gradients``, with the memory of ``weights``; ``forward`` has no arguments. Autograd
    treats the gradients as in any network. Nothing else holds such a tensor, so a parameter without a gradient takes it
    over, and a parameter with a gradient adds it. Its memory is the same in every pass, as under a caching allocator.
    """

    def __init__(self, gradients: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self._gradients = tuple(gradients)
        for number, weight in enumerate(weights):
            self.register_parameter(f"tensor{number}", nn.Parameter(weight))

    def forward(self) -> Tensor:
        """A scalar. Its backward pass gives every parameter its gradient, from the last parameter to the first."""
        signal = torch.zeros((), requires_grad=True)
        for gradient, parameter in zip(self._gradients, self.parameters(), strict=True):
            signal = _Layer.apply(gradient, signal, parameter)  # type: ignore[no-untyped-call]
        return signal


class _Layer(torch.autograd.Function):
    """The identity on the signal; the parameter is an argument so that it gets a gradient."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, signal: Tensor, parameter: Tensor) -> Tensor:  # noqa: ARG004
        ctx.gradient = gradient
        return signal.view_as(signal)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (signal,) = gradients
        return None, signal, ctx.gradient.detach()


class Ground:
    """The state that a rank's forms share: session, gradients as backward leaves them, and the block for copies."""

    def __init__(self, session: Session, shapes: Shapes) -> None:
        self.session = session
        self.ranks, self.share = session.world_size, 1.0 / session.world_size
        self.gradients = [torch.zeros(tuple(shape)) for shape in shapes]
        self.weights = [torch.zeros(tuple(shape)) for shape in shapes]
        self.nbytes = sum(gradient.nbytes for gradient in self.gradients)
        self.array = session.engine.allocate(self.nbytes, np.dtype(np.float32))
        self.block = torch.from_numpy(self.array)
        self.plain = self.model()
        self.key = session.enter_model(self.plain)
        self.checking = False
        self._kind: Collective = collective("allreduce")
        self._versions = [0] * len(self.gradients)

    def model(self) -> Scattered:
        """A new model with these gradients. All models share the weights, which no form reads."""
        return Scattered(self.gradients, self.weights)

    def fill(self, seed: int) -> None:
        """Write gradients that differ by element, rank and seed, with exact sums, and overwrite the block.

        The next iteration is checked.
        """
        self.checking = True
        self.block.fill_(-1.0)
        for number, gradient in enumerate(self.gradients):
            self._kind.fill(gradient.view(-1).numpy(), self.session.rank, self.ranks, seed + number)
        self._versions = [gradient._version for gradient in self.gradients]

    def fill_alike(self) -> None:
        """Write gradients as backward does. The next iteration is timed and not checked."""
        self.checking = False
        for gradient in self.gradients:
            gradient.fill_(1.0)

    def is_sum(self, array: np.ndarray[Any, np.dtype[np.float32]], seed: int) -> bool:
        """Whether an array is the sum of the values that all ranks wrote with this seed."""
        return self._kind.is_right(array, self.session.rank, self.ranks, seed)

    def has_means(self, model: Scattered, seed: int) -> bool:
        """Whether every ``grad`` of a model is the mean of the values that ``fill`` wrote on all ranks."""
        return self.are_means([parameter.grad for parameter in model.parameters()], seed)

    def are_means(self, tensors: Sequence[Tensor | None], seed: int) -> bool:
        """Whether the tensors are the means of the values that ``fill`` wrote, in its order."""
        return all(
            tensor is not None and self.is_sum(self._summed(tensor), seed + number)
            for number, tensor in enumerate(tensors)
        )

    def written_back(self) -> bool:
        """Whether torch has written into every gradient since ``fill``; backward does not."""
        return all(gradient._version > before for gradient, before in zip(self.gradients, self._versions, strict=True))

    def fill_block(self, seed: int) -> None:
        """Write the block as one array with exact sums."""
        self._kind.fill(self.array, self.session.rank, self.ranks, seed)

    def exchange(self, array: np.ndarray[Any, np.dtype[np.float32]], number: int = 0) -> None:
        """Sum an array over the ranks in place, as a bucket is summed."""
        program = self.session.bucket_program(array.nbytes)
        self.session.engine.run(Order(program, array, self.key + number, "gradients"))

    def _summed(self, mean: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        found = mean.reshape(-1).numpy() * np.float32(self.ranks)
        # A share that is not a power of two rounds the mean; sums are integers, far from any rounding error.
        return found if self.ranks & (self.ranks - 1) == 0 else np.rint(found)


class Iteration(ABC):
    """One form's iteration: all ranks call ``ready``, then the timed ``run``."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.exchanged_bytes = ground.nbytes
        """The size of all exchanged data of the form."""

    def ready(self) -> None:  # noqa: B027 - most need nothing
        """Prepare the form's inputs, which by default are where backward leaves them; not timed."""

    @abstractmethod
    def run(self) -> None:
        """From ``zero_grad`` until the mean is in the form's place."""

    @abstractmethod
    def is_right(self, seed: int) -> bool:
        """Whether every element was moved and is the ranks' mean of what ``Ground.fill`` wrote with that seed.

        A single rank's mean equals the gradient from backward: only the places and the block show whether anything was
        moved.
        """


class _Bare(Iteration):
    """Backward, and the exchange of a block that is not filled from gradients."""

    def ready(self) -> None:
        self._ground.fill_block(0)

    def run(self) -> None:
        self._ground.plain.zero_grad()
        self._ground.plain().backward()
        self._ground.exchange(self._ground.array)

    def is_right(self, seed: int) -> bool:  # noqa: ARG002 - the block was filled by ``ready``
        return self._ground.is_sum(self._ground.array, 0)


class _Prepared(Iteration):
    """A model from ``syncline.prepare``. With ``keep``, gradients are zeroed in place instead of dropped."""

    def __init__(self, ground: Ground, *, keep: bool) -> None:
        super().__init__(ground)
        self._keep, self._model = keep, ground.model()
        made = prepare(ground.session, self._model)
        assert made is not None  # only servers get None
        self._storage = made.replica.storage
        self.exchanged_bytes = sum(array.nbytes for array in self._storage.arrays)

    def run(self) -> None:
        self._model.zero_grad(set_to_none=not self._keep)
        self._model().backward()

    def is_right(self, seed: int) -> bool:
        return _lie_at(self._model, self._storage.places) and self._ground.has_means(self._model, seed)


class _Copied(Iteration):
    """Backward, copies into one block, the exchange, copies back. With ``stays`` the block's parts become ``grad``."""

    def __init__(
        self, ground: Ground, together: Callable[[_Copied, list[Tensor]], Tensor], *, stays: bool = False
    ) -> None:
        super().__init__(ground)
        self._together, self._stays = together, stays
        self.block, self.share = ground.block, ground.share
        sizes = [gradient.numel() for gradient in ground.gradients]
        parts = zip(torch.split(ground.block, sizes), ground.gradients, strict=True)
        self.views = [part.view(gradient.shape) for part, gradient in parts]
        self._copies: Sequence[Tensor] = ()

    def run(self) -> None:
        gradients = _backward(self._ground.plain)
        flat = self._together(self, gradients)
        self._ground.exchange(flat.numpy())
        if self._stays:
            for parameter, view in zip(self._ground.plain.parameters(), self.views, strict=True):
                parameter.grad = view
            return
        parts = self.views if flat is self.block else _unflatten_dense_tensors(flat, gradients)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(gradients, parts)
        self._copies = (
            parts if self._ground.checking else ()
        )  # kept only for a check: a live block would force the next one elsewhere

    def is_right(self, seed: int) -> bool:
        ground = self._ground
        if self._stays:
            moved = _lie_at(ground.plain, [view.data_ptr() for view in self.views])
        else:
            count = len(ground.gradients)
            moved = len(self._copies) == count and ground.are_means(self._copies, seed) and ground.written_back()
            self._copies = ()
        return moved and ground.has_means(ground.plain, seed)

    def divided(self, flat: Tensor) -> Tensor:
        """Divide the block by the number of ranks, in a pass of its own."""
        return flat if self.share == 1.0 else flat.mul_(self.share)


def _mul(copied: _Copied, gradients: list[Tensor]) -> Tensor:
    for view, gradient in zip(copied.views, gradients, strict=True):
        torch.mul(gradient, copied.share, out=view)
    return copied.block


def _foreach(copied: _Copied, gradients: list[Tensor]) -> Tensor:
    torch._foreach_copy_(copied.views, gradients)
    return copied.divided(copied.block)


def _cat(copied: _Copied, gradients: list[Tensor]) -> Tensor:
    torch.cat([gradient.view(-1) for gradient in gradients], out=copied.block)
    return copied.divided(copied.block)


def _flatten(copied: _Copied, gradients: list[Tensor]) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
    return copied.divided(flat)


class _Layerwise(Iteration):
    """Backward, then an exchange of every gradient where it lies; ``waits`` for each before the next."""

    def __init__(self, ground: Ground, *, waits: bool) -> None:
        super().__init__(ground)
        self._waits = waits

    def run(self) -> None:
        ground, engine = self._ground, self._ground.session.engine
        gradients = _backward(ground.plain)
        if ground.share != 1.0:
            torch._foreach_mul_(gradients, ground.share)
        arrays = [gradient.view(-1).numpy() for gradient in gradients]
        if self._waits:
            for number, array in enumerate(arrays):
                ground.exchange(array, number)
            return
        program = ground.session.bucket_program
        works = [
            engine.start(Order(program(array.nbytes), array, ground.key + number, f"gradient {number}"))
            for number, array in enumerate(arrays)
        ]
        engine.wait(*works)

    def is_right(self, seed: int) -> bool:
        return self._ground.has_means(self._ground.plain, seed)


def _lie_at(model: Scattered, places: Sequence[int]) -> bool:
    """Whether every ``grad`` of a model lies at its address in ``places``."""
    found = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
    return found == list(places)


def _backward(model: Scattered) -> list[Tensor]:
    """Run a backward pass of a plain model, and return its gradients where they lie."""
    model.zero_grad()
    model().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


_MAKERS: dict[str, Callable[[Ground], Iteration]] = {
    BARE: _Bare,
    CONTIGUOUS: lambda ground: _Prepared(ground, keep=False),
    "placed": lambda ground: _Copied(ground, _mul, stays=True),
    "accumulated": lambda ground: _Prepared(ground, keep=True),
    "copied:mul": lambda ground: _Copied(ground, _mul),
    "copied:foreach": lambda ground: _Copied(ground, _foreach),
    "copied:cat": lambda ground: _Copied(ground, _cat),
    "copied:flatten": lambda ground: _Copied(ground, _flatten),
    "layerwise:all": lambda ground: _Layerwise(ground, waits=False),
    "layerwise:one": lambda ground: _Layerwise(ground, waits=True),
}


def iteration_of(name: str, ground: Ground) -> Iteration:
    """The iteration of a form. All ranks make the same iterations in the same order."""
    return _MAKERS[name](ground)
