"""What ranks of the pool do with codecs."""

from __future__ import annotations

import copy
import io
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from rank_bodies import BATCH, Place, batch, build, joined

import syncline


def prepared(state: dict[str, Any] | None = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = build(torch.float32)
    if state is not None:
        model.load_state_dict(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    syncline.prepare(model, optimizer)
    return model, optimizer


def some_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    rank, world = syncline.rank(), syncline.world_size()
    for step in steps:
        x, y = batch(step, torch.float32)
        mine = slice(BATCH * rank // world, BATCH * (rank + 1) // world)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()


def weights(model: torch.nn.Module) -> bytes:
    return b"".join(tensor.detach().numpy().tobytes() for tensor in model.state_dict().values())


def stop_and_resume(line: Connection, place: Place, strategies: list[str]) -> None:
    """For every strategy: the weights without a stop, after a stop, and after one whose checkpoint lacks the codec."""
    found = []
    for strategy in strategies:
        with joined(place, strategy):
            model, optimizer = prepared()
            some_steps(model, optimizer, range(3))
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": syncline.state_dict()}
            file = io.BytesIO()
            torch.save(kept, file)
            some_steps(model, optimizer, range(3, 6))
            through = weights(model)
        with joined(place, strategy):
            resumed, warned = resume(file, with_codec=True)
            assert not warned, warned
        with joined(place, strategy):
            _, warned = resume(file, with_codec=False)
        found.append([through == resumed, bool(warned), "codec" in kept["run"]])
    line.send(found)


def resume(file: io.BytesIO, with_codec: bool) -> tuple[bytes, list[str]]:
    """The weights after three steps from a checkpoint, and the warnings on the way."""
    model, optimizer = prepared()
    file.seek(0)
    kept: dict[str, Any] = torch.load(file, weights_only=True)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    run = kept["run"] if with_codec else {key: value for key, value in kept["run"].items() if key != "codec"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        syncline.load_state_dict(run)
    some_steps(model, optimizer, range(3, 6))
    return weights(model), [str(one.message) for one in caught]


def stop_and_resume_served(line: Connection, place: Place, strategies: list[str]) -> None:
    """As ``stop_and_resume`` where servers hold the weights: the model is loaded before ``prepare``."""
    found: list[Any] = []
    for strategy in strategies:
        kept: dict[str, Any] = {}
        with joined(place, strategy), suppress(SystemExit):
            model, optimizer = prepared()
            some_steps(model, optimizer, range(3))
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": syncline.state_dict()}
            kept = copy.deepcopy(kept)
            some_steps(model, optimizer, range(3, 6))
            through = weights(model)
        row: list[Any] = []
        for left_out in ((), ("codec", "weights")):
            with joined(place, strategy), suppress(SystemExit):
                model, optimizer = prepared(kept.get("model"))
                optimizer.load_state_dict(kept["optimizer"])
                run = {key: value for key, value in kept["run"].items() if key not in left_out}
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    syncline.load_state_dict(run)
                some_steps(model, optimizer, range(3, 6))
                row += [weights(model) == through, len(caught)]
        found.append(row and [*row, "weights" in kept["run"]])
    line.send(found)


def compressed_steps(line: Connection, place: Place, strategies: list[str]) -> None:
    """For every strategy: what was learnt, the loss, and the bytes that this rank sent."""
    found = []
    for strategy in strategies:
        with joined(place, strategy):
            try:
                model, optimizer = prepared()
            except SystemExit:
                found.append(None)
                continue
            some_steps(model, optimizer, range(6))
            stats = syncline.stats()
            found.append([weights(model), stats.strategy, stats.exchange, sum(stats.bytes_sent.values())])
    line.send(found)


def wire_bits(line: Connection, place: Place, cases: list[tuple[str, int]]) -> None:
    """Bits per element and transfer that the transport has counted for one large gradient."""
    found = []
    for codec, elements in cases:
        with joined(place, f"direct codec={codec} transport=tcp"):
            model = torch.nn.Module()
            model.register_parameter("w", torch.nn.Parameter(torch.zeros(elements)))
            model.forward = lambda x, w=model.w: (w * x).sum()  # type: ignore[method-assign]
            syncline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            draw = torch.Generator().manual_seed(syncline.rank())
            gradient = torch.randn(elements, generator=draw)
            syncline.barrier()
            before = sum(syncline.stats().bytes_sent.values())
            model(gradient).backward()
            sent = sum(syncline.stats().bytes_sent.values()) - before
            world = syncline.world_size()
            found.append(8 * sent / (2 * (world - 1) / world * elements))
            assert np.isfinite(model.w.grad.numpy()).all()
    line.send(found)


def chosen_codec(line: Connection, place: Place, strategy: str, later: str) -> None:
    """What ``codec=auto`` took and why; from its checkpoint under ``later``, whether training went on the same way."""
    with joined(place, strategy):
        model, optimizer = prepared()
        some_steps(model, optimizer, range(2))
        kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "run": syncline.state_dict()}
        file = io.BytesIO()
        torch.save(kept, file)
        some_steps(model, optimizer, range(2, 5))
        first, stats = weights(model), syncline.stats()
    with joined(place, later):
        model, optimizer = prepared()
        file.seek(0)
        kept = torch.load(file, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        syncline.load_state_dict(kept["run"])
        some_steps(model, optimizer, range(2, 5))
        line.send([stats.strategy, stats.reason, syncline.stats().strategy, weights(model) == first])
