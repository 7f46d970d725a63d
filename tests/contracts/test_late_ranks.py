"""A worker that hangs is named, by servers and by neighbours of neighbours: not those that only wait for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from ends import network

from syncline.errors import PeerError, PeerLost
from syncline.frameworks.torch import prepare
from syncline.nouns import Group
from syncline.session import member
from syncline.session.member import Membership, Process
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy
from syncline.wire.meeting import Member, Roll
from syncline.wire.watch import Watcher

LIMIT_S = 120.0
SHORT_S = 0.9
HANGS = 1
STEPS = 2
CASES = [
    *(("ps(servers=1)", 3, "backward", kind) for kind in ("inproc", "shm", "tcp")),
    ("ps(servers=1) codec=fp16", 3, "backward", "shm"),
    ("ps(servers=2, update=worker)", 3, "backward", "tcp"),
    ("ps(servers=1)", 3, "step", "shm"),
    ("ps(servers=1)", 3, "norm", "tcp"),
    ("ring", 4, "backward", "inproc"),
    ("ring", 4, "backward", "tcp"),
    ("ring codec=int8", 4, "backward", "shm"),
]


def train_until(session: Session, where: str, faults: dict[int, BaseException], over: threading.Event) -> None:
    """Some steps; in the last a rank hangs in the middle of backward, before the norm, or before the step."""
    hangs = session.index == HANGS and where != "nowhere"
    try:
        first, last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        model = torch.nn.Sequential(first, last)
        made = prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1))
        if made is None:
            return
        for step in range(STEPS):
            late = hangs and step == STEPS - 1
            if where == "backward" and late:  # the last layer's gradients have gone by then
                first.register_full_backward_pre_hook(lambda *_: over.wait(LIMIT_S) and None)
            made.optimizer.zero_grad()
            model(torch.ones(4, 2, requires_grad=True)).sum().backward()
            if late:
                over.wait(LIMIT_S)
                return
            if where == "norm":
                assert made.client is not None
                made.client.clip(1.0)
            made.optimizer.step()
    except BaseException as error:
        faults[session.index] = error


@contextmanager
def sessions_of(kind: str, strategy: str, workers: int, limit_s: float) -> Iterator[list[Session]]:
    """A group that knows who waits for whom: over the control connections, or as threads of one process do."""
    chosen = Strategy.parse(strategy).resolve(Group(workers), inproc=True)
    group = Group(workers, chosen.servers)
    with network(kind, group.processes) as net:
        # Of processes that tell each other only the last worker, two places from the culprit in a ring, ever looks.
        limits = [limit_s if kind == "inproc" or index == workers - 1 else LIMIT_S for index in range(group.processes)]
        sessions = [
            Session(chosen, Membership(Process(group, index, end, limit_s=limits[index])))
            for index, end in enumerate(net.ends)
        ]
        if kind == "inproc":
            for session in sessions:
                session.process.neighbours = [other.process for other in sessions if other is not session]
        else:
            watch(sessions)
        yield sessions


def watch(sessions: list[Session]) -> None:
    """A watcher for each, as between processes; none of them may end this one."""
    socks: list[dict[int, socket.socket]] = [{} for _ in sessions]
    for low in range(len(sessions)):
        for high in range(low + 1, len(sessions)):
            socks[low][high], socks[high][low] = socket.socketpair()
    # Two of them see each other as processes of other machines.
    spaces = [str(index) if index < 2 else "here" for index in range(len(sessions))]
    members = [
        Member(index, 1, "host", "machine", 1, spaces[index], "127.0.0.1", 1, "", {}) for index in range(len(sessions))
    ]
    for session in sessions:
        roll = Roll(session.index, tuple(members), "a run", b"")
        end = session.process
        end.watcher = Watcher(
            roll, socks[session.index], session.process.on_peer_failure, end.left, LIMIT_S, end.answer
        )
        end.watcher.came_back()
        end.watcher.start()


def run(kind: str, strategy: str, workers: int, where: str, limit_s: float) -> dict[int, BaseException]:
    """Some steps of a group; what each of its processes raised until all but the one that hangs were through."""
    faults: dict[int, BaseException] = {}
    over = threading.Event()
    with sessions_of(kind, strategy, workers, limit_s) as sessions:
        threads = [
            threading.Thread(target=train_until, args=(session, where, faults, over), daemon=True)
            for session in sessions
        ]
        for thread in threads:
            thread.start()
        for rank in range(workers):
            if rank != HANGS or where == "nowhere":
                threads[rank].join(LIMIT_S)
        found = dict(faults)
        over.set()
        for session in sessions:
            session.fail(RuntimeError("the test is over"))
        for thread in threads:
            thread.join(LIMIT_S)
        for session in sessions:
            session.shutdown()
    return found


@cache
def compiled(kind: str, strategy: str, workers: int) -> bool:
    """Nobody is late because it compiles something: steps in which nobody hangs."""
    return not run(kind, strategy, workers, "nowhere", LIMIT_S)


@pytest.mark.every(2)
@pytest.mark.parametrize(("strategy", "workers", "where", "kind"), CASES)
def test_everybody_names_the_worker_that_hangs(
    monkeypatch: pytest.MonkeyPatch, strategy: str, workers: int, where: str, kind: str
) -> None:
    monkeypatch.setattr(member, "VERDICT_S", 0.2)  # nobody else has news here
    combined = f"{strategy} schedule=wait_free"
    assert compiled(kind, combined, workers)
    found = run(kind, combined, workers, where, SHORT_S)
    if kind == "inproc":  # nobody is told there: who finds its peers gone because of it says so
        found = {rank: error for rank, error in found.items() if not isinstance(error, PeerLost)}
        assert found
    else:
        assert set(range(workers)) - {HANGS} <= set(found)
    for error in found.values():
        assert isinstance(error, PeerError), found
        assert error.rank == HANGS, found
        assert "has not come to" in str(error)
