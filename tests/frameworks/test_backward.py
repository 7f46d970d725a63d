"""A backward pass ends once, after those inside it; one that ended with an exception is noticed."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.frameworks.torch.passes import Backward


class Log:
    """The passes of a linear layer whose gradients are watched; ``events`` has every gradient and every end."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.layer = torch.nn.Linear(3, 3)
        self.backward = Backward(self._ended, lambda: self.events.append("given up"))
        self.breaks = False
        for parameter in self.layer.parameters():
            parameter.register_post_accumulate_grad_hook(self._gradient)

    def _gradient(self, _: torch.Tensor) -> None:
        self.backward.enter()
        self.events.append("gradient")
        if self.breaks:
            raise ValueError("in a hook")

    def _ended(self) -> None:
        self.events.append("end")
        self.backward.leave()


def inputs() -> torch.Tensor:
    return torch.ones(2, 3, requires_grad=True)


def test_a_plain_pass_ends_after_its_gradients() -> None:
    log = Log()
    for _ in range(2):
        log.layer(inputs()).sum().backward()
    assert log.events == ["gradient", "gradient", "end"] * 2
    assert not log.backward.nested


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_the_end_is_that_of_the_outermost_pass(levels: int) -> None:
    """Every gradient comes from the innermost pass, and the first sign of the outer ones is their end."""
    log = Log()

    def wrapped(x: torch.Tensor, level: int) -> torch.Tensor:
        return log.layer(x) if level == 0 else checkpoint(lambda y: wrapped(y, level - 1), x, use_reentrant=True)

    for _ in range(2):
        (wrapped(inputs(), levels) + wrapped(inputs(), levels)).sum().backward()
    assert log.events == [*["gradient"] * 4, "end"] * 2
    assert log.backward.nested


def test_outer_gradients_may_come_before_between_and_after_inner_ones() -> None:
    log = Log()
    x = log.layer(inputs())
    x = checkpoint(log.layer, x, use_reentrant=True)
    x = log.layer(x)
    x = checkpoint(log.layer, x, use_reentrant=True)
    x.sum().backward()
    assert log.events[-1] == "end"
    assert log.events.count("end") == 1
    assert not log.backward.running


@pytest.mark.parametrize("inside", [False, True])
def test_a_pass_that_raised_is_given_up_when_the_next_one_comes(inside: bool) -> None:
    log = Log()

    def run() -> None:
        x = inputs()
        (checkpoint(log.layer, x, use_reentrant=True) if inside else log.layer(x)).sum().backward()

    log.breaks = True
    with pytest.raises(ValueError, match="in a hook"):
        run()
    log.breaks = False
    run()
    assert log.events[-4:] == ["given up", "gradient", "gradient", "end"]


def test_a_pass_that_raised_after_an_inner_one_is_given_up_too() -> None:
    log = Log()
    x = inputs()
    y = x * 1.0
    y.register_hook(lambda _: (_ for _ in ()).throw(ValueError("in a hook")))
    with pytest.raises(ValueError, match="in a hook"):
        checkpoint(log.layer, y, use_reentrant=True).sum().backward()
    log.layer(inputs()).sum().backward()
    assert log.events == ["gradient", "gradient", "given up", "gradient", "gradient", "end"]
