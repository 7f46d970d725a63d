"""A worker that does not come is named by the server that waits for it, not the server by those that wait for that."""

from __future__ import annotations

import threading

import pytest
import torch
from ends import network

from syncline import session as module
from syncline.errors import PeerTimeout
from syncline.frameworks.torch import prepare
from syncline.session import Session
from syncline.strategy import Strategy
from syncline.types import Group

LIMIT_S = 60.0
WORKERS, HANGS = 3, 1
STRATEGIES = ["ps(servers=1)", "ps(servers=1) codec=int8"]


class Fault(threading.Event):
    """The first error of a process."""

    error: BaseException | None = None


def train_until(session: Session, fault: Fault, over: threading.Event) -> None:
    """One step; a rank hangs between backward and the step."""
    try:
        model = torch.nn.Linear(2, 1)
        made = prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
        if made is None:
            return
        model(torch.ones(4, 2)).sum().backward()
        if session.index == HANGS:
            over.wait(LIMIT_S)
            return
        made.optimizer.step()
    except BaseException as error:
        if not fault.is_set():
            fault.error = error
            fault.set()


@pytest.mark.parametrize("kind", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_server_names_the_worker(monkeypatch: pytest.MonkeyPatch, kind: str, strategy: str) -> None:
    monkeypatch.setattr(module, "SERVERS_FIRST_S", 2 * LIMIT_S)
    chosen = Strategy.parse(f"{strategy} schedule=wait_free").resolve(Group(WORKERS), inproc=True)
    fault, over = Fault(), threading.Event()
    with network(kind, WORKERS + 1) as net:
        group = Group(WORKERS, 1)
        sessions = [Session(chosen, group, index, end, limit_s=1.0) for index, end in enumerate(net.ends)]
        arguments = [(session, fault, over) for session in sessions]
        threads = [threading.Thread(target=train_until, args=each, daemon=True) for each in arguments]
        for thread in threads:
            thread.start()
        found = fault.wait(LIMIT_S)
        over.set()
        for session in sessions:
            session.fail(RuntimeError("the test is over"))
        for thread in threads:
            thread.join(LIMIT_S)
        for session in sessions:
            session.shutdown()
    assert found
    assert isinstance(fault.error, PeerTimeout), fault.error
    assert fault.error.rank == HANGS
