"""What a model computes is told to the session's observer, once each, in the order in which it happens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from toy import batch, loss_of, mlp

from host_copier import HostCopier
from recorded import Recorder
from syncline.engine.trace import Span
from syncline.frameworks.torch import prepare
from syncline.frameworks.torch.hooks import NO_GRADIENT
from syncline.launch.connecting import in_process
from syncline.session.session import Session

COMPUTE = ("forward", "backward", "optimizer")


def recorder() -> Recorder:
    looks = count()
    return Recorder(lambda: float(next(looks)))


def train(session: Session, steps: int = 2) -> torch.nn.Module:
    """Some steps of a small model."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if prepare(session, model, optimizer) is not None:
        for step in range(steps):
            optimizer.zero_grad()
            loss_of(model(batch(step))).backward()
            optimizer.step()
    return model


def lifetime(of: Recorder, span: Span) -> tuple[float, float]:
    begun, ended = (event.at_s for event in of.events if event.span is span)
    return begun, ended


def test_who_only_observes_leaves_updates_in_the_next_forward_pass(run_on: Callable[..., Any]) -> None:
    recorders = [recorder() for _ in range(2)]
    run_on(in_process("ring schedule=priority(slice=40B)", 2, recorders), train)
    for one in recorders:
        second = lifetime(one, one.spans("forward")[1])
        updates = [span for span in one.spans("optimizer") if span.label.startswith("SGD, ")]
        inside = [span for span in updates if second[0] < lifetime(one, span)[0] < lifetime(one, span)[1] < second[1]]
        assert len(inside) == 4  # a tensor each


@pytest.mark.parametrize(
    ("strategy", "owners"),
    [("ring", []), ("ps(servers=1)", [2]), ("ps(servers=2, on=workers) codec=int8", [0, 1])],
)
def test_passes_and_steps_follow_each_other_and_owners_update(
    run_on: Callable[..., Any], strategy: str, owners: list[int]
) -> None:
    recorders = [recorder() for _ in range(3)]
    run_on(in_process(strategy, 2, recorders), train)
    for one in recorders[:2]:
        spans = one.spans(*COMPUTE)
        assert [span.kind for span in spans] == list(COMPUTE) * 2
        times = [at_s for span in spans for at_s in lifetime(one, span)]
        assert times == sorted(times)
    updates = [[(span.step, span.peer) for span in one.spans("update")] for one in recorders]
    assert updates == [[(1, -1), (2, -1)] if process in owners else [] for process in range(3)]
    turns = {span.phase for one in recorders for span in one.spans("compute")}
    assert turns == ({"encode", "decode"} if "codec" in strategy else set())


def test_what_is_waited_for_at_the_end_of_backward_comes_after_it(run_on: Callable[..., Any]) -> None:
    one = recorder()
    run_on(in_process("ring schedule=fifo", 2, [one]), train)
    for backward in one.spans("backward"):
        begun, ended = lifetime(one, backward)
        waits = [lifetime(one, span) for span in one.spans("wait")]
        assert not any(begun < at_s < ended for wait in waits for at_s in wait)


def test_evaluations_and_passes_that_failed_are_told_too(run_on: Callable[..., Any]) -> None:
    one = recorder()

    def body(session: Session) -> None:
        model = mlp()
        prepare(session, model)
        with torch.no_grad():
            model(batch(0))
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 5, dtype=torch.float64))
        loss_of(model(batch(0))).backward()

    run_on(in_process("ring", 2, [one]), body)
    assert [(span.kind, span.phase) for span in one.spans(*COMPUTE)] == [
        ("forward", NO_GRADIENT),
        ("forward", ""),
        ("forward", ""),
        ("backward", ""),
    ]
    for span in one.spans(*COMPUTE):
        begun, ended = lifetime(one, span)
        assert begun < ended


def test_models_of_one_optimizer_and_copies_are_told_once_and_nothing_stays(run_on: Callable[..., Any]) -> None:
    one = recorder()

    def body(session: Session) -> None:
        models = [mlp(), mlp()]
        optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
        made = [prepare(session, model, optimizer) for model in (*models, models[0])]
        copy.deepcopy(models[0])(batch(0))
        sum(loss_of(model(batch(0))) for model in models).backward()
        optimizer.step()
        for prepared in made[1:]:
            assert prepared is not None
            prepared.release()
        models[0](batch(0))
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks

    run_on(in_process("ring", 2, [one]), body)
    kinds = [span.kind for span in one.spans(*COMPUTE)]
    assert sorted(kinds) == ["backward", "backward", "forward", "forward", "optimizer"]


def test_where_nobody_observes_there_are_no_hooks_for_it(run_on: Callable[..., Any]) -> None:
    def body(session: Session) -> list[int]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(session, model, optimizer)
        return [len(model._forward_hooks), len(optimizer._optimizer_step_pre_hooks)]

    assert run_on(in_process("ring", 2), body) == [[0, 0]] * 2


def test_payloads_from_a_device_are_told_within_their_bucket(run_on: Callable[..., Any]) -> None:
    pytest.importorskip("triton")
    one = recorder()

    def body(session: Session) -> None:
        model = mlp()
        made = prepare(session, model, torch.optim.SGD(model.parameters(), lr=0.1), copier=HostCopier(codes=True))
        assert made is not None
        loss_of(model(batch(session.rank))).backward()
        made.replica.detach()  # nothing may be interpreted once another test begins

    run_on(in_process("ring codec=int8 schedule=wait_free", 2, [one]), body)
    copies = one.spans("staging")
    assert {span.label for span in copies} == {span.label for span in one.spans("run") if span.phase == "reduce"}
    for span in copies:
        begun, ended = lifetime(one, span)
        assert span.within is not None
        assert lifetime(one, span.within)[0] < begun < ended < lifetime(one, span.within)[1]


def test_copies_from_a_device_are_told_within_what_waits_for_them(run_on: Callable[..., Any]) -> None:
    one = recorder()

    def body(session: Session) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(session, model, optimizer, copier=HostCopier())
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model(batch(step))).backward()
            optimizer.step()

    run_on(in_process("ring schedule=wait_free", 2, [one]), body)
    copies = one.spans("staging")
    assert [span.nbytes for span in copies] == [8 * size for size in (3, 18, 6, 24)] * 2
    for span in copies:
        assert span.within is not None
        begun, ended = lifetime(one, span)
        assert lifetime(one, span.within)[0] < begun < ended < lifetime(one, span.within)[1]
