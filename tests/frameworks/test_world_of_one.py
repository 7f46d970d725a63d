"""The public calls in a world of one worker: the script runs as if Syncline were not there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from toy import Here, alone, batch, loss_of, mlp, sgd, weights

import syncline
from syncline import api
from syncline.errors import UsageError
from syncline.frameworks.torch import prepare
from syncline.process import process
from syncline.session.session import Session


@pytest.fixture
def single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``init`` without a launcher, undone at the end."""
    for name in ("RANK", "WORLD_SIZE", "SYNCLINE_STRATEGY", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    syncline.init(rank=0, world_size=1)
    yield
    syncline.shutdown()


@pytest.mark.usefixtures("single")
def test_training_is_bit_for_bit_that_of_a_plain_script() -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        for step in range(3):
            here.optimizer.zero_grad()
            loss_of(here.model(batch(step))).backward()
            torch.nn.utils.clip_grad_norm_(here.model.parameters(), 0.5)
            here.optimizer.step()
        return weights(here.model)

    model, optimizer = sgd()
    before = vars(model).copy(), vars(optimizer).copy()
    prepared = syncline.prepare(model, optimizer)
    assert prepared == (model, optimizer)
    assert (vars(model), vars(optimizer)) == before
    for step in range(3):
        optimizer.zero_grad()
        with syncline.join(), syncline.no_sync():
            loss_of(model(batch(step))).backward()
        syncline.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    wanted = alone(sgd, body)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(model).items())


@pytest.mark.usefixtures("single")
def test_collectives_are_the_identity() -> None:
    assert (syncline.rank(), syncline.local_rank(), syncline.world_size()) == (0, 0, 1)
    tensor = torch.tensor([[1.5, 2.0]])
    assert torch.equal(syncline.allreduce(tensor), torch.tensor([[1.5, 2.0]]))
    array = np.arange(3)
    assert syncline.allreduce(array, op="sum") is array
    assert torch.equal(syncline.broadcast(tensor), torch.tensor([[1.5, 2.0]]))
    assert api.gather(b"text") == [b"text"]
    syncline.barrier(timeout=1.0)
    assert syncline.stats().blocked_s == 0
    state = syncline.state_dict()
    syncline.load_state_dict(state)


@pytest.mark.usefixtures("single")
def test_mistakes_are_refused_in_a_world_of_one_too() -> None:
    with pytest.raises(UsageError, match="no rank 1"):
        syncline.broadcast(torch.ones(1), root=1)
    with pytest.raises(UsageError, match="choose 'mean' or 'sum'"):
        syncline.allreduce(torch.ones(1), op="max")
    with pytest.raises(UsageError, match="use op='sum'"):
        syncline.allreduce(torch.ones(1, dtype=torch.int64))


def as_public(session: Session, body: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run ``body`` on a group's only worker with the public calls bound to its session."""
    model, optimizer = sgd()
    made = prepare(session, model, optimizer)
    if made is None:
        return None
    monkeypatch.setattr(process, "joined", session)
    monkeypatch.setattr(process, "prepared", [made])
    return body(Here(model, optimizer, 0, 1, session, made.replica, made.client))


def test_public_calls_reach_servers_that_hold_the_gradients(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(here: Here) -> None:
        with syncline.no_sync():
            loss_of(here.model(batch(0))).backward()
        assert here.replica is not None
        assert here.replica.steps == 0
        loss_of(here.model(batch(0))).backward()
        plain = [parameter.grad.clone() for parameter in here.model.parameters() if parameter.grad is not None]
        norm = torch.linalg.vector_norm(torch.cat([grad.reshape(-1) for grad in plain]))
        for given in (here.model, list(here.model.parameters())):
            assert torch.isclose(syncline.clip_grad_norm_(given, 1e9).double(), norm, rtol=1e-6)
        with pytest.raises(UsageError, match="all parameters of one prepared model"):
            syncline.clip_grad_norm_(here.model[0].parameters(), 1.0)  # type: ignore[index]
        here.optimizer.step()
        with syncline.join():
            pass
        assert syncline.state_dict()["steps"] == [1]
        syncline.load_state_dict({**syncline.state_dict(), "steps": [5]})
        assert here.replica.steps == 5
        loss_of(here.model(batch(1))).backward()
        here.optimizer.step()  # the servers' own clock began at 0
        assert here.replica.steps == 6
        with pytest.raises(UsageError, match="to a run with 'tree'"):
            syncline.load_state_dict({"strategy": "tree", "world_size": 1, "steps": []})

    group("ps(servers=1)", 1, lambda session: as_public(session, body, monkeypatch))


def test_servers_answer_a_single_worker(group: Any) -> None:
    """A server may follow only one worker; it has the optimizer then, and the result is that of a plain script."""

    def run(session: Session) -> Any:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        if prepare(session, model, optimizer) is None:
            return None
        loss_of(model(batch(0))).backward()
        optimizer.step()
        return weights(model)

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_of(model(batch(0))).backward()
    optimizer.step()
    found = group("ps(servers=2)", 1, run)[0]
    assert all(torch.allclose(found[name], tensor, rtol=1e-12) for name, tensor in weights(model).items())
