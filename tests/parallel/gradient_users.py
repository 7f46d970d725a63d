"""What scripts do with gradients in the middle of a backward pass, under DistributedDataParallel and prepared."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from backend_bodies import grouped
from rank_bodies import Place, joined
from torch.nn.parallel import DistributedDataParallel

import syncline

STEPS = 4
"""The first pass of a prepared model sends nothing before its end, and the others do."""

Kept = list[Any]


class Network(torch.nn.Module):
    """Small layers, a weight that is used twice, and gradients that autograd makes in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(5)))
        self.norm = torch.nn.LayerNorm(6)
        self.one, self.other = (torch.nn.Parameter(torch.randn(6)) for _ in range(2))
        self.parts = torch.nn.ParameterList(torch.randn(3) for _ in range(2))
        self.sometimes = torch.nn.Linear(6, 6)
        self.skips = False
        self.shares = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers[0](self.norm(self.layers(x).tanh()))
        # Of gradients in one piece of memory accumulating makes something else, in plain torch too.
        both = self.one.view(2, 3) + self.other.view(2, 3) * (1 if self.shares else 2)
        return (out if self.skips else out + self.sometimes(out)) * both.view(6) + torch.cat(list(self.parts))


Case = Callable[[torch.nn.Module, Kept], None]
"""Attaches what keeps something in every pass."""


def nothing(model: torch.nn.Module, kept: Kept) -> None:
    pass


def own_hooks(keep: Callable[[torch.Tensor], Any]) -> Case:
    """Each parameter's own hook keeps what becomes of its gradient."""

    def attach(model: torch.nn.Module, kept: Kept) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda found: kept.append(keep(found.grad)))

    return attach


def _all(model: torch.nn.Module, kept: Kept, keep: Callable[[torch.Tensor], Any]) -> None:
    kept += [keep(one.grad) for one in model.parameters() if one.grad is not None]


def anothers_hook(keep: Callable[[torch.Tensor], Any]) -> Case:
    """The hook of one parameter keeps what becomes of all gradients that are there by then."""

    def attach(model: torch.nn.Module, kept: Kept) -> None:
        last = next(model.layers.parameters())  # type: ignore[union-attr, operator]
        last.register_post_accumulate_grad_hook(lambda _: _all(model, kept, keep))

    return attach


def hooks_of_tensors(keep: Callable[[torch.Tensor], Any]) -> Case:
    """The hook of a layer's output, which backward calls before the layer's own gradients are there."""

    def attach(model: torch.nn.Module, kept: Kept) -> None:
        def after(_: Any, __: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda _: _all(model, kept, keep))

        model.layers[2].register_forward_hook(after)  # type: ignore[union-attr, index]

    return attach


def hooks_of_modules(keep: Callable[[torch.Tensor], Any]) -> Case:
    def attach(model: torch.nn.Module, kept: Kept) -> None:
        model.layers[1].register_full_backward_hook(lambda *_: _all(model, kept, keep))  # type: ignore[union-attr, index]

    return attach


def _as_anothers(gradient: torch.Tensor) -> Any:
    other = torch.nn.Parameter(torch.zeros_like(gradient))
    other.grad = gradient
    return other


KEEPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1)[:2],
    "a detached one": lambda gradient: gradient.detach(),
    "its data": lambda gradient: gradient.data,
    "an array": lambda gradient: gradient.numpy(),
    "another's gradient": _as_anothers,
    "a number": lambda gradient: float(gradient.numel()),
}

HOOKS = {
    "own": own_hooks,
    "another's": anothers_hook,
    "a tensor's": hooks_of_tensors,
    "a module's": hooks_of_modules,
}

CASES: dict[str, Case] = {"nothing": nothing} | {
    f"{hook} hook keeps {what}": attaching(keep) for hook, attaching in HOOKS.items() for what, keep in KEEPS.items()
}

SOME = ["nothing", "a module's hook keeps itself", "another's hook keeps a detached one"]
WAYS = {"plain": list(CASES), "accumulated": ["nothing"]} | dict.fromkeys(
    ["not to none", "graph retained", "inner derivatives", "skipped by one"], SOME
)


def _bits(kept: Any) -> int:
    """A digest of what a value is now."""
    if isinstance(kept, torch.nn.Parameter):
        kept = kept.grad
    return zlib.crc32(np.array(kept.detach() if isinstance(kept, torch.Tensor) else kept).tobytes())


def _backward(way: str, model: Any, inner: torch.nn.Module, x: torch.Tensor) -> None:
    """One step's gradients; ``model`` is ``inner``, or what is around it."""
    if way == "accumulated":
        model.require_backward_grad_sync = False
        model(x.flip(0)).square().mean().backward()
        model.require_backward_grad_sync = True
    loss = model(x).square().mean()
    if way == "inner derivatives":
        slopes = torch.autograd.grad(loss, list(inner.layers.parameters()), retain_graph=True)  # type: ignore[union-attr]
        assert all(slope.abs().sum() > 0 for slope in slopes)
    loss.backward(retain_graph=way == "graph retained")


Wrap = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


def _trained(way: str, case: Case, rank: int, inner: torch.nn.Module, wrap: Wrap, early: bool) -> list[int]:
    """Gradients, what was kept, and weights, step by step; ``early`` attaches before the model is wrapped."""
    kept = Kept()
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)
    if early:
        case(inner, kept)
    model = wrap(inner, optimizer)
    if not early:
        case(inner, kept)
    seen = []
    for step in range(STEPS):
        x = torch.randn(6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad(set_to_none=way != "not to none")
        kept.clear()
        _backward(way, model, inner, x)
        seen += [_bits(one.grad) for one in inner.parameters()]
        seen += [_bits(one) for one in kept]
        optimizer.step()
    return seen + [_bits(one.detach()) for one in inner.parameters()]


def ddp(line: Connection, place: Place) -> None:
    """All cases over Gloo."""
    with grouped(place, "gloo") as rank:

        def wrap(model: torch.nn.Module, _: torch.optim.Optimizer) -> Any:
            return DistributedDataParallel(model, find_unused_parameters=True)

        line.send(_all_cases(rank, wrap, lambda _: None))


def prepared(line: Connection, place: Place, strategy: str) -> None:
    """The same by three lines."""
    with joined(place, strategy):

        def wrap(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            syncline.prepare(model, optimizer, unused="zeros")
            return model

        line.send(_all_cases(syncline.rank(), wrap, syncline.release))


def _all_cases(rank: int, wrap: Wrap, release: Callable[[Any], object]) -> dict[str, list[int]]:
    found = {}
    for way, names in WAYS.items():
        for name in names:
            for early in (True, False) if name.startswith("own") else (False,):
                model = Network()
                model.skips = way == "skipped by one" and rank == 1
                model.shares = way not in ("accumulated", "not to none")
                found[f"{way}, {name}, {early}"] = _trained(way, CASES[name], rank, model, wrap, early)
                release(model)
    return found
