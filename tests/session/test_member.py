"""What a process says of a fault: who is to blame, where that is, and during which operation."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from frames import header
from syncline import registry
from syncline.engine.engine import Engine
from syncline.engine.order import Order
from syncline.errors import ProtocolError, UsageError
from syncline.nouns import Group
from syncline.plans.messages import compile_program
from syncline.session.member import Process
from syncline.session.printing import watch_exceptions
from syncline.transports.tcp import Tcp

LIMIT_S = 30.0


def test_nonsense_of_a_peer_names_rank_host_and_operation_and_all_are_told() -> None:
    told: list[tuple[str, int]] = []
    watcher: Any = SimpleNamespace(
        failure=None, left=set(), verdict=lambda _: None, abort=lambda why, culprit: told.append((why, culprit))
    )
    roll: Any = SimpleNamespace(name=lambda index: f"rank {index} (host{index}, pid {index})")
    process = Process(Group(2), 0, None, roll=roll)
    process.watcher = watcher
    mine, theirs = socket.socketpair()
    engine = Engine(Tcp(0, {1: mine}), explain=process.explain)
    plan = compile_program(registry.get("algorithms", "ring").target(Group(2)), 0)
    work = engine.start(Order(plan, np.ones(100_000), 0, "bucket 3"))
    theirs.sendall(header(77, 5, 0, 0) + b"about")
    with pytest.raises(ProtocolError, match=r"^rank 0 \(host0, .*during bucket 3: rank 1 broke.*\(host1, ") as fault:
        engine.wait(work, timeout=LIMIT_S)
    assert fault.value.rank == 1
    assert [culprit for _, culprit in told] == [1]
    engine.close()
    theirs.close()


def test_a_fault_of_nobody_alone_names_nobody() -> None:
    watcher: Any = SimpleNamespace(failure=None, left=set(), verdict=lambda _: None, abort=lambda *_: None)
    roll: Any = SimpleNamespace(name=lambda index: f"rank {index} (host{index})")
    process = Process(Group(2), 0, None, roll=roll)
    process.watcher = watcher
    error = process.explain(ProtocolError("the update fails", rank=-1))
    assert str(error) == "rank 0 (host0): the update fails"


def test_an_error_is_printed_in_full_where_both_kinds_of_sessions_watch(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process may have a session of its own and one of the torch backend, and so two hooks for its last error."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    text = f"of {capfd}"  # what an earlier test has printed is not printed again

    def session() -> Any:
        return SimpleNamespace(alone=True, forked=False, fail=lambda _: None, index=0, name=lambda _: "rank 0")

    for _ in range(2):
        watch_exceptions(session)
    error = UsageError(text)
    sys.excepthook(UsageError, error, None)
    printed = capfd.readouterr().err
    assert f"UsageError: {text}" in printed
    assert "see above" not in printed
    sys.excepthook(UsageError, UsageError(text), None)
    assert capfd.readouterr().err == "syncline: ended: rank 0: the same UsageError, see above\n"
