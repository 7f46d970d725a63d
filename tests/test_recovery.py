"""What elastic runs refuse, and what survivors share besides weights; tests/parallel has the runs themselves."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import syncline
from syncline.errors import GroupError, NotBuiltError, PeerLost, SynclineError, UsageError, ViewEnds
from syncline.frameworks._supported import SILENT
from syncline.frameworks.numpy import adapt
from syncline.frameworks.torch.prepare import GroupValues, prepare
from syncline.launch.relay import VARIABLE, RelayLine
from syncline.membership import Commit, Peer, Refused, Send, View, to_plain
from syncline.process import process
from syncline.recovery import _ended
from syncline.recovery.agreement import Agreement, AllDone, join_in
from syncline.recovery.lasting import check_shareable
from syncline.recovery.members import Members
from syncline.saving import packed, unpacked
from syncline.session.session import Session


@contextmanager
def members(most: int = 0) -> Iterator[Members]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield Members(RelayLine(theirs, 0, 2, 1, most))


@contextmanager
def agreement(most: int = 0) -> Iterator[Agreement]:
    with members(most) as found:
        yield found.agreement


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("ps(servers=1, on=workers)", r"state, .*: use 'ps\(servers=1, on=workers, replicas=1\) "),
        ("ps(servers=1, on=workers) sync=asp", "with server processes, or replicas=1, if each worker"),
        ("ps(servers=1, on=workers) sync=bsp(backup=1)", "with server processes, or replicas=1, if each worker"),
        ("ring transport=inproc", "over transport=auto, shm and tcp"),
    ],
)
def test_what_cannot_go_on_is_refused(group: Any, strategy: str, words: str) -> None:
    def body(session: Session) -> None:
        with members() as found, pytest.raises(NotBuiltError, match=words):
            found.check(session)

    group(strategy, 2, body)


def test_followers_need_buckets_that_stay(group: Any) -> None:
    def body(session: Session) -> None:
        with members() as found, pytest.raises(NotBuiltError, match=r"keep their buckets, .*: use .* schedule=fixed'"):
            found.check(session)

    group("ps(servers=2, on=workers, replicas=1) schedule=merged", 2, body)


@pytest.mark.parametrize("strategy", ["ps", "ps(on=workers)"])
def test_every_process_refuses_at_init_and_waits_for_no_other(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """Nobody listens where rank 0 should be, and the script may never come to ``syncline.elastic``."""
    monkeypatch.setenv(VARIABLE, "9999:1:2:1:0")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    with pytest.raises(NotBuiltError, match=r"use 'ps\(servers=1, on=workers, replicas=1\)'; or leave --elastic out"):
        syncline.init(strategy=strategy, timeout=60)


def test_models_of_numpy_are_whole_on_each_worker(group: Any) -> None:
    def body(session: Session) -> None:
        adapt(session, {"w": np.zeros(3)}, Rule(), SILENT)
        (lasting,) = session.lasting
        with pytest.raises(NotBuiltError, match="works with models of NumPy that each worker updates itself, not with"):
            lasting.check_lasting(session.strategy)

    group("ps(servers=2, on=workers, replicas=1)", 2, body)


class Rule:
    """Gradient descent, whose rate a script may change."""

    lr = 0.5

    def update(self, weights: Any, gradient: Any, state: dict[str, Any]) -> None:
        state["steps"] = state.get("steps", 0) + 1
        weights -= self.lr * gradient


def test_values_of_numpy_come_back_if_a_view_breaks_before_it_begins(group: Any) -> None:
    """Arrays, the rule's state and its attributes, which another worker's have replaced in part."""

    def body(session: Session) -> None:
        rule = Rule()
        handed = adapt(session, {"w": np.ones((2, 3))[:, ::2]}, rule, SILENT)
        assert handed is not None
        arrays, trainer = handed.result
        (lasting,) = session.lasting
        trainer.step({"w": np.ones((2, 2))})
        put_back = lasting.keep_values()
        if session.rank == 1:
            arrays["w"][...], trainer.lr, lasting.weights.states[0]["steps"] = 7.0, 0.25, 9
        lasting.copy_again(session, 1, True)
        assert (arrays["w"] == 7).all()
        assert (rule.lr, lasting.weights.states[0]["steps"]) == (0.25, 9)
        trainer._steps.resume_at(5)  # as in a session that broke, whose source had made more steps
        put_back()
        assert (arrays["w"] == 0.5).all()
        assert (rule.lr, lasting.weights.states[0]["steps"]) == (0.5, 1)
        lasting.copy_again(session, 0, True)
        assert lasting._made == 1

    group("ring", 2, body)


def test_models_of_numpy_exchange_gradients(group: Any) -> None:
    def body(session: Session) -> None:
        adapt(session, {"w": np.zeros(3)}, Rule(), SILENT)
        (lasting,) = session.lasting
        with pytest.raises(NotBuiltError, match=r"of NumPy under sync=bsp, not with sync=local\(steps=2\)"):
            lasting.check_lasting(session.strategy)

    group("ring sync=local(steps=2)", 2, body)


@pytest.mark.parametrize("strategy", ["ring", "ring sync=local(steps=2)"])
def test_a_step_that_breaks_leaves_no_trace(group: Any, strategy: str) -> None:
    """Buffers, also one that a step has replaced, and what a worker has changed that trains alone."""

    def body(session: Session) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        optimizer = torch.optim.Adam(model.parameters())
        made = prepare(session, model, optimizer)
        assert made is not None

        def values() -> list[Any]:
            return [*model.state_dict().values(), *(one["exp_avg"] for one in optimizer.state.values())]

        def step() -> None:
            model(torch.rand(5, 3)).square().sum().backward()
            optimizer.step()

        step()
        earlier = made.mark()
        step()
        model.seen = model.seen + 1  # which replaces the buffer
        before, mark = [value.clone() for value in values()], made.mark(earlier)
        model(torch.rand(5, 3)) if strategy == "ring" else step()
        model.seen += 1
        assert not all(map(torch.equal, values(), before))
        made.release()
        mark.put_back()
        assert all(map(torch.equal, values(), before))

    group(strategy, 2, body)


def test_without_a_launcher_that_lets_it_go_on_the_function_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert process.elastic is None
    calls: list[int] = []

    def train() -> int:
        calls.append(1)
        if len(calls) == 2:
            raise PeerLost("gone", rank=1)
        return 7

    assert syncline.elastic(train) == 7
    with pytest.raises(PeerLost):
        syncline.elastic(train)
    assert len(calls) == 2


def test_an_elastic_run_needs_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SYNCLINE_LAUNCHER", "SYNCLINE_STRATEGY", "SYNCLINE_SERVERS"):
        monkeypatch.delenv(name, raising=False)
    syncline.init()
    try:
        with members() as found:
            with pytest.raises(UsageError, match=r"take the batches from syncline.sampler\(global_batch=\)"):
                found.check(process.session)
            syncline.sampler(10, global_batch=2)
            found.check(process.session)
    finally:
        syncline.shutdown()


def test_only_a_lost_process_or_a_new_worker_ends_a_view() -> None:
    assert _ended(SynclineError("no")) is None
    assert _ended(ValueError("no")) is None
    lost, end, wrapped = PeerLost("gone", rank=1), ViewEnds(), RuntimeError(str(ViewEnds()))
    wrapped.__cause__ = end
    assert _ended(lost) is lost
    assert _ended(end) is _ended(wrapped) is end


def test_survivors_share_the_values_of_groups() -> None:
    def made(lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr, betas=(lr, 2 * lr))

    one, other = made(0.1), made(0.2)
    GroupValues(other).load_state_dict(unpacked(packed(GroupValues(one).state_dict())))
    for name, value in one.param_groups[0].items():
        if name != "params":
            assert other.param_groups[0][name] == value
            assert type(other.param_groups[0][name]) is type(value)


def test_the_state_of_a_scheduler_comes_back_as_it_was() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5]).state_dict()
    found = unpacked(packed(state | {"pair": (1, [2.5])}))
    assert found == state | {"pair": (1, [2.5])}
    assert type(found["milestones"]) is type(state["milestones"])


def test_a_rate_that_is_a_tensor_stays_the_tensor_that_the_optimizer_reads() -> None:
    rates = torch.tensor(0.1), torch.tensor(0.2)
    one, other = (torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate, foreach=False) for rate in rates)
    rate = other.param_groups[0]["lr"]
    GroupValues(other).load_state_dict(unpacked(packed(GroupValues(one).state_dict())))
    assert other.param_groups[0]["lr"] is rate
    assert rate == torch.tensor(0.1)


def test_a_state_that_cannot_be_shared_is_refused_at_the_call() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"best": {"run": object()}}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError(state)

    with pytest.raises(UsageError, match=r"the state of a Odd: .* cannot contain the object at best/run"):
        check_shareable(Odd())


def test_the_end_of_an_earlier_call_ends_no_later_one() -> None:
    with agreement() as found:
        found.calls = 2
        assert found._heard({"done": 1, "call": 1}) == []
        with pytest.raises(AllDone):
            found._heard({"done": 1, "call": 2})


def test_a_worker_that_comes_when_all_have_finished_ends() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        found = Agreement(RelayLine(theirs, 2, 2, 1, 2), 0, serves=False)
        assert found.joins
        with pytest.raises(AllDone):
            found._heard({"done": 1})


@pytest.mark.parametrize(
    ("ended", "error", "blamed"),
    [
        ([], GroupError("a worker has not come"), {2}),
        ([], PeerLost("gone", rank=2), {2}),
        ([], PeerLost("gone", rank=1), set()),
        ([1], GroupError("a worker has not come"), {1}),
        ([1, 2], PeerLost("gone", rank=1), {1, 2}),
    ],
)
def test_a_new_worker_is_left_out_unless_an_older_one_is_lost(
    ended: list[int], error: SynclineError, blamed: set[int]
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        found = Agreement(RelayLine(theirs, 0, 2, 1, 2), 0, serves=False)
        view = View(2, tuple(Peer(number, f"{number}@host:1") for number in range(3)), 3)
        for number in ended:
            ours.send(json.dumps({"ended": number}).encode())
        assert found.blamed(view, frozenset({2}), error) == blamed


def test_a_message_of_another_version_is_refused() -> None:
    with agreement(most=3) as found:
        packet = {"from": 7, "message": ["Join", "7@host:1", [], -1, False, "a field of a newer version"]}
        (sent,) = found._heard(packet)
        assert isinstance(sent, Send)
        assert (sent.to.name, type(sent.message)) == ("7@elsewhere:0", Refused)
        assert join_in(packet) is None


def test_a_member_with_a_name_that_no_launcher_gives_is_not_taken_over() -> None:
    with agreement() as found:
        view = View(2, (Peer(0, "0@host:1"), Peer(1, "../1")), 2)
        (sent,) = found._heard({"from": 1, "message": to_plain(Commit(view))})
        assert isinstance(sent, Send)
        assert isinstance(sent.message, Refused)
        assert found.keeper.view.number == 1
        for nonsense in ({}, {"from": [], "message": 1}, {"view": 1, "half": 3}, {"ended": {}}, {"done": 9}):
            assert found._heard(nonsense) == []


@pytest.mark.parametrize(
    "name", ["8@host:1", "7", "", "7@", "-7@host:1", "9" * 5000 + "@host:1", "7@a@b:1", "7@h:65536", "7@h:65535"]
)
def test_nobody_joins_under_another_name_than_the_senders(name: str) -> None:
    with agreement(most=3) as found:
        packet = {"from": 7, "message": ["Join", name, [], -1, False]}
        assert (join_in(packet) is not None) == (name == "7@h:65535")
        found._heard(packet)
        assert found.keeper.view.number == 1
        assert found.keeper.halted == (name == "7@h:65535")


def test_nobody_joins_after_the_call() -> None:
    """A request that came too late must not end the run, in which nothing would go on with it."""
    script = """
import json, os, socket
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.environ["SYNCLINE_ELASTIC"] = f"{theirs.fileno()}:0:1:1:2"
import syncline
from syncline.membership import Join, to_plain
from syncline.process import process
syncline.init("ring")
sampler = syncline.sampler(list(range(12)), global_batch=6)

def train():
    asks = to_plain(Join("1@host:1", process.elastic.agreement.keeper._terms))
    ours.send(json.dumps({"from": 1, "message": asks}).encode())
    process.elastic.agreement._look_s = 0.0

syncline.elastic(train)
for batch in sampler:
    sampler.commit()
print(sampler.epoch)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
