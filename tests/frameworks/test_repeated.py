"""A run that one process repeats from its log: bit for bit the same weights, and refusals of what it cannot repeat."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline
from syncline.errors import GradientError, NotBuiltError, UsageError
from syncline.frameworks.torch import Options, prepare
from syncline.global_batches import global_batches_of
from syncline.launch.environment import REPEATS
from syncline.sampling import SampleOrder
from syncline.session.session import Session
from syncline.transports.inproc import InProc
from syncline.transports.tcp import Tcp

SAMPLES, BATCH, EPOCHS = 48, 10, 2
X, Y = (torch.randn(SAMPLES, size, generator=torch.Generator().manual_seed(size)) for size in (33, 7))


MODEL = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.BatchNorm1d(65), torch.nn.Tanh(), torch.nn.Linear(65, 7))


def problem() -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def learn_all(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, sampler: Any) -> None:
    while sampler.epoch < EPOCHS:
        for batch in sampler:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(X[batch]), Y[batch]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            sampler.commit()
            scheduler.step()


def values(model: torch.nn.Module) -> list[list[float]]:
    return [tensor.reshape(-1).tolist() for tensor in model.state_dict().values()]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SYNCLINE_LAUNCHER", "SYNCLINE_STRATEGY", "SYNCLINE_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SYNCLINE_SAMPLES", str(tmp_path / "samples.jsonl"))
    return tmp_path / "samples.jsonl"


@pytest.fixture
def alone(log: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SYNCLINE_SAMPLES")
    monkeypatch.setenv(REPEATS, str(log))
    yield
    syncline.shutdown()


def ran(group: Any, strategy: str, workers: int, **more: Any) -> list[list[float]]:
    """The values of a model after a run of workers, whose log is kept."""

    def body(session: Session) -> list[list[float]]:
        model, optimizer, scheduler = problem()
        prepare(session, model, optimizer, Options(weight="batch"))
        sampler = global_batches_of(session, SampleOrder(SAMPLES, global_batch=BATCH))
        learn_all(model, optimizer, scheduler, sampler)
        return values(model)

    found: list[list[float]] = group(strategy, workers, body, **more)[0]
    return found


def repeated(log: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    monkeypatch.delenv("SYNCLINE_SAMPLES", raising=False)
    monkeypatch.setenv(REPEATS, str(log))
    syncline.init()
    try:
        model, optimizer, scheduler = problem()
        syncline.prepare(model, optimizer, weight="batch")
        sampler = syncline.sampler(SAMPLES, global_batch=BATCH)
        syncline.elastic(lambda: learn_all(model, optimizer, scheduler, sampler), [scheduler])
        return values(model)
    finally:
        syncline.shutdown()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("ring", 3),
        ("ring schedule=wait_free", 4),
        ("direct schedule=fixed(bucket=4KiB)", 3),
        ("recursive_doubling", 3),
        ("halving_doubling", 4),
        ("tree", 3),
        ("double_tree", 4),
        ("ring", 12),  # more workers than samples in the last batch of an epoch
    ],
)
def test_the_values_are_those_of_the_run(
    group: Any, log: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, workers: int
) -> None:
    assert ran(group, strategy, workers) == repeated(log, monkeypatch)


def test_a_plan_that_depends_on_hosts_is_made_for_those_of_the_run(
    group: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ran(group, "hierarchical", 4, nodes=(0, 0, 0, 1))
    assert found == repeated(log, monkeypatch)
    log.write_text(log.read_text().replace('"nodes": [0, 0, 0, 1]', '"nodes": [0, 1, 1, 1]'))
    assert found != repeated(log, monkeypatch)


@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_arrays_are_cut_as_over_the_transport_of_the_run(
    group: Any, log: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    for end in (InProc, Tcp):
        monkeypatch.setattr(end, "chunk_bytes", 256, raising=False)
    found = ran(group, "ring", 3)
    log.write_text(log.read_text().replace("transport=inproc", f"transport={transport}"))
    assert found == repeated(log, monkeypatch)


def test_another_order_of_additions_would_show(group: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ran(group, "ring", 3)
    log.write_text(log.read_text().replace('"strategy": "ring', '"strategy": "tree'))
    assert found != repeated(log, monkeypatch)


def test_a_step_that_is_lost_or_has_other_samples_is_named(
    group: Any, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(group, "ring", 2)
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(UsageError, match="before step 3 of epoch 0, or has lost it"):
        repeated(log, monkeypatch)
    third = json.loads(lines[3])
    log.write_text("".join([*lines, json.dumps(third | {"samples": third["samples"][::-1]}) + "\n"]))
    with pytest.raises(UsageError, match="step 3 of epoch 0 had other samples"):
        repeated(log, monkeypatch)


def line(**values: Any) -> str:
    head = {"sampler": 0, "members": [0, 1], "view": 1, "nodes": [], "epoch": 0, "step": 0}
    head |= {"strategy": "ring schedule=fixed", "algorithms": []}
    return json.dumps({**head, "samples": [0, 1, 2], **values}) + "\n"


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_repeated_is_refused(log: Path) -> None:
    log.write_text(line(strategy="ring schedule=fixed codec=int8"))
    syncline.init()
    model, optimizer, _ = problem()
    with pytest.raises(NotBuiltError, match="its optimizer"):
        syncline.prepare(model)
    with pytest.raises(NotBuiltError, match="float32 and float64"):
        syncline.prepare(torch.nn.Linear(1, 1).half(), optimizer)
    syncline.prepare(model, optimizer)
    with pytest.raises(NotBuiltError, match="with one model"):
        syncline.prepare(torch.nn.Linear(1, 1), optimizer)
    sampler = syncline.sampler(3, global_batch=3, shuffle=False)
    with pytest.raises(NotBuiltError, match="with one sampler"):
        syncline.sampler(3, global_batch=3)
    with pytest.raises(NotBuiltError, match="without accumulation"):
        sampler.commit(2)
    with pytest.raises(NotBuiltError, match="without codecs, not with ring schedule=fixed codec=int8"):
        model(X[:3]).sum().backward()


@pytest.mark.usefixtures("alone")
def test_two_backward_passes_of_a_part_are_refused(log: Path) -> None:
    log.write_text(line())
    syncline.init()
    model, optimizer, _ = problem()
    syncline.prepare(model, optimizer)
    syncline.sampler(3, global_batch=3, shuffle=False)
    model(X[:3]).sum().backward()
    with pytest.raises(GradientError, match="one backward pass per step"):
        model(X[:3]).sum().backward()
