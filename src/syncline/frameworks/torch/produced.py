"""Which gradients of a backward pass have come, where they are put, and what none of them may be, have or do.

Owns what is remembered of them during one pass, how they get into their places in buckets, and the errors that name
them. Does not know when they are sent.

A gradient is moved into its place in a contiguous bucket, divided on the way by the number of ranks unless each rank's
is an update by itself, and ``param.grad`` becomes a view of it: after ``zero_grad(set_to_none=True)`` that is the only
copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from ...errors import GradientError
from .local import LocalSteps
from .storage import Storage

_NAMED = 8
"""So many names of parameters are in an error."""


class Produced:
    """The gradients of one pass of a model's parameters, which are ``named``."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        storage: Storage,
        fault: Callable[[str], GradientError],
    ) -> None:
        self._named, self._fault = named, fault
        self.storage = storage
        """Where they are put, from one pass to the next."""
        self._versions = [(0, 0)] * len(named)  # of parameters and gradients, as they were sent
        self.forget()

    def forget(self) -> None:
        """The pass is over."""
        self._came = [False] * len(self._named)

    @property
    def any(self) -> bool:
        """Whether one has come."""
        return True in self._came

    def place(self, index: int, parameter: torch.Tensor, share: float, local: LocalSteps | None) -> None:
        """Put ``share`` of a gradient where it belongs in its bucket; ``local`` keeps it as it was."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.requires_grad:
            self._refuse(index, gradient)
        storage = self.storage
        moves = gradient.data_ptr() != storage.places[index]
        if local is not None:
            local.keep(index, gradient, copy=not moves)
        if moves:
            view = storage.fresh(index)
            torch.mul(gradient, share, out=view)
            parameter.grad = view
        elif share != 1.0:
            gradient.mul_(share)

    def fill(self, index: int, share: float, local: LocalSteps | None) -> None:
        """Take a gradient that has not come for zeros, or for what was accumulated before, which still counts."""
        parameter = self._named[index][1]
        if parameter.grad is None:
            parameter.grad = self.storage.fresh(index).zero_()
        else:
            self.place(index, parameter, share, local)

    def came(self, index: int, parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
        """A gradient lies in its bucket; whether it is the first of that parameter in the pass."""
        self._versions[index] = parameter._version, gradient._version
        if self._came[index]:
            return False
        self._came[index] = True
        return True

    def share_out(self, share: float) -> None:
        """Multiply all that have come."""
        for came, view in zip(self._came, self.storage.views, strict=True):
            if came:
                view.mul_(share)

    def check_first(self, index: int) -> None:
        """Raise GradientError for a gradient that comes a second time when the first has been sent."""
        if self._came[index]:
            raise self._fault(
                f"the gradient of {self._named[index][0]!r} was produced again after it had been sent: this backward"
                " pass has re-entrant checkpoints, the first one had none; use use_reentrant=False, or checkpoint from"
                " the first step on"
            )

    def check_untouched(self) -> None:
        """Raise GradientError where a parameter or its gradient was changed after the gradient had come."""
        places = self.storage.places
        for index, (name, parameter) in enumerate(self._named):
            gradient = parameter.grad
            if self._came[index] and (
                gradient is None
                or gradient.data_ptr() != places[index]
                or (parameter._version, gradient._version) != self._versions[index]
            ):
                raise self._fault(
                    f"{name!r} or its gradient was changed during backward, when the gradient had been sent: change"
                    " gradients and make optimizer steps after backward(), not in post-accumulate hooks"
                    " (Tensor.register_hook is called in time)"
                )

    def _refuse(self, index: int, gradient: torch.Tensor) -> NoReturn:
        """Raise GradientError for one that is sparse, or that can itself be differentiated."""
        name = self._named[index][0]
        if gradient.is_sparse:
            raise self._fault(f"the gradient of {name!r} is sparse, which cannot be exchanged: use sparse=False")
        raise self._fault(
            f"the gradient of {name!r} can itself be differentiated (create_graph=True), which an exchange would"
            " lose: use torch.autograd.grad() for inner derivatives and a plain backward() for the last one"
        )

    def refuse_missing(self, missing: Sequence[int]) -> NoReturn:
        """Raise GradientError for those that have not come."""
        names = ", ".join(repr(self._named[index][0]) for index in missing[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise self._fault(
            f"{len(missing)} parameters got no gradient in this backward pass: {names}{more}. If that is meant,"
            ' pass unused="zeros" to syncline.prepare(), or freeze them before it'
        )
